"""Connections that have something to send are flushed together, and none is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rallypoint.kv.types import Batch, Change, Item, Put, Txn
from rallypoint.server import outbox as outbox_module
from rallypoint.server.hub import Hub
from rallypoint.server.local import LocalBackend
from rallypoint.server.outbox import MOST_KNOWN, Outbox, raw_of, settled
from rallypoint.testing.loop import run
from rallypoint.wire.messages import Answer, Push, PushRaw, encoder


class Sender:
    """Notes that it was flushed; may fail at that, or have something to send again."""

    def __init__(self, flushed: list[Sender], error: Exception | None = None) -> None:
        self._flushed = flushed
        self._error = error

    def flush(self) -> None:
        self._flushed.append(self)
        if self._error is not None:
            raise self._error


def batch(revision: int) -> Batch:
    return Batch(revision, (Change("/a", Item("/a", b"1", revision, revision, 1)),))


def test_all_are_flushed_in_order_when_the_loop_has_run_what_is_due() -> None:
    async def story() -> None:
        outbox, flushed = Outbox(), list[Sender]()
        senders = [Sender(flushed) for _ in range(3)]
        for one in senders:
            outbox.add(one)
        assert flushed == []
        await asyncio.sleep(0)
        assert flushed == senders
        outbox.add(senders[0])
        await asyncio.sleep(0)
        assert flushed == [*senders, senders[0]]

    run(story())


@pytest.mark.parametrize("count", [1, 3])
def test_those_who_were_told_together_get_the_core(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    async def story() -> None:
        outbox, flushed, ways = Outbox(), list[Sender](), list[int]()
        monkeypatch.setattr(outbox_module, "give_way", lambda: ways.append(len(flushed)))
        for _ in range(count):
            outbox.add(Sender(flushed))
        outbox.deliver()
        assert len(flushed) == count
        assert ways == ([count] if count > 1 else []), "once, and when all were told"

    run(story())


def test_who_was_flushed_at_once_is_not_flushed_again_and_who_comes_then_is_not_forgotten() -> None:
    async def story() -> None:
        outbox, flushed = Outbox(), list[Sender]()
        first, second = Sender(flushed), Sender(flushed)
        outbox.add(first)
        outbox.flush()
        assert flushed == [first]
        outbox.add(second)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert flushed == [first, second]

    run(story())


def test_one_that_fails_does_not_keep_the_others_from_being_flushed() -> None:
    async def story() -> None:
        told = list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        outbox, flushed = Outbox(), list[Sender]()
        broken, fine = Sender(flushed, RuntimeError("broken")), Sender(flushed)
        outbox.add(broken)
        outbox.add(fine)
        await asyncio.sleep(0)
        assert flushed == [broken, fine]
        assert [str(one["exception"]) for one in told] == ["broken"]

    run(story())


def test_what_a_coordinator_writes_is_sent_before_anything_else_runs() -> None:
    async def story() -> None:
        hub, flushed = Hub(), list[Sender]()
        hub.outbox.add(Sender(flushed))
        seen = list[int]()
        asyncio.get_running_loop().call_soon(lambda: seen.append(len(flushed)))
        await LocalBackend(hub).execute(Txn((), (Put("/a", b""),)))
        assert seen == [1]

    run(story())


def test_batch_is_encoded_once_for_all_and_each_as_itself() -> None:
    batches = [batch(revision) for revision in range(1, 3 * MOST_KNOWN)]
    assert all(bytes(raw_of(one)) == encoder.encode(one) for one in batches)
    assert raw_of(batches[-1]) is raw_of(batches[-1])
    assert all(bytes(raw_of(one)) == encoder.encode(one) for one in reversed(batches))


def test_messages_are_the_same_on_the_wire_whenever_they_were_encoded() -> None:
    messages = [Push(1, batch(1)), PushRaw(2, raw_of(batch(2))), Push(1, batch(3)), Answer(1, None)]
    assert encoder.encode(settled(messages)) == encoder.encode(messages)
