"""Checks of watches: order, no gap, no repetition, one batch per revision, prefixes, cancellation."""

from __future__ import annotations

import asyncio

from rallypoint.backends.contract import Backend, Watch
from rallypoint.errors import HistoryGone
from rallypoint.kv.types import Batch, Change, Delete, Exists, Put
from rallypoint.testing.conformance.kit import (
    BackendKit,
    Check,
    changes_of,
    expect,
    expect_error,
    expect_same,
    item_of,
    put,
)

WATCHERS = 50


async def check_a_watch_starts_from_a_past_revision_and_goes_on(kit: BackendKit) -> None:
    """A watch delivers the changes after its revision: first the past ones, then new ones."""
    async with kit.two_connections() as (one, other):
        key = kit.key("a")
        first = await put(one, key, b"1")
        revisions = [await put(one, key, b"2"), await put(one, key, b"3")]
        watch = one.watch(kit.prefix, first)
        batches = await take(kit, watch, 2)
        revisions += [await put(other, key, b"4"), await put(one, key, b"5")]
        batches += await take(kit, watch, 2)
        expect_same("a watch gives every revision after its start", [batch.revision for batch in batches], revisions)
        values = [changes_of(batch) for batch in batches]
        expect_same("each batch has its change", values, [{key: b"2"}, {key: b"3"}, {key: b"4"}, {key: b"5"}])
        expect_same("a change carries the item", batches[-1].changes, (Change(key, await item_of(one, key)),))
        watch.cancel()


async def check_a_watch_has_no_gap_and_no_repetition(kit: BackendKit) -> None:
    """Changes of concurrent writers arrive in order of revision, each once."""
    async with kit.connections(3) as backends:
        start = (await backends[0].scan(kit.prefix)).revision
        watch = backends[0].watch(kit.prefix, start)
        revisions: list[int] = []

        async def write(writer: int, backend: Backend) -> None:
            revisions.extend([await put(backend, kit.key(f"{writer}"), b"%d" % n) for n in range(20)])

        writing = asyncio.gather(*(write(n, backend) for n, backend in enumerate(backends)))
        batches = await take(kit, watch, 60)
        await writing
        expect_same("every change comes once, in order", [batch.revision for batch in batches], sorted(revisions))
        for writer in range(3):
            key = kit.key(f"{writer}")
            seen = [value for batch in batches for name, value in changes_of(batch).items() if name == key]
            expect_same("no change is exchanged for another", seen, [b"%d" % n for n in range(20)])
        watch.cancel()


async def check_a_watch_resumes_where_another_ended(kit: BackendKit) -> None:
    """A watch that starts after the last revision seen continues without gap or repetition."""
    async with kit.two_connections() as (one, other):
        start = (await one.scan(kit.prefix)).revision
        wanted = [await put(one, kit.key("a"), b"%d" % n) for n in range(9)]
        seen: list[int] = []
        for backend in (one, other, one):
            watch = backend.watch(kit.prefix, seen[-1] if seen else start)
            seen += [batch.revision for batch in await take(kit, watch, 3)]
            watch.cancel()
        expect_same("resuming leaves nothing out and repeats nothing", seen, wanted)


async def check_a_batch_is_one_revision(kit: BackendKit) -> None:
    """All changes of one transaction arrive in one batch, including deletes."""
    async with kit.connection() as backend:
        a, b, c = kit.key("a"), kit.key("b"), kit.key("c")
        start = await put(backend, a, b"1")
        result = await backend.txn((), (Put(b, b"2"), Delete(a), Put(c, b"3")))
        last = await put(backend, b, b"4")
        watch = backend.watch(kit.prefix, start)
        first, second = await take(kit, watch, 2)
        expect_same("a transaction is one batch", (first.revision, len(first.changes)), (result.revision, 3))
        expect_same("with all that it changed", changes_of(first), {a: None, b: b"2", c: b"3"})
        expect_same("the next is another", (second.revision, changes_of(second)), (last, {b: b"4"}))
        watch.cancel()


async def check_a_watch_sees_only_its_prefix(kit: BackendKit) -> None:
    """Changes of other keys are left out, also in the same transaction, and make no empty batches."""
    async with kit.connection() as backend:
        inside, near, outside = kit.key("in/1"), kit.key("in"), kit.key("out")
        start = await put(backend, outside)
        watches = {name: backend.watch(kit.key(name), start) for name in ("in/", "in/1")}
        await put(backend, outside, b"1")
        both = await backend.txn((), (Put(inside, b"2"), Put(outside, b"2"), Put(near, b"2")))
        await put(backend, near, b"3")
        last = await put(backend, inside, b"4")
        for name, watch in watches.items():
            batches = await take(kit, watch, 2)
            seen = [(batch.revision, changes_of(batch)) for batch in batches]
            wanted = [(both.revision, {inside: b"2"}), (last, {inside: b"4"})]
            expect_same(f"a watch of {name!r} sees only what it covers", seen, wanted)
            watch.cancel()


