"""Marks in rare branches: a long simulation asserts that each of them was reached, so that none goes untested.

`mark(name)` costs a comparison; only a simulator collects.
"""

from __future__ import annotations

MARKS = {
    "session.expired_here": "a session was given up by this side's own clock",
    "fenced_writer.lease_gone": "a node, or the run, went while the coordinator wrote",
    "fenced_writer.refused_by_term": "a deposed coordinator's write was refused",
    "fenced_writer.refused_by_view": "a write on an old view was refused",
    "fenced_writer.split": "an attempt took several transactions",
    "coordinator.burnt": "an attempt was committed, and not all were told of their place",
    "coordinator.lost_backend": "the coordinator lost the backend and looked again",
    "coordinator.silent_watch": "the coordinator gave up a watch that stayed silent after its own write",
    "decide.broken": "a planned member went before the round was active",
    "decide.late": "a member did not confirm in time",
    "decide.above": "members of a round above the known one blocked forming",
    "decide.held_back": "a node was held back",
    "node_session.resent": "a write that was sent again had been executed the first time",
    "node_session.left_behind": "a key of the node's own earlier session was in the way",
    "node_session.key_gone": "the node's key was not what it had written",
    "node.forgotten": "the run forgot a round that a node had confirmed",
    "node.showed_up": "a node that was left out wrote its key to count again",
    "node.overtime": "a node that had confirmed waited past its deadline for the outcome",
    "node.spare": "a node was a spare",
    "node.closed": "a node that waited was told that the run is closed",
    "run_config.raced": "two nodes made the run at once",
    "run_config.reopened": "a node reopened a run that nobody was left in",
    "run_config.lease_ended": "the run's lease ended while a node was at the door",
    "watched_keys.rescanned": "a node's watch had fallen behind the history",
    "election.again": "a coordinator found its own key after an unknown outcome",
    "decide.returning": "nothing formed because a server without its data waited for the members of its earlier life",
    "tcp.reconnects": "a connection ended and was made again",
    "tcp.stalled": "a connection on which nothing was heard was given up",
    "tcp.forgotten": "a client came back to a server that had lost its memory",
    "server.replaced": "a client came back while its earlier connection was still there",
    "server.mass": "so many connections closed at once that no session was shortened",
    "server.stood_still": "a grace was over while the server stood still, and began again",
    "server.malformed": "a frame that could not be read cost its connection",
    "server.slow": "a peer that did not read was dropped",
    "server.coordinator_failed": "a coordinator in the server failed and was started again",
    "server.collected": "a run that nobody was left in was let go",
    "journal.failed": "a disk failed, and everything was written anew",
    "journal.stalled": "a disk did not come back in time",
    "journal.snapshot_failed": "a snapshot could not be written while the log could",
    "journal.refused": "a request was not executed because nothing could be kept",
    "recovery.cut": "the torn end of a log was cut off",
}
REGISTER_MARKS = {
    "register.expired": "a lease was ended by somebody who had seen it stand still",
    "register.contended": "somebody else was faster, and it was done again on what that one had written",
    "register.unknown": "a write gave no answer, and was looked for in what was there",
    "register.resent": "a write that might still be under way was sent again as it was",
    "register.too_slow": "a session was refused because the cell is too slow for its time to live",
    "register.vanished": "what the cell held was gone, and a new store was begun",
}
"""Of register worlds (`rallypoint sim --register`), in which those of servers cannot be reached."""

ETCD_MARKS = {
    "etcd.add_was_done": "an increment whose outcome was unknown had been done",
    "etcd.compacted": "a watch had to scan again: what it would have gone on from was compacted",
    "etcd.leaderless": "a member answered that the cluster has no leader",
    "etcd.outcome_unknown": "a write gave no answer",
    "etcd.renewals_stalled": "renewals were sent and not answered",
    "etcd.suspected": "an endpoint was left for another",
    "etcd.token_renewed": "the token of a user had run out, and another was asked for",
    "session.nothing_ended": "the backend had nobody who could have ended a session: it counts from then",
}
"""Of a real etcd, which is not simulated."""

hits: set[str] | None = None
"""Where marks are collected; None: nowhere."""


def mark(name: str) -> None:
    """This branch was reached."""
    if hits is not None:
        hits.add(name)


def collect() -> set[str]:
    """Begin to collect, afresh; the set fills as marks are reached."""
    global hits
    hits = set()
    return hits
