"""Blanks data that only people read, which is not part of a state: sentences, and times and names in reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec

from rallypoint.kv.types import Op, Put, Txn
from rallypoint.rendezvous import coordinator, kept_events, records
from rallypoint.testing.exhaustive.symbolic import FAR_S

SENTENCES = frozenset({"why", "reason", "by", "ended", "broken", "_waiting_reason", "_reported_reason", "_error"})
"""Attributes that hold a sentence: only whether there is one matters."""
_BLANKED = SENTENCES | {"formed_at", "gather_s", "last_call_s", "confirm_s", "lasted_s", "first_arrival"}
_EMPTIED = {"last_arrivals", "last_confirmed"}


@cache
def blank_record(value: bytes) -> bytes:
    """An encoded record with these fields blank."""
    fields: dict[str, Any] = msgspec.json.decode(value)
    for name in fields:
        if name in _BLANKED:
            fields[name] = "" if isinstance(fields[name], str) else 0.0
        elif name in _EMPTIED:
            fields[name] = []
    return msgspec.json.encode(fields)  # keeps the order of fields: writers compare it with their own encoding


@contextmanager
def patched() -> Iterator[None]:
    """During the block the real code may put symbolic values into records (encoded as 0: they are never read back),
    does not rewrite `state/waiting` if only its sentence has changed, and keeps no events."""
    before = records._encoder, coordinator.REASON_EVERY_S, kept_events.KEPT
    records._encoder = msgspec.json.Encoder(order="deterministic", enc_hook=lambda symbol: 0)
    coordinator.REASON_EVERY_S = 2 * FAR_S
    kept_events.KEPT = 0
    try:
        yield
    finally:
        records._encoder, coordinator.REASON_EVERY_S, kept_events.KEPT = before


def blank_op(op: Op) -> Op:
    """A request with blank records."""
    if not isinstance(op, Txn):
        return op
    steps = tuple(
        [Put(one.key, blank_record(one.value), one.lease) if isinstance(one, Put) else one for one in op.then]
    )
    return Txn(op.compares, steps, op.otherwise)
