"""The coordinator's writes: how they are packed into transactions, and that none is committed on an outdated view."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.backends.contract import Limits
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.kv.types import BranchOp, Compare, CreateRevisionIs, Delete, Exists, ModRevisionIs, Put, TxnResult
from rallypoint.rendezvous.attempt import Writes
from rallypoint.rendezvous.fenced_writer import Deposed, FencedWriter, LookAgain
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.testing import loop as virtual
from tests.rendezvous.kit import ForwardingBackend

KEYS = RunKeys("rallypoint", "run")


class Recording(ForwardingBackend):
    """Records every transaction."""

    def __init__(self, server: MemoryServer, limits: Limits | None = None) -> None:
        super().__init__(MemoryBackend(server), limits)
        self.sent: list[tuple[Sequence[Compare], Sequence[BranchOp]]] = []

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        self.sent.append((tuple(compares), tuple(then)))
        return await super().txn(compares, then, otherwise)


async def elected(backend: ForwardingBackend) -> int:
    """The term of a coordinator on an empty store."""
    return (await backend.txn([], [Put(KEYS.coordinator, b"{}")])).revision


def puts(count: int, size: int = 1) -> list[Put]:
    return [Put(f"/key/{index:03d}", b"x" * size) for index in range(count)]


def write_round(writes: Writes, limits: Limits) -> tuple[list[tuple[Sequence[Compare], Sequence[BranchOp]]], list[int]]:
    """The transactions of one `write_round`, and how many of them were sent when the marker was reported."""
    marked: list[int] = []

    async def main() -> Recording:
        backend = Recording(MemoryServer(), limits)
        term = await elected(backend)
        backend.sent.clear()
        writer = FencedWriter(backend, KEYS, term)
        await writer.write_round(0, 0, writes, lambda _: marked.append(len(backend.sent)))
        return backend

    return virtual.run(main()).sent, marked


@st.composite
def some_writes(draw: st.DrawFn) -> Writes:
    ops: list[Put] = []
    before, after = draw(st.integers(0, 12)), draw(st.integers(1, 12))
    for index in range(before + after):
        key = KEYS.round if index == before else f"/key/{index:03d}"
        ops.append(Put(key, b"x" * draw(st.integers(0, 30))))
    return Writes(ops, before)


@given(some_writes(), st.integers(3, 10), st.sampled_from([40, 100, 10_000]))
def test_all_writes_are_sent_in_order_and_within_the_limits(writes: Writes, max_ops: int, max_bytes: int) -> None:
    sent, _ = write_round(writes, Limits(max_txn_ops=max_ops, max_txn_bytes=max_bytes))
    assert [op for _, ops in sent for op in ops] == writes.ops
    for compares, ops in sent:
        assert 0 < len(ops) <= max_ops
        assert len(compares) <= max_ops
        size = sum(len(op.value) for op in ops if isinstance(op, Put))
        with_the_marker = [op for op in ops if isinstance(op, Put) and op.key == KEYS.round]
        # The write after the marker stays with it, whatever its size.
        assert size <= max_bytes or len(ops) == 1 or (with_the_marker and len(ops) == 2) or size <= max_bytes + 30


@given(some_writes(), st.integers(3, 10))
def test_writes_up_to_the_marker_compare_the_old_round_and_later_ones_the_new(writes: Writes, max_ops: int) -> None:
    sent, marked = write_round(writes, Limits(max_txn_ops=max_ops))
    is_marked = [any(isinstance(op, Put) and op.key == KEYS.round for op in ops) for _, ops in sent]
    assert sum(is_marked) == 1
    position = is_marked.index(True)
    assert marked == [position + 1]
    for index, (compares, _) in enumerate(sent):
        (compared,) = [c.revision for c in compares if isinstance(c, ModRevisionIs) and c.key == KEYS.round]
        assert (compared == 0) == (index <= position)
        assert any(isinstance(c, CreateRevisionIs) and c.key == KEYS.coordinator for c in compares)
        closed = [c for c in compares if isinstance(c, ModRevisionIs) and c.key == KEYS.closed]
        assert len(closed) == (1 if index == position else 0)


def test_writes_that_fit_are_one_transaction() -> None:
    sent, marked = write_round(Writes([*puts(3), Put(KEYS.round, b""), *puts(5)[3:]], 3), Limits(max_txn_ops=7))
    assert len(sent) == 1
    assert marked == [1]


def test_status_is_written_in_the_transaction_of_the_marker() -> None:
    """A phase change and its counts are in one transaction, also if that is full."""
    for before in range(8):
        ops = [*puts(before), Put(KEYS.round, b"round"), Put(KEYS.waiting, b"waiting"), *puts(20)[before:]]
        sent, _ = write_round(Writes(ops, before), Limits(max_txn_ops=4))
        (together,) = [ops for _, ops in sent if any(isinstance(op, Put) and op.key == KEYS.round for op in ops)]
        assert KEYS.waiting in [op.key for op in together if isinstance(op, Put)]


# Fencing


def run_refused(interference: list[BranchOp]) -> tuple[type[BaseException], int]:
    """The error of a write after other writes interfered, and how many keys it has written."""

    async def main() -> tuple[type[BaseException], int]:
        server = MemoryServer()
        backend = Recording(server)
        term = await elected(backend)
        writer = FencedWriter(backend, KEYS, term)
        round_revision = (await writer.write(0, [Put(KEYS.round, b"1")])).revision
        for op in interference:
            await backend.txn([], [op])
        with pytest.raises((Deposed, LookAgain)) as caught:
            await writer.write_round(
                round_revision, 0, Writes([Put("/key", b""), Put(KEYS.round, b"2")], 1), lambda _: None
            )
        return caught.type, sum(key == "/key" for key in server.engine.items)

    return virtual.run(main())


def test_write_of_a_deposed_coordinator_is_refused() -> None:
    assert run_refused([Delete(KEYS.coordinator)]) == (Deposed, 0)


def test_write_of_an_earlier_term_is_refused_even_if_the_key_looks_the_same() -> None:
    assert run_refused([Delete(KEYS.coordinator), Put(KEYS.coordinator, b"{}")]) == (Deposed, 0)


def test_rewriting_the_coordinator_key_does_not_depose() -> None:
    async def main() -> bool:
        backend = Recording(MemoryServer())
        term = await elected(backend)
        await backend.txn([], [Put(KEYS.coordinator, b"again")])
        return (await FencedWriter(backend, KEYS, term).write(0, [Put("/key", b"")])).committed

    assert virtual.run(main())


def test_write_on_an_outdated_round_is_refused() -> None:
    assert run_refused([Put(KEYS.round, b"another")]) == (LookAgain, 0)


def test_write_of_the_round_after_a_close_is_refused() -> None:
    assert run_refused([Put(KEYS.closed, b"closed")]) == (LookAgain, 0)


def test_ended_lease_raises_look_again() -> None:
    async def main() -> None:
        backend = Recording(MemoryServer())
        writer = FencedWriter(backend, KEYS, await elected(backend))
        lease = await backend.grant(10)
        await backend.revoke(lease)
        with pytest.raises(LookAgain):
            await writer.write(0, [Put("/key", b"", lease)])

    virtual.run(main())


def test_failed_compare_of_the_caller_raises_look_again() -> None:
    async def main() -> None:
        backend = Recording(MemoryServer())
        writer = FencedWriter(backend, KEYS, await elected(backend))
        with pytest.raises(LookAgain):
            await writer.write(0, [Put("/key", b"")], [Exists("/other")])

    virtual.run(main())


def test_split_write_stops_where_it_is_refused() -> None:
    """The session ends between two transactions of one write: the earlier ones stay, no later one is committed."""

    async def main() -> list[str]:
        server = MemoryServer()
        backend = Recording(server, Limits(max_txn_ops=4))
        writer = FencedWriter(backend, KEYS, await elected(backend))
        ops = [Put(KEYS.round, b"1"), Put(KEYS.waiting, b""), *puts(6)]
        marked = asyncio.Event()
        writing = asyncio.create_task(writer.write_round(0, 0, Writes(ops, 0), lambda _: marked.set()))
        await marked.wait()
        await MemoryBackend(server).txn([], [Delete(KEYS.coordinator)])
        with pytest.raises(Deposed):
            await writing
        return sorted(server.engine.items)

    written = virtual.run(main())
    assert KEYS.round in written
    assert "/key/005" not in written
