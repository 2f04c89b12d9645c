"""Checks of keys: reading, revisions and versions, values of all kinds, `add`."""

from __future__ import annotations

import asyncio

from rallypoint.backends.contract import Backend
from rallypoint.errors import LeaseGone, Rejected
from rallypoint.kv.types import Delete, Exists, Item, Put
from rallypoint.testing.conformance.kit import (
    BackendKit,
    Check,
    expect,
    expect_error,
    expect_same,
    item_of,
    put,
    value_of,
)


async def check_an_absent_key_is_no_item(kit: BackendKit) -> None:
    """Reading an absent key returns no item, and the revision of the read."""
    async with kit.connection() as backend:
        got = await backend.get(kit.key("absent"))
        expect_same("an absent key is no item", got.item, None)
        expect("a read returns its revision", got.revision >= 1, got.revision)


async def check_a_written_key_is_read_back(kit: BackendKit) -> None:
    """A written key is read with its value, revisions, version and lease."""
    async with kit.connection() as backend:
        key = kit.key("a")
        revision = await put(backend, key, b"one")
        got = await backend.get(key)
        expect_same("a new key is as it was written", got.item, Item(key, b"one", revision, revision, 1, 0))
        expect_same("a read is at the current revision", got.revision, revision)


async def check_a_scan_gives_the_keys_under_a_prefix_in_order(kit: BackendKit) -> None:
    """A scan returns exactly the keys with the prefix, in order, and the revision."""
    async with kit.connection() as backend:
        names = ["b/2", "b/10", "b", "a", "c", "b/", "ba", "b/1/x"]
        *_, last = [await put(backend, kit.key(name), name.encode()) for name in names]
        scanned = await backend.scan(kit.key("b/"))
        wanted = [kit.key(name) for name in sorted(names) if name.startswith("b/")]
        expect_same("a scan gives the keys in order", [item.key for item in scanned.items], wanted)
        values = [kit.key(item.value.decode()) for item in scanned.items]
        expect_same("a scan gives each key with its own value", values, wanted)
        expect_same("a scan returns its revision", scanned.revision, last)
        items = [await item_of(backend, key) for key in wanted]
        expect_same("scan and get give the same items", list(scanned.items), items)


async def check_a_scan_of_nothing_is_empty(kit: BackendKit) -> None:
    """A scan of an empty range returns no items, and the revision."""
    async with kit.connection() as backend:
        revision = await put(backend, kit.key("elsewhere"))
        scanned = await backend.scan(kit.key("nothing/"))
        expect_same("a scan of nothing gives nothing", scanned.items, ())
        expect_same("an empty scan returns its revision", scanned.revision, revision)


async def check_every_change_has_a_revision_of_its_own(kit: BackendKit) -> None:
    """Each change of any key has a higher revision than the one before; reads make no revision."""
    async with kit.connection() as backend:
        revisions = [await put(backend, kit.key(f"{n % 3}")) for n in range(9)]
        expect("revisions grow with every change", revisions == sorted(set(revisions)), revisions)
        await backend.get(kit.key("0"))
        await backend.scan(kit.prefix)
        got = await backend.get(kit.key("0"))
        expect_same("reading makes no revision", got.revision, revisions[-1])


async def check_revisions_and_versions_over_the_life_of_a_key(kit: BackendKit) -> None:
    """Rewriting keeps the create revision and increments the version; a deleted key starts again."""
    async with kit.connection() as backend:
        key = kit.key("a")
        created = await put(backend, key, b"1")
        await put(backend, kit.key("other"))
        rewritten = await put(backend, key, b"2")
        expect_same("a rewritten key", (await backend.get(key)).item, Item(key, b"2", created, rewritten, 2, 0))
        same = await put(backend, key, b"2")
        expect_same(
            "writing the same value is a change", await item_of(backend, key), Item(key, b"2", created, same, 3, 0)
        )
        deleted = (await backend.txn((), (Delete(key),))).revision
        expect("deleting is a change", deleted > same, (deleted, same))
        expect_same("a deleted key is absent", (await backend.get(key)).item, None)
        again = await put(backend, key, b"3")
        expect_same("a key created again", await item_of(backend, key), Item(key, b"3", again, again, 1, 0))


async def check_values_of_all_kinds_are_kept(kit: BackendKit) -> None:
    """A value is any bytes: empty, all byte values, and a million bytes if the limits allow."""
    async with kit.connection() as backend:
        large = min(backend.limits.max_txn_bytes, 1_000_000)
        values = {
            "empty": b"",
            "all": bytes(range(256)),
            "zero": b"\0",
            "large": b"\xff" * large,
        }
        for name, value in values.items():
            await put(backend, kit.key(name), value)
        for name, value in values.items():
            seen = await value_of(backend, kit.key(name))
            expect(f"the value {name!r} is read as it was written", seen == value, None if seen is None else seen[:40])
        scanned = {item.key: item.value for item in (await backend.scan(kit.prefix)).items}
        expect(
            "a scan gives whole values", scanned == {kit.key(name): value for name, value in values.items()}, "others"
        )


