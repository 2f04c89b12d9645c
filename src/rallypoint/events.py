"""Typed events: one per fact, emitted once, by the process where it happens. Sinks log them, count them, show them.

An event is a frozen value with its data and its reason; `str()` is the sentence for people. Nothing else in the package
logs: there is no second log line beside an event. A program that uses the library gets no output until it adds a sink
or configures the `rallypoint` logger.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import msgspec

from rallypoint.sentences import listed, round_ended

logger = logging.getLogger("rallypoint")
logger.addHandler(logging.NullHandler())


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """Base of all events: the run, and the node or process that emits the event."""

    level: ClassVar[int] = logging.DEBUG

    run_id: str
    by: str

    def text(self) -> str:
        """The sentence, without the run."""
        raise NotImplementedError(type(self).__name__)

    def __str__(self) -> str:
        about = f"run {self.run_id!r}: " if self.run_id else ""
        return f"{about}{self.by}: {self.text()}"


# --- events of a node -------------------------------------------------------------------------------------------------


class JoinStarted(Event, frozen=True, kw_only=True):
    """A call of `next_rendezvous` starts."""

    level = logging.INFO
    join: int

    def text(self) -> str:
        return f"asks to join (join {self.join})"


class WaitingFor(Event, frozen=True, kw_only=True):
    """What the node waits for; emitted when the reason changes."""

    reason: str

    def text(self) -> str:
        return f"waits: {self.reason}"


class Confirmed(Event, frozen=True, kw_only=True):
    """The node confirmed its place in a round that is forming."""

    round: int
    rank: int

    def text(self) -> str:
        return f"confirmed round {self.round} as rank {self.rank}"


class RoundEntered(Event, frozen=True, kw_only=True):
    """`next_rendezvous` returns."""

    level = logging.INFO
    round: int
    rank: int
    world_size: int

    def text(self) -> str:
        return f"is in round {self.round} as rank {self.rank} of {self.world_size}"


class RankNotGiven(Event, frozen=True, kw_only=True):
    """The node asked for a rank (`node_rank`) and is in a round with another one."""

    level = logging.WARNING
    round: int
    requested: int
    rank: int
    reason: str

    def text(self) -> str:
        return f"asked for rank {self.requested} and has rank {self.rank} in round {self.round}: {self.reason}"


class WorldChanged(Event, frozen=True, kw_only=True):
    """A member was told of a change of its round."""

    level = logging.INFO
    round: int
    cause: str
    reason: str

    def text(self) -> str:
        return f"round {self.round} changed ({self.cause}): {self.reason}"


class JoinFailed(Event, frozen=True, kw_only=True):
    """`next_rendezvous` raises."""

    level = logging.WARNING
    error: str
    reason: str

    def text(self) -> str:
        return f"could not join: {self.error}: {self.reason}"


class NodeLeft(Event, frozen=True, kw_only=True):
    """The node left the run and ended its session."""

    level = logging.INFO
    reason: str

    def text(self) -> str:
        return f"left: {self.reason or 'no reason given'}"


class SessionLost(Event, frozen=True, kw_only=True):
    """The node's lease ended unexpectedly."""

    level = logging.WARNING
    reason: str

    def text(self) -> str:
        return f"lost its session: {self.reason}"


class RenewalMissed(Event, frozen=True, kw_only=True):
    """One renewal of the session failed or was late."""

    level = logging.WARNING
    reason: str

    def text(self) -> str:
        return f"missed a keep-alive: {self.reason}"


class BackendUnreachable(Event, frozen=True, kw_only=True):
    """The backend no longer answers; emitted once until it answers again."""

    level = logging.WARNING
    reason: str

    def text(self) -> str:
        return f"cannot reach the backend: {self.reason}"


class BackendReachable(Event, frozen=True, kw_only=True):
    """The backend answers again."""

    level = logging.INFO
    after_s: float

    def text(self) -> str:
        return f"reaches the backend after {self.after_s:.1f} s"


class RunClosed(Event, frozen=True, kw_only=True):
    """This process closed the run."""

    level = logging.INFO
    reason: str

    def text(self) -> str:
        return f"closed the run: {self.reason or 'no reason given'}"


