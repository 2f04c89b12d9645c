"""What a run of the scenarios found, kept beside the page that is made of it.

`docs/scenarios.json` holds the last outcome of every test; `docs/scenarios.md` is made from it and from the rows. A run
of some of the tests replaces their outcomes and leaves the others alone. Both files are replaced as a whole.
"""

import fcntl
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.scenarios.rows import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "scenarios.json"
PAGE = ROOT / "docs" / "scenarios.md"
LOCK = Path(tempfile.gettempdir()) / "rallypoint-scenarios.lock"
BACKENDS = ("tcp", "etcd")
KEPT, MISSED, FAILED, SKIPPED = "kept", "missed", "failed", "skipped"
WORST_FIRST = (FAILED, MISSED, SKIPPED, KEPT)

HEAD = """# Scenarios

What hurts users of rendezvous today, played with real processes: what happened with Rallypoint, and in how many
seconds. This page is written by `make scenarios` and by nothing else; a run of some rows (`make scenarios ARGS="-k
row_03"`) replaces just those. Each row is a test of the same number in `tests/scenarios`.

A row is *kept* if everything in it happened, and within the seconds that it promises. It is *missed* if it happened but
took longer than promised: the machine was shared with other work while this ran, so a test fails only beyond the
promised time scaled by the load, which is written down: how many processes wanted a core, for each core there is. The
allowance is the promise times one more than that (four at most), and twice the time that the machine stood still.

On `tcp` there is one `rallypoint serve`; on `etcd` three members of a real etcd 3.4, where a loss is known by the time
to live alone, to which a new leader of etcd adds its election time-out ([why](etcd.md#what-happens-when)); "-" where a
row is about the embedded server. Machines are network namespaces, agents those of torch 2.13.
"""


class Sight(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that was seen, with the seconds it took and those that were promised, if there are any."""

    what: str
    seconds: float | None = None
    bound_s: float | None = None

    @property
    def is_missed(self) -> bool:
        return self.seconds is not None and self.bound_s is not None and self.seconds > self.bound_s

    def __str__(self) -> str:
        if self.seconds is None:
            return self.what
        if self.bound_s is None:
            return f"{self.what}: {self.seconds:.2f} s"
        return f"{self.what}: {self.seconds:.2f} s, promised {self.bound_s:g} s{' (missed)' * self.is_missed}"


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one test of a row ended. `test` is its name with its parameters."""

    test: str
    row: int
    backend: str
    verdict: str
    day: str
    took_s: float
    load: float
    sights: tuple[Sight, ...] = ()
    why: str = ""


def verdict_of(sights: Iterable[Sight]) -> str:
    """The verdict on a test that passed."""
    return MISSED if any(sight.is_missed for sight in sights) else KEPT


def read(data: Path = DATA) -> list[Outcome]:
    """What is known so far."""
    return msgspec.json.decode(data.read_bytes(), type=list[Outcome]) if data.exists() else []


def note(outcome: Outcome, known_tests: Iterable[str] | None = None, data: Path = DATA, page: Path = PAGE) -> None:
    """Replace what is known of one test, forget tests that are no more, and write both files."""
    known = set(row_tests() if known_tests is None else known_tests)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = [one for one in read(data) if _function(one) in known and not _is_replaced(one, outcome)]
        outcomes = sorted([*kept, outcome], key=lambda one: (one.row, BACKENDS.index(one.backend), one.test))
        replace(data, msgspec.json.format(msgspec.json.encode(outcomes), indent=1).decode() + "\n")
        replace(page, render(outcomes))


def _function(outcome: Outcome) -> str:
    return outcome.test.partition("[")[0]


def _is_replaced(old: Outcome, new: Outcome) -> bool:
    """Whether it is of the same test, or of that test from before it had parameters, or after."""
    return old.test == new.test or (_function(old) == _function(new) and ("[" in old.test) != ("[" in new.test))


def replace(path: Path, text: str) -> None:
    """The whole file or nothing."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as new:
        new.write(text)
    os.chmod(new.name, 0o644)
    os.replace(new.name, path)


def row_tests() -> list[str]:
    """The names of all tests of rows, without parameters."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("test_rows_*.py"))]
    return [name for text in texts for name in re.findall(r"^def (test_row_\d\d_\w+)", text, re.MULTILINE)]


# --- the page ---------------------------------------------------------------------------------------------------------


def render(outcomes: Iterable[Outcome]) -> str:
    """docs/scenarios.md."""
    by_row: dict[int, list[Outcome]] = {number: [] for number in ROWS}
    for outcome in outcomes:
        by_row[outcome.row].append(outcome)
    table = ["", "| row | what | tcp | etcd |", "|---|---|---|---|"]
    table += [_summary(row, by_row[number]) for number, row in ROWS.items()]
    sections = [_section(row, by_row[number]) for number, row in ROWS.items()]
    return HEAD + "\n".join(table) + "\n" + "".join(sections)


def _summary(row: Row, outcomes: list[Outcome]) -> str:
    cells = [_cell([one for one in outcomes if one.backend == backend]) for backend in BACKENDS]
    return f"| [{row.number}](#row-{row.number}) | {row.title} | {cells[0]} | {cells[1]} |"


def _cell(outcomes: list[Outcome]) -> str:
    """The worst verdict, and of the promises in seconds the one that was nearest to being missed."""
    if not outcomes:
        return "-"
    verdict = next(one for one in WORST_FIRST if any(outcome.verdict == one for outcome in outcomes))
    bounded = [
        (sight.seconds / sight.bound_s, sight)
        for outcome in outcomes
        for sight in outcome.sights
        if sight.seconds is not None and sight.bound_s
    ]
    if not bounded:
        return verdict
    sight = max(bounded, key=lambda one: one[0])[1]
    return f"{verdict}, {sight.seconds:.2f} s of {sight.bound_s:g} s"


def _section(row: Row, outcomes: list[Outcome]) -> str:
    text = f'\n<a id="row-{row.number}"></a>\n\n## {row.number}. {row.title}\n\n'
    text += f"*What hurt* ({row.seen_in}): {row.hurt}\n\n*Instead*: {row.instead}\n"
    if not outcomes:
        return text + "\nNot run yet.\n"
    for outcome in outcomes:
        sentence = outcome.test.partition("[")[0].removeprefix(f"test_row_{row.number:02d}_").replace("_", " ")
        text += f"\n**{outcome.backend}**: {sentence}. **{outcome.verdict.capitalize()}**"
        text += f" ({outcome.day}, {outcome.took_s:.0f} s in all, load {outcome.load:.1f}).\n\n"
        text += "".join(f"- {sight}\n" for sight in outcome.sights)
        text += f"- {outcome.verdict}: {outcome.why}\n" if outcome.why else ""
    return text
