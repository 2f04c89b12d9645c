"""An event as a line of JSON: what `rallypoint events --json` prints and what files of events hold. Pure.

Fields are added, never renamed.
"""

from __future__ import annotations

import logging

import msgspec

from rallypoint.events import Event

FIELDS = {
    "run_id": "the run it is about; empty: none in particular",
    "by": "the node, server or operator that tells it",
    "address": "where it listens",
    "addresses": "where it listens",
    "after_s": "how long it was not so, in seconds",
    "again_s": "after so many seconds it is started again",
    "bytes": "how many",
    "cause": "`waiting`, `loss`, `drain`, `round over`, `session lost`",
    "confirm_s": "seconds from the decision until all had confirmed",
    "data": "the directory of its data",
    "endpoints": "how nodes reach it",
    "error": "the class of the error",
    "file": "which file",
    "gather_s": "seconds from the first to the last arrival",
    "hold_s": "for so many seconds",
    "join": "the number of this call of `next_rendezvous`, from 1",
    "key": "the key of the record",
    "keys": "how many keys",
    "last_call_s": "seconds from the minimum being there to the decision",
    "lasted_s": "for how many seconds the round was active",
    "leases": "how many leases",
    "lost": "how many events were lost",
    "members": "how many members the cluster has",
    "node": "the name of the node",
    "peer": "the address of the client",
    "rank": "the rank of the node in that round",
    "reason": "why, in words",
    "replayed": "changes that were in the log after the snapshot",
    "round": "the number of the round or attempt; 0: none",
    "size": "how many members the round has",
    "status": "the exit status",
    "term": "the revision at which it became coordinator",
    "took_s": "how many seconds it took",
    "url": "where a browser finds it",
    "version": "of the program",
    "waits_for": "whom it waits for, in words",
    "where": "the file or directory",
    "world_size": "how many members the round has",
}
"""What the fields of events mean, whichever event has them."""

_encoder = msgspec.json.Encoder()


def event_line(at: float | None, event: Event) -> bytes:
    """One JSON object without a line end: `at` (a wall clock), the kind, its fields, its level, its sentence."""
    fields = msgspec.to_builtins(event)
    level = logging.getLevelName(event.level).lower()
    return _encoder.encode({"at": at, **fields, "level": level, "text": event.text()})
