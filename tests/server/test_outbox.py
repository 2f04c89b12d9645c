"""Connections with unsent messages are flushed together, and batches are encoded once."""

from __future__ import annotations

import asyncio
from typing import Any

from rallypoint.kv.types import Batch, Change, Item
from rallypoint.server.outbox import MOST_KNOWN, Outbox, raw_of
from rallypoint.testing.loop import run
from rallypoint.wire.messages import encoder


class Sender:
    """Records that it was flushed, and may raise."""

    def __init__(self, flushed: list[Sender], error: Exception | None = None) -> None:
        self._flushed = flushed
        self._error = error

    def flush(self) -> None:
        self._flushed.append(self)
        if self._error is not None:
            raise self._error


def batch(revision: int) -> Batch:
    return Batch(revision, (Change("/a", Item("/a", b"1", revision, revision, 1)),))


def test_all_connections_are_flushed_in_order_after_the_ready_callbacks() -> None:
    async def main() -> None:
        outbox, flushed = Outbox(), list[Sender]()
        senders = [Sender(flushed) for _ in range(3)]
        for sender in senders:
            outbox.add(sender)
        assert flushed == []
        await asyncio.sleep(0)
        assert flushed == senders
        outbox.add(senders[0])
        await asyncio.sleep(0)
        assert flushed == [*senders, senders[0]]

    run(main())


def test_failed_flush_does_not_prevent_others() -> None:
    async def main() -> None:
        reported = list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        outbox, flushed = Outbox(), list[Sender]()
        broken, fine = Sender(flushed, RuntimeError("broken")), Sender(flushed)
        outbox.add(broken)
        outbox.add(fine)
        await asyncio.sleep(0)
        assert flushed == [broken, fine]
        assert [str(one["exception"]) for one in reported] == ["broken"]

    run(main())


def test_batch_is_encoded_once_and_cached() -> None:
    batches = [batch(revision) for revision in range(1, 3 * MOST_KNOWN)]
    assert all(bytes(raw_of(one)) == encoder.encode(one) for one in batches)
    assert raw_of(batches[-1]) is raw_of(batches[-1])
    assert all(bytes(raw_of(one)) == encoder.encode(one) for one in reversed(batches))
