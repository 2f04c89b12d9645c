"""Coverage marks in rare branches: a long simulation asserts that each of them was reached.

`mark(name)` costs a comparison; only a simulator collects.
"""

from __future__ import annotations

MARKS = {
    "session.expired_here": "a client gave up its session by its own clock",
    "fenced_writer.lease_gone": "a node's or the run's lease ended while the coordinator wrote",
    "fenced_writer.refused_by_term": "a deposed coordinator's write was refused",
    "fenced_writer.refused_by_view": "a write based on an old view was refused",
    "fenced_writer.split": "an attempt needed several transactions",
    "coordinator.burnt": "an attempt was committed without all of its assignments",
    "coordinator.lost_backend": "the coordinator lost the backend and scanned again",
    "coordinator.silent_watch": "the coordinator gave up a watch that stayed silent after its own write",
    "kept_events.written": "events of the run were written",
    "kept_events.was_written": "a write of events without an answer had been executed",
    "kept_events.trimmed": "the oldest events were removed",
    "kept_events.continued": "a coordinator continued the events of another one",
    "coordinator.end_known": "a coordinator took over after its predecessor had reported the end of the round",
    "round_end.loss_and_failure": "a round lost a member, and a worker of another one failed",
    "round_end.explained": "a lost member came back before the round was over, and said why its session was lost",
    "round_end.vanished": "a round ended because members were gone before the coordinator had taken over",
    "round_end.inherited": "a coordinator took over the cause that its predecessor had composed",
    "round_end.unseen": "a coordinator took over, and its predecessor knew only that members were gone",
    "end.worker_failed": "a round ended because a worker had failed",
    "end.stalled": "a round ended because a worker had stalled",
    "end.member_lost": "a round ended because a member was lost",
    "end.session_lost": "a round ended because a member had lost its session and came back",
    "end.drain": "a round ended because a member was drained",
    "end.operator": "a round ended because an operator wanted it",
    "end.stopped": "a round ended because a member was told to stop",
    "end.finished": "a round ended because a member had finished",
    "end.admission": "a round ended because nodes waited",
    "end.requested": "a round ended because a program asked for the next round",
    "decide.broken": "a planned member was lost before the round was active",
    "decide.late": "a member did not confirm in time",
    "decide.above": "members of a round above the known one blocked forming",
    "decide.held_back": "a node was held back",
    "node_session.resent": "a resent write had been executed the first time",
    "node_session.left_behind": "a key of the node's own earlier session was in the way",
    "node_session.key_gone": "the node's key did not hold what it had written",
    "node.forgotten": "a round that a node had confirmed was no longer known to the run",
    "node.showed_up": "a node that was left out rewrote its key to be considered again",
    "node.overtime": "a node that had confirmed waited past its deadline for the result of the attempt",
    "node.spare": "a node was a spare",
    "node.closed": "a waiting node was told that the run is closed",
    "node.closed_still": "a node that was told of a close asked again, and the run was still closed",
    "node.closed_unreached": "a node that was told of a close found no server that may know more",
    "run_config.raced": "two nodes created the run at the same time",
    "run_config.reopened": "a node reopened a closed run without nodes",
    "run_config.lease_ended": "the run's lease ended while a node joined",
    "watched_keys.rescanned": "a node's watch had fallen behind the history and scanned again",
    "election.again": "a coordinator found its own key after an unknown outcome",
    "decide.returning": "no round formed while a server that had lost its data waited for its earlier members",
    "tcp.reconnects": "a client reconnected",
    "tcp.stalled": "a silent connection was closed",
    "tcp.forgotten": "a client reconnected to a server that had lost its data",
    "server.replaced": "a client reconnected while its earlier connection was still open",
    "server.mass": "so many connections closed at once that no session was shortened",
    "server.stood_still": "a grace that ended while the server was paused was started again",
    "server.malformed": "a malformed frame closed its connection",
    "server.slow": "a client that did not read was disconnected",
    "server.coordinator_failed": "a coordinator in the server failed and was restarted",
    "server.closed_again": "a server that had lost its data made a run anew as closed, as a client had been told",
    "server.closed_new": "a server that had lost its data closed a run that others had made anew",
    "server.collected": "the state of a run without nodes was removed",
    "journal.failed": "a disk failed, and the store was written again as a whole",
    "journal.stalled": "a disk did not answer in time",
    "journal.snapshot_failed": "a snapshot could not be written while the log could",
    "journal.refused": "a request was not executed because the log could not be written",
    "recovery.cut": "the torn end of a log was cut off",
}
REGISTER_MARKS = {
    "register.expired": "a process ended a lease whose counter it had seen unchanged for the time to live",
    "register.contended": "a write lost a race and was applied again to the winner's document",
    "register.yielded": "a process waited before its write because the lease of another was overdue",
    "register.unknown": "a write without an answer was looked for in the document",
    "register.resent": "a write that might still arrive was sent again unchanged",
    "register.too_slow": "a session was refused because the cell was too slow for its time to live",
    "register.vanished": "the cell was emptied, and a new store was created",
}
"""For worlds on a register (`rallypoint sim --register`), which cannot reach the marks of servers."""

ETCD_MARKS = {
    "etcd.add_was_done": "an add with an unknown outcome had been executed",
    "etcd.compacted": "the history after a watch's revision was compacted",
    "etcd.leaderless": "it was certain that the cluster had no leader",
    "etcd.outcome_unknown": "a write got no answer",
    "etcd.renewals_stalled": "renewals were not answered in time",
    "etcd.suspected": "an endpoint failed and another one was used",
    "etcd.token_renewed": "the token of a user had expired and was renewed",
    "session.nothing_ended": "a session's deadline was moved because the backend had no leader to end it",
}
"""For a real etcd, which is not simulated."""

hits: set[str] | None = None
"""The collected marks; None: not collecting."""


def mark(name: str) -> None:
    """Note that this branch was reached."""
    if hits is not None:
        hits.add(name)


def collect() -> set[str]:
    """Start a new collection; the set is filled as marks are reached."""
    global hits
    hits = set()
    return hits
