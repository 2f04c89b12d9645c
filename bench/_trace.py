"""Who ran on which core, and when, while the last of N nodes brought all into a round: from the kernel's own events.

    python bench/_trace.py rallypoint 8
    python bench/_trace.py torchft 8 --samples 5 --keep /tmp/trace.txt

Needs Linux, root and tracefs, and costs little itself: every switch between threads is an event, and every return from
a system call, which is the first thing that a woken thread does. Printed for each sample: how long it took, what the
server, the nodes and others used of the cores meanwhile, how long the cores were idle, and what ran on each of them
from the call on.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rallypoint.bench.crew import Do
from rallypoint.bench.measures import Stage, stage
from rallypoint.bench.plan import LAST_ARRIVAL, Bench, Case, Side
from rallypoint.bench.sides import contender

TRACING = Path("/sys/kernel/tracing")
EVENTS = ("events/sched/sched_switch/enable", "events/raw_syscalls/sys_exit/enable")
BUFFER_KB = "8192"
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

    The kernel does not always tell that a core was woken: what runs there is known from its first event on, and before
    that the core counts as idle.
    """
    found: list[Span] = []
    since: dict[int, tuple[int, float]] = {}

    def close(core: int, tid: int, began: float, until: float) -> None:
        began, until = max(began, begin), min(until, end)
        if began < until:
            found.append(Span(core, IDLE if tid == 0 else owners.get(tid, OTHERS), began, until))

    for line in lines:
        match = _LINE.search(line)
        if match is None:
            continue
        core, tid, at = int(match["core"]), int(match["tid"]), float(match["at"])
        running, began = since.get(core, (0, begin))
        close(core, tid if running == tid else 0, began, at)
        following = _NEXT.search(match["what"])
        since[core] = (int(following[1]) if following is not None else tid, at)
    for core, (running, began) in since.items():
        close(core, running, began, end)
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
def tracing() -> Iterator[Path]:
    """Somewhere to trace, apart from whatever else is traced on this machine; gone afterwards."""
    place = TRACING / "instances" / f"rallypoint-{os.getpid()}"
    place.mkdir()
    try:
        for name, word in (
            ("tracing_on", "0"),
            ("trace_clock", "mono"),
            ("buffer_size_kb", BUFFER_KB),
            *((one, "1") for one in EVENTS),
        ):
            (place / name).write_text(word, encoding="ascii")
        yield place
    finally:
        place.rmdir()


def threads_of(pids: Iterable[int]) -> Iterator[int]:
    """The ids of all threads of these processes."""
    for pid in pids:
        with suppress(OSError):
            yield from (int(path.name) for path in Path(f"/proc/{pid}/task").iterdir())


def sample(there: Stage, repetition: int, place: Path) -> tuple[float, float, dict[int, str]]:
    """As `rallypoint bench` has it: when the last node called, when all were released, and whose the threads were."""
    crew, last = there.crew, there.all_but_the_last_wait(repetition)
    owners = dict.fromkeys(threads_of(crew.pids), NODES) | dict.fromkeys(threads_of([there.server.pid]), SERVER)
    (place / "trace").write_text("", encoding="ascii")
    (place / "tracing_on").write_text("1", encoding="ascii")
    crew.tell(Do.JOIN, [last])
    end = crew.gather(crew.nodes, there.deadline())
    (place / "tracing_on").write_text("0", encoding="ascii")
    return crew.called_at[last], end, owners


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("side", choices=("rallypoint", "torchft", "torchft-twice"))
    parser.add_argument("nodes", type=int)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="the last sample's events, as the kernel wrote them")
    chosen = parser.parse_args(arguments)
    if not all((TRACING / one).exists() for one in EVENTS):
        parser.error(f"{TRACING} is not there, or not for this user: as root, mount -t tracefs nodev {TRACING}")
    case = Case(Bench.RENDEZVOUS, Side(chosen.side), chosen.nodes, only=LAST_ARRIVAL)
    side = contender(case.side)
    side.load()
    gc.collect()
    gc.freeze()
    with tracing() as place:
        for repetition in range(chosen.samples):
            with stage(side, case, case.nodes, case.nodes) as there:
                begin, end, owners = sample(there, repetition, place)
            text = (place / "trace").read_text(encoding="utf-8", errors="replace")
            if chosen.keep is not None:
                chosen.keep.write_text(text, encoding="utf-8")
            found = spans(text.splitlines(), owners, begin, end)
            used = ", ".join(f"{name} {1e3 * spent:.2f}" for name, spent in totals(found).items())
            print(f"{chosen.side} {case.nodes}: {1e3 * (end - begin):.2f} ms; core ms: {used}")
            for core in sorted({span.core for span in found}):
                print(f"  core {core}: {by_time(found, core, begin)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
