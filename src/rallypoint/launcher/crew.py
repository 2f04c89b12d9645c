"""The workers of one round on one node, as processes: started together, stopped together, and none is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rallypoint.launcher import guard
from rallypoint.launcher.environment import MARK
from rallypoint.launcher.logs import Logs
from rallypoint.launcher.output import Console, Stream

GUARD = str(Path(guard.__file__))
LAST_WORDS_S = 5.0
"""How long the last lines of workers that are gone may take to be written."""
KILLED = 137


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker to be started."""

    local_rank: int
    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]


class Crew:
    """Start it once. `on_exit(local_rank, code)` for every worker, then `on_empty()` once nothing is left of them."""

    def __init__(
        self,
        workers: Sequence[Worker],
        console: Console,
        logs: Logs,
        *,
        on_exit: Callable[[int, int], None],
        on_empty: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._console = console
        self._logs = logs
        self._on_exit = on_exit
        self._on_empty = on_empty
        self._running = {worker.local_rank for worker in workers}
        self._open_streams = 0
        self._streams_ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._guard: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self.pids: dict[int, int] = {}
        """Local rank -> process id."""

    async def start(self) -> None:
        """Start all workers. One that cannot be started has ended with 126 or 127. OSError: no process at all."""
        fds: list[int] = []
        try:
            specs = [self._prepare(worker, fds) for worker in self._workers]
            self._guard = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                GUARD,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=fds,
                env={**os.environ, MARK: self._workers[0].env[MARK]},
                start_new_session=True,
            )
        finally:
            for fd in set(fds):
                os.close(fd)
        text = json.dumps(specs).encode()
        self._tell(f"{len(text)}\n".encode() + text)
        self._following = asyncio.create_task(self._follow(), name="crew")

    def _prepare(self, worker: Worker, fds: list[int]) -> dict[str, object]:
        places = {}
        for to, name in ((1, "stdout"), (2, "stderr")):
            shown, file = self._logs.open(worker.local_rank, to)
            if not shown:
                assert file is not None
                fds.append(file)
                places[name] = file
                continue
            reader, writer = os.pipe()
            os.set_blocking(writer, True)
            fds.append(writer)
            places[name] = writer
            tag = self._console.colour(f"[rank {worker.rank}]", worker.local_rank, to)
            self._open_streams += 1
            self._console.follow(Stream(reader, f"{tag} ".encode(), to, file, self._stream_ended))
        return {"argv": worker.argv, "env": worker.env, "local_rank": worker.local_rank, **places}

    def _stream_ended(self) -> None:
        """In the thread of the console."""
        with suppress(RuntimeError):  # the launcher has ended
            self._loop.call_soon_threadsafe(self._one_stream_less)

    def _one_stream_less(self) -> None:
        self._open_streams -= 1
        if self._open_streams == 0:
            self._streams_ended.set()

    # --- stopping -----------------------------------------------------------------------------------------------------

    def stop(self, grace_s: float) -> None:
        """Ask the workers to end, and kill what is left after the grace period."""
        if self._patience is None:
            self._tell(b"t\n")
            self._patience = self._loop.call_later(grace_s, self.kill)

    def kill(self) -> None:
        """Kill all that is left."""
        self._tell(b"k\n")

    async def wait_empty(self) -> None:
        """Until nothing is left. Ask it to stop before."""
        if self._following is not None:
            await self._following

    def _tell(self, words: bytes) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.stdin.write(words)

    # --- following ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        process = self._guard
        assert process is not None
        assert process.stdout is not None
        is_empty = False
        async for line in process.stdout:
            match line.decode().split():
                case ["started", rank, pid]:
                    self.pids[int(rank)] = int(pid)
                case ["exited", rank, code]:
                    self._ended(int(rank), int(code))
                case ["left", *pids]:
                    self._console.say(f"these processes were killed and do not end: {', '.join(pids)}")
                case ["empty"]:
                    is_empty = True
        await process.wait()
        if not is_empty:
            await self._clear_away()
        if self._patience is not None:
            self._patience.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                if self._open_streams:
                    await self._streams_ended.wait()
        self._on_empty()

    def _ended(self, local_rank: int, code: int) -> None:
        if local_rank in self._running:
            self._running.discard(local_rank)
            self._on_exit(local_rank, code)

    async def _clear_away(self) -> None:
        """The guard was killed. Its workers die with it; what they leave behind is a child of this process now."""
        self._console.say("the guard of the workers was killed: they are gone with it")
        while left := guard.kill_below(os.getpid()):
            guard.reap_all(left)
            await asyncio.sleep(guard.LOOK_AGAIN_S)
        for local_rank in sorted(self._running):
            self._ended(local_rank, KILLED)
