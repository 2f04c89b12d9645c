"""One process's view of a cell: reads it, writes it, and knows when to look again. Shared by the connections to it.

One task does all of it, one call of the cell at a time. A turn takes all requests that wait, applies them to the last
document that is known, and writes the outcome with the token of that document: if it is written, that document was
still the current one, and all of them happened at that moment, together. If not, the answer is the current document,
and it is done again on that. Requests that change nothing need a read that began after they came.

A write whose outcome is not known is looked for in what the cell holds then: every document says which write of each
process was its last. It may still be under way; then the very same bytes are sent again with the same token, so that
it happens once whichever of them arrives.

While somebody watches, or a lease lives, the cell is looked at again: soon after something has happened, ever more
rarely while nothing does, never more rarely than once in `idle_s`, and when a lease is due. Renewals of leases do not
count as something: while nothing happens they wait for the next look, and are written instead of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rallypoint._marks import mark
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.ops import changes_something
from rallypoint.backends.register.cell import Answer, AsyncCell, Found, Token
from rallypoint.backends.register.pace import Pace
from rallypoint.backends.register.progress import Progress
from rallypoint.backends.register.watch import RegisterWatch
from rallypoint.errors import BackendError, OutcomeUnknown, Rejected, Unavailable, UnreadableState
from rallypoint.kv.document import DEFAULT_HISTORY, LARGEST, Document, DocumentError
from rallypoint.kv.types import KeepAlive, Op, Result

IDLE_S = 1.0
FASTEST_S = 0.01
FASTEST_PER_LEASE_S = 0.002
"""The more processes share a cell, the more slowly each of them looks at it: all together at most so often."""
QUIET = 0.1
"""The pause between two looks is this part of how long nothing has happened."""
MOST_AT_ONCE = 256
RESENDS = 8
LOST_S = 0.002
"""Whoever lost a race tries again within so long (or what a call of the cell takes, if that is more) for each time that
it lost in a row, up to `MOST_LOST` times of it. The window grows little: one that doubles would leave those who have
waited longest behind those who have just come. With a renewal among what it wants it does not grow: a session can be
lost by waiting."""
MOST_LOST = 8
RENEWED_AT_ONCE = 4
"""A renewal that lost a race is tried so often on what the winner wrote: an idle process need not read for it."""
LONG = 10.0
"""A time to live is long if it is so many times as long as the pause between two looks of an idle process."""
IN_DOUBT_S = 0.05
GENERATION_APART = 1 << 20


class Request:
    """An operation on its way, and its result for whoever waits."""

    def __init__(self, op: Op, result: asyncio.Future[Result]) -> None:
        self.op = op
        self.result = result
        self.is_sent = False
        """It is in a write whose outcome is not known."""

    def fail(self, error: BackendError) -> None:
        """It did not work, or nobody knows whether it did."""
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # whoever waited may have stopped waiting

    def doubt(self, error: BackendError) -> None:
        """The write that it was in may or may not have happened."""
        if changes_something(self.op):
            self.fail(OutcomeUnknown(f"it may have happened: {error}"))
        else:
            self.fail(Unavailable(str(error)))


@dataclass(frozen=True, slots=True)
class _Base:
    """What a write is to replace."""

    generation: int
    version: int
    is_nothing: bool


class _TooLarge(Exception):
    """What is to be written is more than a cell may hold."""


def _has_renewal(requests: Sequence[Request]) -> bool:
    return any(isinstance(request.op, KeepAlive) for request in requests)


class Hub:
    """See the module. Begins with its first request or watch, ends with `close`."""

    def __init__(
        self,
        cell: AsyncCell,
        rng: random.Random,
        *,
        idle_s: float = IDLE_S,
        history: int = DEFAULT_HISTORY,
    ) -> None:
        self.cell = cell
        self.on_reach: list[Callable[[BackendError | None], None]] = []
        self._rng = rng
        self._idle_s = idle_s
        self._history = history
        self._client = f"{rng.getrandbits(64):016x}"
        self._seq = 0
        self._loop = asyncio.get_running_loop()
        self._progress = Progress()
        self.pace = Pace()
        self._waiting: list[Request] = []
        self._work = asyncio.Event()
        self._watches: dict[RegisterWatch, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_at_it = True
        """It is not waiting for work."""
        self._is_closed = False
        self._trouble: BackendError | None = None
        # What is known of the cell. The document is None if it has to be read, or decoded, first.
        self._document: Document | None = None
        self._raw: bytes | None = None
        self._token: Token | None = None
        self._generation: int | None = None
        self._version = 0
        self._revision = 0
        self._looked_at = float("-inf")
        self._quiet_since = float("-inf")
        self._call_s = 0.0
        """What the last write that was answered took."""

    # --- for connections ----------------------------------------------------------------------------------------------

    def submit(self, op: Op) -> Request:
        """Have it executed; the outcome is in the request's result."""
        request = Request(op, self._loop.create_future())
        if self._is_closed:
            request.fail(Unavailable("this connection is closed"))
            return request
        self._waiting.append(request)
        if not (isinstance(op, KeepAlive) and self._can_wait(op)):
            self._wake()
        return request

    def renewals_wait_s(self, ttl_s: float) -> float:
        """For how long a renewal may wait for the next look, to have an idle process call the cell once for both."""
        return self._idle_s if ttl_s >= LONG * self._idle_s else 0.0

    def _can_wait(self, renewal: KeepAlive) -> bool:
        at, document = self._next_look_at(), self._document
        if self._is_at_it or at is None or document is None or self._trouble is not None:
            return False
        lease = document.engine.leases.get(renewal.lease)
        return lease is not None and 0.0 < at - self._loop.time() <= self.renewals_wait_s(lease.ttl_s)

    def start_watch(self, watch: RegisterWatch) -> None:
        self._watches[watch] = None
        self._quiet_since = self._loop.time()  # whoever begins to watch expects something
        self._wake()

    def stop_watch(self, watch: RegisterWatch) -> None:
        self._watches.pop(watch, None)

    def document_for(self, watch: RegisterWatch) -> Document | None:
        document = self._document
        return None if document is None or document.is_changed else document

    @property
    def generation(self) -> int | None:
        """Of the document that is known."""
        return self._generation

    @property
    def trouble(self) -> BackendError | None:
        """Why the cell cannot be reached, while it cannot."""
        return self._trouble

    @property
    def document(self) -> Document | None:
        """The last that was read or written, if it is whole."""
        return None if self._document is None or self._document.is_changed else self._document

    async def close(self) -> None:
        """Do nothing any more. Who waits is told."""
        self._is_closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._fail_all(Unavailable("this connection is closed"))
        await self.cell.close()

    def _fail_all(self, error: BackendError) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            request.fail(error)

    # --- the one task -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._work.set()
        if self._task is None and not self._is_closed:
            self._task = asyncio.create_task(self._run(), name=f"register {self.cell.name}")

    async def _run(self) -> None:
        retry = Backoff(self._rng, first_s=0.05, most_s=self._idle_s / 2)
        while True:
            if isinstance(self._trouble, Unavailable):
                await retry.sleep()
            else:
                retry.reset()
            await self._wait_for_work()
            requests = self._take_waiting()
            try:
                await self._turn(requests)
            except BackendError as error:
                self._failed(requests, error)
            except Exception as error:  # a defect must not end the task in silence
                self._document = None
                self._failed(requests, Rejected(f"{self.cell.name} failed: {error!r}"))
            except asyncio.CancelledError:
                for request in requests:
                    closed = Unavailable("this connection is closed")
                    request.doubt(closed) if request.is_sent else request.fail(closed)
                raise
            else:
                self._reached(None)

    async def _wait_for_work(self) -> None:
        await asyncio.sleep(0)  # what is asked for in the same turn of the loop is done together
        if not self._work.is_set():
            self._is_at_it = False
            try:
                async with asyncio.timeout_at(self._next_look_at()):
                    await self._work.wait()
            except TimeoutError:
                pass  # it is time to look
            self._is_at_it = True
        self._work.clear()

    def _next_look_at(self) -> float | None:
        due = self._progress.next_due()
        if not self._watches and due is None:
            return None
        document = self._document
        leases = len(document.counters) if document is not None else 0
        fastest_s = FASTEST_S + FASTEST_PER_LEASE_S * leases
        quiet_s = self._looked_at - self._quiet_since
        at = self._looked_at + min(max(quiet_s * QUIET, fastest_s), self._idle_s)
        if due is not None:
            at = min(at, max(due, self._looked_at + fastest_s))
        return at if self._trouble is None else max(at, self._looked_at + self._idle_s / 4)

    def _take_waiting(self) -> list[Request]:
        taken, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
        if self._waiting:
            self._work.set()
        return taken

    def _failed(self, requests: Sequence[Request], error: BackendError) -> None:
        """A cell that cannot be reached is tried again for as long as those who wait are patient."""
        self._looked_at = self._loop.time()
        for request in requests:
            if request.is_sent:
                request.doubt(error)
            elif not isinstance(error, Unavailable):
                request.fail(error)
        if isinstance(error, Unavailable):
            self._waiting[:0] = [request for request in requests if not request.result.done()]
            if self._waiting:
                self._work.set()
        if isinstance(error, UnreadableState):
            for watch in list(self._watches):
                watch.fail(error)
        if not isinstance(error, OutcomeUnknown):  # then it is known already whether it can be reached
            self._reached(error)

    def _reached(self, error: BackendError | None) -> None:
        if (error is None) != (self._trouble is None):
            for listener in list(self.on_reach):
                listener(error)
        self._trouble = error

    async def _turn(self, requests: list[Request]) -> None:
        """Have all of them executed, and leases that are due ended. With neither, look at the cell once."""
        is_fresh = self._document is None  # whether what is known was read after all of them came
        if is_fresh:
            await self._read()
        if await self._attempt(requests, is_fresh):
            return
        mark("register.contended")
        if all(isinstance(request.op, KeepAlive) for request in requests):
            for _ in range(RENEWED_AT_ONCE):
                if await self._attempt(requests, is_fresh=True):  # the answer to the last one was what there is now
                    return
        lost = 0
        while requests:
            lost = 1 if _has_renewal(requests) else min(lost + 1, MOST_LOST)
            await asyncio.sleep(self._rng.uniform(0.0, lost * max(LOST_S, self._call_s)))
            async with self.cell.turn():
                requests += self._take_waiting()
                await self._read()
                if await self._attempt(requests, is_fresh=True):
                    return

    async def _attempt(self, requests: list[Request], is_fresh: bool) -> bool:
        """Apply all of them to what is known, and write the outcome; False: somebody else was faster."""
        while True:
            requests[:] = [request for request in requests if not request.result.done()]
            document = self._document
            assert document is not None
            due = self._progress.due(self._loop.time())
            if [lease for lease, counter in due if document.expire(lease, counter)]:
                mark("register.expired")
            results = [document.apply(request.op) for request in requests]
            if not document.is_changed:
                if is_fresh:
                    self._settle(requests, results)
                    return True
                await self._read()
                is_fresh = True
                continue
            try:
                if await self._write(document, requests):
                    self._settle(requests, results)
                    return True
            except _TooLarge as error:
                await self._one_by_one(requests, str(error))
                return True
            return not requests  # if it was only about leases: whoever was faster has ended them, or they were renewed

    def _settle(self, requests: Sequence[Request], results: Sequence[Result]) -> None:
        for request, result in zip(requests, results, strict=True):
            if not request.result.done():
                request.result.set_result(result)

    async def _one_by_one(self, requests: list[Request], why: str) -> None:
        """Together they are too much; alone, only one that is too much itself is refused."""
        if len(requests) == 1:
            requests[0].fail(
                Rejected(
                    f"the store of this run does not fit into one cell any more: {why}. Put less into the round's "
                    f"store, or use tcp:// or etcd://, which have no such limit"
                )
            )
            return
        for request in requests:
            await self._turn([request])

    # --- the cell -----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Know what the cell holds. Unavailable, or UnreadableState if that is no document."""
        began_at = self._loop.time()
        found = await self.cell.get()
        self.pace.read(self._loop.time() - began_at)
        self._take(found)

    def _take(self, found: Found) -> None:
        """The cell held this at some moment since it was asked."""
        now = self._looked_at = self._loop.time()
        if found is None:
            if self._generation is not None:
                mark("register.vanished")
            self._document = Document.fresh(self._rng.getrandbits(62), self._first_revision(), self._history)
            self._raw = self._token = None
            return
        state, token = found
        if self._document is None or self._document.is_changed or state != self._raw:
            self._document = None
            document = self._decoded(state)
            if document.generation == self._generation and document.version < self._version:
                raise Unavailable(
                    f"{self.cell.name} gave version {document.version}, which is older than {self._version}, which it "
                    f"gave before: it does not always read what was written last"
                )
            self._document = document
        self._raw, self._token = state, token
        self._know(self._document, now)

    def _first_revision(self) -> int:
        """Above everything that this process has seen; else such that no other store's revisions are taken for ours."""
        return self._revision + GENERATION_APART if self._revision else self._rng.getrandbits(40) + 1

    def _decoded(self, state: bytes) -> Document:
        try:
            return Document.decode(state, self._history)
        except DocumentError as error:
            where = self.cell.endpoint or self.cell.name
            raise UnreadableState(
                f"what is stored at {where} is not a store of Rallypoint that this version can read: {error}. "
                f"It was left "
                f"as it is: remove it, or use another place",
                key=where,
            ) from error

    def _know(self, document: Document, now: float) -> None:
        """This document is, or was just now, what the cell holds."""
        self._generation, self._version = document.generation, document.version
        self._progress.look(document, now)
        self.pace.looked(now, document.version)
        if document.engine.revision != self._revision:
            self._revision = document.engine.revision
            self._quiet_since = now
        for watch in list(self._watches):
            watch.take(document)

    async def _write(self, document: Document, requests: Sequence[Request]) -> bool:
        """Replace what the cell holds by the document; False if it had changed: then that is known.

        Raises OutcomeUnknown if that cannot be found out, _TooLarge if it may not be tried.
        """
        base = _Base(document.generation, document.version, self._raw is None)
        token = self._token
        self._seq += 1
        document.sign(self._client, self._seq)
        self._document = None  # until it is known to be what the cell holds
        try:
            data = document.encode()
        except DocumentError as error:
            if self._raw is not None:
                self._document = self._decoded(self._raw)
            raise _TooLarge(f"{error} (at most {LARGEST:,} bytes)") from error
        for request in requests:
            request.is_sent = True
        for resend in range(RESENDS):
            answer = await self._set(data, token)
            if answer is not None and answer[2]:
                self._written(document, data, answer[1])
                return True
            if answer is None:
                mark("register.unknown")
                await self._read_in_doubt(requests)
            else:
                self._take((answer[0], answer[1]))
            if (done := self._outcome(base)) is not None:
                for request in requests:
                    request.is_sent = done
                return done
            if resend < RESENDS - 1:
                mark("register.resent")
            token = self._token
        raise OutcomeUnknown(f"{self.cell.name} does not say whether it was written")

    async def _set(self, data: bytes, token: Token | None) -> Answer:
        """What the cell says. It may have been written although the call failed: None."""
        began_at = self._loop.time()
        try:
            answer = await self.cell.set(data, token)
        except UnreadableState:
            raise
        except Unavailable as error:
            self._reached(error)
            return None
        if answer is not None:  # how long one waits in vain says nothing of how fast the cell is
            took_s = self._loop.time() - began_at
            self.pace.written(took_s)
            self._call_s = min(took_s, self._idle_s)
        return answer

    async def _read_in_doubt(self, requests: Sequence[Request]) -> None:
        """Read, for as long as anybody waits for it. OutcomeUnknown if nobody does any more."""
        pause = Backoff(self._rng, first_s=IN_DOUBT_S, most_s=self._idle_s / 2)
        while True:
            await pause.sleep()
            try:
                await self._read()
                return
            except Unavailable as error:
                self._document = None
                self._reached(error)
                if all(request.result.done() for request in requests):
                    raise OutcomeUnknown(str(error)) from error

    def _outcome(self, base: _Base) -> bool | None:
        """Whether the last write is in what the cell holds; None: it is not, but it may still come."""
        document = self._document
        assert document is not None
        if self._raw is None and base.is_nothing:
            return None
        if (document.generation, document.version) == (base.generation, base.version):
            return None  # nothing was written since: it may be under way
        written = document.has_write(self._client, self._seq, base.version)
        if written is None:
            raise OutcomeUnknown(f"{self.cell.name} was written so often meanwhile that it no longer says who wrote it")
        return written

    def _written(self, document: Document, data: bytes, token: Token) -> None:
        document.is_changed = False
        self._document, self._raw, self._token = document, data, token
        now = self._looked_at = self._loop.time()
        self._know(document, now)
