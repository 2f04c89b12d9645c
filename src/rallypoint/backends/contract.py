"""The backend contract: a linearizable, revisioned key-value store with leases and watches. Narrow on purpose.

The layers above (rendezvous, store, tools) use this interface only. It holds storage, which etcd v3 has as it is (but
for `add`), and a few facts about the runs kept there (`# --- runs ---`), which only `rendezvous` uses. It must hold
nothing of ranks, joins or rounds. A backend guarantees:

- Reads and writes are linearizable. Every change has a revision; all changes of one transaction have the same one.
- A refused transaction is a value, not an error.
- A watch is one ordered, gap-free stream. A batch contains all changes of one revision that the watch covers. Different
  watches have no order between them.
- Leases expire by the backend's own clock only. When a lease ends, its keys are deleted in one revision.
- Errors say what the caller may assume (`Unavailable`, `OutcomeUnknown`, `Rejected`). Every call ends in bounded time.

The conformance suite in `rallypoint.testing.conformance` checks these guarantees on any implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rallypoint.backends.loss_signal import LossSignal
from rallypoint.errors import BackendError
from rallypoint.events import Event
from rallypoint.kv.types import AddResult, Batch, BranchOp, Compare, Item, Op, Range, Result, TxnResult


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one request. A caller splits larger ones, but never a transaction that must be atomic."""

    max_txn_ops: int = 128
    """The most compares, and the most operations of a branch."""
    max_txn_bytes: int = 1_000_000
    """The total size of the values of a transaction."""


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
    """The state of a backend, for display."""

    backend: str
    endpoint: str
    revision: int
    details: dict[str, str]


class Watch(ABC):
    """A stream of batches. Iterate it; `cancel()` ends the iteration at once and is idempotent.

    The iteration raises `HistoryGone` if the next revisions are no longer kept: scan again. A lost connection is not an
    error here: the backend resumes the watch without gap or repetition.
    """

    is_idle: bool = False
    """The last call of `ready()` returned None, and nothing has arrived since: calling it again is useless."""

    is_over: bool = False
    """The watch was cancelled, by its user or with its backend. Watches that cannot `follow()` need not set it."""

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    @abstractmethod
    async def __anext__(self) -> Batch: ...

    @abstractmethod
    def ready(self) -> Batch | None:
        """The next batch if it has arrived, else None. A reader can take several batches without waiting."""

    def follow(self, on_ready: Callable[[], None]) -> bool:
        """Start the watch and call `on_ready` when a batch is `ready()`; False: not supported, iterate the watch.

        `on_ready` is also called when the watch fails: then `ready()` raises the error that the iteration would raise.
        The callback must not raise.
        """
        return False

    @abstractmethod
    def cancel(self) -> None: ...


class Session(ABC):
    """A lease that this process renews until the session is closed or lost."""

    lease: int
    ttl_s: float
    lost: LossSignal
    """Set, with the reason, when this process can no longer rely on the lease; never later than the backend ends it.
    `close` does not set it."""

    @abstractmethod
    async def close(self) -> None:
        """Stop renewing and end the lease. Does not raise; if the backend is unreachable, the lease expires."""

    @abstractmethod
    def abandon(self) -> None:
        """Stop renewing without ending the lease, as if the process had died."""

    def set_local_expiry(self, enabled: bool) -> None:  # noqa: B027
        """Whether this process's own clock ends the session too (the default), or only the backend does.

        Disable it while nothing relies on noticing a loss without the backend. Then late answers to renewals do not end
        a session that the backend still has. Without effect if the backend does not report expired sessions.
        """


class DeadlineExceeded(Exception):
    """The deadline of a direct request has passed. The request may have been executed."""


