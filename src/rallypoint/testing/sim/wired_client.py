"""The real client of one process in a wire world, with what a director may do to its connection and its requests."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable

from rallypoint.backends.contract import Limits
from rallypoint.backends.tcp import TcpBackend
from rallypoint.backends.tcp_link import Link
from rallypoint.backends.tcp_requests import Pending, Ready
from rallypoint.errors import OutcomeUnknown
from rallypoint.kv.types import Op, Put, Txn
from rallypoint.testing.sim.lanes import WiredLane
from rallypoint.testing.sim.network import Weather
from rallypoint.testing.sim.streams import Above, Stream
from rallypoint.testing.sim.wired import ENDPOINT, UNREACHABLE, WiredServer
from rallypoint.wire.messages import AskStatus, Do

PLEDGES = 0.7
"""How often callers confirm beforehand, where not all of them do."""


class WiredBackend(TcpBackend):
    """The client of one process, over simulated connections."""

    def __init__(self, server: WiredServer, process: str, writer: str, rng: random.Random, weather: Weather) -> None:
        plan = server.plan
        super().__init__(
            ENDPOINT,
            self._dial,
            run="sim" if writer else "",
            grace_s=plan.disconnect_grace_s,
            call_timeout_s=plan.call_timeout_s,
            stall_s=plan.stall_s,
            rng=rng,
        )
        self.limits = Limits(max_txn_ops=plan.max_txn_ops, max_txn_bytes=1 << 20)
        self.server = server
        self.is_dead = False
        self.swallow: Callable[[Op], bool] | None = None
        """Requests that this process never manages to send."""
        self.left_to_send: int | None = None
        self.pledges = plan.all_pledge or random.Random(f"{plan.seed} pledges of {process}").random() < PLEDGES
        """Whether its callers confirm beforehand."""
        self.has_sent = asyncio.Event()
        """Set when `left_to_send` more requests were sent."""
        self._process = process
        self._above = Above(weather)
        self._cleared = asyncio.Event()
        self.stream: Stream | None = None
        self._rng_of_lines = random.Random(f"{plan.seed} lines of {process}")
        self._writer = writer
        self._aside: Stream | None = None
        """The connection of a caller that waits, if it has one."""
        server.writers[self._client] = writer
        server.backends[self._client] = self
        if writer:
            self._shortcut.make_lane = lambda node_id: WiredLane(self, node_id)

    @property
    def weather(self) -> Weather:
        return self._above.weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        self._above.weather = weather
        self._cleared.set()
        for stream in self._streams():
            stream.kick()

    def reset(self) -> None:
        """What follows a fault: the connection breaks, or goes on where it was."""
        for stream in self._streams():
            if self._rng_of_lines.random() < 0.6:
                stream.reset()

    def crash(self, is_machine: bool) -> None:
        """The process is dead, and perhaps its machine with it. It is frozen already."""
        self.is_dead = True
        for stream in self._streams():
            if is_machine:
                stream.near.vanish()
            else:
                stream.near.die()

    def machine_is_back(self) -> None:
        """Another process runs on the machine that died: whoever sends to this one is told that it is gone."""
        for stream in self._streams():
            if stream.near.is_deaf:
                stream.later(self._rng_of_lines.uniform(0.0, 1.0), stream.reset)

    def speaks_as(self, client: str) -> None:
        """What a client of this name writes is this process's doing."""
        self.server.writers[client] = self._writer

    def dawdle_s(self) -> float:
        """How long a thread that was woken waits for a core: most often not at all."""
        rng = self._rng_of_lines
        return 0.0 if rng.random() < 0.7 else rng.uniform(0.0, 0.2)

    def vanishes(self, op: Op) -> bool:
        """Whether a request of a caller is never sent."""
        return self._vanishes(op)

    def pledged(self, op: Txn | None) -> None:
        """The server may write what this would from now on, and it is this process's doing."""
        self.server.pledged.update((step.key, step.value) for step in (op.then if op else ()) if isinstance(step, Put))

    def _streams(self) -> list[Stream]:
        return [stream for stream in (self.stream, self._aside) if stream is not None]

    def _asked(self, message: Do | AskStatus, changes: bool) -> Pending:
        if isinstance(message, Do) and self._vanishes(message.op):
            return self._vanished(message)
        return super()._asked(message, changes)

    def _ask_now(self, op: Txn, ready: Ready | None) -> Pending:
        if self._vanishes(op):
            return self._vanished(Do(self._requests.number(), op))
        return super()._ask_now(op, ready)

    def _vanished(self, message: Do) -> Pending:
        """It is never sent, and whoever asked is told so late."""
        pending = self._requests.add(message, changes=True)
        self._requests.forget(pending)
        late_s = min(self.server.plan.call_timeout_s, self.server.plan.ttl_s / 2)
        self._loop.call_later(late_s, pending.fail, OutcomeUnknown("no answer from the server: it may have happened"))
        return pending

    def _vanishes(self, op: Op) -> bool:
        """Count a request that is about to be sent; whether it never is."""
        if self.left_to_send is not None:
            self.left_to_send -= 1
            if self.left_to_send <= 0:
                self.has_sent.set()
        return self.swallow is not None and self.swallow(op)

    async def _dial(self, make: Callable[[], Link]) -> None:
        def noted(stream: Stream) -> None:
            self.stream = stream

        await self._dial_and(make, noted)

    async def dial_aside(self, make: Callable[[], Link]) -> None:
        """Another connection, beside the one that the sessions hang on. OSError, TimeoutError."""

        def noted(stream: Stream) -> None:
            self._aside = stream

        await self._dial_and(make, noted)

    async def _dial_and(self, make: Callable[[], Link], noted: Callable[[Stream], None]) -> None:
        rng = self._rng_of_lines
        await asyncio.sleep(rng.uniform(*self.weather.delay_s))
        while not (self.weather.to_server and self.weather.from_server):
            if rng.random() < UNREACHABLE:
                raise OSError(errno.EHOSTUNREACH, "No route to host")
            self._cleared.clear()
            await self._cleared.wait()
        if self.server.is_silent and not self.server.is_up:
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            raise TimeoutError("no answer")
        stream = self.server.accept(self._process, self._above, rng, make())
        noted(stream)
        try:
            await asyncio.sleep(rng.uniform(*self.weather.delay_s))
        except BaseException:
            stream.near.die()
            raise
        if not stream.near.is_closing():
            stream.near.open()
        else:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
