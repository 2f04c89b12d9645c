"""One process's client of a cell: batches requests, writes by compare-and-set, polls for changes, expires leases.
Shared by all connections of the process to the cell.

One task makes all calls of the cell, one at a time. A turn takes all waiting requests, applies them to the last known
document, and writes the result with the token of that document. If the write succeeds, that document was still current
and all requests were executed at that moment. Otherwise the cell returns the current document, and they are applied to
that one. Requests that change nothing need a read that began after they were made.

After a write with an unknown outcome the task reads the cell: every document contains the number of the last write of
each process. If the write is not in it, it may still arrive; then the same bytes are sent again with the same token, so
that it is executed once, whichever of the two arrives first.

While there are watches or leases, the cell is polled: soon after a change, then at growing intervals up to `idle_s`,
and when a lease may have expired. A process whose own leases are less urgent waits before it writes while a lease of
another is overdue: otherwise one that writes all the time wins every race. Renewals do not count as changes: while the
cell is quiet they wait for the next poll and are written instead of it.
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
from rallypoint.backends.register.cell_latency import CellLatency
from rallypoint.backends.register.lease_expiry import LeaseExpiry
from rallypoint.backends.register.watch import RegisterWatch
from rallypoint.errors import BackendError, OutcomeUnknown, Rejected, Unavailable, UnreadableState
from rallypoint.kv.document import DEFAULT_HISTORY, LARGEST, Document, DocumentError
from rallypoint.kv.types import KeepAlive, Op, Result

IDLE_S = 1.0
FASTEST_S = 0.01
FASTEST_PER_LEASE_S = 0.002
"""The shortest interval between two polls grows by this with each lease: it bounds the polls of all processes."""
QUIET = 0.1
"""The pause before the next poll is this part of the time without changes."""
MOST_AT_ONCE = 256
RESENDS = 8
LOST_S = 0.002
"""A process that lost a race tries again after a random part of this time (or of a call's time, if that is longer)
multiplied by its losses in a row, up to `MOST_LOST`. The window grows linearly: doubling it would put the longest
waiting process behind new ones. It does not grow if a renewal is among the requests, because a session can be lost by
waiting."""
MOST_LOST = 8
RENEWED_AT_ONCE = 4
"""After a lost race, renewals alone are tried this many times on what the winner wrote, without another read."""
OVERDUE = 0.5
"""A process lets others write first while a lease of theirs is older than this part of its time to live, and older than
those that it renews itself: renewals are due at a third."""
LONG = 10.0
"""Renewals of leases with a time to live of at least this many `idle_s` may wait for the next poll."""
IN_DOUBT_S = 0.05
GENERATION_APART = 1 << 20


class Request:
    """A pending operation and its future result."""

    def __init__(self, op: Op, result: asyncio.Future[Result]) -> None:
        self.op = op
        self.result = result
        self.is_sent = False
        """It is in a write with an unknown outcome."""

    def fail(self, error: BackendError) -> None:
        """End it with an error."""
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # the caller may have stopped waiting

    def doubt(self, error: BackendError) -> None:
        """End it: the write that contains it may have been executed."""
        if changes_something(self.op):
            self.fail(OutcomeUnknown(f"it may have happened: {error}"))
        else:
            self.fail(Unavailable(str(error)))


@dataclass(frozen=True, slots=True)
class _Base:
    """The document that a write is to replace."""

    generation: int
    version: int
    is_nothing: bool


class _TooLarge(Exception):
    """The document to write exceeds the size limit of a cell."""


def _has_renewal(requests: Sequence[Request]) -> bool:
    return any(isinstance(request.op, KeepAlive) for request in requests)


class SharedCell:
    """See the module. Starts with its first request or watch, ends with `close`."""

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
        self._expiry = LeaseExpiry()
        self.latency = CellLatency()
        self._waiting: list[Request] = []
        self._work = asyncio.Event()
        self._watches: dict[RegisterWatch, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_busy = True
        """The task is not waiting for work."""
        self._is_closed = False
        self._trouble: BackendError | None = None
        # The last known content of the cell. The document is None if it has to be read or decoded first.
        self._document: Document | None = None
        self._raw: bytes | None = None
        self._token: Token | None = None
        self._generation: int | None = None
        self._version = 0
        self._revision = 0
        self._looked_at = float("-inf")
        self._quiet_since = float("-inf")
        self._call_s = 0.0
        """The time of the last write that was answered."""

    # --- for connections ----------------------------------------------------------------------------------------------

    def submit(self, op: Op) -> Request:
        """Queue an operation; its outcome is in the request's `result`."""
        request = Request(op, self._loop.create_future())
        if self._is_closed:
            request.fail(Unavailable("this connection is closed"))
            return request
        self._waiting.append(request)
        if not (isinstance(op, KeepAlive) and self._can_wait(op)):
            self._wake()
        return request

    def renewals_wait_s(self, ttl_s: float) -> float:
        """How long a renewal may wait for the next poll, so that an idle process makes one call for both."""
        return self._idle_s if ttl_s >= LONG * self._idle_s else 0.0

    def _can_wait(self, renewal: KeepAlive) -> bool:
        at, document = self._next_look_at(), self._document
        if self._is_busy or at is None or document is None or self._trouble is not None:
            return False
        lease = document.engine.leases.get(renewal.lease)
        return lease is not None and 0.0 < at - self._loop.time() <= self.renewals_wait_s(lease.ttl_s)

    def start_watch(self, watch: RegisterWatch) -> None:
        self._watches[watch] = None
        self._quiet_since = self._loop.time()  # a new watch expects changes: poll fast
        self._wake()

    def stop_watch(self, watch: RegisterWatch) -> None:
        self._watches.pop(watch, None)

    def document_for(self, watch: RegisterWatch) -> Document | None:
        document = self._document
        return None if document is None or document.is_changed else document

    @property
    def generation(self) -> int | None:
        """The generation of the known document."""
        return self._generation

    @property
    def trouble(self) -> BackendError | None:
        """Why the cell cannot be reached; None if it can."""
        return self._trouble

    @property
    def document(self) -> Document | None:
        """The last document that was read or written; None while a changed one is being written."""
        return None if self._document is None or self._document.is_changed else self._document

    async def close(self) -> None:
        """End the task. Pending requests fail."""
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
            except Exception as error:  # a bug must not end the task silently
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
        await asyncio.sleep(0)  # batches the requests of one turn of the loop
        if not self._work.is_set():
            self._is_busy = False
            try:
                async with asyncio.timeout_at(self._next_look_at()):
                    await self._work.wait()
            except TimeoutError:
                pass  # it is time to poll
            self._is_busy = True
        self._work.clear()

    def _next_look_at(self) -> float | None:
        due = self._expiry.next_due()
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
        """Fail the requests, or queue them again: an unreachable cell is tried until their callers time out."""
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
        if not isinstance(error, OutcomeUnknown):  # then `_set` has reported whether it can be reached
            self._reached(error)

    def _reached(self, error: BackendError | None) -> None:
        if (error is None) != (self._trouble is None):
            for listener in list(self.on_reach):
                listener(error)
        self._trouble = error

    async def _turn(self, requests: list[Request]) -> None:
        """Execute the requests and end expired leases. If there is neither, read the cell once."""
        if requests and self._is_less_urgent(requests):
            mark("register.yielded")
            await asyncio.sleep(self._rng.uniform(1.0, 2.0) * max(LOST_S, self._call_s))
        is_fresh = self._document is None  # whether the known document was read after the last request was made
        if is_fresh:
            await self._read()
        if await self._attempt(requests, is_fresh):
            return
        mark("register.contended")
        if all(isinstance(request.op, KeepAlive) for request in requests):
            for _ in range(RENEWED_AT_ONCE):
                if await self._attempt(requests, is_fresh=True):  # a refused write returns the current document
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

    def _is_less_urgent(self, requests: Sequence[Request]) -> bool:
        """Whether the lease of another process is overdue, and more so than those that these requests renew."""
        now = self._loop.time()
        own = {request.op.lease for request in requests if isinstance(request.op, KeepAlive)}
        others = self._expiry.oldest(now, without=own)
        return others > OVERDUE and others > max((self._expiry.age(lease, now) for lease in own), default=0.0)

    async def _attempt(self, requests: list[Request], is_fresh: bool) -> bool:
        """Apply the requests to the known document and write the result; False: another process was faster."""
        while True:
            requests[:] = [request for request in requests if not request.result.done()]
            document = self._document
            assert document is not None
            due = self._expiry.due(self._loop.time())
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
            return not requests  # without requests: the winner has ended the expired leases, or they were renewed

    def _settle(self, requests: Sequence[Request], results: Sequence[Result]) -> None:
        for request, result in zip(requests, results, strict=True):
            if not request.result.done():
                request.result.set_result(result)

    async def _one_by_one(self, requests: list[Request], why: str) -> None:
        """The batch is too large: execute the requests one by one, and refuse each that is too large by itself."""
        if len(requests) == 1:
            requests[0].fail(
                Rejected(
                    f"the store of this run no longer fits into one cell: {why}. Put less into the round's store, or "
                    f"use tcp:// or etcd://, which have no such limit"
                )
            )
            return
        for request in requests:
            await self._turn([request])

    # --- the cell -----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read the cell. Raises Unavailable, or UnreadableState if the content is not a document."""
        began_at = self._loop.time()
        found = await self.cell.get()
        self.latency.read(self._loop.time() - began_at)
        self._take(found)

    def _take(self, found: Found) -> None:
        """The cell had this content at some moment since the call began."""
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
                    f"{self.cell.name} returned version {document.version} after version {self._version}: it does not "
                    f"always read the last write"
                )
            self._document = document
        self._raw, self._token = state, token
        self._know(self._document, now)

    def _first_revision(self) -> int:
        """Above all revisions that this process has seen; if none, random, so that two stores share no revisions."""
        return self._revision + GENERATION_APART if self._revision else self._rng.getrandbits(40) + 1

    def _decoded(self, state: bytes) -> Document:
        try:
            return Document.decode(state, self._history)
        except DocumentError as error:
            where = self.cell.endpoint or self.cell.name
            raise UnreadableState(
                f"the content of {where} is not a store of Rallypoint that this version can read: {error}. It was not "
                f"changed: remove it, or use another place",
                key=where,
            ) from error

    def _know(self, document: Document, now: float) -> None:
        """The cell holds this document, or did so a moment ago."""
        self._generation, self._version = document.generation, document.version
        self._expiry.observe(document, now)
        self.latency.observed(now, document.version)
        if document.engine.revision != self._revision:
            self._revision = document.engine.revision
            self._quiet_since = now
        for watch in list(self._watches):
            watch.take(document)

    async def _write(self, document: Document, requests: Sequence[Request]) -> bool:
        """Replace the content of the cell by the document; False if it had changed: then the new content is known.

        Raises OutcomeUnknown if the outcome cannot be found out, _TooLarge if the document is too large.
        """
        base = _Base(document.generation, document.version, self._raw is None)
        token = self._token
        self._seq += 1
        document.sign(self._client, self._seq)
        self._document = None  # until the outcome is known
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
        raise OutcomeUnknown(f"{self.cell.name} does not say whether the write was executed")

    async def _set(self, data: bytes, token: Token | None) -> Answer:
        """The cell's answer; None if the call failed, which does not mean that nothing was written."""
        began_at = self._loop.time()
        try:
            answer = await self.cell.set(data, token)
        except UnreadableState:
            raise
        except Unavailable as error:
            self._reached(error)
            return None
        if answer is not None:  # the time of a failed call does not measure the cell's latency
            took_s = self._loop.time() - began_at
            self.latency.written(took_s)
            self._call_s = min(took_s, self._idle_s)
        return answer

    async def _read_in_doubt(self, requests: Sequence[Request]) -> None:
        """Read until it succeeds. OutcomeUnknown once all callers have stopped waiting."""
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
        """Whether the last write is in the content of the cell; None: it is not, but it may still arrive."""
        document = self._document
        assert document is not None
        if self._raw is None and base.is_nothing:
            return None
        if (document.generation, document.version) == (base.generation, base.version):
            return None  # nothing was written since: it may still arrive
        written = document.has_write(self._client, self._seq, base.version)
        if written is None:
            raise OutcomeUnknown(
                f"{self.cell.name} was written by too many others since: this write is no longer listed"
            )
        return written

    def _written(self, document: Document, data: bytes, token: Token) -> None:
        document.is_changed = False
        self._document, self._raw, self._token = document, data, token
        now = self._looked_at = self._loop.time()
        self._know(document, now)
