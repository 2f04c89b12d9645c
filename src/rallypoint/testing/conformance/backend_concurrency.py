"""Checks of concurrent connections: linearizable reads, no lost or partial writes; and of closing a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rallypoint.backends.contract import Backend
from rallypoint.errors import Unavailable
from rallypoint.kv.types import Get, GotItem, ModRevisionIs, Put, VersionIs
from rallypoint.testing.conformance.backend_watch import take
from rallypoint.testing.conformance.kit import (
    BackendKit,
    Check,
    expect,
    expect_error,
    expect_same,
    item_of,
    put,
    results_of,
    value_of,
)


async def check_a_read_sees_what_was_written_before_it(kit: BackendKit) -> None:
    """After a write has returned, every connection sees it, by get, scan and transaction."""
    async with kit.connections(3) as backends:
        key = kit.key("a")
        for n in range(15):
            value = b"%d" % n
            revision = await put(backends[n % 3], key, value)
            for reader in backends:
                got = await reader.get(key)
                seen = (got.item and got.item.value, got.revision >= revision)
                expect_same("a get sees a write that has returned", seen, (value, True))
                values = [item.value for item in (await reader.scan(key)).items]
                expect_same("a scan sees a write that has returned", values, [value])
                if n % 5 == 0:  # not always: a connection might refresh its view only because it sends a transaction
                    compared = await reader.txn((ModRevisionIs(key, revision),), ())
                    expect_same("a compare sees a write that has returned", compared.committed, True)


async def check_revisions_never_go_back_for_a_reader(kit: BackendKit) -> None:
    """A reader never sees the revision or a key's value go back, whichever connection it uses."""
    async with kit.connections(3) as backends:
        key = kit.key("n")
        await put(backends[0], key, b"0")

        async def write() -> None:
            for _ in range(30):
                await backends[0].add(key, 1)

        writing = asyncio.create_task(write(), name="write while others read")
        seen = (0, 0)
        for n in range(30):
            got = await backends[n % 3].get(key)
            now = (got.revision, int(got.item.value) if got.item is not None else -1)
            expect("a reader never sees an older revision", now[0] >= seen[0] and now[1] >= seen[1], (seen, now))
            expect("an item is not newer than the read", got.item is None or got.item.mod_revision <= got.revision, got)
            seen = now
        await writing


async def check_compare_and_set_loses_nothing(kit: BackendKit) -> None:
    """A counter that several tasks increment by compare-and-set counts every increment."""
    async with kit.connections(3) as backends:
        key = kit.key("n")

        async def raise_by_one(backend: Backend) -> None:
            item = (await backend.get(key)).item
            while True:
                revision, value = (item.mod_revision, int(item.value)) if item is not None else (0, 0)
                result = await backend.txn((ModRevisionIs(key, revision),), (Put(key, b"%d" % (value + 1)),))
                if result.committed:
                    return
                (answer,) = results_of(result, 1)
                expect("a refusal gives the current value", isinstance(answer, GotItem), answer)
                assert isinstance(answer, GotItem)
                item = answer.item

        async def raise_often(backend: Backend) -> None:
            for _ in range(5):
                await raise_by_one(backend)

        await asyncio.gather(*(raise_often(backend) for backend in backends for _ in range(2)))
        item = await item_of(backends[0], key)
        expect_same("compare-and-set loses nothing", (item.value, item.version), (b"30", 30))


async def check_a_key_can_be_created_by_one_only(kit: BackendKit) -> None:
    """Of several concurrent creations of a key one wins; the others are refused and see the winner's value."""
    async with kit.connections(4) as backends:
        key = kit.key("leader")

        async def create(n: int) -> tuple[bool, object]:
            result = await backends[n % 4].txn((VersionIs(key, 0),), (Put(key, b"%d" % n),))
            return result.committed, result.results

        outcomes = await asyncio.gather(*(create(n) for n in range(12)))
        winners = [n for n, (won, _) in enumerate(outcomes) if won]
        expect_same("one wins", len(winners), 1)
        item = await item_of(backends[0], key)
        expect_same("the winner's value is there", item.value, b"%d" % winners[0])
        for won, results in outcomes:
            if not won:
                expect_same("a loser is shown the winner", results, (GotItem(item),))


