"""Who ran on which core, and when, while the last of N nodes brought all into a round: from the kernel's own events.

    python bench/_trace.py quorate 8
    python bench/_trace.py torchft 8 --samples 5 --keep /tmp/trace.txt

Needs Linux, root and tracefs, and costs little itself: every switch between threads is an event, nothing else. Printed
for each sample: how long it took, what the server, the nodes and others used of the cores meanwhile, how long the
cores were idle, and what ran on each of them from the call on.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from quorate.bench.crew import Do
from quorate.bench.measures import Stage, stage
from quorate.bench.plan import LAST_ARRIVAL, Bench, Case, Side
from quorate.bench.sides import contender

TRACING = Path("/sys/kernel/tracing")
EVENT = "events/sched/sched_switch/enable"
BUFFER_KB = 8192
SHORT_US = 15
"""What ran for less is not listed."""
IDLE, SERVER, NODES, OTHERS = "idle", "server", "nodes", "others"
_LINE = re.compile(r"-(?P<tid>\d+)\s+\[(?P<core>\d+)\]\s+\S+\s+(?P<at>[\d.]+): (?P<what>.*)")
_NEXT = re.compile(r"next_pid=(\d+)")


class Span(NamedTuple):
    """Something ran on a core from one instant to another, in seconds."""

    core: int
    what: str
    begin: float
    end: float


def spans(lines: Iterable[str], owners: Mapping[int, str], begin: float, end: float) -> list[Span]:
    """What ran between two instants. `owners` says whose the threads are, by their ids.

    Not every switch is told when a core was asleep: what is not known to run is taken for idle.
    """
    found: list[Span] = []
    state: dict[int, tuple[int, float, float]] = {}  # core -> thread, since when, and last seen when

    def close(core: int, tid: int, since: float, until: float) -> None:
        since, until = max(since, begin), min(until, end)
        if since < until:
            found.append(Span(core, IDLE if tid == 0 else owners.get(tid, OTHERS), since, until))

    for line in lines:
        match = _LINE.search(line)
        if match is None:
            continue
        core, tid, at = int(match["core"]), int(match["tid"]), float(match["at"])
        running, since, seen = state.get(core, (tid, at, at))
        if running != tid:
            close(core, running, since, seen)
            close(core, 0, seen, at)
            since = at
        close(core, tid, since, at)
        following = _NEXT.search(match["what"])
        state[core] = (int(following[1]) if following else tid, at, at)
    for core, (running, since, _) in state.items():
        close(core, running, since, end)
    return found


def totals(found: Iterable[Span]) -> dict[str, float]:
    """Core seconds by who had them."""
    used = dict.fromkeys((SERVER, NODES, OTHERS, IDLE), 0.0)
    for span in found:
        used[span.what] += span.end - span.begin
    return used


def by_time(found: Iterable[Span], core: int, begin: float) -> str:
    """What ran on a core, in microseconds since the call; neighbours of one kind are one."""
    merged: list[Span] = []
    for span in sorted((span for span in found if span.core == core), key=lambda span: span.begin):
        if merged and merged[-1].what == span.what:
            merged[-1] = merged[-1]._replace(end=span.end)
        else:
            merged.append(span)
    return "  ".join(
        f"{span.what} {1e6 * (span.begin - begin):.0f}-{1e6 * (span.end - begin):.0f}"
        for span in merged
        if 1e6 * (span.end - span.begin) >= SHORT_US
    )


@contextmanager
def traced() -> Iterator[None]:
    """Note every switch, on a clock that processes can read too."""
    _say("tracing_on", "0")
    _say("trace_clock", "mono")
    _say("buffer_size_kb", str(BUFFER_KB))
    _say("trace", "")
    _say(EVENT, "1")
    _say("tracing_on", "1")
    try:
        yield
    finally:
        _say("tracing_on", "0")
        _say(EVENT, "0")


def _say(name: str, word: str) -> None:
    (TRACING / name).write_text(word, encoding="ascii")


def threads_of(pids: Iterable[int]) -> Iterator[int]:
    """The ids of all threads of these processes."""
    for pid in pids:
        with suppress(OSError):
            yield from (int(path.name) for path in Path(f"/proc/{pid}/task").iterdir())


def sample(there: Stage, repetition: int) -> tuple[float, float, dict[int, str]]:
    """As `quorate bench` has it: when the last node called, when all were released, and whose the threads were."""
    crew, last = there.crew, there.all_but_the_last_wait(repetition)
    owners = dict.fromkeys(threads_of(crew.pids), NODES) | dict.fromkeys(threads_of([there.server.pid]), SERVER)
    with traced():
        crew.tell(Do.JOIN, [last])
        end = crew.gather(crew.nodes, there.deadline())
    return crew.called_at[last], end, owners


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("side", choices=("quorate", "torchft", "torchft-twice"))
    parser.add_argument("nodes", type=int)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="the last sample's events, as the kernel wrote them")
    chosen = parser.parse_args(arguments)
    if not (TRACING / EVENT).exists():
        parser.error(f"{TRACING} is not there, or not for this user: as root, mount -t tracefs nodev {TRACING}")
    case = Case(Bench.RENDEZVOUS, Side(chosen.side), chosen.nodes, only=LAST_ARRIVAL)
    side = contender(case.side)
    side.load()
    gc.collect()
    gc.freeze()
    for repetition in range(chosen.samples):
        with stage(side, case, case.nodes, case.nodes) as there:
            begin, end, owners = sample(there, repetition)
        text = (TRACING / "trace").read_text(encoding="utf-8", errors="replace")
        found = spans(text.splitlines(), owners, begin, end)
        used = ", ".join(f"{name} {1e3 * spent:.2f}" for name, spent in totals(found).items())
        print(f"{chosen.side} {case.nodes}: {1e3 * (end - begin):.2f} ms; core ms: {used}")
        for core in sorted({span.core for span in found}):
            print(f"  core {core}: {by_time(found, core, begin)}", flush=True)
        if chosen.keep is not None:
            chosen.keep.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
