"""Workers that hang, in one round on one node: notices a stall, has the stacks of all nodes written, reports the cause.

The decisions are in `stall`. This module belongs to one round: the supervisor runs `run()` as a task of that round, and
calls `stop()` before the workers are stopped, from when on silence means nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from rallypoint.errors import RendezvousError, StoreError
from rallypoint.launcher import stall_reports
from rallypoint.launcher.console import Console
from rallypoint.launcher.stacks import FILE, Target, is_stopped, write_stacks
from rallypoint.launcher.stall import NodeReport, StallWatch, Verdict, verdict
from rallypoint.launcher.worker_guardian import descendants, parent_of
from rallypoint.launcher.worker_signs import WorkerSigns
from rallypoint.sentences import listed
from rallypoint.store import AsyncStore

STACKS_S = 10.0
"""The time limit for the stacks of one node."""
KILL_STACKS_S = 5.0
"""The time limit for stacks before a kill: the kill must not wait for a machine in trouble."""
REPORTER_S = 60.0
"""If the reporter has not ended the round by then, every node with a stalled worker does."""
MAX_PROCESSES = 4
"""Of a worker that never said that it is alive: a shell, and the program that it runs."""
MAX_DEPTH = 64


class HangWatch:
    """Create it before the workers start. `on_stall` is called at most once, when all stacks are written."""

    def __init__(
        self,
        store: AsyncStore,
        private: Path,
        node: str,
        first: int,
        count: int,
        *,
        limit_s: float | None,
        logs: Path | None,
        console: Console,
        on_stall: Callable[[Verdict], None],
    ) -> None:
        self._store = store
        self._node = node
        self._first = first
        self._limit_s = limit_s
        self.logs = logs
        self._console = console
        self._on_stall = on_stall
        self._watch = StallWatch(first, count, limit_s)
        self._signs = WorkerSigns(private, self._watch, self._owner_of)
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self.pids: dict[int, int] = {}
        """Local rank -> process id, of the workers that run."""

    def environment(self) -> dict[str, str]:
        """Further variables for the workers."""
        return self._signs.environment()

    def ended(self, local_rank: int) -> None:
        """A worker has ended."""
        self._watch.ended(local_rank)
        self.pids.pop(local_rank, None)

    def stop(self) -> None:
        """The workers are being stopped: they are no longer judged."""
        self._is_over = True

    def close(self) -> None:
        """No process is left: stop reading the pipe. Idempotent."""
        self._is_over = True
        self._signs.close()

    async def run(self) -> None:
        """Watch until the round is over. Ends after a stall."""
        async with asyncio.TaskGroup() as tasks:
            if self._limit_s is not None:
                tasks.create_task(self._judge(self._limit_s), name="stalled workers")
            tasks.create_task(self._take_part(), name="stalls of the round")

    # --- this node's workers ------------------------------------------------------------------------------------------

    async def _judge(self, limit_s: float) -> None:
        every_s = min(1.0, limit_s / 10)
        while True:
            await asyncio.sleep(every_s)
            if self._is_over:
                return
            self._signs.read()  # what has arrived while this process was stopped counts
            if not self._watch.look(self._loop.time(), every_s):
                continue
            with suppress(StoreError):
                if (own := verdict([self._report()])) is not None:
                    await stall_reports.announce(self._store, own.why)
                    await asyncio.sleep(REPORTER_S)
            if (own := verdict([self._report()])) is not None:  # else it goes on after all
                self._end(own)
                return

    def _report(self) -> NodeReport:
        return NodeReport(node=self._node, workers=self._watch.states(self._loop.time()))

    def _end(self, found: Verdict) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_stall(found)

    # --- a stall of the round -----------------------------------------------------------------------------------------

    async def _take_part(self) -> None:
        with suppress(StoreError):
            async for notice in stall_reports.follow(self._store):
                if self._is_over:  # its workers have finished, or are being stopped
                    await stall_reports.report(self._store, NodeReport(node=self._node, workers=()))
                else:
                    await self._answer(notice)

    async def _answer(self, notice: stall_reports.StallNotice) -> None:
        """Write the stacks of this node, and report; the reporter then ends the round."""
        stopped = {self._first + local for local in self.pids if any(is_stopped(pid) for pid in self._processes(local))}
        report = self._report()  # before the stacks are written: that takes a while, and wakes stopped processes
        directory = await self.write_stacks(f"a worker of the round has stalled: {notice.why}", STACKS_S)
        where = f"the stacks of this node's workers are in {directory}" if directory else "no stacks could be written"
        self._console.say(f"a worker has stalled: {notice.why}; {where}")
        workers = [
            msgspec.structs.replace(one, is_stopped=True) if one.rank in stopped else one for one in report.workers
        ]
        own = msgspec.structs.replace(report, workers=tuple(workers), stacks=str(directory or ""))
        reports, missing = [own], list[int]()
        with suppress(StoreError, RendezvousError):
            await stall_reports.report(self._store, own)
            if notice.node_rank == self._store.rank:
                reports, missing = await stall_reports.collect(self._store, STACKS_S + 1)
        if notice.node_rank != self._store.rank:
            return
        places = [f"{one.node}: {one.stacks}" for one in reports if one.stacks]
        absent = f"; no report from node {listed([str(rank) for rank in missing])}" if missing else ""
        self._console.say(f"stacks of all nodes: {listed(places)}{absent}")
        if (found := verdict(reports)) is not None:
            self._end(found)

    # --- stacks -------------------------------------------------------------------------------------------------------

    async def write_stacks(self, why: str, limit_s: float) -> Path | None:
        """Write the stacks of all workers that run. Returns their directory; None if that failed. Never raises."""
        targets = [Target(self._first + local, local, self._processes(local)) for local in sorted(self.pids)]
        try:
            if self.logs is None:  # kept, so that somebody can read it
                self.logs = Path(tempfile.mkdtemp(prefix="rallypoint-stacks-"))
            async with asyncio.timeout(limit_s):
                await write_stacks(targets, self._signs.directory, self.logs, why)
        except (OSError, TimeoutError) as error:
            self._console.say(f"stacks could not be written: {str(error) or f'not done within {limit_s:g} s'}")
            return None
        return self.logs

    async def before_kill(self, grace_s: float) -> None:
        """Workers are left after their grace period, and will be killed."""
        ranks = listed([str(self._first + local) for local in sorted(self.pids)])
        if ranks and (directory := await self.write_stacks(f"still there {grace_s:g} s after SIGTERM", KILL_STACKS_S)):
            self._console.say(
                f"the workers of rank {ranks} are still there {grace_s:g} s after SIGTERM and are killed now; their "
                f"stacks are in {directory}/*/{FILE}"
            )

    def _processes(self, local_rank: int) -> tuple[int, ...]:
        """The processes of a worker whose stacks are of interest."""
        said = [pid for pid in self._signs.pids.get(local_rank, []) if self._owner_of(pid) == local_rank]
        if said:
            return tuple(said)
        pid = self.pids[local_rank]
        return (pid, *descendants(pid)[: MAX_PROCESSES - 1])

    def _owner_of(self, pid: int) -> int | None:
        """The local rank of the worker that has this process, or whose descendant it is."""
        owners = {worker: local_rank for local_rank, worker in self.pids.items()}
        for _ in range(MAX_DEPTH):
            if pid in owners:
                return owners[pid]
            if (parent := parent_of(pid)) is None:
                return None
            pid = parent
        return None
