"""Backend `tcp`: a client of the embedded server.

It connects at first use and reconnects while it is open, with jittered back-off. A reconnect resumes everything:
sessions continue, watches start after the last revision that arrived, and unanswered requests are sent again under
their numbers and executed once. If the server was restarted without its data (it has another generation), sessions are
lost, watches raise `HistoryGone`, and the outcome of requests that had been sent is unknown.

Without a connection, requests that were never sent fail with the cause as soon as an attempt to connect fails; those
that were sent wait for the reconnect. Every request ends within its time-out, whatever the server does. The client must
never execute a request twice, and never send requests out of the order of their numbers.
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
from rallypoint.kv.types import Grant, Op, Range, Result, Revoke, Txn, TxnResult
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
CONNECT_S = 10.0
"""The limit of one attempt to connect, until the welcome."""
CALL_S = 60.0
TRIES_IN_GRACE = 5
"""A client that lost its connection tries to connect at least this often within its grace."""


class TcpBackend(OpBackend):
    """One client of one server. It belongs to the event loop that it was created on."""

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
        grace_s: float = 0.3,
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
        self._link: ClientConnection | None = None
        """The connection, from the welcome until it ends."""
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
        """The requests for leases that are not granted yet. The server may not know these leases after a reconnect."""
        self._make_claim: Callable[[], bytes] | None = None
        self._claim: Claim | None = None
        """The claim to a server that was restarted without its data, until the server is known to have received it."""
        self._on_reach: Callable[[BackendError | None], None] | None = None
        self._is_down = self._is_closed = False
        self._was_dedicated = False
        """Whether the last server was started by `rallypoint serve`, not hosted by a node."""

    # --- the contract -------------------------------------------------------------------------------------------------

    async def execute(self, op: Op) -> Result:
        result = await self._request(Do(self._requests.number(), op), changes_something(op))
        assert not isinstance(result, Status)
        return result

    def watch(self, prefix: str, after_revision: int) -> Watch:
        self._check_open()
        return TcpWatch(self, prefix, after_revision)

    async def scan_and_watch(self, prefixes: Sequence[str]) -> tuple[TxnResult, list[Watch]]:
        """One round trip. Changes from before the scan are removed from the watches."""
        self._start()
        scan = Txn((), tuple(map(Range, prefixes)))
        watches = [TcpWatch(self, prefix) for prefix in prefixes]
        for watch in watches:
            watch.begin()  # before the scan: a change in between is in both, never in neither
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
        grant = self._asked(Do(self._requests.number(), Grant(ttl_s, lease)), changes=True)
        self._ungranted[lease] = grant
        self._send(Hold(lease, self._grace_s))  # in the same frame; without a connection, `_welcomed` sends both
        if self._link is None:  # else requests that use the lease follow the grant on the connection: no need to wait
            try:
                self.checked(await grant.answer)
            except asyncio.CancelledError:
                if grant.is_sent:  # the server may keep a lease without a user
                    self._asked(Do(self._requests.number(), Revoke(lease)), changes=True)
                raise
            finally:
                self._ungranted.pop(lease, None)
        session = LeaseSession(
            self,
            lease,
            ttl_s,
            grant.first_sent_at,  # not the time of the call: connecting may take longer than the time to live
            interval_s=interval_s,
            renew_timeout_s=renew_timeout_s,
            on_missed=on_missed,
            spread=True,
            reports_expiry=True,
        )
        self._sessions[lease] = session
        session.lost.add_callback(lambda _: self._forget_session(lease))
        grant.answer.add_done_callback(lambda answer: self._lost_if_not_granted(session, answer))
        return session

    def _lost_if_not_granted(self, session: LeaseSession, answer: asyncio.Future[Result | Status]) -> None:
        self._ungranted.pop(session.lease, None)
        try:
            self.checked(answer.result())
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
        status = await self._request(AskStatus(self._requests.number()), changes=False)
        assert isinstance(status, Status)
        return BackendStatus(self.name, self.endpoint, status.revision, status.details)

    def on_reachability(self, listener: Callable[[BackendError | None], None]) -> None:
        self._on_reach = listener

    def on_data_loss(self, make_claim: Callable[[], bytes]) -> None:
        self._make_claim = make_claim

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
            del pending  # an error's traceback contains this frame: a reference cycle

    def _asked(self, message: Do | AskStatus, changes: bool) -> Pending:
        """Register a request and send it, now or after the next welcome."""
        pending = self._requests.add(message, changes)
        if self._link is not None:
            self._dispatch(pending)
        self._stall_detector.arm()
        return pending

    def _dispatch(self, pending: Pending) -> None:
        pending.sent(self._loop.time())
        self._send(pending.message)

    def _send(self, message: ClientMessage) -> None:
        """Send in one frame with all messages of this iteration of the loop. Without a connection, do nothing."""
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
        hurried = Backoff(self._rng, most_s=self._grace_s / TRIES_IN_GRACE)
        grace_ends_at = float("-inf")
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
                else:  # a bug must not leave callers waiting without an error
                    trouble = Unavailable(f"connecting to {self.endpoint} failed: {error!r}")
                self._requests.fail(trouble, lambda pending: not pending.is_sent)
                self._down(trouble)
                await (hurried if self._loop.time() < grace_ends_at else backoff).sleep()
                continue
            backoff.reset()
            hurried.reset()
            self._up()
            why = await closed
            grace_ends_at = self._loop.time() + self._grace_s
            mark("tcp.reconnects")
            if why:
                await asyncio.sleep(self._rng.uniform(0.0, 0.02))

    async def _unreachable(self, error: Exception) -> bool:
        return False  # overridden: whether to try again at once

    async def _connect(self) -> asyncio.Future[str]:
        """Connect, and send everything that has to be resumed. The result is set when the connection ends."""
        closed: asyncio.Future[str] = self._loop.create_future()

        def on_closed(link: ClientConnection, why: str) -> None:
            if self._link is link:
                self._link = None
                self._out.clear()
            if not closed.done():
                closed.set_result(why)

        link = ClientConnection(self._hello, self._received, on_closed)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._connector(lambda: link)
                welcome = await link.welcome
        except BaseException as error:
            link.abort("the attempt to connect failed")
            if (trouble := trouble_of(link, self.endpoint, error, CONNECT_S)) is not None:
                raise trouble from None
            raise
        if isinstance(welcome, Refused):
            link.close()
            raise refusal_of(self.endpoint, welcome)
        self._welcomed(link, welcome)
        return closed

    def _hello(self) -> Hello:
        sent = [lease for lease, grant in self._ungranted.items() if grant.is_sent]
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
        has_lost_data = self._generation not in ("", welcome.generation)
        self._generation = welcome.generation
        self._link = link
        if has_lost_data:
            self._forgotten()
        elif self._claim is not None:
            self._send(self._claim)
        for lease in welcome.ended:
            if lease in self._ungranted:
                continue  # not granted yet: the request is sent again below
            if (session := self._sessions.pop(lease, None)) is not None:
                session.lost.set("the server ended the session: it had not been renewed in time")
        for number, watch in self._watches.items():  # before the requests, as in `scan_and_watch`
            self._send(WatchStart(number, watch.prefix, watch.after))
        for pending in self._requests.open():
            self._dispatch(pending)
        for lease in self._ungranted:
            self._send(Hold(lease, self._grace_s))

    def _forgotten(self) -> None:
        """The server was restarted without its data: end everything that depends on the old data."""
        mark("tcp.forgotten")
        why = f"{self.endpoint} was restarted without its data"
        # An empty claim is sent, too. It precedes all requests, so the first answer proves that it was received.
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
                if type(message) is Push:  # the most frequent message
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
