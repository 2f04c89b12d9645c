"""The backend contract: a linearizable, revisioned key-value store with leases and watches. Narrow on purpose.

Everything above (the algorithm, the store, the tools) is written against this and nothing else; etcd v3 maps onto it
one to one. What a backend promises:

- Reads and writes are linearizable. Every change has a revision; all changes of one transaction have the same one.
- A refused transaction is a value, not an error.
- A watch is one ordered, gap-free stream; each batch is everything of one revision that the watch covers. Different
  watches have no order between them.
- A lease is judged by the backend's own clock alone. When it ends, its keys go in one revision.
- An error says what may be assumed (`Unavailable`, `OutcomeUnknown`, `Rejected`), and every call ends in bounded time.

The conformance suite in `rallypoint.testing.conformance` checks all of it on any implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypedDict, Unpack

from rallypoint.backends.lost import Lost
from rallypoint.errors import BackendError, Unavailable
from rallypoint.events import Event
from rallypoint.kv.types import AddResult, Batch, BranchOp, Compare, Item, Op, Put, Range, Result, Txn, TxnResult


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may hold. Whoever writes more splits it, and never splits what must be atomic."""

    max_txn_ops: int = 128
    """Compares, or operations of a branch, whichever are more."""
    max_txn_bytes: int = 1_000_000
    """All values of a transaction together."""


@dataclass(frozen=True, slots=True)
class Got:
    """One key (None: absent) and the revision it was read at."""

    item: Item | None
    revision: int


