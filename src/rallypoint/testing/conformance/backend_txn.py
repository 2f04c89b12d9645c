"""Checks of transactions: compares, branches, answers, atomicity, revisions."""

from __future__ import annotations

from rallypoint.backends.contract import Backend
from rallypoint.errors import Rejected
from rallypoint.kv.types import (
    BranchOp,
    Compare,
    CreateRevisionIs,
    Delete,
    Deleted,
    DeleteRange,
    Exists,
    Get,
    GotItem,
    GotRange,
    Item,
    ModRevisionIs,
    Put,
    PutDone,
    Range,
    RangeEmpty,
    ValueIs,
    VersionIs,
)
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


async def check_every_compare_holds_and_fails_as_it_should(kit: BackendKit) -> None:
    """Each kind of compare holds exactly when it should; 0 as a version or revision means absent."""
    async with kit.connection() as backend:
        key, absent = kit.key("a"), kit.key("absent")
        await put(backend, key, b"1")
        await put(backend, key, b"2")
        item = await item_of(backend, key)
        cases: list[tuple[Compare, bool]] = [
            (Exists(key), True),
            (Exists(key, False), False),
            (Exists(absent), False),
            (Exists(absent, False), True),
            (ValueIs(key, b"2"), True),
            (ValueIs(key, b"1"), False),
            (ValueIs(absent, b""), False),
            (VersionIs(key, 2), True),
            (VersionIs(key, 1), False),
            (VersionIs(key, 0), False),
            (VersionIs(absent, 0), True),
            (VersionIs(absent, 1), False),
            (CreateRevisionIs(key, item.create_revision), True),
            (CreateRevisionIs(key, item.mod_revision), False),
            (CreateRevisionIs(key, 0), False),
            (CreateRevisionIs(absent, 0), True),
            (ModRevisionIs(key, item.mod_revision), True),
            (ModRevisionIs(key, item.create_revision), False),
            (ModRevisionIs(key, 0), False),
            (ModRevisionIs(absent, 0), True),
            (RangeEmpty(kit.key("nothing/")), True),
            (RangeEmpty(kit.prefix), False),
            (RangeEmpty(key), False),
        ]
        for compare, holds in cases:
            result = await backend.txn((compare,), (), ())
            expect_same(f"{compare} {'holds' if holds else 'fails'} for {item}", result.committed, holds)


async def check_a_transaction_needs_all_its_compares(kit: BackendKit) -> None:
    """One failing compare refuses the whole transaction; without compares it commits."""
    async with kit.connection() as backend:
        key = kit.key("a")
        await put(backend, key, b"1")
        refused: tuple[tuple[Compare, ...], ...] = ((Exists(key), VersionIs(key, 7)), (VersionIs(key, 7), Exists(key)))
        for compares in refused:
            result = await backend.txn(compares, (Put(key, b"2"),))
            expect_same("one failing compare refuses", result.committed, False)
            expect_same("a refused transaction does not do `then`", await value_of(backend, key), b"1")
        result = await backend.txn((Exists(key), VersionIs(key, 1)), (Put(key, b"2"),))
        expect_same("all compares hold: committed", result.committed, True)
        expect_same("no compares: committed", (await backend.txn((), (Put(key, b"3"),))).committed, True)


async def check_a_refusal_reads_what_was_compared(kit: BackendKit) -> None:
    """Refused without an `otherwise`: one answer per compare, in order, with the current values."""
    async with kit.connection() as backend:
        a, b, absent = kit.key("a"), kit.key("b"), kit.key("absent")
        await put(backend, a, b"1")
        revision = await put(backend, b, b"2")
        compares = (VersionIs(b, 9), ValueIs(a, b"1"), Exists(absent), RangeEmpty(kit.prefix), RangeEmpty(absent))
        result = await backend.txn(compares, (Put(a, b"x"),))
        expect_same("a refusal is a value", (result.committed, result.revision), (False, revision))
        item_a, item_b = await item_of(backend, a), await item_of(backend, b)
        wanted = (GotItem(item_b), GotItem(item_a), GotItem(None), GotRange((item_a,), 2), GotRange((), 0))
        expect_same("a refusal reads what was compared, in order", result.results, wanted)


