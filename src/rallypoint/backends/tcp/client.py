"""Backend `tcp`: a client of the embedded server.

It connects when it is first used and reconnects for as long as it is open, with jittered pauses. A reconnect resumes
everything: sessions go on, watches start after the last revision that arrived, requests that were not answered are
sent again under their numbers and executed once. A server that has lost its memory (another generation) is different:
sessions are lost, watches have to scan again, and of requests that had been sent the outcome is unknown.

While there is no connection, requests that were never sent fail with the cause as soon as an attempt to connect has
failed; those that were sent wait for the resumption. Every request ends within its time-out, whatever the peer does.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from itertools import count

from rallypoint._marks import mark
from rallypoint._version import SOFTWARE
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import BackendStatus, Limits, Session, Watch
from rallypoint.backends.ops import OpBackend, changes_something
from rallypoint.backends.session import LeaseSession, draw_lease
from rallypoint.backends.tcp.connection import ClientConnection, Connector, cause_of, refusal_of, trouble_of
from rallypoint.backends.tcp.requests import Pending, Requests
from rallypoint.backends.tcp.stall_detector import STALL_S, StallDetector
from rallypoint.backends.tcp.watch import TcpWatch
from rallypoint.errors import BackendError, HistoryGone, Rejected, Unavailable
from rallypoint.kv.types import BranchOp, Compare, Grant, Op, Put, Range, Result, Revoke, Txn, TxnResult
from rallypoint.wire.handshake import Versions
from rallypoint.wire.messages import (
    Answer,
    AskStatus,
    Claim,
    ClientFrame,
    ClientMessage,
    Do,
    Going,
    Held,
    Hello,
    Hold,
    MakeRun,
    Push,
    Refused,
    ServerMessage,
    Status,
    WatchRefused,
    WatchStart,
    WatchStop,
    Welcome,
    encoder,
)

LIMITS = Limits(max_txn_ops=100_000, max_txn_bytes=16 * 1024 * 1024)
CONNECT_S = 10.0  # one attempt to connect, with the welcome, takes no longer
CALL_S = 60.0


class TcpBackend(OpBackend):
    """One client of one server. Belongs to the loop it is first used on."""

    name = "tcp"
    limits = LIMITS
    has_coordinator = True
    renews_runs = True

    def __init__(
        self,
        endpoint: str,
        connector: Connector,
        *,
        run: str = "",
        token: str = "",
        grace_s: float = 1.0,
        call_timeout_s: float = CALL_S,
        stall_s: float = STALL_S,
        rng: random.Random | None = None,
        versions: Versions | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._connector = connector
        self._run = run
        self._token = token
        self._grace_s = grace_s
        self._rng = rng or random.Random(secrets.randbits(64))
        self._versions = versions or Versions()
        self._client = f"{self._rng.getrandbits(96):024x}"
        self._generation = ""
        self._loop = asyncio.get_running_loop()
        self._keeper: asyncio.Task[None] | None = None
        self._link: ClientConnection | None = None  # the connection, once it is welcome
        self._requests = Requests(call_timeout_s)
        self._stall_detector = StallDetector(endpoint, self._requests, lambda: self._link, stall_s)
        self._out: list[ClientMessage] = []
        self._flush_due = False
        self._max_frame = 0
        self._watch_numbers = count(1)
        self._watches: dict[int, TcpWatch] = {}
        self._to_call: dict[Callable[[], None], None] = {}
        self._is_receiving = False
        self._sessions: dict[int, LeaseSession] = {}
        self._ungranted: dict[int, Pending] = {}
        """Sessions whose lease is asked for, and the request: a new connection may not know them."""
        self._make_claim: Callable[[], bytes] | None = None
        self._claim: Claim | None = None
        """What was claimed when the server had lost its memory, until it is known to have heard it."""
        self._on_reach: Callable[[BackendError | None], None] | None = None
        self._is_down = self._is_closed = False
        self._was_dedicated = False  # whether the last server was one that somebody runs for its own sake

    # --- the contract -------------------------------------------------------------------------------------------------

    async def execute(self, op: Op) -> Result:
        result = await self._request(Do(self._requests.number(), op), changes_something(op))
        assert not isinstance(result, Status)
        return result

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        """As in the contract, with fewer steps: a node's part in a round is one of these."""
        self._start()
        op = Txn(tuple(compares), tuple(then), tuple(otherwise))
        changes = (bool(then) and type(then[0]) is Put) or changes_something(op)
        result = self.checked(await self._answer(self._asked(Do(self._requests.number(), op), changes)))
        assert isinstance(result, TxnResult)
        return result

    def watch(self, prefix: str, after_revision: int) -> Watch:
        self._check_open()
        return TcpWatch(self, prefix, after_revision)

    async def scan_and_watch(self, prefixes: Sequence[str]) -> tuple[TxnResult, list[Watch]]:
        """In one trip; what the watches tell of the time before the scan is left out."""
        self._start()
        scan = Txn((), tuple(map(Range, prefixes)))
        watches = [TcpWatch(self, prefix) for prefix in prefixes]
        for watch in watches:
            watch.begin()  # first: what changes until the scan is in both, never in neither
        answer = self._answer(self._asked(Do(self._requests.number(), scan), changes=False))
        try:
            result = self.checked(await answer)
        except BaseException:
            for watch in watches:
                watch.cancel()
            raise
        assert isinstance(result, TxnResult)
        for watch in watches:
            watch.since(result.revision)
        return result, list(watches)

    async def open_session(
        self,
        ttl_s: float,
        *,
        interval_s: float | None = None,
        renew_timeout_s: float | None = None,
        on_missed: Callable[[str], None] | None = None,
    ) -> Session:
        lease = draw_lease(self._rng)
        self._start()
        asked = self._asked(Do(self._requests.number(), Grant(ttl_s, lease)), changes=True)
        self._ungranted[lease] = asked
        self._send(Hold(lease, self._grace_s))  # in the same frame, or both in `_welcomed`
        if self._link is None:  # else what needs the session goes out behind the request for it: no need to wait
            try:
                self.checked(await asked.answer)
            except asyncio.CancelledError:
                if asked.is_sent:  # and so it is held for somebody who does not want it any more
                    self._asked(Do(self._requests.number(), Revoke(lease)), changes=True)
                raise
            finally:
                self._ungranted.pop(lease, None)
        session = LeaseSession(
            self,
            lease,
            ttl_s,
            asked.first_sent_at,  # connecting may have taken longer than the session lasts
            interval_s=interval_s,
            renew_timeout_s=renew_timeout_s,
            on_missed=on_missed,
            spread=True,
            is_told=True,
        )
        self._sessions[lease] = session
        session.lost.add_callback(lambda _: self._forget_session(lease))
        asked.answer.add_done_callback(lambda granting: self._lost_if_not_granted(session, granting))
        return session

    def _lost_if_not_granted(self, session: LeaseSession, granting: asyncio.Future[Result | Status]) -> None:
        self._ungranted.pop(session.lease, None)
        try:
            self.checked(granting.result())
        except (BackendError, asyncio.CancelledError) as error:
            session.lost.set(f"the session could not be opened: {error}")

    async def revoke(self, lease: int) -> None:
        try:
            await super().revoke(lease)
        finally:
            self._forget_session(lease)

    def _forget_session(self, lease: int) -> None:
        self._sessions.pop(lease, None)
        self._ungranted.pop(lease, None)

    async def status(self) -> BackendStatus:
        told = await self._request(AskStatus(self._requests.number()), changes=False)
        assert isinstance(told, Status)
        return BackendStatus(self.name, self.endpoint, told.revision, told.details)

    def listen(self, on_reach: Callable[[BackendError | None], None]) -> None:
        self._on_reach = on_reach

    def claim_by(self, make: Callable[[], bytes]) -> None:
        self._make_claim = make

    async def close(self) -> None:
        self._is_closed = True
        for watch in list(self._watches.values()):
            watch.cancel()
        for session in list(self._sessions.values()):
            session.abandon()
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        if self._link is not None:
            self._flush()
            self._link.close()
        self._stall_detector.end()
        self._requests.fail(Unavailable("this connection was closed"))

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _request(self, message: Do | AskStatus, changes: bool) -> Result | Status:
        self._start()
        return await self._answer(self._asked(message, changes))

    async def _answer(self, pending: Pending) -> Result | Status:
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self._requests.forget(pending)
            raise
        finally:
            del pending  # or an error would refer to itself

    def _asked(self, message: Do | AskStatus, changes: bool) -> Pending:
        """Send it, now or when there is a connection."""
        pending = self._requests.add(message, changes)
        if self._link is not None:
            self._dispatch(pending)
        self._stall_detector.arm()
        return pending

    def _dispatch(self, pending: Pending) -> None:
        pending.sent(self._loop.time())
        self._send(pending.message)

    def _send(self, message: ClientMessage) -> None:
        """Send with whatever else is to be sent in this turn of the loop; nothing, if there is no connection."""
        if self._link is None:
            return
        self._out.append(message)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        out, self._out = self._out, []
        if self._link is not None and out:
            self._write(self._link, out)

    def _write(self, link: ClientConnection, messages: Sequence[ClientMessage]) -> None:
        payload = encoder.encode(ClientFrame(self._requests.acked, tuple(messages)))
        if not self._max_frame or len(payload) <= self._max_frame:
            link.send(payload)
        elif len(messages) > 1:
            half = len(messages) // 2
            self._write(link, messages[:half])
            self._write(link, messages[half:])
        elif isinstance(message := messages[0], Do):
            self._requests.too_large(message.seq, len(payload), self._max_frame)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable(f"this connection to {self.endpoint} was closed")

    # --- watches ------------------------------------------------------------------------------------------------------

    def start_watch(self, watch: TcpWatch) -> int:
        self._start()
        number = next(self._watch_numbers)
        self._watches[number] = watch
        self._send(WatchStart(number, watch.prefix, watch.after))
        return number

    def stop_watch(self, number: int) -> None:
        if self._watches.pop(number, None) is not None:
            self._send(WatchStop(number))

    def call_soon(self, callback: Callable[[], None]) -> None:
        if not self._to_call and not self._is_receiving:
            self._loop.call_soon(self._call)
        self._to_call[callback] = None

    def _call(self) -> None:
        callbacks, self._to_call = self._to_call, {}
        for callback in callbacks:
            callback()

    # --- the connection -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._check_open()
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep_connected(), name=f"connection to {self.endpoint}")

    async def _keep_connected(self) -> None:
        backoff = Backoff(self._rng, most_s=2.0)
        while not self._is_closed:
            try:
                closed = await self._connect()
            except Rejected as error:
                self._requests.fail(Unavailable(str(error)), lambda pending: pending.is_sent and pending.changes)
                self._requests.fail(error)
                self._down(error)
                return
            except Exception as error:
                if isinstance(error, OSError | TimeoutError | Unavailable):
                    trouble = Unavailable(f"{self.endpoint} cannot be reached: {cause_of(error)}")
                    if await self._unreachable(error):
                        continue
                else:  # a defect must not leave everybody waiting in silence
                    trouble = Unavailable(f"connecting to {self.endpoint} failed: {error!r}")
                self._requests.fail(trouble, lambda pending: not pending.is_sent)
                self._down(trouble)
                await backoff.sleep()
                continue
            backoff.reset()
            self._up()
            why = await closed
            mark("tcp.reconnects")
            if why:
                await asyncio.sleep(self._rng.uniform(0.0, 0.02))

    async def _unreachable(self, error: Exception) -> bool:
        return False  # an attempt failed; whether to try again at once

    async def _connect(self) -> asyncio.Future[str]:
        """A connection that is welcome and has been told all that is open; what is returned says when it is over."""
        closed: asyncio.Future[str] = self._loop.create_future()

        def over(link: ClientConnection, why: str) -> None:
            if self._link is link:
                self._link = None
                self._out.clear()
            if not closed.done():
                closed.set_result(why)

        link = ClientConnection(self._hello, self._received, over)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._connector(lambda: link)
                welcome = await link.welcome
        except BaseException as error:
            link.abort("given up")
            if (trouble := trouble_of(link, self.endpoint, error, CONNECT_S)) is not None:
                raise trouble from None
            raise
        if isinstance(welcome, Refused):
            link.close()
            raise refusal_of(self.endpoint, welcome)
        self._welcomed(link, welcome)
        return closed

    def _hello(self) -> Hello:
        sent = [lease for lease, asked in self._ungranted.items() if asked.is_sent]
        return Hello(
            oldest=self._versions.oldest,
            newest=self._versions.newest,
            client=self._client,
            token=self._token,
            run=self._run,
            software=SOFTWARE,
            generation=self._generation,
            sessions=tuple([Held(lease, self._grace_s) for lease in dict.fromkeys([*self._sessions, *sent])]),
        )

    def _welcomed(self, link: ClientConnection, welcome: Welcome) -> None:
        self._max_frame = welcome.max_frame
        self._was_dedicated = welcome.is_dedicated
        self.makes_run = welcome.makes_run
        if link.is_over:
            return
        has_forgotten = self._generation not in ("", welcome.generation)
        self._generation = welcome.generation
        self._link = link
        if has_forgotten:
            self._forgotten()
        elif self._claim is not None:
            self._send(self._claim)
        for lease in welcome.ended:
            if lease in self._ungranted:
                continue  # it has not begun: what asks for it is sent again
            if (session := self._sessions.pop(lease, None)) is not None:
                session.lost.set("the server ended the session: it had not been renewed in time")
        for number, watch in self._watches.items():  # before the requests: the scan that it goes on from may be there
            self._send(WatchStart(number, watch.prefix, watch.after))
        for pending in self._requests.open():
            self._dispatch(pending)
        for lease in self._ungranted:
            self._send(Hold(lease, self._grace_s))

    def _forgotten(self) -> None:
        """The server has lost its memory: so has everything that was based on it."""
        mark("tcp.forgotten")
        why = f"{self.endpoint} was restarted without its data"
        # Nothing to claim has to be said, too. Before all requests: the first answer shows that it was heard.
        self._claim = Claim(self._make_claim() if self._make_claim is not None else b"")
        self._send(self._claim)
        for session in list(self._sessions.values()):
            session.lost.set(why)
        self._sessions.clear()
        self._requests.fail(Unavailable(why), lambda pending: pending.is_sent and pending.changes)
        for watch in list(self._watches.values()):
            watch.gone(HistoryGone(f"{why}: scan again", oldest=0))

    def _received(self, messages: Sequence[ServerMessage]) -> None:
        self._is_receiving = True
        try:
            for message in messages:
                if type(message) is Push:  # most often
                    if (watch := self._watches.get(message.watch)) is not None:
                        watch.push(message.batch)
                elif type(message) is Answer:
                    self._claim = None
                    self._requests.answered(message.seq, message.result)
                else:
                    self._take(message)
        finally:
            self._is_receiving = False
            if self._to_call:
                self._call()

    def _take(self, message: ServerMessage) -> None:
        match message:
            case Status(seq):
                self._requests.answered(seq, message)
            case WatchRefused(number, oldest):
                if (watch := self._watches.get(number)) is not None:
                    watch.gone(HistoryGone(f"changes under {watch.prefix!r} are no longer kept", oldest=oldest))
            case MakeRun():
                self.makes_run = True
                self._reached(None)
            case Going(why):
                if self._link is not None:
                    self._link.note(f"the server said: {why}")

    def _down(self, error: BackendError) -> None:
        self._is_down = True
        self._reached(error)

    def _up(self) -> None:
        if self._is_down:
            self._reached(None)
        self._is_down = False

    def _reached(self, error: BackendError | None) -> None:
        if self._on_reach is not None:
            self._on_reach(error)
