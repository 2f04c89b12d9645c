"""Many worlds, in parallel processes: their verdicts as they come, what they have in sum, and how to see one again."""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from rallypoint._marks import MARKS
from rallypoint.testing.sim.plan import Plan, draw, draw_register
from rallypoint.testing.sim.run import Verdict, run_plan, run_seed

CHUNK = 10
LARGE = 20


def run_many(seeds: Iterable[int], workers: int | None = None, register: bool = False) -> Iterator[Verdict]:
    """The verdicts of all seeds, in no particular order."""
    count = workers or os.cpu_count() or 1
    chunks = _chunks(seeds)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, max_tasks_per_child=200, initializer=_begin) as pool:
        running: set[Future[list[Verdict]]] = set()
        try:
            for chunk in chunks:
                running.add(pool.submit(_run_chunk, chunk, register))
                if len(running) >= 2 * count:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield from future.result()
            for future in running:
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _chunks(seeds: Iterable[int]) -> Iterator[list[int]]:
    chunk: list[int] = []
    for seed in seeds:
        chunk.append(seed)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _begin() -> None:
    """In a new process, when all modules are there: they need not be looked at whenever a world is cleared away."""
    gc.freeze()


def _run_chunk(seeds: list[int], register: bool) -> list[Verdict]:
    return [run_seed(seed, register) for seed in seeds]


@dataclass(slots=True)
class Sum:
    """What a campaign has shown so far."""

    worlds: int = 0
    large: int = 0
    faults: int = 0
    fewest_faults: int = 0
    events: list[int] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MARKS, 0))
    """How many worlds have reached each of those that they can reachability."""
    broken: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        """Count one world."""
        self.fewest_faults = min(self.fewest_faults, verdict.faults) if self.worlds else verdict.faults
        self.worlds += 1
        self.large += verdict.nodes >= LARGE
        self.faults += verdict.faults
        self.events.append(verdict.events)
        for name in verdict.marks & self.marks.keys():
            self.marks[name] += 1
        if verdict.broke:
            self.broken.append(verdict)

    @property
    def missed(self) -> list[str]:
        """Marks that no world has reached."""
        return [name for name, count in self.marks.items() if count == 0]

    def in_words(self) -> str:
        """One paragraph."""
        if not self.worlds:
            return "no world was run"
        return (
            f"{self.worlds:,} worlds, {len(self.broken):,} broken; "
            f"{self.large / self.worlds:.0%} with {LARGE} nodes or more; at least {self.fewest_faults} faults each, "
            f"{self.faults / self.worlds:.1f} on average; median {statistics.median(self.events):,.0f} events; "
            f"{len(self.marks) - len(self.missed)} of {len(self.marks)} marks hit"
        )


def replay_command(seed: int, kept: frozenset[int] | None = None, register: bool = False) -> str:
    """What to type to see this world again."""
    keep = "" if kept is None else f" --keep {','.join(map(str, sorted(kept))) or 'none'}"
    return f"rallypoint sim --seed {seed}{' --register' if register else ''}{keep}"


def shrink(seed: int, register: bool = False) -> tuple[Plan, frozenset[int], Verdict]:
    """A failing world with as few of its faults as still break the same guarantee: one after the other is left out."""
    plan = draw_register(seed) if register else draw(seed)
    kept = frozenset(range(len(plan.actions)))
    verdict = run_plan(plan)
    broke = verdict.broke
    smaller = True
    while smaller and broke:
        smaller = False
        for index in sorted(kept):
            attempt = run_plan(plan.keeping(kept - {index}))
            if attempt.broke == broke:
                kept, verdict, smaller = kept - {index}, attempt, True
    return plan.keeping(kept), kept, verdict