async def check_keys_are_any_text(kit: BackendKit) -> None:
    """A key is any text; keys are ordered by code point and prefixes work on characters."""
    async with kit.connection() as backend:
        names = [
            "plain",
            "with space",
            "ключ",
            "鍵/1",
            "鍵/2",
            "🔑",
            "é",
            "e\u0301",
            "%2F",
            "a\nb",
            '"',
            "\\",
            "..",
            "//",
        ]
        for name in names:
            await put(backend, kit.key(name), name.encode())
        for name in names:
            expect_same(f"the key {name!r} is found", await value_of(backend, kit.key(name)), name.encode())
        keys = [item.key for item in (await backend.scan(kit.prefix)).items]
        expect_same("keys are in order of code points", keys, sorted(map(kit.key, names)))
        keys = [item.key for item in (await backend.scan(kit.key("鍵"))).items]
        expect_same("a prefix is any text", keys, [kit.key("鍵/1"), kit.key("鍵/2")])


# --- add --------------------------------------------------------------------------------------------------------------


async def check_add_counts_in_decimal(kit: BackendKit) -> None:
    """`add` starts from an absent key or a decimal number, up or down, and returns the sum and its revision."""
    async with kit.connection() as backend:
        key = kit.key("n")
        first = await backend.add(key, 5)
        expect_same("add to nothing gives the amount", (first.committed, first.value), (True, 5))
        item = await item_of(backend, key)
        expect_same("a sum is kept in decimal", item, Item(key, b"5", first.revision, first.revision, 1, 0))
        second = await backend.add(key, -12)
        expect_same("add can go below zero", second.value, -7)
        item = await item_of(backend, key)
        expect_same("adding rewrites the key", item, Item(key, b"-7", first.revision, second.revision, 2, 0))
        await put(backend, key, b"40")
        expect_same("add continues from a written number", (await backend.add(key, 2)).value, 42)
        expect_same("large numbers are exact", (await backend.add(key, 2**60)).value, 42 + 2**60)


async def check_add_is_atomic(kit: BackendKit) -> None:
    """Concurrent adds of several connections are all counted, and no sum is returned twice."""
    async with kit.connections(4) as backends:
        key = kit.key("n")

        async def add_often(backend: Backend) -> list[int]:
            return [(await backend.add(key, 1)).value for _ in range(10)]

        sums = await asyncio.gather(*(add_often(backend) for backend in backends for _ in range(2)))
        seen = sorted(value for values in sums for value in values)
        expect_same("every add gives a sum of its own", seen, list(range(1, 81)))
        expect_same("no add is lost", await value_of(backends[0], key), b"80")


async def check_add_refuses_what_is_no_number(kit: BackendKit) -> None:
    """`add` to a value that is not a decimal number is Rejected, and the value does not change."""
    async with kit.connection() as backend:
        key = kit.key("n")
        for value in (b"seven", b"", b"1.5", b"\xff"):
            await put(backend, key, value)
            await expect_error(f"add to {value!r} is rejected", Rejected, backend.add(key, 1))
            expect_same("a rejected add writes nothing", await value_of(backend, key), value)


async def check_add_can_be_refused_by_compares(kit: BackendKit) -> None:
    """`add` with a compare that does not hold returns a result: not committed, 0, and nothing is written."""
    async with kit.connection() as backend:
        key, guard = kit.key("n"), kit.key("guard")
        before = await put(backend, key, b"3")
        refused = await backend.add(key, 1, compares=(Exists(guard),))
        expect_same("a refused add is not committed", (refused.committed, refused.value), (False, 0))
        got = await backend.get(key)
        expect_same("a refused add writes nothing", (got.item and got.item.value, got.revision), (b"3", before))
        await put(backend, guard)
        done = await backend.add(key, 1, compares=(Exists(guard), Exists(key)))
        expect_same("add is done if its compares hold", (done.committed, done.value), (True, 4))


async def check_add_can_hang_on_a_lease(kit: BackendKit) -> None:
    """A key written by `add` ends with its lease; under an ended lease `add` raises LeaseGone and writes nothing."""
    async with kit.connection() as backend:
        key = kit.key("n")
        lease = await backend.grant(kit.ttl_s)
        await backend.add(key, 1, lease=lease)
        expect_same("the sum is under the lease", (await item_of(backend, key)).lease, lease)
        await backend.revoke(lease)
        expect_same("the sum is removed with its lease", await value_of(backend, key), None)
        await expect_error("add under an ended lease raises", LeaseGone, backend.add(key, 1, lease=lease))
        expect_same("and nothing is written", await value_of(backend, key), None)


async def check_a_deleted_key_can_be_deleted_with_another_written(kit: BackendKit) -> None:
    """One transaction may delete some keys and write others; all of it is read together."""
    async with kit.connection() as backend:
        await put(backend, kit.key("old"), b"x")
        result = await backend.txn((), (Delete(kit.key("old")), Put(kit.key("new"), b"x")))
        scanned = await backend.scan(kit.prefix)
        expect_same("a rename leaves only the new key", [item.key for item in scanned.items], [kit.key("new")])
        expect_same("it is read at its revision", scanned.revision, result.revision)


CHECKS: tuple[Check, ...] = (
    check_an_absent_key_is_no_item,
    check_a_written_key_is_read_back,
    check_a_scan_gives_the_keys_under_a_prefix_in_order,
    check_a_scan_of_nothing_is_empty,
    check_every_change_has_a_revision_of_its_own,
    check_revisions_and_versions_over_the_life_of_a_key,
    check_values_of_all_kinds_are_kept,
    check_keys_are_any_text,
    check_add_counts_in_decimal,
    check_add_is_atomic,
    check_add_refuses_what_is_no_number,
    check_add_can_be_refused_by_compares,
    check_add_can_hang_on_a_lease,
    check_a_deleted_key_can_be_deleted_with_another_written,
)
