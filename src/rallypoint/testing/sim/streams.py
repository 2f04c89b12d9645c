"""Simulated TCP connections: two ends with asyncio's transport interface, and bytes with delays between them.

TCP's guarantees hold: the bytes of a direction arrive in order, each once, or the connection ends. Nothing else is
guaranteed: they arrive in arbitrary pieces, with delays, are held back while their direction is cut, and a reset loses
bytes in flight, before or after the peer has received some of them. A process that dies closes its connections; a
machine that dies leaves them open at the peer, which notices it by a reset or, much later, by a time-out.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Protocol

from rallypoint.testing.sim.network import LinkConditions

KERNEL_BYTES = 1_024
"""The size of the kernel's send buffer; further bytes wait in the process."""
HIGH_BYTES, LOW_BYTES = 1_024, 256
"""The buffer sizes at which a writing process is told to pause and to resume."""
WINDOW_BYTES = 2_048
"""The most bytes that may have arrived without being read."""
WHOLE = 0.7
"""The probability that all bytes in flight arrive at once."""
NOTICED_S = (15.0, 60.0)
"""When a kernel times out a peer that does not answer."""
WIRE = Context()
"""The context of bytes in flight, which belong to no machine: they arrive even if their sender is paused or dead."""


class Last(enum.Enum):
    """How a direction ends after its last bytes."""

    FIN = "the end"
    RST = "a reset"