class Direct(Protocol):
    """Blocking requests without an event loop, from any thread."""

    limits: Limits

    @property
    def is_usable(self) -> bool:
        """Whether this thread may use it: not in a forked child, and not on the event loop."""

    def execute(self, op: Op, deadline: float) -> Result:
        """Execute once. DeadlineExceeded at `deadline` (monotonic clock), or the errors of the contract."""

    def await_keys(
        self, keys: Sequence[str], until: float, deadline: float, is_cancelled: Callable[[], object] | None = None
    ) -> Result:
        """Wait until all keys exist, at most until `until`; the result is a TxnResult with a GotItem for each key.

        It may return before `until` although keys are missing. `is_cancelled` is polled: Unavailable soon after it
        returns a true value.
        """


class Backend(ABC):
    """A connection to a store. All methods may raise the three errors of the contract."""

    name: str
    limits: Limits = Limits()

    is_run_closed: bool = False
    """Whether this process was told that its run is closed: then it serves the run no longer. Set by its node."""

    @abstractmethod
    async def get(self, key: str) -> Got: ...

    @abstractmethod
    async def scan(self, prefix: str) -> Scanned: ...

    @abstractmethod
    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        """Execute `then` if all compares hold, else `otherwise`, by default: read the keys that were compared.

        Raises `LeaseGone` if a put names a lease that has ended; then nothing is written.
        """

    @abstractmethod
    async def add(self, key: str, amount: int, *, compares: Sequence[Compare] = (), lease: int = 0) -> AddResult:
        """Atomic increment of a decimal number. Executed once, even if the request is sent again."""

    @abstractmethod
    def watch(self, prefix: str, after_revision: int) -> Watch:
        """All changes under `prefix` after a revision. The watch starts when it is iterated or followed."""

    async def scan_and_watch(self, prefixes: Sequence[str]) -> tuple[TxnResult, list[Watch]]:
        """The keys under the prefixes (one `GotRange` each) at one revision, and watches that start after it."""
        result = await self.txn((), list(map(Range, prefixes)))
        return result, [self.watch(prefix, result.revision) for prefix in prefixes]

    @abstractmethod
    async def grant(self, ttl_s: float) -> int:
        """Grant a lease, which is not renewed automatically."""

    @abstractmethod
    async def keep_alive(self, lease: int) -> bool:
        """Renew any lease once; False if it has ended."""

    @abstractmethod
    async def revoke(self, lease: int) -> None:
        """End a lease. Idempotent."""

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
        `on_missed` gets the reason, the first time and again after each time to live without a success. It must not
        raise.
        """

    def on_reachability(self, listener: Callable[[BackendError | None], None]) -> None:  # noqa: B027 - optional
        """Call `listener` with the cause when the backend becomes unreachable, and with None when it is reachable again
        or `makes_run` becomes true.

        A backend with a connection reports this without a request. The listener must not raise.
        """

    def on_event(self, emit: Callable[[Event], None]) -> None:  # noqa: B027 - most emit no events
        """Where the backend emits its own events. Call it before the first use."""

    def direct(self) -> Direct | None:
        """Blocking requests without the event loop, if the backend has them. May be called from any thread."""
        return None

    @abstractmethod
    async def status(self) -> BackendStatus: ...

    def shorten_close(self) -> None:  # noqa: B027 - most wait for no other process
        """The next `close` must not wait for other processes."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection. Its sessions and watches end; leases that were not ended expire."""

    # --- runs: who makes, renews and coordinates them -----------------------------------------------------------------

    has_coordinator: bool = False
    """Whether the backend runs the coordinator of each run; if not, the nodes elect one among themselves."""

    renews_runs: bool = False
    """Whether the backend renews the leases of a run while the run has sessions; if not, the nodes do."""

    makes_run: bool = True
    """Whether this process is to make the run if it does not exist; if not, another process is about to. It may become
    true when a session is opened."""

    make_run_delay_s: tuple[float, float] = (2.0, 4.0)
    """A process with `makes_run` false waits for the run, for a random time between these, before it makes the run
    itself. An elected coordinator does not wait."""

    def on_data_loss(self, make_claim: Callable[[], bytes]) -> None:  # noqa: B027 - most keep their data
        """`make_claim` describes the state of the run to a server that was restarted without its data. It is called
        just before the sessions are lost."""
