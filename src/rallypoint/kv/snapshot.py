"""Snapshot and restore of a whole engine as bytes, in a canonical form: equal states give equal bytes.

For simulation and tests; a server writes `snapshot_parts`. Watches are not included: a watch starts again after the
last revision it saw, from the history in the snapshot. A restored lease has its full time to live again, as after a
change of leader in etcd: clients could not renew while the server was down.
"""

from __future__ import annotations

import msgspec

from rallypoint.kv.dedupe import ClientAnswers
from rallypoint.kv.engine import Engine
from rallypoint.kv.leases import Lease
from rallypoint.kv.types import Batch, Item, Result

FORMAT = 1


class SnapshotError(ValueError):
    """The bytes are not a snapshot, or have a format that this version does not know."""


class _Lease(msgspec.Struct, array_like=True):
    id: int
    ttl_s: float
    keys: list[str]


class _Client(msgspec.Struct, array_like=True):
    client: str
    forgotten: int
    answers: list[tuple[int, Result]]


class _Snapshot(msgspec.Struct, array_like=True):
    format: int
    revision: int
    next_lease: int
    items: list[Item]
    leases: list[_Lease]
    clients: list[_Client]
    history_oldest: int
    history: list[Batch]


class _Format(msgspec.Struct, array_like=True):
    """The common part of all formats."""

    format: int


_encoder = msgspec.msgpack.Encoder()
_format_decoder = msgspec.msgpack.Decoder(_Format)
_decoder = msgspec.msgpack.Decoder(_Snapshot)


def snapshot(engine: Engine) -> bytes:
    """The engine's state."""
    return _encoder.encode(
        _Snapshot(
            FORMAT,
            engine.revision,
            engine.leases.next_id,
            [engine.items[key] for key in sorted(engine.items)],
            [_Lease(lease.id, lease.ttl_s, sorted(lease.keys)) for lease in sorted(engine.leases, key=lambda x: x.id)],
            [
                _Client(client, known.forgotten, sorted(known.answers.items(), key=lambda pair: pair[0]))
                for client, known in engine.dedupe.clients.items()
            ],
            engine.history.oldest,
            list(engine.history.batches),
        )
    )


def restore(data: bytes, now: float, history: int | None = None) -> Engine:
    """An engine in the state of the snapshot, with its leases renewed at `now`. SnapshotError for invalid bytes."""
    try:
        found = _format_decoder.decode(data).format
        if found != FORMAT:
            raise SnapshotError(f"snapshot format {found} is not known (this version reads {FORMAT})")
        saved = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotError(f"not a snapshot of a store: {error}") from error
    engine = Engine() if history is None else Engine(history)
    engine.revision, engine.now = saved.revision, now
    for item in saved.items:
        engine.adopt(item)
    engine.leases.next_id = saved.next_lease
    for lease in saved.leases:
        engine.leases.insert(Lease(lease.id, lease.ttl_s, now + lease.ttl_s, set(lease.keys)))
    for client in saved.clients:
        engine.dedupe.clients[client.client] = ClientAnswers(client.forgotten, dict(client.answers))
    engine.history.oldest = saved.history_oldest
    for batch in saved.history:
        engine.history.append(batch)
    return engine
