"""Simulated TCP connections: two ends with asyncio's face of a transport, and bytes that take their time between them.

What TCP promises holds: the bytes of a direction arrive in order, each once, or the connection ends. Nothing else does:
they arrive cut anywhere, with delays, are held back while their direction is cut, and a reset loses what is under way,
after the peer has taken some of it or before. A process that dies closes its connections with it; a machine that dies
leaves them open at the other side, which learns of it when it is told that the bytes reach nobody, or much later.
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

from rallypoint.testing.sim.network import Weather

KERNEL_BYTES = 1_024
"""What the sending kernel takes at once; what is beyond waits in the process."""
HIGH_BYTES, LOW_BYTES = 1_024, 256
"""When a process that writes is told to pause, and to go on."""
WINDOW_BYTES = 2_048
"""What may have arrived without being read."""
WHOLE = 0.7
"""How often everything that is under way arrives at once."""
NOTICED_S = (15.0, 60.0)
"""When a kernel gives up a peer that does not answer."""
WIRE = Context()
"""What is under way belongs to no machine: it arrives even if its sender stands still or is dead."""


class Last(enum.Enum):
    """What follows the last bytes of a direction."""

    FIN = "the end"
    RST = "a reset"


class End(asyncio.Transport):
    """One side of a connection. Its protocol is called in its own context: not while its machine stands still."""

    def __init__(self, stream: Stream, protocol: asyncio.Protocol, context: Context) -> None:
        super().__init__()
        self.peer: End = self
        self.is_deaf = False
        """Its machine is dead: what arrives is lost, and nothing is answered."""
        self._stream = stream
        self._protocol = protocol
        self._context = context
        self._under_way = bytearray()
        self._last: Last | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self._arrived_at: deque[float] = deque()
        """When what is unread has arrived, piece by piece."""
        self._is_closing = False
        self._is_over = False
        """The protocol was told that the connection is lost, or never will be."""
        self._has_paused = False

    # --- asyncio's face -----------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or self._stream.is_broken:
            return
        self._under_way += data
        if len(self._under_way) > KERNEL_BYTES + HIGH_BYTES and not self._has_paused:
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
        del self._under_way[KERNEL_BYTES:]
        self._last = Last.RST if self._unread or self._stream.rng.random() < 0.5 else Last.FIN
        self.kick()
        self._lose(None)

    def is_closing(self) -> bool:
        return self._is_closing

    @property
    def unread_s(self) -> float:
        """For how long something has waited to be read: the process does not listen."""
        return self._stream.loop.time() - self._arrived_at[0] if self._arrived_at else 0.0

    def get_write_buffer_size(self) -> int:
        return max(0, len(self._under_way) - KERNEL_BYTES)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._stream.name if name == "peername" else default

    # --- what happens to the machine ----------------------------------------------------------------------------------

    def open(self) -> None:
        """The connection is made, as this side sees it. Call it in this side's context."""
        self._protocol.connection_made(self)

    def die(self) -> None:
        """The process is killed: its kernel says goodbye for it."""
        if not self._is_over:
            self._is_over = True
            self.abort_quietly()

    def abort_quietly(self) -> None:
        """Close as a kernel does, without telling the process."""
        self._is_closing = True
        del self._under_way[KERNEL_BYTES:]
        self._last = Last.RST if self._unread else Last.FIN
        self.kick()

    def vanish(self) -> None:
        """The machine is gone: what it sent is under way, and nothing follows. The peer notices some time."""
        if self.is_deaf:
            return
        self._is_over = self._is_closing = self.is_deaf = True
        del self._under_way[KERNEL_BYTES:]
        self._stream.later(self._stream.rng.uniform(*NOTICED_S), self.peer.time_out)

    def time_out(self) -> None:
        """The kernel has given up the peer."""
        self.lose_soon(OSError(errno.ETIMEDOUT, "Connection timed out"))

    # --- bytes under way ----------------------------------------------------------------------------------------------

    def kick(self) -> None:
        """See to it that what is under way arrives, unless it is held back."""
        if self._timer is not None or not (self._under_way or self._last):
            return
        stream = self._stream
        if not stream.is_broken and stream.flows(self):
            self._timer = stream.loop.call_later(stream.delay_s(), self._pump, context=WIRE)

    def _pump(self) -> None:
        """Some bytes arrive, or the end after the last of them."""
        self._timer = None
        stream, peer = self._stream, self.peer
        if stream.is_broken or not stream.flows(self):
            return
        if stream.sky.weather.lose and stream.is_unlucky():
            stream.reset()
            return
        if self._under_way and not peer._is_closing:
            room = WINDOW_BYTES - peer._unread
            if room <= 0:
                return  # kicked when the peer has read
            size = min(room, len(self._under_way))
            if stream.rng.random() >= WHOLE:
                size = stream.rng.randint(1, size)
            peer._arrive(bytes(self._under_way[:size]))
            del self._under_way[:size]
            if self._has_paused or self._is_closing:
                self._sent()
            if self._under_way or self._last:
                self.kick()
            return
        if self._under_way and not peer.is_deaf:
            peer._last = peer._last or Last.RST  # nobody is there to take it
            peer.kick()
        self._under_way.clear()
        self._sent()
        if self._last is not None:
            last, self._last = self._last, None
            peer._hear(last)

    def deliver_now(self) -> None:
        """All that is under way arrives at this moment, as far as the peer has room."""
        size = min(WINDOW_BYTES - self.peer._unread, len(self._under_way))
        if size > 0 and not self.peer._is_closing and self._stream.flows(self):
            self.peer._arrive(bytes(self._under_way[:size]))

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
        """Something left the buffer."""
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
        """The kernel learns that the connection is over; the process when it runs."""
        self._is_closing = True
        self._under_way.clear()
        self._last = None
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._stream.loop.call_soon(self._lost, error, context=self._context)

    def _lost(self, error: Exception | None) -> None:
        if not self._stream.is_void:
            self._protocol.connection_lost(error)


