"""The definitions of all metrics: name, type, labels, unit, meaning. Exposition and docs/metrics.md are made from them.

Names follow the conventions of Prometheus: the prefix `rallypoint_`, base units at the end, `_total` for counters.
Labels have few values, all of them listed here, except for `run`: one process exposes at most `MAX_RUNS` run ids and
adds up all other runs under the empty one, so that sums are right whatever the number of runs. No label holds a node,
an address or a sentence, so the number of series does not grow with the size of a run.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.records import LeaveKind
from rallypoint.server.admission.refusals import Refusal
from rallypoint.server.clients import Ended

MAX_RUNS = 200
"""How many runs have series of their own, the first ones. All others share one series."""


class Kind(enum.Enum):
    """A type of metric, as the text format names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


class Exporter(enum.Enum):
    """The kind of process that exposes a metric."""

    SERVER = "server"
    DATA = "server with data"
    RUN = "run"
    DECISIONS = "decisions"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels` maps each label to a description of its values."""

    name: str
    kind: Kind
    exporter: Exporter
    meaning: str
    labels: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""
    buckets: tuple[float, ...] = ()


def _listed(words: type[enum.Enum]) -> str:
    return ", ".join(f"`{word(one)}`" for one in words)


def word(one: enum.Enum) -> str:
    """The label value for a member of an enumeration: without spaces."""
    return str(one.value).replace(" ", "_")


PHASE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
ROUND_BUCKETS = (1.0, 10.0, 60.0, 600.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0)
_RUN_LABEL = {"run": f"the run id; empty: all runs beyond the first {MAX_RUNS} together"}
_COUNTER, _GAUGE, _HISTOGRAM, _SUMMARY = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM, Kind.SUMMARY
_SERVER, _DATA, _RUN, _NODE = Exporter.SERVER, Exporter.DATA, Exporter.RUN, Exporter.NODE
_DECISIONS = Exporter.DECISIONS

# --- runs -------------------------------------------------------------------------------------------------------------

RUN_MEMBERS = Metric(
    "rallypoint_run_members", _GAUGE, _RUN, "Members of the current round that are still in it.", _RUN_LABEL
)
RUN_JOINING = Metric(
    "rallypoint_run_joining",
    _GAUGE,
    _RUN,
    "Nodes that are joining while no round is current, or confirming a forming one.",
    _RUN_LABEL,
)
RUN_WAITING = Metric(
    "rallypoint_run_waiting", _GAUGE, _RUN, "Nodes that would be admitted if the members re-joined.", _RUN_LABEL
)
RUN_SPARES = Metric(
    "rallypoint_run_spares", _GAUGE, _RUN, "Nodes that ask to join while the round is full.", _RUN_LABEL
)
RUN_HELD_BACK = Metric(
    "rallypoint_run_held_back", _GAUGE, _RUN, "Nodes that are held back because they were lost repeatedly.", _RUN_LABEL
)
RUN_GONE = Metric(
    "rallypoint_run_gone", _GAUGE, _RUN, "Members of the current round that were lost or have left.", _RUN_LABEL
)
RUN_OPEN_PLACES = Metric(
    "rallypoint_run_open_places", _GAUGE, _RUN, "How many more members the current round could have.", _RUN_LABEL
)
RUN_ROUND = Metric(
    "rallypoint_run_round",
    _GAUGE,
    _RUN,
    "The number of the current round or attempt; absent for the empty run id.",
    _RUN_LABEL,
)
RUN_ACTIVE = Metric(
    "rallypoint_run_active",
    _GAUGE,
    _RUN,
    "1 if a round is active, else 0; for the empty run id, how many runs have an active round.",
    _RUN_LABEL,
)
RUN_CLOSED = Metric(
    "rallypoint_run_closed",
    _GAUGE,
    _RUN,
    "1 if the run is closed, else 0; for the empty run id, how many runs are closed.",
    _RUN_LABEL,
)

RUN_RESTARTS = Metric(
    "rallypoint_run_restarts",
    _GAUGE,
    _RUN,
    "Restarts that the launchers of the run have counted; 0 if the run has none.",
    _RUN_LABEL,
)
RUN_RESTARTS_LIMIT = Metric(
    "rallypoint_run_restarts_limit",
    _GAUGE,
    _RUN,
    "Restarts that the run may use (`--max-restarts`); 0 if it has no launchers.",
    _RUN_LABEL,
)

# --- decisions: counted only in the process whose coordinator decides -------------------------------------------------

ROUNDS = Metric(
    "rallypoint_rounds_total",
    _COUNTER,
    _DECISIONS,
    "Attempts to form a round, by how they ended.",
    {"outcome": "`active`, `given_up`"},
)
ROUND_PHASE = Metric(
    "rallypoint_round_phase_seconds",
    _HISTOGRAM,
    _DECISIONS,
    "How long each phase of a round took: from the first to the last arrival, from reaching `min_nodes` to the "
    "decision, and from the decision until all members had confirmed.",
    {"phase": "`gather`, `last_call`, `confirm`"},
    "seconds",
    PHASE_BUCKETS,
)
ROUND_ENDS = Metric(
    "rallypoint_round_ends_total",
    _COUNTER,
    _DECISIONS,
    "Rounds that ended, by the kind of their root cause.",
    {"kind": _listed(LeaveKind)},
)
ROUND_LASTED = Metric(
    "rallypoint_round_lasted_seconds",
    _HISTOGRAM,
    _DECISIONS,
    "How long rounds were active, counted when they end.",
    unit="seconds",
    buckets=ROUND_BUCKETS,
)
NODES_LOST = Metric(
    "rallypoint_nodes_lost_total",
    _COUNTER,
    _DECISIONS,
    "Nodes whose session ended without their leaving the run.",
    {"standing": "`member` of an active round, or `other`"},
)
NODES_HELD_BACK = Metric(
    "rallypoint_nodes_held_back_total", _COUNTER, _DECISIONS, "How many times a node was held back."
)
RECORDS_UNREADABLE = Metric(
    "rallypoint_records_unreadable_total", _COUNTER, _DECISIONS, "Records of runs that could not be read."
)

# --- a server ---------------------------------------------------------------------------------------------------------

SERVER_INFO = Metric(
    "rallypoint_server_info",
    _GAUGE,
    _SERVER,
    "Always 1; the labels identify the process.",
    {"version": "the version of Rallypoint", "generation": "changes when the server starts without earlier data"},
)
SERVER_UP = Metric(
    "rallypoint_server_uptime_seconds", _GAUGE, _SERVER, "How long the server has been running.", unit="seconds"
)
SERVER_LOOP_LAG = Metric(
    "rallypoint_server_loop_lag_seconds",
    _GAUGE,
    _SERVER,
    "How long this scrape waited for the server's event loop; other requests wait about as long.",
    unit="seconds",
)
SERVER_RUNS = Metric("rallypoint_server_runs", _GAUGE, _SERVER, "Runs that have a coordinator on this server.")
SERVER_CONNECTIONS = Metric(
    "rallypoint_server_connections", _GAUGE, _SERVER, "Connections that have completed the handshake."
)
SERVER_PENDING = Metric(
    "rallypoint_server_pending_connections", _GAUGE, _SERVER, "Connections that have not completed the handshake yet."
)
SERVER_RECONNECTS = Metric(
    "rallypoint_server_reconnects_total",
    _COUNTER,
    _SERVER,
    "Clients that reconnected: known ones, and those that resume a session.",
)
SERVER_SESSIONS = Metric(
    "rallypoint_server_sessions", _GAUGE, _SERVER, "Sessions that are alive, as far as the server has noticed."
)
SERVER_SESSIONS_ENDED = Metric(
    "rallypoint_server_sessions_ended_total",
    _COUNTER,
    _SERVER,
    "Sessions that ended, by cause: the client ended it (left); the peer closed the connection and the grace period is "
    "over, so its process died (disconnected); or it was not renewed in time, so its process is paused, starved or cut "
    "off (silent). Counted within a few seconds.",
    {"cause": _listed(Ended)},
)
SERVER_REFUSALS = Metric(
    "rallypoint_server_refusals_total",
    _COUNTER,
    _SERVER,
    "Clients and requests that were refused, by reason.",
    {"reason": _listed(Refusal)},
)
SERVER_OPERATIONS = Metric(
    "rallypoint_server_operations_total",
    _COUNTER,
    _SERVER,
    "Executed operations of the store, including the server's own.",
    {"operation": "`txn`, `add`, `grant`, `keep_alive`, `revoke`, `shorten`, `tick`"},
)
SERVER_COMMITS = Metric(
    "rallypoint_server_commits_total", _COUNTER, _SERVER, "Revisions of the store: operations that changed it."
)
SERVER_WATCHES = Metric("rallypoint_server_watches", _GAUGE, _SERVER, "Open watches. Read-only clients share theirs.")
SERVER_WATCH_LAG = Metric(
    "rallypoint_server_watch_lag_seconds",
    _GAUGE,
    _SERVER,
    "How long messages have been waiting for the slowest client; 0: none are waiting.",
    unit="seconds",
)
SERVER_WATCH_BACKLOG = Metric(
    "rallypoint_server_watch_backlog_messages", _GAUGE, _SERVER, "Messages that wait for clients to read them."
)
SERVER_RECEIVED = Metric(
    "rallypoint_server_received_bytes_total", _COUNTER, _SERVER, "Bytes from clients.", unit="bytes"
)
SERVER_SENT = Metric("rallypoint_server_sent_bytes_total", _COUNTER, _SERVER, "Bytes to clients.", unit="bytes")
SERVER_FRAMES_IN = Metric("rallypoint_server_received_frames_total", _COUNTER, _SERVER, "Frames from clients.")
SERVER_FRAMES_OUT = Metric("rallypoint_server_sent_frames_total", _COUNTER, _SERVER, "Frames to clients.")
SERVER_KEYS = Metric("rallypoint_server_keys", _GAUGE, _SERVER, "Keys in the store.")
SERVER_STORE = Metric(
    "rallypoint_server_store_bytes", _GAUGE, _SERVER, "Bytes of keys and values in the store.", unit="bytes"
)
SERVER_LEASES = Metric("rallypoint_server_leases", _GAUGE, _SERVER, "Leases: those of sessions and those of runs.")
SERVER_MAX_CONNECTIONS = Metric("rallypoint_server_max_connections", _GAUGE, _SERVER, "The limit `--max-connections`.")
SERVER_MAX_RUNS = Metric("rallypoint_server_max_runs", _GAUGE, _SERVER, "The limit `--max-runs`.")
SERVER_MAX_KEYS = Metric("rallypoint_server_max_keys", _GAUGE, _SERVER, "The limit `--max-keys`.")
SERVER_MAX_STORE = Metric(
    "rallypoint_server_max_store_bytes", _GAUGE, _SERVER, "The limit `--max-bytes`.", unit="bytes"
)
SERVER_MAX_LEASES = Metric("rallypoint_server_max_leases", _GAUGE, _SERVER, "The limit `--max-leases`.")

# --- a server with --data ---------------------------------------------------------------------------------------------

DATA_FAILING = Metric(
    "rallypoint_server_data_failing",
    _GAUGE,
    _DATA,
    "1 while the data cannot be written and the server executes nothing, else 0.",
)
LOG_SIZE = Metric(
    "rallypoint_server_log_bytes", _GAUGE, _DATA, "The size of the log since the last snapshot.", unit="bytes"
)
LOG_ENTRIES = Metric("rallypoint_server_log_entries", _GAUGE, _DATA, "Changes in the log since the last snapshot.")
LOG_PENDING = Metric(
    "rallypoint_server_log_pending_entries", _GAUGE, _DATA, "Changes that are executed but not durable yet."
)
LOG_COMMIT = Metric(
    "rallypoint_server_log_commit_seconds",
    _SUMMARY,
    _DATA,
    "How long writes to the log took, including syncs (`--sync`).",
    unit="seconds",
)
SNAPSHOTS = Metric("rallypoint_server_snapshots_total", _COUNTER, _DATA, "Snapshots written.")
SNAPSHOT_SIZE = Metric(
    "rallypoint_server_snapshot_bytes", _GAUGE, _DATA, "The size of the last snapshot.", unit="bytes"
)

# --- a node -----------------------------------------------------------------------------------------------------------

NODE_INFO = Metric(
    "rallypoint_node_info",
    _GAUGE,
    _NODE,
    "Always 1; the labels identify the process.",
    {"run": "the run id", "node": "this node's name", "backend": "the scheme of its URL"},
)
NODE_ROUND = Metric(
    "rallypoint_node_round", _GAUGE, _NODE, "The number of the round that the node is a member of; 0: none."
)
NODE_RANK = Metric("rallypoint_node_rank", _GAUGE, _NODE, "The node's rank in that round; -1: it is in no round.")
NODE_WORLD = Metric("rallypoint_node_world_size", _GAUGE, _NODE, "The size of that round; 0: the node is in no round.")
NODE_WAITING = Metric(
    "rallypoint_node_nodes_waiting", _GAUGE, _NODE, "Nodes that wait to be admitted, as far as this node knows."
)
NODE_JOINS = Metric("rallypoint_node_joins_total", _COUNTER, _NODE, "How many times the node asked to join.")
NODE_ENTERED = Metric("rallypoint_node_rounds_entered_total", _COUNTER, _NODE, "How many rounds the node entered.")
NODE_JOIN = Metric(
    "rallypoint_node_join_seconds",
    _HISTOGRAM,
    _NODE,
    "How long joining took, from the call until the node entered a round.",
    unit="seconds",
    buckets=PHASE_BUCKETS,
)
NODE_FAILURES = Metric(
    "rallypoint_node_join_failures_total",
    _COUNTER,
    _NODE,
    "How many times joining failed, by error.",
    {"error": "the class of the error, see [errors.md](errors.md)"},
)
NODE_CHANGES = Metric(
    "rallypoint_node_world_changes_total",
    _COUNTER,
    _NODE,
    "How many times the node was notified that its round has changed.",
    {"cause": _listed(Cause).replace(" lost", "_lost").replace(" over", "_over")},
)
NODE_SESSIONS_LOST = Metric(
    "rallypoint_node_sessions_lost_total", _COUNTER, _NODE, "How many times the node lost its session."
)
NODE_RENEWALS_MISSED = Metric(
    "rallypoint_node_renewals_missed_total", _COUNTER, _NODE, "Keep-alives that failed or came late."
)
NODE_REACHES = Metric(
    "rallypoint_node_backend_reachable", _GAUGE, _NODE, "1 while the node can reach the backend, else 0."
)
NODE_OUTAGE = Metric(
    "rallypoint_node_backend_outage_seconds",
    _SUMMARY,
    _NODE,
    "How long the backend was unreachable, counted when it is reached again.",
    unit="seconds",
)

TABLE: tuple[Metric, ...] = tuple(one for one in list(globals().values()) if isinstance(one, Metric))