@dataclass(frozen=True, slots=True)
class Scanned:
    """The keys under a prefix, in order, and the revision they were read at."""

    items: tuple[Item, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """What a backend says of itself, for people."""

    backend: str
    endpoint: str
    revision: int
    details: dict[str, str]


class Watch(ABC):
    """A stream of batches. Iterate it; `cancel()` ends the iteration at once and is idempotent.

    Raises `HistoryGone` from the iteration when the revisions to go on from are no longer kept: scan again. Losing the
    connection is not an error here: the backend resumes by itself, without gap or repetition.
    """

    is_idle: bool = False
    """Nothing is `ready()`, as whoever asked last was told: one need not ask before one is called."""

    is_over: bool = False
    """It was cancelled, by whoever has it or with its backend. Told at least by those that `follow()`."""

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    @abstractmethod
    async def __anext__(self) -> Batch: ...

    @abstractmethod
    def ready(self) -> Batch | None:
        """The next batch if it is here already: lets a reader take many at once without waiting."""

    def follow(self, on_ready: Callable[[], None]) -> bool:
        """Begin, and be called whenever a batch is `ready()`, so that nobody has to wait for it; False: iterate it.

        When the watch fails, `on_ready` is called too, and `ready()` raises what the iteration would have raised. The
        callback must not raise.
        """
        return False

    @abstractmethod
    def cancel(self) -> None: ...


class Session(ABC):
    """A lease that is kept alive by this process until it is closed or lost."""

    lease: int
    ttl_s: float
    lost: Lost
    """Await it, or ask it: when, and why, this process can no longer count on the lease. Never later than the backend
    thinks so. Closing is not losing."""
    expires_at: float = float("-inf")
    """When it is lost by this side's clock, the loop's, unless it is renewed; where the backend's kind knows."""

    @abstractmethod
    async def close(self) -> None:
        """Stop renewing and end the lease. Does not raise; if the backend cannot be reached, time ends the lease."""

    @abstractmethod
    def abandon(self) -> None:
        """Stop renewing without a word: what a dead process does."""

    def wait_for_word(self, waits: bool) -> None:  # noqa: B027
        """Whether nothing depends on it that this process notices a loss by itself: it is not in a round.

        Then a session whose renewals are only answered late is not lost before the backend says so, where one does.
        """


class Renewing(TypedDict):
    """How a session is renewed, as `Backend.open_session` is told."""

    interval_s: float | None
    renew_timeout_s: float | None
    on_missed: Callable[[str], None] | None


class Late(Exception):
    """The deadline of a direct request has passed; whether it was executed is not known."""


class TooOld(Unavailable):
    """The server does not know a direct request: ask it in the ordinary way. Nothing was executed."""


class Direct(Protocol):
    """Requests that block the thread that makes them, without an event loop. For any thread."""

    limits: Limits

    @property
    def is_usable(self) -> bool:
        """Whether this thread may ask: it is of no use in a fork, and must not block the event loop."""

    def execute(self, op: Op, deadline: float) -> Result:
        """Get it executed once. Late at the deadline (of the monotonic clock), and the errors of the contract."""

    def await_keys(
        self, keys: Sequence[str], until: float, deadline: float, given_up: Callable[[], object] | None = None
    ) -> Result:
        """A TxnResult with a GotItem for each key, once all exist; at `until` or before it, as they are then.

        Unavailable soon after `given_up`, which is asked now and then, says anything.
        """


OnPush: TypeAlias = Callable[[Sequence[Batch], TxnResult | None], bool]
"""Shown what was pushed, and what was answered to what it sent: whether it has done what could not wait."""


class Sent(Protocol):
    """A transaction that is under way."""

    async def result(self) -> TxnResult:
        """As `Backend.txn` returns it, or raises."""


class Done(NamedTuple):
    """What somebody has done on a lane by itself."""

    rank: int
    """The place that it has confirmed. What was answered to that is not known, unless it has gone on since."""
    revision: int = 0
    """Of the confirmation, if it has; 0: it has not."""
    number: int = 0
    size: int = 0
    addr: str = ""
    port: int = 0


class Seat(Protocol):
    """A place in an active round."""

    @property
    def number(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def addr(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def revision(self) -> int:
        """Of the confirmation."""


class Start(Protocol):
    """How a node joins, for a caller that does it by itself. Used once."""

    lease: int
    """Of the session to be opened."""
    ttl_s: float
    number: int
    """Of the attempt that is expected."""
    join: int
    incarnation: str
    held_s: float
    """For so long the session has to last, and the call to be allowed, when a place is confirmed."""
    join_timeout_s: float

    def joins(self) -> Txn:
        """What is sent to join now."""

    def pledges(self) -> tuple[bytes, bytes]:
        """What is written to confirm a place, and that of rank 0 (empty: it takes the ordinary way), for who says so
        beforehand."""

    def confirms(self, rank: int, revision: int) -> Txn | None:
        """What is sent to confirm a place, on top of a join of that revision; None: that takes the ordinary way."""


@dataclass(slots=True)
class Begun:
    """How far a caller has come with a start. Noted before each step: one that is interrupted may have made it."""

    start: Start
    sent_at: float = 0.0
    """When the join was sent; 0: it was not."""
    revision: int = 0
    """Of the node's key as it joined, if that is known."""
    done: Done | None = None
    is_given_up: bool = False
    """The caller does not want a place any more."""
    is_taken_over: bool = False
    """The node goes on with it, and has not seen that it was given up."""


class Lane(Protocol):
    """Where one who waits for a node's place may find it by itself, on its own thread."""

    @property
    def is_standing(self) -> bool:
        """Whether it is told there already."""

    def stand_by(self) -> None:
        """Make it likely that one can `begin`. Takes as long as connecting does, a second at most."""

    def begin(self, begun: Begun) -> Done | None:
        """Join, and go on for as long as the server says at once what is next: the place, if that went to the end.

        If not, what was begun is gone on with in the ordinary way; afterwards one may `wait`.
        """

    def wait(self, bell: int, within_s: float) -> object | None:
        """Until something can be read from `bell`, or for so long: what it goes on with, if it has found it.

        To be called again and again, until it has, or there is no need to; may take a second longer.
        """

    def keep_warm(self, bell: int) -> None:
        """To be called now and then between two waits: do for practice what has to be done when the place is told.

        Whoever sleeps for long does that several times as slowly, because its code is in no cache any more. Takes a
        tenth of a millisecond, and changes nothing; ends early if something can be read from `bell`.
        """

    def leave(self) -> None:
        """Nobody waits any more. Idempotent."""


class Terms(NamedTuple):
    """What one who waits on a lane waits for, and may do by itself."""

    node_id: str
    number: int
    """Of the attempt that is expected."""
    join: int
    incarnation: str
    op: Txn
    """What is sent to confirm a place."""
    as_zero: Txn | None
    """The same, as rank 0; None: that takes the ordinary way."""
    session: Session
    """It has to last, by its own clock, and for `held_s` when a place is confirmed."""
    held_s: float
    deadline: float
    """Nothing is confirmed that may be told to others only after this."""
    enter: Callable[[Seat], object]
    """What to go on with, in that place. Called on the thread that waits."""


class Shortcut(Protocol):
    """For one who waits for a certain push, and has to answer it before anything else is done about it."""

    held_s: float
    """Everybody else sees what was pushed so much later at most."""

    def open(
        self,
        on_push: OnPush,
        op: Txn | None,
        terms: Terms | None = None,
        on_done: Callable[[Done], None] | None = None,
    ) -> Lane | None:
        """Show it what is pushed from now on before everybody else, until `settle()` or until it is at a loss.

        `op` is what it will send first, most likely: made ready while there is time. With `terms`, where that can be,
        somebody on another thread may do it all, on the lane that is returned: `on_done` is told what was done there,
        before anything that followed is shown to anybody.
        """

    def send(self, op: Txn) -> Sent:
        """What `Backend.txn` does, sent before this returns. Only for the one who is shown things first."""

    def settle(self) -> None:
        """Nobody is shown anything first any more; everybody sees now what was held. Idempotent."""

    def lane(self, node_id: str) -> Lane | None:
        """Where a caller may begin by itself, if it can."""

    def take_session(self, lease: int, ttl_s: float, granted_at: float, **how: Unpack[Renewing]) -> Session:
        """One that somebody has opened on a lane: as `Backend.open_session` has it."""


class Asked(NamedTuple):
    """A place that is about to be given: to whom, for which of its joins, and what its key is as far as is known."""

    node_id: str
    join: int
    rank: int
    revision: int
    """Of the node's key."""


class Backend(ABC):
    """A connection to where the keys of a run live. All methods may raise the three errors of the contract."""

    name: str
    limits: Limits = Limits()
    has_coordinator: bool = False
    """Whether the backend itself runs the coordinator of each run; if not, the nodes elect one of theirs."""

    renews_runs: bool = False
    """Whether the backend itself renews the leases of a run while sessions of it live; if not, the nodes do."""

    makes_run: bool = True
    """Whether this process is to make the run if it does not exist; if not, another one is about to. May become true
    with a session that was opened."""

    gives_way_s: tuple[float, float] = (2.0, 4.0)
    """How long, at random, one that is not to make the run waits for it before it makes it all the same. Who is elected
    does not wait: where the nodes elect a coordinator, that one makes it."""

    rest_s: float = 0.0
    """When a round has become active, for how long whoever decided that leaves the processor to its members."""

    @abstractmethod
    async def get(self, key: str) -> Got: ...

    @abstractmethod
    async def scan(self, prefix: str) -> Scanned: ...

    @abstractmethod
    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        """If all compares hold do `then`, else `otherwise`; with no `otherwise`, a refusal reads what was compared.

        Raises `LeaseGone` if a put names a lease that has ended; then nothing was written.
        """

    @abstractmethod
    async def add(self, key: str, amount: int, *, compares: Sequence[Compare] = (), lease: int = 0) -> AddResult:
        """Atomic increment of a decimal number, executed once even if it had to be sent twice."""

    @abstractmethod
    def watch(self, prefix: str, after_revision: int) -> Watch:
        """Everything that changes under `prefix` after a revision. The watch is asked for when it is iterated."""

    async def scan_and_watch(self, prefixes: Sequence[str]) -> tuple[TxnResult, list[Watch]]:
        """What is under the prefixes (one `GotRange` each) at one revision, and watches that go on from there."""
        result = await self.txn((), list(map(Range, prefixes)))
        return result, [self.watch(prefix, result.revision) for prefix in prefixes]

    @abstractmethod
    async def grant(self, ttl_s: float) -> int:
        """A lease that nobody renews by itself."""

    @abstractmethod
    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease once, whoever made it; False if it has ended."""

    @abstractmethod
    async def revoke(self, lease: int) -> None:
        """End a lease; one that has ended already is fine."""

    @abstractmethod
    async def open_session(
        self,
        ttl_s: float,
        *,
        interval_s: float | None = None,
        renew_timeout_s: float | None = None,
        on_missed: Callable[[str], None] | None = None,
    ) -> Session:
        """A lease that is renewed every `interval_s` (default: a third of the time to live).

        A renewal that fails or takes longer than `renew_timeout_s` (default: half the interval) counts as missed:
        `on_missed` is told why, the first time and again after each time to live that none succeeds. It must not raise.
        """

    def listen(self, on_reach: Callable[[BackendError | None], None]) -> None:  # noqa: B027 - most need not
        """Tell when the backend becomes unreachable (with the cause), and reachable again or `makes_run` (None), if it
        knows.

        One that holds a connection knows before anybody asks for anything. The listener must not raise.
        """

    def claim_by(self, make: Callable[[], bytes]) -> None:  # noqa: B027 - most never forget
        """For a backend that may lose its memory: `make` says where the run stood, just before sessions are lost."""

    def tell_by(self, emit: Callable[[Event], None]) -> None:  # noqa: B027 - most have nothing to tell
        """Where events of the backend itself go. Said before it is first used."""

    def direct(self) -> Direct | None:
        """A way to make requests that needs no event loop, if there is one. May be called from any thread."""
        return None

    def shortcut(self) -> Shortcut | None:
        """A way to answer a push with fewer steps, if there is one."""
        return None

    def confirmed(self, run_id: str, number: int, incarnation: str, asked: Iterable[Asked]) -> Sequence[Put | None]:
        """How each of them confirms its place in that attempt, in this order; None: it has not said so beforehand.

        Each is the node's own word, for that attempt and that join, under its session, and is to be written on top of
        the revision that was named. Empty: nobody has, or it counts no more.
        """
        return ()

    @abstractmethod
    async def status(self) -> BackendStatus: ...

    def hurry(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Whoever closes it next does not want to wait for others."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the connection. Sessions and watches of it end here; leases that were not closed end by time."""