class Sky(Protocol):
    """Where the weather is looked up: it changes under way."""

    weather: Weather


@dataclass(slots=True)
class Above:
    """The sky over one process."""

    weather: Weather


class Stream:
    """A connection between a process (`near`) and the server (`far`), in the weather that the process has now."""

    def __init__(self, name: str, sky: Sky, rng: random.Random) -> None:
        self.name = name
        self.sky = sky
        self.rng = rng
        self.loop = asyncio.get_running_loop()
        self.is_broken = False
        self.is_void = False
        """The world is over: nobody is told anything any more."""
        self.near: End
        self.far: End

    def join(self, near: tuple[asyncio.Protocol, Context], far: tuple[asyncio.Protocol, Context]) -> None:
        """Give it its ends. Each is opened when its side knows of the connection."""
        self.near, self.far = End(self, *near), End(self, *far)
        self.near.peer, self.far.peer = self.far, self.near

    @property
    def is_over(self) -> bool:
        """Neither side has it any more, and nothing is under way."""
        return self.near._is_over and self.far._is_over and not (self.near._timer or self.far._timer)

    def flows(self, end: End) -> bool:
        """Whether bytes that this end sends arrive now."""
        weather = self.sky.weather
        return weather.to_server if end is self.near else weather.from_server and weather.watches

    def delay_s(self) -> float:
        """How long the next bytes take, and with them all that follow."""
        weather = self.sky.weather
        if weather.late and self.rng.random() < weather.late / 3:
            return self.rng.uniform(0.0, weather.late_s)
        fastest_s, slowest_s = weather.delay_s
        return fastest_s + (slowest_s - fastest_s) * self.rng.random()

    def is_unlucky(self) -> bool:
        """Whether something between the two resets the connection just now. TCP itself mends what is lost."""
        weather = self.sky.weather
        return weather.lose > 0 and self.rng.random() < weather.lose

    def later(self, after_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        """Something happens on the way."""
        return self.loop.call_later(after_s, act, context=WIRE)

    def kick(self) -> None:
        """The weather has changed."""
        self.near.kick()
        self.far.kick()

    def reset(self, silent: float = 0.2) -> None:
        """Both sides lose it, each at its own time, with what was under way; or what goes to the server arrives first,
        so that it is executed and the answer is lost. Now and then the server's side ends without a word."""
        if self.is_broken:
            return
        if self.rng.random() < 0.5:
            self.near.deliver_now()
        self.is_broken = True
        weather = self.sky.weather
        near_s, far_s = self.rng.uniform(*weather.delay_s), self.rng.uniform(*weather.delay_s)
        reset = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self.later(near_s, lambda: self.near.lose_soon(reset))
        self.later(far_s, self.far.time_out if self.rng.random() < silent else lambda: self.far.lose_soon(reset))
