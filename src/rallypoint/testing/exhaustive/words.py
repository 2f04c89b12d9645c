"""What is written for people only, and is no part of a state: sentences, and the times and names in reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec

from rallypoint.kv.types import Op, Put, Txn
from rallypoint.rendezvous import coordinator, records
from rallypoint.testing.exhaustive.symbols import FAR_S

WORDS = frozenset({"why", "reason", "by", "ended", "broken", "_waiting_reason", "_reported_reason", "_error"})
"""Attributes that hold a sentence: only whether there is one can matter."""
_BLANKED = WORDS | {"formed_at", "gather_s", "last_call_s", "confirm_s", "lasted_s", "first_arrival"}
_EMPTIED = {"last_arrivals", "last_confirmed"}


@cache
def wordless(value: bytes) -> bytes:
    """A record as it is stored, without them."""
    fields: dict[str, Any] = msgspec.json.decode(value)
    for name in fields:
        if name in _BLANKED:
            fields[name] = "" if isinstance(fields[name], str) else 0.0
        elif name in _EMPTIED:
            fields[name] = []
    return msgspec.json.encode(fields)  # in the order of the record: whoever compares it with its own finds the same


@contextmanager
def adapted() -> Iterator[None]:
    """While this lasts the real code may put symbols into records (written out they are 0: nothing reads them back),
    and does not write `state/waiting` again when nothing but its sentence has changed."""
    before = records._encoder, coordinator.REASON_EVERY_S
    records._encoder = msgspec.json.Encoder(order="deterministic", enc_hook=lambda symbol: 0)
    coordinator.REASON_EVERY_S = 2 * FAR_S
    try:
        yield
    finally:
        records._encoder, coordinator.REASON_EVERY_S = before


def wordless_op(op: Op) -> Op:
    """A request that writes records without them."""
    if not isinstance(op, Txn):
        return op
    steps = tuple([Put(one.key, wordless(one.value), one.lease) if isinstance(one, Put) else one for one in op.then])
    return Txn(op.compares, steps, op.otherwise)
