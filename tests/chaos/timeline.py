"""The timeline of a world as text, and its logs as files."""

import json
from collections.abc import Iterable
from pathlib import Path

from rallypoint.testing.summary import key_summary, value_summary
from tests.chaos.plan import RUN_ID
from tests.chaos.server import AuditLine, Committed
from tests.chaos.world import World
from tests.e2e.kit import Fact, Process

DULL = {"added", "set", "got", "arrives", "passed", "stall"}
WIDTH = 150


def timeline(world: World, lines: Iterable[AuditLine] = ()) -> list[str]:
    """One line per event: seconds since the start, process, event."""
    found: list[tuple[float, str, str]] = [*world.notes]
    for process in (*world.all_nodes, *world.all_servers):
        facts = [fact for fact in list(process.facts) if "at" in fact and fact["kind"] not in DULL]
        found += [(fact["at"], process.name, _in_words(fact)) for fact in facts]
    for line in lines:
        if isinstance(line, Committed) and line.at:
            found.append((line.at, f"r{line.batch.revision % 10**9}", _commit(line)))
        elif line.at:
            found.append((line.at, "store", f"begins: {line.generation} at revision {line.revision}"))
    found = [one for one in found if one[2]]
    found.sort(key=lambda one: one[0])
    began_at = found[0][0] if found else 0.0
    return [f"{at - began_at:9.3f}  {who:12}  {what[:WIDTH]}" for at, who, what in found]


def _in_words(fact: Fact) -> str:
    if fact["kind"] == "event":
        return str(fact["text"])
    return " ".join([fact["kind"], *(f"{key}={value}" for key, value in fact.items() if key not in ("kind", "at"))])


def _commit(line: Committed) -> str:
    said = []
    for change in line.batch.changes:
        key = change.key.removeprefix("/rallypoint/").removeprefix(RUN_ID)
        if ":data/store/" not in key:
            said.append(f"{key_summary(key)} {value_summary(change.item.value) if change.item else 'gone'}")
    return ", ".join(said)


def write_logs(world: World, lines: Iterable[AuditLine], directory: Path) -> None:
    """Write the reports of each process, and the timeline."""
    (directory / "timeline.txt").write_text("\n".join(timeline(world, lines)) + "\n", encoding="utf-8")
    (directory / "plan.txt").write_text(f"{world.plan}\n", encoding="utf-8")
    for process in (*world.all_nodes, *world.all_servers):
        _write(process, directory)


def _write(process: Process, directory: Path) -> None:
    facts = "\n".join(json.dumps(fact) for fact in list(process.facts))
    (directory / f"{process.name}.jsonl").write_text(facts + "\n", encoding="utf-8")
    (directory / f"{process.name}.stderr").write_text("\n".join(process.errors) + "\n", encoding="utf-8")
