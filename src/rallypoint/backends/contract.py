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
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rallypoint.backends.lost import Lost
from rallypoint.errors import BackendError
from rallypoint.events import Event
from rallypoint.kv.types import AddResult, Batch, BranchOp, Compare, Item, Op, Range, Result, TxnResult


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


class Late(Exception):
    """The deadline of a direct request has passed; whether it was executed is not known."""


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

    @abstractmethod
    async def status(self) -> BackendStatus: ...

    def hurry(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Whoever closes it next does not want to wait for others."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the connection. Sessions and watches of it end here; leases that were not closed end by time."""
