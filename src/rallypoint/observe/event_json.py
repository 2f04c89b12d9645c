"""Events as lines of JSON, as `rallypoint events --json` prints them and event files hold them.

Fields are added, never renamed.
"""

from __future__ import annotations

import logging

import msgspec

from rallypoint.events import Event

FIELDS = {
    "run_id": "the run; empty if the event is not about one run",
    "by": "the node, server or operator that emitted the event",
    "address": "the address that it listens on",
    "addresses": "the addresses that it listens on",
    "after_s": "the length of the interruption, in seconds",
    "again_s": "seconds until it is started again",
    "bytes": "the number of bytes",
    "cause": "`waiting`, `loss`, `drain`, `round over`, `session lost`",
    "confirm_s": "seconds from the decision until all members had confirmed",
    "count": "the number of nodes",
    "data": "the data directory",
    "endpoints": "the endpoints for nodes",
    "error": "the class of the error",
    "file": "the file",
    "gather_s": "seconds from the first to the last arrival",
    "hold_s": "how many seconds the node is held back",
    "join": "the number of this call of `next_rendezvous`, from 1",
    "key": "the key of the record",
    "keys": "the number of keys",
    "last_call_s": "seconds from reaching `min_nodes` to the decision",
    "kind": "why a round ended: `worker failed`, `stalled`, `member lost`, `session lost`, `drain`, `operator`, "
    "`stopped`, `admission`, `round over`, `finished` or `requested`",
    "lasted_s": "how many seconds the round was active",
    "leases": "the number of leases",
    "lost": "the number of events lost",
    "members": "the number of members of the cluster",
    "node": "the name of the node",
    "nodes": "the names of the first nodes",
    "peer": "the address of the client",
    "rank": "the rank of the node in that round",
    "reason": "the reason, in a sentence",
    "replayed": "the number of changes replayed from the log after the snapshot",
    "requested": "the rank that the node asked for",
    "round": "the number of the round or attempt; 0: none",
    "size": "the number of members of the round",
    "status": "the exit status",
    "term": "the revision at which it became coordinator",
    "took_s": "how many seconds it took",
    "url": "the URL for a browser",
    "version": "the version of the program",
    "waits_for": "what it waits for, in words",
    "where": "the file or directory",
    "world_size": "the number of members of the round",
}
"""The meaning of each field; a field has the same meaning in every event."""

_encoder = msgspec.json.Encoder()


def event_line(at: float | None, event: Event) -> bytes:
    """One JSON object without a line end: `at` (wall-clock time), the event's kind, fields, level and sentence."""
    fields = msgspec.to_builtins(event)
    level = logging.getLevelName(event.level).lower()
    return _encoder.encode({"at": at, **fields, "level": level, "text": event.text()})