class End(asyncio.Transport):
    """One end of a connection. Its protocol is called in its own context: not while its machine is paused."""

    def __init__(self, stream: Stream, protocol: asyncio.Protocol, context: Context) -> None:
        super().__init__()
        self.peer: End = self
        self.is_deaf = False
        """Its machine is dead: bytes that arrive are lost, and nothing is answered."""
        self._stream = stream
        self._protocol = protocol
        self._context = context
        self._in_flight = bytearray()
        self._last: Last | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self._arrived_at: deque[float] = deque()
        """The arrival times of unread pieces."""
        self._is_closing = False
        self._is_over = False
        """`connection_lost` was called, or never will be."""
        self._has_paused = False

    # --- asyncio's interface ------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or self._stream.is_broken:
            return
        self._in_flight += data
        if len(self._in_flight) > KERNEL_BYTES + HIGH_BYTES and not self._has_paused:
            self._has_paused = True
            self._protocol.pause_writing()
        self.kick()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._last = Last.FIN
            self.kick()
            self._close_when_sent()

    def abort(self) -> None:
        if self._is_over:
            return
        self._is_closing = True
        del self._in_flight[KERNEL_BYTES:]
        self._last = Last.RST if self._unread or self._stream.rng.random() < 0.5 else Last.FIN
        self.kick()
        self._lose(None)

    def is_closing(self) -> bool:
        return self._is_closing

    def can_write_eof(self) -> bool:
        return False

    @property
    def unread_s(self) -> float:
        """How long the oldest bytes have waited to be read."""
        return self._stream.loop.time() - self._arrived_at[0] if self._arrived_at else 0.0

    def get_write_buffer_size(self) -> int:
        return max(0, len(self._in_flight) - KERNEL_BYTES)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._stream.name if name == "peername" else default

    # --- failures of the process and the machine ----------------------------------------------------------------------

    def open(self) -> None:
        """Report the connection to this end's protocol. Call it in this end's context."""
        self._protocol.connection_made(self)

    def die(self) -> None:
        """The process is killed: its kernel closes the connection."""
        if not self._is_over:
            self._is_over = True
            self.abort_quietly()

    def abort_quietly(self) -> None:
        """Close without calling the protocol."""
        self._is_closing = True
        del self._in_flight[KERNEL_BYTES:]
        self._last = Last.RST if self._unread else Last.FIN
        self.kick()

    def vanish(self) -> None:
        """The machine is gone: bytes in flight still arrive, and nothing follows. The peer notices later."""
        if self.is_deaf:
            return
        self._is_over = self._is_closing = self.is_deaf = True
        del self._in_flight[KERNEL_BYTES:]
        self._stream.later(self._stream.rng.uniform(*NOTICED_S), self.peer.time_out)

    def time_out(self) -> None:
        """The kernel has timed out the peer."""
        self.lose_soon(OSError(errno.ETIMEDOUT, "Connection timed out"))

    # --- bytes in flight ----------------------------------------------------------------------------------------------

    def kick(self) -> None:
        """Schedule the arrival of bytes in flight, unless the direction is cut."""
        if self._timer is not None or not (self._in_flight or self._last):
            return
        stream = self._stream
        if not stream.is_broken and stream.flows(self):
            self._timer = stream.loop.call_later(stream.delay_s(), self._pump, context=WIRE)

    def _pump(self) -> None:
        """Deliver some bytes, or the end of the direction."""
        self._timer = None
        stream, peer = self._stream, self.peer
        if stream.is_broken or not stream.flows(self):
            return
        if stream.link.conditions.lose and stream.is_unlucky():
            stream.reset()
            return
        if self._in_flight and not peer._is_closing:
            room = WINDOW_BYTES - peer._unread
            if room <= 0:
                return  # scheduled again when the peer has read
            size = min(room, len(self._in_flight))
            if stream.rng.random() >= WHOLE:
                size = stream.rng.randint(1, size)
            peer._arrive(bytes(self._in_flight[:size]))
            del self._in_flight[:size]
            if self._has_paused or self._is_closing:
                self._sent()
            if self._in_flight or self._last:
                self.kick()
            return
        if self._in_flight and not peer.is_deaf:
            peer._last = peer._last or Last.RST  # the peer has closed: its kernel resets
            peer.kick()
        self._in_flight.clear()
        self._sent()
        if self._last is not None:
            last, self._last = self._last, None
            peer._hear(last)

    def deliver_now(self) -> None:
        """Deliver all bytes in flight now, as far as the peer has room."""
        size = min(WINDOW_BYTES - self.peer._unread, len(self._in_flight))
        if size > 0 and not self.peer._is_closing and self._stream.flows(self):
            self.peer._arrive(bytes(self._in_flight[:size]))

    def _arrive(self, data: bytes) -> None:
        self._unread += len(data)
        self._arrived_at.append(self._stream.loop.time())
        self._stream.loop.call_soon(self._read, data, context=self._context)

    def _read(self, data: bytes) -> None:
        self._unread -= len(data)
        self._arrived_at.popleft()
        if self.peer._timer is None:
            self.peer.kick()
        if not self._is_closing and not self._is_over:
            self._protocol.data_received(data)

    def _hear(self, last: Last) -> None:
        if self.is_deaf:
            return
        if last is Last.RST:
            self.lose_soon(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        else:
            self._stream.loop.call_soon(self._read_end, context=self._context)

    def _read_end(self) -> None:
        if not self._is_closing and not self._is_over and not self._protocol.eof_received():
            self.close()

    def _sent(self) -> None:
        """Some bytes have left the buffer."""
        if self._is_closing:
            self._close_when_sent()
        elif self._has_paused and self.get_write_buffer_size() <= LOW_BYTES:
            self._has_paused = False
            self._stream.loop.call_soon(self._resume, context=self._context)

    def _resume(self) -> None:
        if not self._is_over and not self._is_closing and not self._has_paused:
            self._protocol.resume_writing()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _close_when_sent(self) -> None:
        if self.get_write_buffer_size() == 0:
            self._lose(None)

    def lose_soon(self, error: Exception) -> None:
        """The kernel learns now that the connection is over; the process when it runs."""
        self._is_closing = True
        self._in_flight.clear()
        self._last = None
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._stream.loop.call_soon(self._lost, error, context=self._context)

    def _lost(self, error: Exception | None) -> None:
        if not self._stream.is_void:
            self._protocol.connection_lost(error)


class HasConditions(Protocol):
    """Where the current network conditions are read from."""

    conditions: LinkConditions


@dataclass(slots=True)
class ProcessLink:
    """The network conditions of one process."""

    conditions: LinkConditions


class Stream:
    """A connection between a process (`near`) and the server (`far`), with the process's network conditions."""

    def __init__(self, name: str, link: HasConditions, rng: random.Random) -> None:
        self.name = name
        self.link = link
        self.rng = rng
        self.loop = asyncio.get_running_loop()
        self.is_broken = False
        self.is_void = False
        """The world has ended: protocols are no longer called."""
        self.near: End
        self.far: End

    def join(self, near: tuple[asyncio.Protocol, Context], far: tuple[asyncio.Protocol, Context]) -> None:
        """Set its ends. Each is opened when its side learns of the connection."""
        self.near, self.far = End(self, *near), End(self, *far)
        self.near.peer, self.far.peer = self.far, self.near

    @property
    def is_over(self) -> bool:
        """Both ends are closed, and nothing is in flight."""
        return self.near._is_over and self.far._is_over and not (self.near._timer or self.far._timer)

    def flows(self, end: End) -> bool:
        """Whether bytes from this end can arrive now."""
        conditions = self.link.conditions
        return conditions.to_server if end is self.near else conditions.from_server and conditions.watches

    def delay_s(self) -> float:
        """The delay of the next bytes, and so of all that follow."""
        conditions = self.link.conditions
        if conditions.late and self.rng.random() < conditions.late / 3:
            return self.rng.uniform(0.0, conditions.late_s)
        fastest_s, slowest_s = conditions.delay_s
        return fastest_s + (slowest_s - fastest_s) * self.rng.random()

    def is_unlucky(self) -> bool:
        """Whether the network resets the connection now. TCP itself repairs lost packets."""
        conditions = self.link.conditions
        return conditions.lose > 0 and self.rng.random() < conditions.lose

    def later(self, after_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        """Schedule an event of the network."""
        return self.loop.call_later(after_s, act, context=WIRE)

    def kick(self) -> None:
        """The network conditions have changed."""
        self.near.kick()
        self.far.kick()

    def reset(self, silent: float = 0.2) -> None:
        """Both ends lose the connection and bytes in flight, each at its own time. Or bytes to the server arrive first,
        so that requests are executed and their answers are lost. Sometimes the server's end only times out."""
        if self.is_broken:
            return
        if self.rng.random() < 0.5:
            self.near.deliver_now()
        self.is_broken = True
        conditions = self.link.conditions
        near_s, far_s = self.rng.uniform(*conditions.delay_s), self.rng.uniform(*conditions.delay_s)
        reset = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self.later(near_s, lambda: self.near.lose_soon(reset))
        self.later(far_s, self.far.time_out if self.rng.random() < silent else lambda: self.far.lose_soon(reset))