async def check_a_change_that_did_not_happen_is_not_seen(kit: BackendKit) -> None:
    """Refused transactions and deletes of absent keys make no batches."""
    async with kit.connection() as backend:
        key = kit.key("a")
        start = (await backend.scan(kit.prefix)).revision
        watch = backend.watch(kit.prefix, start)
        await backend.txn((Exists(key),), (Put(key, b"no"),))
        await backend.txn((), (Delete(key),))
        revision = await put(backend, key, b"yes")
        (batch,) = await take(kit, watch, 1)
        seen = (batch.revision, changes_of(batch))
        expect_same("only committed changes are delivered", seen, (revision, {key: b"yes"}))
        watch.cancel()


async def check_two_watches_are_independent(kit: BackendKit) -> None:
    """A watch that is not read, or is cancelled, does not affect others."""
    async with kit.connection() as backend:
        start = (await backend.scan(kit.prefix)).revision
        unread, cancelled, read = (backend.watch(kit.prefix, start) for _ in range(3))
        first = await put(backend, kit.key("a"))
        await take(kit, cancelled, 1)
        cancelled.cancel()
        revisions = [first] + [await put(backend, kit.key("a")) for _ in range(5)]
        for watch in (read, unread):
            seen = [batch.revision for batch in await take(kit, watch, 6)]
            expect_same("each watch sees everything", seen, revisions)
            watch.cancel()


async def check_cancel_ends_a_watch(kit: BackendKit) -> None:
    """`cancel` ends the iteration at once, also a waiting one, and can be called again."""
    async with kit.connection() as backend:
        start = (await backend.scan(kit.prefix)).revision
        watch = backend.watch(kit.prefix, start)

        async def read_all() -> list[Batch]:
            return [batch async for batch in watch]

        reading = asyncio.create_task(read_all(), name="read until cancelled")
        await put(backend, kit.key("a"))
        await kit.advance(0)
        watch.cancel()
        watch.cancel()
        seen = await kit.soon("cancel ends an iteration that waits", reading)
        expect("a cancelled watch delivers at most the existing batches", len(seen) <= 1, seen)
        await put(backend, kit.key("a"))
        again = await kit.soon("a cancelled watch does not wait", read_all())
        expect_same("a cancelled watch gives nothing", (again, watch.ready()), ([], None))
        fresh = backend.watch(kit.prefix, start)
        fresh.cancel()
        unread = await kit.soon("a watch cancelled before it was read does not wait", anext(fresh, None))
        expect_same("a watch cancelled before it was read gives nothing", unread, None)


async def check_ready_takes_what_is_here_already(kit: BackendKit) -> None:
    """`ready` returns the next batch or None without waiting; mixed with iteration, nothing is lost or repeated."""
    async with kit.connection() as backend:
        start = (await backend.scan(kit.prefix)).revision
        watch = backend.watch(kit.prefix, start)
        expect_same("nothing is here before anything happened", watch.ready(), None)
        wanted = [await put(backend, kit.key("a"), b"%d" % n) for n in range(30)]
        seen: list[int] = []
        while len(seen) < len(wanted):
            seen += [batch.revision for batch in await take(kit, watch, 1)]
            while (batch := watch.ready()) is not None:
                seen.append(batch.revision)
        expect_same("iterating and taking give everything once", seen, wanted)
        watch.cancel()


async def check_many_watchers_see_the_same(kit: BackendKit) -> None:
    """All watches of one or several connections see the same batches."""
    async with kit.connections(5) as backends:
        start = (await backends[0].scan(kit.prefix)).revision
        watches = [backends[n % 5].watch(kit.prefix, start) for n in range(WATCHERS)]
        reading = [asyncio.create_task(take(kit, watch, 5), name=f"watcher {n}") for n, watch in enumerate(watches)]
        wanted = [await put(backends[n], kit.key("a"), b"%d" % n) for n in range(5)]
        for batches in await asyncio.gather(*reading):
            expect_same("every watcher sees every revision", [batch.revision for batch in batches], wanted)
        for watch in watches:
            watch.cancel()


async def check_a_scan_and_a_watch_join_without_a_gap(kit: BackendKit) -> None:
    """A scan plus the changes of a watch from the scan's revision is the state, with concurrent writers."""
    async with kit.two_connections() as (reader, writer):

        async def write() -> int:
            last = 0
            for n in range(40):
                change = Delete(kit.key(f"{n % 7}")) if n % 3 == 0 else Put(kit.key(f"{n % 7}"), b"%d" % n)
                last = (await writer.txn((), (change, Put(kit.key("count"), b"%d" % n)))).revision
            return last

        writing = asyncio.create_task(write(), name="write during a scan")
        await kit.advance(0)
        scanned = await reader.scan(kit.prefix)
        state: dict[str, bytes | None] = {item.key: item.value for item in scanned.items}
        watch = reader.watch(kit.prefix, scanned.revision)
        last, seen = await writing, scanned.revision
        while seen < last:
            (batch,) = await take(kit, watch, 1)
            expect("a watch continues after its revision", batch.revision > seen, (seen, batch.revision))
            seen = batch.revision
            state |= changes_of(batch)
        final = {item.key: item.value for item in (await reader.scan(kit.prefix)).items}
        expect_same("scan and watch give the state", {k: v for k, v in state.items() if v is not None}, final)
        watch.cancel()