class RunReopened(Event, frozen=True, kw_only=True):
    """This process reopened the run."""

    level = logging.INFO
    reason: str

    def text(self) -> str:
        return f"reopened the run: {self.reason or 'no reason given'}"


class ShutdownFailed(Event, frozen=True, kw_only=True):
    """Closing the run at shutdown failed; the node has left all the same."""

    level = logging.WARNING
    reason: str

    def text(self) -> str:
        return f"could not close the run at shutdown: {self.reason}"


# --- events of a coordinator ------------------------------------------------------------------------------------------


class CoordinatorElected(Event, frozen=True, kw_only=True):
    """This process is now the coordinator of the run."""

    term: int

    def text(self) -> str:
        return f"is the coordinator (term {self.term})"


class CoordinatorDeposed(Event, frozen=True, kw_only=True):
    """This process is no longer the coordinator."""

    term: int
    reason: str

    def text(self) -> str:
        return f"is no longer the coordinator (term {self.term}): {self.reason}"


class RoundForming(Event, frozen=True, kw_only=True):
    """An attempt was decided."""

    round: int
    size: int
    reason: str

    def text(self) -> str:
        return f"round {self.round} forms with {self.size} node{'s' * (self.size != 1)}: {self.reason}"


class RoundGivenUp(Event, frozen=True, kw_only=True):
    """An attempt ended without becoming active."""

    round: int
    reason: str

    def text(self) -> str:
        return f"round {self.round} is given up: {self.reason}"


class RoundActive(Event, frozen=True, kw_only=True):
    """All members confirmed; the round is current. The durations of its phases are by the coordinator's clock."""

    level = logging.INFO
    round: int
    size: int
    reason: str
    gather_s: float | None = None
    last_call_s: float | None = None
    confirm_s: float | None = None

    def text(self) -> str:
        return f"round {self.round} is active with {self.size} member{'s' * (self.size != 1)}: {self.reason}"


class RoundOver(Event, frozen=True, kw_only=True):
    """Every member has left or is lost. `kind` and `reason` are the root cause."""

    level = logging.INFO
    round: int
    kind: str
    reason: str
    lasted_s: float | None = None

    def text(self) -> str:
        return round_ended(self.round, self.lasted_s, self.reason)


class NodeLost(Event, frozen=True, kw_only=True):
    """A node's session ended although the node had not left."""

    level = logging.WARNING
    node: str
    round: int
    reason: str

    def text(self) -> str:
        where = f"member of round {self.round}" if self.round else "not in a round"
        return f"{self.node} ({where}) is lost: {self.reason}"


class NodeGone(Event, frozen=True, kw_only=True):
    """A member went before this coordinator took over: it was lost or has left. Only in a run's kept events."""

    level = logging.WARNING
    node: str
    round: int
    reason: str

    def text(self) -> str:
        return f"{self.node} (member of round {self.round}) is gone: {self.reason}"


class NodeHeldBack(Event, frozen=True, kw_only=True):
    """A node that is lost repeatedly has to wait before it is admitted."""

    level = logging.WARNING
    node: str
    hold_s: float
    reason: str

    def text(self) -> str:
        return f"{self.node} is held back for {self.hold_s:g} s: {self.reason}"


class NodeDrained(Event, frozen=True, kw_only=True):
    """An operator asked a node to go."""

    level = logging.INFO
    node: str
    reason: str

    def text(self) -> str:
        return f"asked {self.node} to go: {self.reason or 'no reason given'}"


class NodeRefused(Event, frozen=True, kw_only=True):
    """A node was not admitted: its settings differ from those of the run, or its preflight check failed."""

    level = logging.WARNING
    node: str
    reason: str

    def text(self) -> str:
        return f"{self.node} was refused: {self.reason}"


class RecordUnreadable(Event, frozen=True, kw_only=True):
    """A record in the backend cannot be decoded; the reason names its key."""

    level = logging.WARNING
    key: str
    reason: str

    def text(self) -> str:
        return f"cannot use a record: {self.reason}"


