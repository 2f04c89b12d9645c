"""Every metric there is: name, type, labels, unit and a sentence. What is shown and what is documented is made of it.

Names follow the conventions of Prometheus: `rallypoint_` in front, base units at the end, `_total` for counters. Labels
have few values, all of them listed here, but for `run`: of that at most `MOST_RUNS` are shown by one process, and all
other runs together under the empty one, so that sums are right however many there are. There is no series for each
node, address or sentence, whatever the size of a run.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.rendezvous.membership import Cause
from rallypoint.server.admission.refusals import Refusal
from rallypoint.server.clients import Ended

MOST_RUNS = 200
"""So many runs have series of their own: those that came first. With ten thousand runs, the rest are one."""


class Kind(enum.Enum):
    """A type of metric, in the word of the text format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


class Shown(enum.Enum):
    """Who shows it."""

    SERVER = "server"
    DATA = "server with data"
    RUN = "run"
    DECISIONS = "decisions"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels` maps each to the values it can have, in words or as they are."""

    name: str
    kind: Kind
    shown: Shown
    meaning: str
    labels: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""
    buckets: tuple[float, ...] = ()


def _listed(words: type[enum.Enum]) -> str:
    return ", ".join(f"`{word(one)}`" for one in words)


def word(one: enum.Enum) -> str:
    """A value of a label: without blanks."""
    return str(one.value).replace(" ", "_")


PHASE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
ROUND_BUCKETS = (1.0, 10.0, 60.0, 600.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0)
_RUN = {"run": f"the run id; empty: all runs beyond the first {MOST_RUNS} together"}
_C, _G, _H, _S = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM, Kind.SUMMARY
_AT, _DATA, _OF, _SAID, _NODE = Shown.SERVER, Shown.DATA, Shown.RUN, Shown.DECISIONS, Shown.NODE

# --- runs -------------------------------------------------------------------------------------------------------------

RUN_MEMBERS = Metric("rallypoint_run_members", _G, _OF, "Members of the current round that are there.", _RUN)
RUN_JOINING = Metric(
    "rallypoint_run_joining", _G, _OF, "Nodes that want in while there is no round, or confirm one that forms.", _RUN
)
RUN_WAITING = Metric("rallypoint_run_waiting", _G, _OF, "Nodes that would be admitted if the members re-joined.", _RUN)
RUN_SPARES = Metric("rallypoint_run_spares", _G, _OF, "Nodes that want in while the round is full.", _RUN)
RUN_HELD_BACK = Metric(
    "rallypoint_run_held_back", _G, _OF, "Nodes that are held back because they were lost often.", _RUN
)
RUN_GONE = Metric("rallypoint_run_gone", _G, _OF, "Members of the current round that are not there any more.", _RUN)
RUN_OPEN_PLACES = Metric("rallypoint_run_open_places", _G, _OF, "How many more members the round could have.", _RUN)
RUN_ROUND = Metric(
    "rallypoint_run_round", _G, _OF, "The number of the current round or attempt; not shown for the empty run.", _RUN
)
RUN_ACTIVE = Metric(
    "rallypoint_run_active", _G, _OF, "Whether a round is active: 1, or 0; of many runs, how many.", _RUN
)
RUN_CLOSED = Metric(
    "rallypoint_run_closed", _G, _OF, "Whether the run is closed: 1, or 0; of many runs, how many.", _RUN
)

# --- what is decided: counted by the coordinators of this process, and nowhere else -----------------------------------

ROUNDS = Metric(
    "rallypoint_rounds_total", _C, _SAID, "Attempts to form a round, by how they ended.",
    {"outcome": "`active`, `given_up`"},
)  # fmt: skip
ROUND_PHASE = Metric(
    "rallypoint_round_phase_seconds", _H, _SAID,
    "How long the phases of a round took: from the first to the last arrival, from the minimum to the decision, and "
    "from the decision until all had confirmed.",
    {"phase": "`gather`, `last_call`, `confirm`"}, "seconds", PHASE_BUCKETS,
)  # fmt: skip
ROUND_LASTED = Metric(
    "rallypoint_round_lasted_seconds", _H, _SAID, "How long rounds were active, once they are over.",
    unit="seconds", buckets=ROUND_BUCKETS,
)  # fmt: skip
NODES_LOST = Metric(
    "rallypoint_nodes_lost_total", _C, _SAID, "Nodes whose session ended without a word.",
    {"standing": "`member` of an active round, or `other`"},
)  # fmt: skip
NODES_HELD_BACK = Metric("rallypoint_nodes_held_back_total", _C, _SAID, "Times that a node was held back.")
RECORDS_UNREADABLE = Metric("rallypoint_records_unreadable_total", _C, _SAID, "Records of runs that could not be read.")

# --- a server ---------------------------------------------------------------------------------------------------------

SERVER_INFO = Metric(
    "rallypoint_server_info", _G, _AT, "Always 1; its labels say who this is.",
    {"version": "of Rallypoint", "generation": "changes when the server begins without a past"},
)  # fmt: skip
SERVER_UP = Metric(
    "rallypoint_server_uptime_seconds", _G, _AT, "For how long the server has been there.", unit="seconds"
)
SERVER_LOOP_LAG = Metric(
    "rallypoint_server_loop_lag_seconds", _G, _AT,
    "How long this scrape waited until the server had time for it: so long every request waits, about.",
    unit="seconds",
)  # fmt: skip
SERVER_RUNS = Metric("rallypoint_server_runs", _G, _AT, "Runs that are attended to.")
SERVER_CONNECTIONS = Metric("rallypoint_server_connections", _G, _AT, "Connections that have said hello.")
SERVER_PENDING = Metric("rallypoint_server_pending_connections", _G, _AT, "Connections that have not said hello yet.")
SERVER_RECONNECTS = Metric(
    "rallypoint_server_reconnects_total",
    _C,
    _AT,
    "Clients that came back: known ones, or such that go on with a session.",
)
SERVER_SESSIONS = Metric("rallypoint_server_sessions", _G, _AT, "Sessions that were not seen to end.")
SERVER_SESSIONS_ENDED = Metric(
    "rallypoint_server_sessions_ended_total", _C, _AT,
    "Sessions that ended, by cause: their client ended them; the connection was closed by the peer and the grace is "
    "over, so the process died; or they were not renewed in time, so it is paused, starved or cut off. Noticed after "
    "some seconds at most.",
    {"cause": _listed(Ended)},
)  # fmt: skip
SERVER_REFUSALS = Metric(
    "rallypoint_server_refusals_total", _C, _AT, "Clients and requests that were refused, by reason.",
    {"reason": _listed(Refusal)},
)  # fmt: skip
SERVER_OPERATIONS = Metric(
    "rallypoint_server_operations_total", _C, _AT, "Operations of the store that were executed, those of the "
    "server too.",
    {"operation": "`txn`, `add`, `grant`, `keep_alive`, `revoke`, `shorten`, `tick`"},
)  # fmt: skip
SERVER_COMMITS = Metric(
    "rallypoint_server_commits_total", _C, _AT, "Revisions of the store: operations that changed something."
)
SERVER_WATCHES = Metric(
    "rallypoint_server_watches", _G, _AT, "Watches that are open; those who only look on share theirs."
)
SERVER_WATCH_LAG = Metric(
    "rallypoint_server_watch_lag_seconds", _G, _AT,
    "How long the slowest client has not read what waits for it; 0: all keep up.", unit="seconds",
)  # fmt: skip
SERVER_WATCH_BACKLOG = Metric(
    "rallypoint_server_watch_backlog_messages", _G, _AT, "Messages that wait for clients that do not read."
)
SERVER_RECEIVED = Metric("rallypoint_server_received_bytes_total", _C, _AT, "Bytes from clients.", unit="bytes")
SERVER_SENT = Metric("rallypoint_server_sent_bytes_total", _C, _AT, "Bytes to clients.", unit="bytes")
SERVER_FRAMES_IN = Metric("rallypoint_server_received_frames_total", _C, _AT, "Frames from clients.")
SERVER_FRAMES_OUT = Metric("rallypoint_server_sent_frames_total", _C, _AT, "Frames to clients.")
SERVER_KEYS = Metric("rallypoint_server_keys", _G, _AT, "Keys in the store.")
SERVER_STORE = Metric("rallypoint_server_store_bytes", _G, _AT, "Bytes of keys and values in the store.", unit="bytes")
SERVER_LEASES = Metric("rallypoint_server_leases", _G, _AT, "Leases: sessions, and those that runs live on.")
SERVER_MOST_CONNECTIONS = Metric("rallypoint_server_max_connections", _G, _AT, "The limit `--max-connections`.")
SERVER_MOST_RUNS = Metric("rallypoint_server_max_runs", _G, _AT, "The limit `--max-runs`.")
SERVER_MOST_KEYS = Metric("rallypoint_server_max_keys", _G, _AT, "The limit `--max-keys`.")
SERVER_MOST_STORE = Metric("rallypoint_server_max_store_bytes", _G, _AT, "The limit `--max-bytes`.", unit="bytes")
SERVER_MOST_LEASES = Metric("rallypoint_server_max_leases", _G, _AT, "The limit `--max-leases`.")

# --- a server with --data ---------------------------------------------------------------------------------------------

DATA_FAILING = Metric(
    "rallypoint_server_data_failing", _G, _DATA, "1 while the data cannot be written and nothing is executed; else 0."
)
LOG_SIZE = Metric("rallypoint_server_log_bytes", _G, _DATA, "The log since the last snapshot.", unit="bytes")
LOG_ENTRIES = Metric("rallypoint_server_log_entries", _G, _DATA, "Changes in the log since the last snapshot.")
LOG_PENDING = Metric("rallypoint_server_log_pending_entries", _G, _DATA, "Changes that are executed and not kept yet.")
LOG_COMMIT = Metric(
    "rallypoint_server_log_commit_seconds", _S, _DATA, "How long writes to the log took, syncs included (`--sync`).",
    unit="seconds",
)  # fmt: skip
SNAPSHOTS = Metric("rallypoint_server_snapshots_total", _C, _DATA, "Snapshots that were written.")
SNAPSHOT_SIZE = Metric("rallypoint_server_snapshot_bytes", _G, _DATA, "The last snapshot.", unit="bytes")

# --- a node -----------------------------------------------------------------------------------------------------------

NODE_INFO = Metric(
    "rallypoint_node_info", _G, _NODE, "Always 1; its labels say who this is.",
    {"run": "the run id", "node": "this node's name", "backend": "the scheme of its URL"},
)  # fmt: skip
NODE_ROUND = Metric("rallypoint_node_round", _G, _NODE, "The number of the round that the node is in; 0: none.")
NODE_RANK = Metric("rallypoint_node_rank", _G, _NODE, "Its rank in that round; -1: it is in none.")
NODE_WORLD = Metric("rallypoint_node_world_size", _G, _NODE, "The size of that round; 0: it is in none.")
NODE_WAITING = Metric(
    "rallypoint_node_nodes_waiting", _G, _NODE, "Nodes that wait to be admitted, as the node was told."
)
NODE_JOINS = Metric("rallypoint_node_joins_total", _C, _NODE, "Times that the node asked to join.")
NODE_ENTERED = Metric("rallypoint_node_rounds_entered_total", _C, _NODE, "Rounds that the node was in.")
NODE_JOIN = Metric(
    "rallypoint_node_join_seconds", _H, _NODE, "How long joining took, from asking until it was in a round.",
    unit="seconds", buckets=PHASE_BUCKETS,
)  # fmt: skip
NODE_FAILURES = Metric(
    "rallypoint_node_join_failures_total", _C, _NODE, "Times that joining failed, by error.",
    {"error": "the class of the error, see [errors.md](errors.md)"},
)  # fmt: skip
NODE_CHANGES = Metric(
    "rallypoint_node_world_changes_total", _C, _NODE, "Times that the node was told that its round is not what it was.",
    {"cause": _listed(Cause).replace(" lost", "_lost").replace(" over", "_over")},
)  # fmt: skip
NODE_SESSIONS_LOST = Metric("rallypoint_node_sessions_lost_total", _C, _NODE, "Times that its session ended unasked.")
NODE_RENEWALS_MISSED = Metric(
    "rallypoint_node_renewals_missed_total", _C, _NODE, "Keep-alives that failed or came late."
)
NODE_REACHES = Metric("rallypoint_node_backend_reachable", _G, _NODE, "1 while the backend answers, else 0.")
NODE_OUTAGE = Metric(
    "rallypoint_node_backend_outage_seconds", _S, _NODE,
    "How long the backend could not be reached, each time that it was reached again: the count is of reconnects.",
    unit="seconds",
)  # fmt: skip

TABLE: tuple[Metric, ...] = tuple(one for one in list(globals().values()) if isinstance(one, Metric))
