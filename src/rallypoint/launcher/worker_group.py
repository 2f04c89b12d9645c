"""The worker processes of one round on one node: started together, stopped together, with no process left behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rallypoint.backends.resolver_threads import run_in_thread
from rallypoint.launcher import worker_guardian
from rallypoint.launcher.console import Console, Stream
from rallypoint.launcher.environment import WORKER_MARK
from rallypoint.launcher.failure import Evidence
from rallypoint.launcher.hang_watch import HangWatch
from rallypoint.launcher.logs import WorkerLogs

GUARDIAN = str(Path(worker_guardian.__file__))
DRAIN_S = 5.0
"""How long to wait for the last output of workers that have ended."""
KILLED = 137
MAX_EVIDENCE = 64 * 1024
"""How much is read of an error file or a log file."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker to be started."""

    local_rank: int
    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]


class WorkerGroup:
    """Start it once. If this process is killed, the directory `private` is removed.

    Calls `on_exit(local_rank, code)` for each worker, then `on_empty()` once no process is left."""

    def __init__(
        self,
        workers: Sequence[Worker],
        console: Console,
        logs: WorkerLogs,
        *,
        on_exit: Callable[[int, int], None],
        on_empty: Callable[[], None],
        hangs: HangWatch | None = None,
        private: str = "",
    ) -> None:
        self._workers = workers
        self._console = console
        self._logs = logs
        self._on_exit = on_exit
        self._on_empty = on_empty
        self._hangs = hangs
        self._private = private
        self._running = {worker.local_rank for worker in workers}
        self._exits: dict[int, tuple[int, float]] = {}
        """Local rank -> exit code and instant, of the workers that ended before they were told to."""
        self._open_streams = 0
        self._stderr: dict[int, Stream] = {}
        """Local rank -> its stderr, if the console reads it."""
        self._streams_ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._guardian: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start all workers. OSError if no process can be started.

        A worker whose program cannot be executed counts as ended, with code 126 or 127.
        """
        fds: list[int] = []
        try:
            specs = [self._prepare(worker, fds) for worker in self._workers]
            self._guardian = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                GUARDIAN,
                self._private,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=fds,
                env={**os.environ, WORKER_MARK: self._workers[0].env[WORKER_MARK]},
                start_new_session=True,
            )
        finally:
            for fd in set(fds):
                os.close(fd)
        text = json.dumps(specs).encode()
        self._command(f"{len(text)}\n".encode() + text)
        self._following = asyncio.create_task(self._follow(), name="worker group")

    def _prepare(self, worker: Worker, fds: list[int]) -> dict[str, object]:
        """The worker's specification for the guardian. Opens its outputs, and adds them to `fds`."""
        outputs = {}
        for stream, name in ((1, "stdout"), (2, "stderr")):
            is_shown, file = self._logs.open(worker.local_rank, stream)
            if not is_shown:
                assert file is not None
                fds.append(file)
                outputs[name] = file
                continue
            reader, writer = os.pipe()
            os.set_blocking(writer, True)
            fds.append(writer)
            outputs[name] = writer
            tag = self._console.colour(f"[rank {worker.rank}]", worker.local_rank, stream)
            self._open_streams += 1
            followed = Stream(reader, f"{tag} ".encode(), stream, file, self._stream_ended)
            if stream == 2:
                self._stderr[worker.local_rank] = followed
            self._console.follow(followed)
        return {"argv": worker.argv, "env": worker.env, "local_rank": worker.local_rank, **outputs}

    def _stream_ended(self) -> None:
        """Called on the console's thread."""
        with suppress(RuntimeError):  # the launcher's loop is closed
            self._loop.call_soon_threadsafe(self._count_ended_stream)

    def _count_ended_stream(self) -> None:
        self._open_streams -= 1
        if self._open_streams == 0:
            self._streams_ended.set()

    # --- what a worker left behind ------------------------------------------------------------------------------------

    async def evidence(self) -> list[Evidence]:
        """What each worker has left behind. Ends soon, unless the console or the file system is stuck."""
        return [await self._evidence_of(worker) for worker in self._workers]

    async def _evidence_of(self, worker: Worker) -> Evidence:
        local_rank = worker.local_rank
        code, at = self._exits.get(local_rank, (None, 0.0))
        recorded = await _read_end(Path(worker.env["TORCHELASTIC_ERROR_FILE"]))
        stderr, stderr_s = await self._stderr_of(local_rank)
        ended_s = self._loop.time() - at if code is not None else 0.0
        return Evidence(worker.rank, local_rank, code, ended_s, recorded, stderr, stderr_s)

    async def _stderr_of(self, local_rank: int) -> tuple[bytes, float | None]:
        """The end of a worker's stderr, and its age; None: not known."""
        if local_rank not in self._stderr:
            path = self._logs.path(local_rank, 2)
            return await _read_end(path) if path is not None else b"", None
        read: asyncio.Future[tuple[bytes, float]] = self._loop.create_future()

        def give(tail: bytes, age_s: float) -> None:
            if not read.done():
                read.set_result((tail, age_s))

        def take(tail: bytes, age_s: float) -> None:  # on the console's thread
            with suppress(RuntimeError):  # the launcher's loop is closed
                self._loop.call_soon_threadsafe(give, tail, age_s)

        self._console.read_tail(self._stderr[local_rank], take)
        return await read

    # --- stopping -----------------------------------------------------------------------------------------------------

    def stop(self, grace_s: float) -> None:
        """Ask the workers to end, and kill all processes that are left after the grace period."""
        if self._stopping is None:
            self._command(b"t\n")
            self._stopping = asyncio.create_task(self._kill_after(grace_s), name="grace period")

    async def _kill_after(self, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        if self._hangs is not None:
            await self._hangs.before_kill(grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill all processes that are left."""
        self._command(b"k\n")

    async def wait_empty(self) -> None:
        """Wait until no process is left. Call `stop` or `kill` first."""
        if self._following is not None:
            await self._following

    def _command(self, data: bytes) -> None:
        if self._guardian is not None and self._guardian.stdin is not None:
            with suppress(OSError):
                self._guardian.stdin.write(data)

    # --- following the guardian ---------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        process = self._guardian
        assert process is not None
        assert process.stdout is not None
        is_empty = False
        async for line in process.stdout:
            match line.decode().split():
                case ["started", rank, pid]:
                    if self._hangs is not None:
                        self._hangs.pids[int(rank)] = int(pid)
                case ["exited", rank, code]:
                    self._ended(int(rank), int(code))
                case ["left", *pids]:
                    self._console.say(f"these processes do not end although they were killed: {', '.join(pids)}")
                case ["empty"]:
                    is_empty = True
        await process.wait()
        if not is_empty:
            await self._kill_orphans()
        if self._stopping is not None:
            self._stopping.cancel()
        if self._hangs is not None:
            self._hangs.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                if self._open_streams:
                    await self._streams_ended.wait()
        self._on_empty()

    def _ended(self, local_rank: int, code: int) -> None:
        if local_rank in self._running:
            self._running.discard(local_rank)
            if self._stopping is None:
                self._exits[local_rank] = code, self._loop.time()
            if self._hangs is not None:
                self._hangs.ended(local_rank)
            self._on_exit(local_rank, code)

    async def _kill_orphans(self) -> None:
        """The guardian was killed, and its workers with it. Their orphans are children of this process now."""
        self._console.say("the workers were killed, because their guardian process was killed")
        while left := worker_guardian.kill_below(os.getpid()):
            worker_guardian.reap_all(left)
            await asyncio.sleep(worker_guardian.KILL_AGAIN_S)
        for local_rank in sorted(self._running):
            self._ended(local_rank, KILLED)


def _read_end(path: Path) -> asyncio.Future[bytes]:
    """`_end_of`, on a daemon thread: a file system that does not answer must not keep the launcher from ending."""
    return run_in_thread(partial(_end_of, path), "evidence")


def _end_of(path: Path) -> bytes:
    """The end of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_EVIDENCE))
            return file.read(MAX_EVIDENCE)
    except OSError:
        return b""