async def check_no_read_sees_half_a_transaction(kit: BackendKit) -> None:
    """Keys that are always written together are always read with equal values."""
    async with kit.two_connections() as (reader, writer):
        left, right = kit.key("left"), kit.key("right")
        await writer.txn((), (Put(left, b"0"), Put(right, b"0")))

        async def write() -> None:
            for n in range(1, 30):
                await writer.txn((), (Put(left, b"%d" % n), Put(right, b"%d" % n)))

        writing = asyncio.create_task(write(), name="write two keys together")
        while not writing.done():
            values = {item.value for item in (await reader.scan(kit.prefix)).items}
            expect_same("a scan sees a transaction whole", len(values), 1)
            one, other = results_of(await reader.txn((), (Get(left), Get(right))), 2)
            assert isinstance(one, GotItem)
            assert isinstance(other, GotItem)
            pair = (one.item and one.item.value, other.item and other.item.value)
            expect("a transaction sees another whole", pair[0] == pair[1], pair)
        await writing


# --- the connection itself --------------------------------------------------------------------------------------------


async def check_status_speaks_of_the_backend(kit: BackendKit) -> None:
    """`status` returns the name of the backend and a revision not older than the last write."""
    async with kit.connection() as backend:
        revision = await put(backend, kit.key("a"))
        status = await backend.status()
        expect_same("status names the backend", status.backend, backend.name)
        expect("status knows the revision", status.revision >= revision, status)


async def check_a_closed_connection_is_unavailable(kit: BackendKit) -> None:
    """After `close` every call raises Unavailable, watches have ended, and other connections still work."""
    async with kit.connection() as other:
        closed = await kit.connect()
        key = kit.key("a")
        start = await put(closed, key, b"x")
        lease = await other.grant(kit.ttl_s)
        watch = closed.watch(kit.prefix, start)
        reading = asyncio.create_task(anext(watch, None), name="watch until closed")
        await kit.advance(0)
        await closed.close()
        ended = await kit.soon("closing ends a watch that waits", reading)
        expect_same("closing ends a watch", ended, None)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "get": lambda: closed.get(key),
            "scan": lambda: closed.scan(key),
            "txn": lambda: closed.txn((), (Put(key, b"y"),)),
            "add": lambda: closed.add(kit.key("n"), 1),
            "watch": lambda: _first(closed, key),
            "grant": lambda: closed.grant(kit.ttl_s),
            "keep_alive": lambda: closed.keep_alive(lease),
            "revoke": lambda: closed.revoke(lease),
            "open_session": lambda: closed.open_session(kit.ttl_s),
            "status": lambda: closed.status(),
        }
        for name, call in calls.items():
            promise = f"{name} on a closed connection raises Unavailable"
            await kit.soon(promise, expect_error(promise, Unavailable, call()))
        expect_same("none of the calls was executed", await value_of(other, key), b"x")
        expect_same("not even in part", await other.keep_alive(lease), True)
        await other.revoke(lease)


async def check_closing_a_connection_leaves_the_watches_of_others(kit: BackendKit) -> None:
    """Closing a connection ends only its own watches."""
    async with kit.connection() as other:
        closed = await kit.connect()
        start = await put(other, kit.key("a"))
        watch = other.watch(kit.prefix, start)
        await closed.close()
        revision = await put(other, kit.key("a"))
        (batch,) = await take(kit, watch, 1)
        expect_same("a watch of another connection still works", batch.revision, revision)
        watch.cancel()


async def _first(backend: Backend, prefix: str) -> object:
    return await anext(backend.watch(prefix, 1))


CHECKS: tuple[Check, ...] = (
    check_a_read_sees_what_was_written_before_it,
    check_revisions_never_go_back_for_a_reader,
    check_compare_and_set_loses_nothing,
    check_a_key_can_be_created_by_one_only,
    check_no_read_sees_half_a_transaction,
    check_status_speaks_of_the_backend,
    check_a_closed_connection_is_unavailable,
    check_closing_a_connection_leaves_the_watches_of_others,
)
