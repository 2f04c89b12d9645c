"""Runs that are drawn in a process of its own, so that the server's only passes the pictures on.

The process is started when somebody first looks at a run, and ends when nobody does. It gets two sockets: one for what
is in `studio_words`, and a connection to the server that can only look on. It holds no secret. If it dies, whatever it
drew is over; readers come back, and another is started. If it cannot be started, or dies again and again, runs are
drawn in the server's own process for a while.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from rallypoint.dashboard.studio_words import (
    BEAT_S,
    Ask,
    Begin,
    FromStudio,
    Leave,
    Look,
    News,
    Over,
    Told,
    ToStudio,
    from_studio,
    packed,
    receive,
)
from rallypoint.dashboard.watching import CACHED_S, Readable

MODULE = "rallypoint.dashboard.studio_process"
START_S = 30.0
"""Until its first word."""
SILENT_S = 5 * BEAT_S
"""One that says nothing for so long is ended: it would show old things as if they were new."""
END_S = 2.0
MOST_DEATHS, DEATHS_S, REST_S = 3, 60.0, 600.0
"""After so many deaths within this time, runs are drawn here for so long."""
READ_AT_ONCE = 1 << 20


class Studio:
    """Draws runs of a server in a process of its own. Belongs to the loop it is used on."""

    def __init__(
        self, where: str, admit: Callable[[socket.socket], Awaitable[None]], on_trouble: Callable[[str], None]
    ) -> None:
        self._where = where
        self._admit = admit
        self._on_trouble = on_trouble
        self._life: _Life | None = None
        self._lives: set[_Life] = set()
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._rests_until = float("-inf")

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._life.pid if self._life is not None else None

    def show(self, run_id: str) -> Readable | None:
        """None: it is to be drawn here."""
        if asyncio.get_running_loop().time() < self._rests_until:
            return None
        if self._life is None or self._life.is_ending:
            self._life = life = _Life(self._where, self._admit)
            self._lives.add(life)
            life.task.add_done_callback(lambda _: self._ended(life))
        return self._life.show(run_id)

    def _ended(self, life: _Life) -> None:
        self._lives.discard(life)
        if self._life is life:
            self._life = None
        if not life.failure:
            return
        now = asyncio.get_running_loop().time()
        self._deaths.append(now)
        what = f"the process that draws runs for the page {life.failure}"
        is_often = len(self._deaths) == MOST_DEATHS and now - self._deaths[0] < DEATHS_S
        if is_often or not life.has_begun:
            self._deaths.clear()
            self._rests_until = now + REST_S
            self._on_trouble(f"{what}: for {REST_S / 60:.0f} minutes the server draws them itself, which costs it more")
        else:
            self._on_trouble(f"{what}; another is started when somebody looks")

    async def close(self) -> None:
        """Nothing is left of it afterwards."""
        for life in list(self._lives):
            life.end()
        await asyncio.gather(*(life.task for life in self._lives), return_exceptions=True)


class _Life:
    """One process, from its start until it is gone."""

    def __init__(self, where: str, admit: Callable[[socket.socket], Awaitable[None]]) -> None:
        self.is_ending = False
        self.has_begun = False
        """It has said a word."""
        self.failure = ""
        """How it ended, unless it was told to."""
        self._where = where
        self._admit = admit
        self._drawn: dict[int, Drawn] = {}
        self._count = 0
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._told = asyncio.Event()
        self.task = asyncio.create_task(self._live(), name="a process that draws runs")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def show(self, run_id: str) -> Drawn:
        self._count += 1
        drawn = self._drawn[self._count] = Drawn(self, self._count, run_id)
        self.say(Look(self._count, run_id))
        return drawn

    def leave(self, drawn: Drawn) -> None:
        """Nobody looks at it any more; without anybody at all the process ends."""
        if self._drawn.pop(drawn.number, None) is not None:
            self.say(Leave(drawn.number))
            if not self._drawn:
                self.end()

    def end(self) -> None:
        """It is told to end."""
        self.is_ending = True
        self._told.set()

    def say(self, message: ToStudio) -> None:
        """Nothing, before it is there: then it is told of all runs at once."""
        if self._writer is not None:
            self._writer.write(packed(message))

    async def _live(self) -> None:
        told = asyncio.create_task(self._told.wait(), name="end of a process that draws runs")
        work = asyncio.create_task(self._work(), name="what a process draws")
        try:
            await asyncio.wait({told, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            was_told, self.is_ending = self.is_ending, True
            told.cancel()
            work.cancel()
            (_, found) = await asyncio.gather(told, work, return_exceptions=True)
            code = await self._bury()
            if not was_told:
                self.failure = _why(found, code)
            for drawn in list(self._drawn.values()):
                drawn.end()
            self._drawn.clear()

    async def _work(self) -> str:
        """Start it and pass on what it says; returns how that ended. OSError: it cannot be started."""
        reader = await self._start()
        while True:
            within_s = SILENT_S if self.has_begun else START_S
            try:
                async with asyncio.timeout(within_s):
                    message = await receive(reader, from_studio)
            except TimeoutError:
                return f"has said nothing for {within_s:g} s"
            if message is None:
                return ""
            self.has_begun = True
            self._take(message)

    def _take(self, message: FromStudio) -> None:
        match message:
            case News(number, version) if number in self._drawn:
                self._drawn[number].renew(version)
            case Told(number, since, version, data) if number in self._drawn:
                self._drawn[number].answer(since, version, data)
            case Over(number) if number in self._drawn:
                self._drawn[number].end()
                self.leave(self._drawn[number])
            case _:
                pass  # of a run that was left, or a sign of life

    async def _start(self) -> asyncio.StreamReader:
        control, its_control = socket.socketpair()
        server, its_server = socket.socketpair()
        mine, its = [control, server], (its_control, its_server)
        try:
            for one in mine:
                one.setblocking(False)
            numbers = [one.fileno() for one in its]
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                MODULE,
                *map(str, numbers),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=numbers,
                env={**os.environ, "PYTHONPATH": _path()},
                start_new_session=True,
            )
            await self._admit(mine.pop())
            reader, self._writer = await asyncio.open_unix_connection(sock=control, limit=READ_AT_ONCE)
        except BaseException:
            for one in mine:
                one.close()
            raise
        finally:
            for one in its:
                one.close()
        self.say(Begin(self._where))
        for drawn in self._drawn.values():
            self.say(Look(drawn.number, drawn.run_id))
        return reader

    async def _bury(self) -> int | None:
        """It ends when its sockets are closed; if it does not, it is killed."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is None:
            return None
        try:
            async with asyncio.timeout(END_S):
                return await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            return await self._process.wait()


