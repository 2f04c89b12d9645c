"""A server that goes through a round of its own now and then, while callers wait for one of theirs.

A process that has waited for half a second finds its code and tables gone from the caches: the same decision takes it
several times as long as right after another one (measured: 0.56 ms instead of 0.2, with eight nodes), and everybody
waits for that. So while callers stand and wait for a place (`standing.py`), a server with nothing else to do plays the
end of such a wait with a few nodes that are not there: one joins, all are told, all confirm, the round is active.

Afterwards the coordinators of the runs that are waited for put together what they would write (`Coordinator.practise`),
so that their own tables are at hand, too.

It is the same code, on a stage of its own: another `Server` that nobody can reach, with sockets that end in this
process. Nothing of it is seen in the runs, the counters or the log. Only for a server that is a process of its own, and
for so long as somebody has begun to wait not long ago.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from rallypoint.events import Emitter, Event
from rallypoint.kv.types import Grant, LeaseResult, ModRevisionIs, Put, Revoke, Txn, TxnResult
from rallypoint.options import LastCallMode
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import ClosedRecord, ConfigRecord, NodePhase, NodeRecord, encode
from rallypoint.server.runs import PREFIX
from rallypoint.server.standing import MOST_PLEDGED_S
from rallypoint.server.traffic import Traffic
from rallypoint.settings import Timing
from rallypoint.wire.frames import GREETING, Framer, frame
from rallypoint.wire.messages import (
    NEWEST_VERSION,
    NOW,
    Answer,
    ClientMessage,
    Do,
    Hello,
    Hold,
    Place,
    Pledge,
    Stand,
    WatchStart,
    encoder,
    server_decoder,
)

if TYPE_CHECKING:
    from rallypoint.server.connection import Connection
    from rallypoint.server.server import Server

EVERY_S = 0.025
"""After a pause of this length most is still in the caches. A round of its own, and what follows of it, takes a ms."""
KEEP_S = 60.0
"""For so long after somebody has begun to wait: who waits longer than that does not wait for a millisecond."""
MOST_CORES = 4
BUSY_S = 0.0005
STAY_S = 60.0
"""If it takes longer to get to another core there is somebody at work on it: not for so long then."""
PLAYERS = 3
STAGE_S = 3_600.0
"""A stage is put up anew after this, long before a lease on it ends."""
PATIENCE_S = 5.0
FINISH_S = 0.2
"""What is being played when the server stops is played to its end, unless that takes longer."""
LIFE_S = 86_400.0
RUN = "rehearsal"
SENT_AWAY = "a player was sent away"
_CHUNK = 1 << 14


class Rehearsal:
    """Of one server: `wanted` when somebody begins to wait, `stop` at the end."""

    def __init__(
        self,
        make_server: Callable[[], Server],
        connections: Iterable[Connection],
        traffic: Traffic,
        every_s: float,
        also: Callable[[], None] = lambda: None,
    ) -> None:
        """`make_server` makes one that is alone with itself; `also` is done after each round."""
        self._make_server = make_server
        self._also = also
        self._connections = connections
        self._traffic = traffic
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._until = 0.0
        self._seen = 0
        self._stage: Stage | None = None
        self._cores = Cores()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def rounds(self) -> int:
        """How many rounds were played on the stage there is."""
        return self._stage.rounds if self._stage is not None else 0

    def wanted(self) -> None:
        """Somebody begins to wait."""
        self._until = self._loop.time() + KEEP_S
        if self._timer is None and self._task is None and not self._is_over:
            self._wait()

    async def stop(self) -> None:
        """Play no more."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task = self._task
        if task is not None:
            await asyncio.wait([task], timeout=FINISH_S)
            task.cancel()
            await asyncio.wait([task])
        await self._clear()

    def _wait(self) -> None:
        self._seen = self._traffic.frames_in
        self._timer = self._loop.call_later(self._every_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._loop.time() >= self._until or not any(_is_waited_for(one) for one in self._connections):
            self._until = 0.0
            self._begin(self._clear())
        elif self._traffic.frames_in != self._seen:
            self._wait()  # it has something to do
        else:
            self._begin(self._play())

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        self._task = self._loop.create_task(work, name="rehearsal")
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._is_over = True  # nothing depends on it
            self._loop.call_exception_handler({"message": "a rehearsal failed", "exception": error})
        if self._until and not self._is_over:
            self._wait()

    async def _play(self) -> None:
        if self._stage is not None and self._loop.time() > self._stage.put_up_at + STAGE_S:
            await self._clear()
        try:
            if self._stage is None:
                self._stage = Stage(self._make_server())
                await self._stage.put_up()
            self._cores.change()
            await self._stage.play()
            self._also()
        except OSError:  # no file is left, or the machine stood still for long: nothing depends on it
            self._until = 0.0
            await self._clear()

    async def _clear(self) -> None:
        if self._stage is not None:
            await self._stage.clear()
            self._stage = None


class Cores:
    """Of a machine with few of them: one cannot count on finding the last one free, and each has caches of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turn = 0
        self._stays_until = float("-inf")

    def change(self) -> None:
        """Go on on another core, and be free to leave it at once. If that takes long, others need them: stay then."""
        began_at, cores = self._clock(), os.sched_getaffinity(0)
        if began_at < self._stays_until or not 1 < len(cores) <= MOST_CORES:
            return
        self._turn += 1
        with suppress(OSError):  # not for this process, or somebody has taken cores away meanwhile
            os.sched_setaffinity(0, {sorted(cores)[self._turn % len(cores)]})
            os.sched_setaffinity(0, cores)
        if self._clock() - began_at > BUSY_S:
            self._stays_until = began_at + STAY_S


def _is_waited_for(connection: Connection) -> bool:
    """Somebody waits elsewhere for the place of its node."""
    return connection.stands is not None and connection.stands.is_told_elsewhere


class Silent(Emitter):
    """Whatever happens on a stage is nobody's business."""

    def is_heard(self, kind: type[Event]) -> bool:
        return False

    def __call__(self, event: Event) -> None:
        pass


class Stage:
    """A server with the nodes of one run, of which all but the last wait. `put_up` before use, `clear` at the end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._keys = RunKeys(PREFIX, RUN)
        self._players: list[Player] = []
        self._due: set[Player] = set()
        self._is_active: asyncio.Future[None] | None = None
        self._has_lost = False
        self.put_up_at = self._loop.time()
        self.rounds = 0

    async def put_up(self) -> None:
        """Make the run, and have its nodes come. OSError: no file is left for them."""
        lease = self._server.hub.execute(Grant(LIFE_S))
        assert isinstance(lease, LeaseResult)
        config = ConfigRecord(
            incarnation=RUN,
            shared={
                "min_nodes": PLAYERS,
                "max_nodes": PLAYERS,
                "step": 1,
                "last_call_mode": LastCallMode.ADAPTIVE.value,
                "ranks": "sticky",
                "rank0": "",
            },
            timing=Timing(session_ttl_s=LIFE_S, hold_back_losses=0),
            run_lease=lease.lease,
            data_lease=lease.lease,
            run_ttl_s=LIFE_S,
        )
        made = (
            Put(self._keys.config, encode(config), lease.lease),
            Put(self._keys.closed, encode(ClosedRecord(closed=False)), lease.lease),
        )
        self._server.hub.execute(Txn((), made))
        for number in range(PLAYERS):
            player = Player(self._server, self._keys, number, self._entered, self._lost)
            self._players.append(player)
            await player.come()
        for player in self._players[:-1]:
            player.join()

    async def play(self) -> None:
        """The last one joins, and all are in a round; then it leaves, and the others wait again.

        TimeoutError; ConnectionError if somebody was sent away since the stage was put up.
        """
        *others, last = self._players
        self._due = set(self._players)
        self._is_active = self._loop.create_future()
        if self._has_lost:
            raise ConnectionError(SENT_AWAY)
        async with asyncio.timeout(PATIENCE_S):
            last.join()
            await self._is_active
        self.rounds += 1
        last.leave()
        for player in others:
            player.join()

    def _entered(self, player: Player) -> None:
        self._due.discard(player)
        if not self._due and self._is_active is not None and not self._is_active.done():
            self._is_active.set_result(None)

    def _lost(self) -> None:
        self._has_lost = True
        if self._is_active is not None and not self._is_active.done():
            self._is_active.set_exception(ConnectionError(SENT_AWAY))

    async def clear(self) -> None:
        """Have everybody go. Again, if that was interrupted."""
        for player in self._players:
            player.go()
        await self._server.stop()


class Nowhere(asyncio.Transport):
    """What is written to it is gone."""

    def write(self, data: object) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


class Player:
    """A node as its server sees it: a connection of its own, and one on which its caller waits."""

    def __init__(
        self,
        server: Server,
        keys: RunKeys,
        number: int,
        on_entered: Callable[[Player], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._number = number
        self._id = f"{RUN}-{number}"
        self._key = keys.node(self._id)
        self._keys = keys
        self._server = server
        self._on_entered = on_entered
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._node: Connection | None = None
        self._sock: socket.socket | None = None
        self._framer = Framer()
        self._is_welcome = False
        self._is_in = False
        self._seq = 0
        self._join = 0
        self._lease = 0
        self._next = 1
        """The number of the attempt that is expected."""

    async def come(self) -> None:
        """Connect twice. OSError."""
        self._node = self._server.make_connection()
        self._node.connection_made(Nowhere())
        self._node.data_received(self._hello(self._id, RUN))
        watches = WatchStart(1, self._keys.state, NOW), WatchStart(2, self._keys.assign(self._id), NOW)
        self._node.data_received(frame(encoder.encode((0, watches))))
        self._sock, other = socket.socketpair()
        self._sock.setblocking(False)
        other.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._server.make_connection, other)
        except BaseException:
            other.close()
            raise
        self._loop.add_reader(self._sock.fileno(), self._read)
        self._sock.send(self._hello(f"{self._id} waits", ""))

    @staticmethod
    def _hello(client: str, run: str) -> bytes:
        hello = Hello(oldest=NEWEST_VERSION, newest=NEWEST_VERSION, client=client, run=run)
        return GREETING + frame(encoder.encode(hello))

    def join(self) -> None:
        """As a caller does that begins by itself, or with the session that it has."""
        items = self._server.hub.engine.items
        own = items.get(self._key)
        self._join += 1
        self._is_in = False
        said: list[ClientMessage] = [Stand(self._id, self._id)]
        if own is None:
            self._lease = self._join * PLAYERS + self._number  # far below those that the server would give
            said += [self._do(Grant(LIFE_S, self._lease)), Hold(self._lease, LIFE_S)]
        door = [ModRevisionIs(key, items[key].mod_revision) for key in (self._keys.config, self._keys.closed)]
        own_key = ModRevisionIs(self._key, own.mod_revision if own is not None else 0)
        said.append(self._do(Txn((own_key, *door), (self._put(NodePhase.JOINING, 0),))))
        if own is None:
            said.append(self._pledge(0))
        self._say(*said)

    def leave(self) -> None:
        """End its session, at once."""
        self._server.hub.execute(Revoke(self._lease))

    def go(self) -> None:
        """Close its connections."""
        node, self._node = self._node, None
        sock, self._sock = self._sock, None
        if node is not None:
            node.connection_lost(None)
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
            sock.close()

    def _pledge(self, revision: int) -> Pledge:
        """Whatever place it has next is confirmed beforehand."""
        value = self._put(NodePhase.MEMBER, self._next).value
        return Pledge(MOST_PLEDGED_S, self._next, self._join, RUN, self._lease, revision, value, value)

    def _do(self, op: Grant | Txn) -> Do:
        self._seq += 1
        return Do(self._seq, op)

    def _put(self, phase: NodePhase, number: int) -> Put:
        record = NodeRecord(
            id=self._id,
            name=self._id,
            addr=RUN,
            session=self._lease,
            join=self._join,
            phase=phase,
            round=number,
            floor=number,
        )
        return Put(self._key, encode(record), self._lease)

    def _say(self, *messages: ClientMessage) -> None:
        assert self._sock is not None
        self._sock.send(frame(encoder.encode((self._seq, messages))))

    def _read(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._sock.fileno())
            self._on_lost()
        for payload in self._framer.feed(data):
            if not self._is_welcome:
                self._is_welcome = True
                continue
            for message in server_decoder.decode(payload):
                if isinstance(message, Place):
                    self._told(message)
                elif isinstance(message, Answer) and isinstance(message.result, TxnResult) and not self._is_in:
                    self._say(self._pledge(message.result.revision))

    def _told(self, place: Place) -> None:
        self._is_in = place.is_active
        if place.is_active:
            self._next = place.number + 1
            self._on_entered(self)
            return
        own_key = ModRevisionIs(self._key, place.revision)
        self._say(self._do(Txn((own_key,), (self._put(NodePhase.MEMBER, place.number),))))