class ManyJoined(Event, frozen=True, kw_only=True):
    """Many nodes asked to join at about the same time; `nodes` has the first names. Only in a run's kept events."""

    level = logging.INFO
    nodes: tuple[str, ...]
    count: int

    def text(self) -> str:
        return f"{self.count} nodes ask to join: {listed(self.nodes, self.count)}"


class ManyLost(Event, frozen=True, kw_only=True):
    """Many nodes were lost at about the same time; `nodes` has the first names. Only in a run's kept events."""

    level = logging.WARNING
    nodes: tuple[str, ...]
    count: int
    round: int
    reason: str

    def text(self) -> str:
        where = f"members of round {self.round}" if self.round else "not in a round"
        return f"{self.count} nodes ({where}) are lost: {listed(self.nodes, self.count)}; the first: {self.reason}"


class ManyGone(Event, frozen=True, kw_only=True):
    """Many members went before this coordinator took over; `nodes` has the first names. Only in a run's kept events."""

    level = logging.WARNING
    nodes: tuple[str, ...]
    count: int
    round: int
    reason: str

    def text(self) -> str:
        return f"{self.count} members of round {self.round} are gone ({self.reason}): {listed(self.nodes, self.count)}"


class ManyLeft(Event, frozen=True, kw_only=True):
    """Many nodes left at about the same time; `nodes` has the first names. Only in a run's kept events."""

    level = logging.INFO
    nodes: tuple[str, ...]
    count: int
    reason: str

    def text(self) -> str:
        return f"{self.count} nodes left: {listed(self.nodes, self.count)}; the first: {self.reason}"


# --- events of a server -----------------------------------------------------------------------------------------------


class ServerListens(Event, frozen=True, kw_only=True):
    """An embedded server accepts connections."""

    level = logging.INFO
    addresses: tuple[str, ...]

    def text(self) -> str:
        return f"listening on {', '.join(self.addresses)}"


class MetricsListen(Event, frozen=True, kw_only=True):
    """A process serves its metrics over HTTP."""

    level = logging.INFO
    address: str

    def text(self) -> str:
        return f"shows metrics at http://{self.address}/metrics"


class DashboardListens(Event, frozen=True, kw_only=True):
    """A dashboard is served."""

    level = logging.INFO
    url: str
    where: str

    def text(self) -> str:
        return f"shows {self.where} at {self.url}"


class ServerStopped(Event, frozen=True, kw_only=True):
    """An embedded server was shut down."""

    level = logging.INFO
    reason: str

    def text(self) -> str:
        return f"stopped: {self.reason}"


class ServerTrouble(Event, frozen=True, kw_only=True):
    """An embedded server cannot work for a reason that an operator can fix."""

    level = logging.ERROR
    reason: str

    def text(self) -> str:
        return self.reason


class SecurityNotice(Event, frozen=True, kw_only=True):
    """A warning about a token, a key or an address; the server continues."""

    level = logging.WARNING
    reason: str

    def text(self) -> str:
        return self.reason


class ClientRefused(Event, frozen=True, kw_only=True):
    """An embedded server closed a connection because of an error of the client."""

    level = logging.WARNING
    peer: str
    reason: str

    def text(self) -> str:
        return f"closed the connection of {self.peer}: {self.reason}"


class DataLoaded(Event, frozen=True, kw_only=True):
    """A server has loaded its data and continues with it."""

    level = logging.INFO
    where: str
    keys: int
    leases: int
    replayed: int
    took_s: float

    def text(self) -> str:
        return (
            f"continues with the data in {self.where}: {self.keys} keys, {self.leases} leases, {self.replayed} changes "
            f"since the snapshot, read in {self.took_s:.2f} s"
        )


class LogCut(Event, frozen=True, kw_only=True):
    """The end of a server's log was being written when the server died; it was never acknowledged."""

    level = logging.WARNING
    file: str
    bytes: int

    def text(self) -> str:
        return f"cut off the last {self.bytes} bytes of {self.file}: they were being written when the server died"


