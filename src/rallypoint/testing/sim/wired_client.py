"""The real client of one process in a wire world, with the director's controls of its connection and requests."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable

from rallypoint.backends.contract import Limits
from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.connection import ClientConnection
from rallypoint.backends.tcp.requests import Pending
from rallypoint.errors import OutcomeUnknown
from rallypoint.kv.types import Op
from rallypoint.testing.sim.network import LinkConditions
from rallypoint.testing.sim.streams import ProcessLink, Stream
from rallypoint.testing.sim.wired import ENDPOINT, UNREACHABLE, WiredServer
from rallypoint.wire.messages import AskStatus, Do


class WiredBackend(TcpBackend):
    """The client of one process, over simulated connections."""

    def __init__(
        self, server: WiredServer, process: str, writer: str, rng: random.Random, conditions: LinkConditions
    ) -> None:
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
        """Requests that match are never sent."""
        self.left_to_send: int | None = None
        self.has_sent = asyncio.Event()
        """Set when `left_to_send` more requests have been sent."""
        self._process = process
        self._process_link = ProcessLink(conditions)
        self._cleared = asyncio.Event()
        self.stream: Stream | None = None
        self._rng_of_lines = random.Random(f"{plan.seed} lines of {process}")
        self._writer = writer
        server.writers[self._client] = writer
        server.backends[self._client] = self

    @property
    def conditions(self) -> LinkConditions:
        return self._process_link.conditions

    @conditions.setter
    def conditions(self, conditions: LinkConditions) -> None:
        self._process_link.conditions = conditions
        self._cleared.set()
        if self.stream is not None:
            self.stream.kick()

    def reset(self) -> None:
        """After a fault: the connection is reset, or continues."""
        if self.stream is not None and self._rng_of_lines.random() < 0.6:
            self.stream.reset()

    def crash(self, is_machine: bool) -> None:
        """The process dies, and perhaps its machine. It is already frozen."""
        self.is_dead = True
        if self.stream is not None:
            if is_machine:
                self.stream.near.vanish()
            else:
                self.stream.near.die()

    def machine_is_back(self) -> None:
        """The machine runs again: its kernel resets the connection of the dead process."""
        stream = self.stream
        if stream is not None and stream.near.is_deaf:
            stream.later(self._rng_of_lines.uniform(0.0, 1.0), stream.reset)

    def _asked(self, message: Do | AskStatus, changes: bool) -> Pending:
        if isinstance(message, Do) and self._is_swallowed(message.op):
            return self._swallow(message)
        return super()._asked(message, changes)

    def _swallow(self, message: Do) -> Pending:
        """Never send the request; its caller gets a late error."""
        pending = self._requests.add(message, changes=True)
        self._requests.forget(pending)
        late_s = min(self.server.plan.call_timeout_s, self.server.plan.ttl_s / 2)
        self._loop.call_later(late_s, pending.fail, OutcomeUnknown("no answer from the server: it may have happened"))
        return pending

    def _is_swallowed(self, op: Op) -> bool:
        """Count a request that is about to be sent; True: do not send it."""
        if self.left_to_send is not None:
            self.left_to_send -= 1
            if self.left_to_send <= 0:
                self.has_sent.set()
        return self.swallow is not None and self.swallow(op)

    async def _dial(self, make: Callable[[], ClientConnection]) -> None:
        rng = self._rng_of_lines
        await asyncio.sleep(rng.uniform(*self.conditions.delay_s))
        while not (self.conditions.to_server and self.conditions.from_server):
            if rng.random() < UNREACHABLE:
                raise OSError(errno.EHOSTUNREACH, "No route to host")
            self._cleared.clear()
            await self._cleared.wait()
        if self.server.is_silent and not self.server.is_up:
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            raise TimeoutError("no answer")
        stream = self.server.accept(self._process, self._process_link, rng, make())
        self.stream = stream
        try:
            await asyncio.sleep(rng.uniform(*self.conditions.delay_s))
        except BaseException:
            stream.near.die()
            raise
        if not stream.near.is_closing():
            stream.near.open()
        else:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