async def check_a_watch_sees_a_lease_end(kit: BackendKit) -> None:
    """When a lease expires, a watch gets the removals in one batch, without any request."""
    async with kit.two_connections() as (one, other):
        lease = await one.grant(kit.ttl_s)
        keys = [kit.key(name) for name in ("a", "b", "c")]
        start = (await one.txn((), [Put(key, b"x", lease) for key in keys])).revision
        watch = other.watch(kit.prefix, start)
        reading = asyncio.create_task(take(kit, watch, 1), name="watch a lease end")
        await kit.advance(kit.ttl_s / 2)
        expect("a lease does not end before its time", not reading.done(), reading)
        await kit.advance(kit.ttl_s / 2 + kit.lease_slack_s)
        (batch,) = await kit.soon("the end of a lease is seen", reading)
        expect_same("all keys of a lease go in one revision", changes_of(batch), dict.fromkeys(keys))
        watch.cancel()


async def check_a_watch_from_a_future_revision_waits_for_it(kit: BackendKit) -> None:
    """A watch delivers nothing up to its revision, even if that is in the future."""
    async with kit.connection() as backend:
        start = await put(backend, kit.key("a"), b"0")
        watch = backend.watch(kit.prefix, start + 2)
        reading = asyncio.create_task(take(kit, watch, 1), name="watch the future")
        await kit.advance(0)
        *_, last = [await put(backend, kit.key("a"), b"%d" % n) for n in range(1, 4)]
        (batch,) = await kit.soon("a watch from a future revision sees what is after it", reading)
        expect_same("a watch gives only what is after its revision", batch.revision, last)
        watch.cancel()


async def check_a_watch_beyond_the_history_says_so(kit: BackendKit) -> None:
    """A watch from before the kept history raises HistoryGone; a new scan and a watch from its revision work."""
    if kit.history_limit is None:
        raise ValueError("this check needs a kit with a history_limit")
    async with kit.connection() as backend:
        start = (await backend.scan(kit.prefix)).revision
        *_, last = [await put(backend, kit.key("a"), b"%d" % n) for n in range(kit.history_limit + 2)]
        promise = "a watch from before the history raises HistoryGone"
        error = await expect_error(promise, HistoryGone, take(kit, backend.watch(kit.prefix, start), 1))
        expect("HistoryGone contains the earliest start", start < error.oldest < last, (start, error.oldest, last))
        oldest = backend.watch(kit.prefix, error.oldest)
        (batch,) = await take(kit, oldest, 1)
        expect("a watch from the oldest revision works", error.oldest < batch.revision <= last, batch)
        oldest.cancel()
        scanned = await backend.scan(kit.prefix)
        watch = backend.watch(kit.prefix, scanned.revision)
        revision = await put(backend, kit.key("a"), b"after")
        (batch,) = await take(kit, watch, 1)
        expect_same("after a new scan the watch works", batch.revision, revision)
        watch.cancel()


async def take(kit: BackendKit, watch: Watch, count: int) -> list[Batch]:
    """The next `count` batches; they must arrive within the kit's patience and be well formed."""

    async def read() -> list[Batch]:
        return [await anext(watch) for _ in range(count)]

    batches = await kit.soon(f"a watch gives the {count} batches that there are", read())
    for batch in batches:
        keys = [change.key for change in batch.changes]
        expect("a batch has changes, each of another key", bool(keys) and len(keys) == len(set(keys)), batch)
        revisions = {change.item.mod_revision for change in batch.changes if change.item is not None}
        expect("the items of a batch are of its revision", revisions <= {batch.revision}, batch)
    return batches


CHECKS: tuple[Check, ...] = (
    check_a_watch_starts_from_a_past_revision_and_goes_on,
    check_a_watch_has_no_gap_and_no_repetition,
    check_a_watch_resumes_where_another_ended,
    check_a_batch_is_one_revision,
    check_a_watch_sees_only_its_prefix,
    check_a_change_that_did_not_happen_is_not_seen,
    check_two_watches_are_independent,
    check_cancel_ends_a_watch,
    check_ready_takes_what_is_here_already,
    check_many_watchers_see_the_same,
    check_a_scan_and_a_watch_join_without_a_gap,
    check_a_watch_sees_a_lease_end,
    check_a_watch_from_a_future_revision_waits_for_it,
)
BOUNDED_HISTORY_CHECKS: tuple[Check, ...] = (check_a_watch_beyond_the_history_says_so,)
