"""Which workers of a node have stalled, and how the launchers of a round describe a stall. Pure: time is an argument.

A worker is judged only once it has said that it is alive (`rallypoint.alive()`), or while it holds a timer of
`torch.distributed.elastic.timer`. It has stalled if it then says nothing for the time-out, or if a timer expires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.sentences import listed


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one worker when a stall is reported."""

    rank: int
    silent_s: float | None = None
    """Since its last sign of life; None: it never gave one."""
    step: int | None = None
    note: str = ""
    has_stalled: bool = False
    expired: str = ""
    """The torch timer that has expired."""
    is_stopped: bool = False
    """Its process is stopped by a signal (SIGSTOP, SIGTSTP)."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one launcher, when a worker of the round has stalled."""

    node: str
    workers: tuple[WorkerState, ...]
    stacks: str = ""
    """The directory with the stacks of its workers."""


class Verdict(msgspec.Struct, frozen=True):
    """The worker that is named as the cause of a stall, and the sentence about it."""

    rank: int
    node: str
    why: str


@dataclass(slots=True)
class _Said:
    """The last sign of life of one worker, and its torch timers by scope with the times at which they expire."""

    at: float | None = None
    limit_s: float = 0.0
    step: int | None = None
    note: str = ""
    timers: dict[str, float] = field(default_factory=dict)


class StallWatch:
    """The signs of life of the workers of one node, in one round. `first`: the global rank of its first worker."""

    def __init__(self, first: int, workers: int, limit_s: float | None) -> None:
        self._first = first
        self._limit_s = limit_s
        self._said = {local_rank: _Said() for local_rank in range(workers)}
        self._looked_at: float | None = None

    @property
    def judges(self) -> bool:
        """Whether workers are judged at all."""
        return self._limit_s is not None

    def alive(self, local_rank: int, step: int | None, note: str, within_s: float | None, now: float) -> None:
        """A worker says that it is alive, and that its next sign follows within the time-out or `within_s`."""
        if (said := self._said.get(local_rank)) is not None:
            said.at, said.note = now, note
            said.limit_s = max(self._limit_s or 0.0, within_s or 0.0)
            if step is not None:
                said.step = step

    def timer(self, local_rank: int, scope: str, left_s: float | None, now: float) -> None:
        """A worker has set a torch timer, or cancelled it (`left_s` None)."""
        if (said := self._said.get(local_rank)) is not None:
            if left_s is None:
                said.timers.pop(scope, None)
            else:
                said.timers[scope] = now + left_s

    def timers(self, local_rank: int) -> list[str]:
        """The scopes of the torch timers that a worker holds."""
        return sorted(self._said[local_rank].timers)

    def ended(self, local_rank: int) -> None:
        """A worker has ended: it is no longer judged."""
        self._said.pop(local_rank, None)

    def look(self, now: float, every_s: float) -> bool:
        """Whether a worker has stalled. Called every `every_s`.

        If this launcher itself was stopped for a time, as with its whole machine, it could not hear its workers: the
        time that it missed does not count.
        """
        missed_s = 0.0 if self._looked_at is None else now - self._looked_at - 2 * every_s
        self._looked_at = now
        if missed_s > 0:
            for said in self._said.values():
                said.at = None if said.at is None else said.at + missed_s
                said.timers = {scope: at + missed_s for scope, at in said.timers.items()}
        return self._limit_s is not None and any(self._has_stalled(said, now) for said in self._said.values())

    def states(self, now: float) -> tuple[WorkerState, ...]:
        """All workers that have not ended."""
        return tuple(
            WorkerState(
                rank=self._first + local_rank,
                silent_s=None if said.at is None else now - said.at,
                step=said.step,
                note=said.note,
                has_stalled=self._limit_s is not None and self._has_stalled(said, now),
                expired=min((scope for scope, at in said.timers.items() if at <= now), default=""),
            )
            for local_rank, said in sorted(self._said.items())
        )

    def _has_stalled(self, said: _Said, now: float) -> bool:
        is_silent = said.at is not None and now - said.at >= said.limit_s
        return is_silent or any(at <= now for at in said.timers.values())


def verdict(reports: Sequence[NodeReport]) -> Verdict | None:
    """The worker that held the others up. None if no worker has stalled.

    Of those that have stalled: one whose process is stopped, then one of the lowest step, then the longest silent.
    """
    stalled = [(worker, report.node) for report in reports for worker in report.workers if worker.has_stalled]
    if not stalled:
        return None
    worker, node = min(stalled, key=lambda one: _order(one[0]))
    return Verdict(worker.rank, node, f"{_sentence(worker, node)}{_others(worker, reports)}")


def _order(worker: WorkerState) -> tuple[bool, bool, int, float, int]:
    return not worker.is_stopped, worker.step is None, worker.step or 0, -(worker.silent_s or 0.0), worker.rank


def _sentence(worker: WorkerState, node: str) -> str:
    if worker.expired:
        text = f"rank {worker.rank} on {node}: its torch timer {worker.expired!r} expired"
    else:
        text = f"rank {worker.rank} on {node} said nothing for {worker.silent_s or 0.0:.0f} s"
    if last := _last(worker):
        text += f"; last: {last}"
    return f"{text}; its process is stopped by a signal" if worker.is_stopped else text


def _last(worker: WorkerState) -> str:
    step = "" if worker.step is None else f"step {worker.step}"
    return ", ".join(part for part in (step, worker.note) if part)


def _others(named: WorkerState, reports: Sequence[NodeReport]) -> str:
    """Who else is behind, and how far the others are."""
    workers = [(worker, report.node) for report in reports for worker in report.workers]
    steps = [worker.step for worker, _ in workers if worker.step is not None]
    silent = [worker for worker, _ in workers if worker.has_stalled]
    if steps and named.step is not None and max(steps) > named.step:
        behind = [
            f"{worker.rank} on {node} (step {worker.step})"
            for worker, node in workers
            if worker.step is not None and worker.step < max(steps) and worker.rank != named.rank
        ]
        also = f", also behind: {listed(behind)}" if behind else ""
        return f"; the others have reached step {max(steps)}{also}"
    if len(silent) > 1:
        return f"; {len(silent)} of {len(workers)} ranks are silent"
    return ""