async def check_a_refusal_does_the_otherwise_branch(kit: BackendKit) -> None:
    """Refused with an `otherwise`: that is executed, including writes, and its answers are returned."""
    async with kit.connection() as backend:
        key, other = kit.key("a"), kit.key("other")
        result = await backend.txn((Exists(key),), (Put(key, b"then"),), (Put(other, b"otherwise"), Get(key)))
        expect_same("the first branch was not taken", result.committed, False)
        expect_same("the answers are those of `otherwise`", result.results, (PutDone(), GotItem(None)))
        item = await item_of(backend, other)
        expect_same("`otherwise` writes", item, Item(other, b"otherwise", result.revision, result.revision, 1, 0))
        result = await backend.txn((Exists(other),), (Get(other),), (Put(key, b"x"),))
        expect_same("`otherwise` is not done when committed", await value_of(backend, key), None)
        expect_same("the answers are those of `then`", result.results, (GotItem(item),))


async def check_answers_come_in_the_order_of_the_operations(kit: BackendKit) -> None:
    """There is one answer per operation, in order."""
    async with kit.connection() as backend:
        for name in ("x/1", "x/2", "x/3", "y"):
            await put(backend, kit.key(name), name.encode())
        first, y = await item_of(backend, kit.key("x/1")), await item_of(backend, kit.key("y"))
        operations = (
            Get(kit.key("y")),
            Put(kit.key("z"), b"z"),
            Range(kit.key("x/"), limit=1),
            Range(kit.key("x/"), count_only=True),
            Delete(kit.key("y")),
            Delete(kit.key("absent")),
            DeleteRange(kit.key("x/")),
            Get(kit.key("absent")),
        )
        result = await backend.txn((), operations)
        wanted = (
            GotItem(y),
            PutDone(),
            GotRange((first,), 3),
            GotRange((), 3),
            Deleted(1),
            Deleted(0),
            Deleted(3),
            GotItem(None),
        )
        expect_same("answers come in order", results_of(result, len(operations)), wanted)
        keys = [item.key for item in (await backend.scan(kit.prefix)).items]
        expect_same("what was not deleted is there", keys, [kit.key("z")])


async def check_reads_in_a_transaction_see_its_earlier_writes(kit: BackendKit) -> None:
    """A read sees earlier writes of the same transaction, and not later ones."""
    async with kit.connection() as backend:
        a, b = kit.key("a"), kit.key("b")
        created = await put(backend, a, b"old")
        operations = (Get(a), Put(a, b"new"), Get(a), Put(b, b"b"), Range(kit.prefix), Get(b))
        result = await backend.txn((), operations)
        now = result.revision
        item_a, item_b = Item(a, b"new", created, now, 2, 0), Item(b, b"b", now, now, 1, 0)
        wanted = (
            GotItem(Item(a, b"old", created, created, 1, 0)),
            PutDone(),
            GotItem(item_a),
            PutDone(),
            GotRange((item_a, item_b), 2),
            GotItem(item_b),
        )
        expect_same("reads see earlier writes only", result.results, wanted)
        result = await backend.txn((), (DeleteRange(kit.prefix), Get(a), Range(kit.prefix)))
        expect_same("reads see earlier deletes", result.results, (Deleted(2), GotItem(None), GotRange((), 0)))