class DataTrouble(Event, frozen=True, kw_only=True):
    """A server cannot write its data at the moment."""

    level = logging.ERROR
    where: str
    reason: str

    def text(self) -> str:
        return f"cannot write {self.where}: {self.reason}"


class DataGoesOn(Event, frozen=True, kw_only=True):
    """A server can write its data again."""

    level = logging.WARNING
    where: str
    after_s: float

    def text(self) -> str:
        return f"can write {self.where} again, after {self.after_s:.1f} s; nothing was lost, all sessions were extended"


class SnapshotTaken(Event, frozen=True, kw_only=True):
    """A server has written a snapshot of its store, so that the log before it is no longer needed."""

    keys: int
    bytes: int
    took_s: float

    def text(self) -> str:
        return f"wrote a snapshot of {self.keys} keys ({self.bytes} bytes) in {self.took_s:.2f} s"


class EventsTrouble(Event, frozen=True, kw_only=True):
    """Events cannot be written to their file at the moment; everything else continues."""

    level = logging.WARNING
    where: str
    reason: str

    def text(self) -> str:
        return f"cannot write events to {self.where}: {self.reason}. They are lost until it can be written again"


class EventsGoOn(Event, frozen=True, kw_only=True):
    """Events are written to their file again."""

    level = logging.WARNING
    where: str
    lost: int

    def text(self) -> str:
        return f"writes events to {self.where} again; {self.lost} were lost"


class Hosting(Event, frozen=True, kw_only=True):
    """A node hosts the server itself, because there was none and it could bind the endpoint."""

    level = logging.WARNING
    address: str
    waits_for: str

    def text(self) -> str:
        return f"serves this run itself on {self.address}; {self.waits_for}"


class NobodyServes(Event, frozen=True, kw_only=True):
    """There has been no server at the endpoint for a while, and this node cannot host one."""

    level = logging.ERROR
    reason: str

    def text(self) -> str:
        return self.reason


Sink: TypeAlias = Callable[[Event], None]


def log_event(event: Event) -> None:
    """The logging sink: one line on the `rallypoint` logger at the event's level, the event itself in `extra`."""
    if logger.isEnabledFor(event.level):
        logger.log(event.level, "%s", event, extra={"event": event})


# --- events of `rallypoint serve --engine etcd` -----------------------------------------------------------------------


class EtcdStarts(Event, frozen=True, kw_only=True):
    """An etcd member was started."""

    level = logging.INFO
    version: str
    data: str
    members: int

    def text(self) -> str:
        among = f"as one of {self.members} members, " if self.members > 1 else ""
        return f"starts etcd {self.version}, {among}with its data in {self.data}"


class EtcdHealthy(Event, frozen=True, kw_only=True):
    """An etcd member is healthy: it has a leader and answers."""

    level = logging.INFO
    address: str
    endpoints: str

    def text(self) -> str:
        return f"etcd is healthy, listening on {self.address}; runs are at etcd://{self.endpoints}/run-id?min_nodes=..."


class EtcdUnhealthy(Event, frozen=True, kw_only=True):
    """An etcd member is no longer healthy."""

    level = logging.ERROR
    reason: str

    def text(self) -> str:
        return f"etcd is not healthy: {self.reason}"


class EtcdEnded(Event, frozen=True, kw_only=True):
    """An etcd member has exited unexpectedly, and is restarted."""

    level = logging.ERROR
    status: int
    reason: str
    again_s: float

    def text(self) -> str:
        return f"etcd exited with status {self.status} ({self.reason}); it is restarted in {self.again_s:g} s"


class Emitter:
    """Calls every sink with each event. A sink that raises is logged once and removed: it must not affect the job."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks: list[Sink] = [log_event, *sinks]

    def add(self, sink: Sink) -> None:
        """Call this sink, too, from now on."""
        self._sinks.append(sink)

    def __call__(self, event: Event) -> None:
        for sink in list(self._sinks):
            try:
                sink(event)
            except (Exception, SystemExit):  # the latter would end the event loop
                logger.exception("an event sink failed and is not called again: %r", sink)
                self._sinks.remove(sink)