def _path() -> str:
    """It finds the same code, wherever it is started."""
    found = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(one for one in found if one)


def _why(found: object, code: int | None) -> str:
    """How a process ended, in words that go on from its name."""
    if code is None:
        return f"cannot be started with {sys.executable} ({found})"
    if found:
        return str(found) if isinstance(found, str) else f"has failed ({found!r})"
    if code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"has ended with {code}"


class Drawn:
    """A run that is drawn by a process, for readers here. Belongs to a `Studio`."""

    def __init__(self, life: _Life, number: int, run_id: str) -> None:
        self.epoch = secrets.token_hex(4)
        self.readers = 0
        self.version = 0
        self.number = number
        self.run_id = run_id
        self._life = life
        self._news = asyncio.Event()
        self._is_over = False
        self._asked: dict[int, asyncio.Future[tuple[int, bytes] | None]] = {}
        self._asked_for = 0
        self._asked_at = 0.0

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def news(self) -> asyncio.Event:
        return self._news

    async def tell(self, version: int) -> tuple[int, bytes] | None:
        """Many readers of one version share the work."""
        if self._is_over:
            return None
        loop = asyncio.get_running_loop()
        if self._asked_for != self.version or loop.time() - self._asked_at > CACHED_S:
            self._forget_answers()
            self._asked_for, self._asked_at = self.version, loop.time()
        if version not in self._asked:
            self._asked[version] = loop.create_future()
            self._life.say(Ask(self.number, version))
        return await asyncio.shield(self._asked[version])

    async def stop(self) -> None:
        self._life.leave(self)
        self.end()

    # --- what the process says ----------------------------------------------------------------------------------------

    def renew(self, version: int) -> None:
        """There is a later one."""
        if version > self.version:
            self.version = version
            news, self._news = self._news, asyncio.Event()
            news.set()

    def answer(self, since: int, version: int, data: bytes) -> None:
        asked = self._asked.get(since)
        if asked is not None and not asked.done():
            asked.set_result((version, data))
        self._asked_for = max(self._asked_for, version)
        self.renew(version)

    def end(self) -> None:
        """It is told no more."""
        self._is_over = True
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(None)
        self._asked.clear()
        self._news.set()

    def _forget_answers(self) -> None:
        """But what somebody waits for."""
        self._asked = {version: asked for version, asked in self._asked.items() if not asked.done()}