async def check_a_transaction_has_one_revision(kit: BackendKit) -> None:
    """All changes of a transaction have the same revision, up to the limits."""
    async with kit.connection() as backend:
        names = [f"many/{n:04}" for n in range(min(backend.limits.max_txn_ops, 128))]
        before = await put(backend, kit.key("before"))
        result = await backend.txn((), [Put(kit.key(name), b"x") for name in names])
        scanned = await backend.scan(kit.key("many/"))
        expect_same("all writes were done", len(scanned.items), len(names))
        revisions = {(item.create_revision, item.mod_revision) for item in scanned.items}
        expect_same("all have the revision of the transaction", revisions, {(result.revision, result.revision)})
        expect("it is a new revision", result.revision > before, (before, result.revision))
        expect_same("it is the only one", scanned.revision, result.revision)


async def check_nothing_changed_is_no_revision(kit: BackendKit) -> None:
    """Reads, refusals and deletes of absent keys make no revision."""
    async with kit.connection() as backend:
        key = kit.key("a")
        before = await put(backend, key, b"1")
        absent = kit.key("absent")
        branches: tuple[tuple[BranchOp, ...], ...] = (
            (Get(key), Range(kit.prefix)),
            (Delete(absent),),
            (DeleteRange(absent),),
            (),
        )
        for branch in branches:
            result = await backend.txn((), branch)
            expect_same(f"{branch} makes no revision", (result.committed, result.revision), (True, before))
        refused = await backend.txn((Exists(absent),), (Put(absent, b""),))
        expect_same("a refusal makes no revision", (refused.committed, refused.revision), (False, before))
        expect_same("the revision is as it was", (await backend.get(key)).revision, before)


async def check_a_key_is_written_once_in_a_transaction(kit: BackendKit) -> None:
    """A branch that writes a key twice is Rejected and not executed."""
    async with kit.connection() as backend:
        key, other = kit.key("a/1"), kit.key("b")
        before = await put(backend, key, b"before")
        branches: tuple[tuple[BranchOp, ...], ...] = (
            (Put(other, b""), Put(key, b"1"), Put(key, b"2")),
            (Put(other, b""), Put(key, b"1"), Delete(key)),
            (Put(other, b""), DeleteRange(kit.key("a/")), Put(key, b"1")),
        )
        for branch in branches:
            await expect_error(f"{branch} is rejected", Rejected, backend.txn((), branch))
            got = await backend.get(key)
            seen = (got.item and got.item.value, got.revision, await value_of(backend, other))
            expect_same("a rejected transaction does nothing", seen, (b"before", before, None))


async def check_a_range_can_be_limited_or_counted(kit: BackendKit) -> None:
    """A range returns at most `limit` items and the total count; with `count_only`, only the count."""
    async with kit.connection() as backend:
        items = []
        for n in range(5):
            await put(backend, kit.key(f"r/{n}"), b"%d" % n)
            items.append(await item_of(backend, kit.key(f"r/{n}")))
        await put(backend, kit.key("s"))
        prefix = kit.key("r/")
        cases = {
            Range(prefix): GotRange(tuple(items), 5),
            Range(prefix, limit=2): GotRange(tuple(items[:2]), 5),
            Range(prefix, limit=9): GotRange(tuple(items), 5),
            Range(prefix, count_only=True): GotRange((), 5),
            Range(kit.key("none/"), limit=1): GotRange((), 0),
        }
        for operation, wanted in cases.items():
            expect_same(f"{operation}", await _one(backend, operation), wanted)


async def _one(backend: Backend, operation: BranchOp) -> object:
    (answer,) = results_of(await backend.txn((), (operation,)), 1)
    return answer


CHECKS: tuple[Check, ...] = (
    check_every_compare_holds_and_fails_as_it_should,
    check_a_transaction_needs_all_its_compares,
    check_a_refusal_reads_what_was_compared,
    check_a_refusal_does_the_otherwise_branch,
    check_answers_come_in_the_order_of_the_operations,
    check_reads_in_a_transaction_see_its_earlier_writes,
    check_a_transaction_has_one_revision,
    check_nothing_changed_is_no_revision,
    check_a_key_is_written_once_in_a_transaction,
    check_a_range_can_be_limited_or_counted,
)
