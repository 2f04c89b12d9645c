"""Checks of the store's waiting calls: `get` and `wait`, time-outs, `watch`, barriers and gathers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from rallypoint.errors import StoreTimeoutError
from rallypoint.kv.types import Item
from rallypoint.store import AsyncStore
from rallypoint.testing.conformance.kit import expect, expect_error, expect_same
from rallypoint.testing.conformance.store_kit import SHORT_S, Group, StoreCheck, StoreKit, started


async def check_get_waits_until_another_member_sets(kit: StoreKit) -> None:
    """`get` of an absent key waits, and returns when any member writes it with any call."""
    async with kit.members(3) as group:
        one, two, three = group.stores
        writes: dict[str, Callable[[], Awaitable[object]]] = {
            "set": lambda: three.set("set", b"1"),
            "add": lambda: three.add("add", 1),
            "append": lambda: three.append("append", b"1"),
            "compare_set": lambda: three.compare_set("compare_set", b"", b"1"),
            "multi_set": lambda: three.multi_set(["multi_set"], [b"1"]),
        }
        for key, write in writes.items():
            async with started(one.get(key)) as first, started(two.get(key)) as second:
                await kit.advance(SHORT_S)
                expect_same("get waits for an absent key", (first.done(), second.done()), (False, False))
                await write()
                expect_same(f"get wakes on {key}", await kit.soon("get wakes", first), b"1")
                expect_same(f"every get wakes on {key}", await kit.soon("get wakes", second), b"1")


async def check_get_is_not_woken_by_a_longer_key(kit: StoreKit) -> None:
    """`get` waits for its key, not for one with the same prefix."""
    async with kit.members(2) as group:
        one, other = group.stores
        async with started(one.get("a")) as waiting:
            await other.multi_set(["a/b", "ab", "A"], ["", "", ""])
            await kit.advance(SHORT_S)
            expect_same("another key does not wake it", waiting.done(), False)
            await other.set("a", b"now")
            expect_same("its own key does", await kit.soon("get wakes", waiting), b"now")


async def check_wait_and_multi_get_wait_for_all_keys(kit: StoreKit) -> None:
    """`wait` and `multi_get` return when all of their keys exist, in any order of writing."""
    async with kit.members(2) as group:
        one, other = group.stores
        await other.set("b", b"2")
        async with started(one.wait(["a", "b", "c"])) as waiting, started(one.multi_get(["a", "b", "c"])) as getting:
            await other.set("c", b"3")
            await kit.advance(SHORT_S)
            expect_same("one is still absent", (waiting.done(), getting.done()), (False, False))
            await other.set("a", b"1")
            await kit.soon("wait returns", waiting)
            expect_same("multi_get gives all", await kit.soon("multi_get returns", getting), [b"1", b"2", b"3"])
        await kit.soon("wait for no keys returns", one.wait([]))


async def check_time_outs_name_the_missing_keys_and_come_in_time(kit: StoreKit) -> None:
    """A time-out is on time and names exactly the missing keys."""
    async with kit.members(2) as group:
        store = group.stores[0]
        await group.stores[1].set("there", b"")
        calls: dict[str, tuple[Callable[[], Awaitable[object]], tuple[str, ...]]] = {
            "get": (lambda: store.get("absent", SHORT_S), ("absent",)),
            "wait": (lambda: store.wait(["x", "there", "y"], SHORT_S), ("x", "y")),
            "multi_get": (lambda: store.multi_get(["there", "z"], SHORT_S), ("z",)),
        }
        for name, (call, missing) in calls.items():
            async with kit.in_time(f"the time-out of {name} comes in time", SHORT_S):
                error = await expect_error(f"{name} times out", StoreTimeoutError, call())
            expect_same(f"{name} names what is missing", error.missing, missing)
            expect(f"{name} says it in words", all(key in str(error) for key in (name, *missing)), str(error))
            expect(f"{name} does not blame what is there", "there:" not in str(error), str(error))


async def check_calls_use_the_time_out_of_the_store(kit: StoreKit) -> None:
    """A call without a time-out argument uses the store's time-out, which can be changed."""
    async with kit.members(2) as group:
        store, other = group.stores
        expect_same("the time-out at first", store.timeout_s, 300.0)
        store.timeout_s = SHORT_S
        for call in (store.get("absent"), store.wait(["absent"]), store.barrier("alone")):
            async with kit.in_time("the store's own time-out comes in time", SHORT_S):
                await expect_error("it times out", StoreTimeoutError, call)
        async with kit.in_time("a call's own time-out counts", 2 * SHORT_S):
            await expect_error("it times out", StoreTimeoutError, store.get("absent", 2 * SHORT_S))
        expect_same("others have their own", other.timeout_s, 300.0)


async def check_watch_gives_every_change_of_a_key(kit: StoreKit) -> None:
    """`watch` yields the current value of a key, then every change in order; None for its deletion."""
    async with kit.members(2) as group:
        one, other = group.stores
        await other.set("k", b"0")
        seen: list[bytes | None] = []
        changed = asyncio.Event()

        async def follow() -> None:
            async for value in one.watch("k"):
                seen.append(value)
                changed.set()

        async def until(count: int) -> None:
            while len(seen) < count:
                changed.clear()
                await changed.wait()

        async with started(follow()):
            await kit.soon("watch begins with the current value", until(1))
            await other.set("k", b"1")
            await other.set("k/2", b"not this one")
            await other.append("k", b"2")
            await other.delete_key("k")
            await other.add("k", 3)
            await kit.soon("watch gives all changes", until(len([b"0", b"1", b"12", None, b"3"])))
        expect_same("what a watch gave", seen, [b"0", b"1", b"12", None, b"3"])


async def check_watch_of_an_absent_key_begins_with_its_creation(kit: StoreKit) -> None:
    """`watch` of an absent key yields nothing until it is written."""
    async with kit.members(2) as group:
        one, other = group.stores
        changes = one.watch("k")
        async with started(_first(changes)) as first:
            await kit.advance(SHORT_S)
            expect_same("there is nothing to give", first.done(), False)
            await other.set("k", b"")
            expect_same("the first value", await kit.soon("watch gives it", first), b"")


# --- all ranks together -----------------------------------------------------------------------------------------------


async def check_barrier_holds_everybody_until_the_last_comes(kit: StoreKit) -> None:
    """No rank passes a barrier before every rank has arrived, then all do; a name can be reused."""
    async with kit.members(3) as group:
        for _ in range(3):
            async with (
                started(group.stores[0].barrier("b")) as first,
                started(group.stores[1].barrier("b")) as second,
            ):
                await kit.advance(SHORT_S)
                expect_same("no rank passes before the last one arrives", (first.done(), second.done()), (False, False))
                await kit.soon("the last one passes", group.stores[2].barrier("b"))
                await kit.soon("the others pass", asyncio.gather(first, second))


async def check_barriers_of_other_names_are_other_barriers(kit: StoreKit) -> None:
    """Barriers with different names are independent, however similar the names are."""
    async with kit.members(2) as group:
        for name, other_name in (("a", "b"), ("a", "a/in"), ("a/b", "a%2Fb"), ("ü", "u"), ("", "/")):
            async with started(group.stores[0].barrier(name)) as one, started(group.stores[1].barrier(other_name)):
                await kit.advance(SHORT_S)
                expect_same(f"{name!r} is not {other_name!r}", one.done(), False)


async def check_barrier_names_the_absent_ranks(kit: StoreKit) -> None:
    """A barrier times out on time and names the absent ranks."""
    async with kit.members(4) as group:
        async with started(group.stores[2].barrier("b")), kit.in_time("a barrier times out in time", SHORT_S):
            error = await expect_error("a barrier times out", StoreTimeoutError, group.stores[0].barrier("b", SHORT_S))
        expect_same("the absent ranks", error.missing, (1, 3))
        expect("it says so in words", "2 of 4" in str(error) and "1, 3" in str(error), str(error))


async def check_gather_gives_all_values_in_rank_order(kit: StoreKit) -> None:
    """`gather` returns the values of all ranks to all ranks, in rank order; a name can be reused."""
    async with kit.members(12) as group:
        for turn in range(2):
            gathered = await kit.soon("gather ends", _gather(group, turn))
            wanted = [f"turn {turn} of {rank}".encode() for rank in range(12)]
            for values in gathered:
                expect_same("everyone's value, in rank order", values, wanted)


async def check_gather_names_the_absent_ranks(kit: StoreKit) -> None:
    """A `gather` times out on time and names the absent ranks."""
    async with kit.members(3) as group:
        async with started(group.stores[0].gather("g", b"")), kit.in_time("gather times out in time", SHORT_S):
            error = await expect_error("gather times out", StoreTimeoutError, group.stores[1].gather("g", b"", SHORT_S))
        expect_same("the absent ranks", error.missing, (2,))


async def check_one_member_alone_need_not_wait(kit: StoreKit) -> None:
    """In a round of one, `barrier` and `gather` return at once."""
    async with kit.members(1) as group:
        (store,) = group.stores
        await kit.soon("a barrier of one", store.barrier("b"))
        expect_same("gather of one", await kit.soon("gather of one", store.gather("g", "x")), [b"x"])


async def check_barriers_do_not_pile_up(kit: StoreKit) -> None:
    """The keys of barriers and gathers in the backend do not grow with their number of uses."""
    async with kit.members(2) as group:

        async def left_behind() -> tuple[Item, ...]:
            return (await group.backend.scan(kit.keys.store(group.stores[0].round))).items

        async def use(store: AsyncStore, times: int) -> None:
            for turn in range(times):
                await store.barrier("b")
                await store.gather("g", f"{turn}")

        await kit.soon("all pass", asyncio.gather(*(use(store, 2) for store in group.stores)))
        few = len(await left_behind())
        await kit.soon("all pass", asyncio.gather(*(use(store, 10) for store in group.stores)))
        items = await left_behind()
        expect("what is left does not grow", len(items) <= few, [item.key for item in items])


async def _first(changes: AsyncIterator[bytes | None]) -> bytes | None:
    return await anext(changes)


async def _gather(group: Group, turn: int) -> list[list[bytes]]:
    return await asyncio.gather(*(store.gather("g", f"turn {turn} of {store.rank}") for store in group.stores))


CHECKS: tuple[StoreCheck, ...] = (
    check_get_waits_until_another_member_sets,
    check_get_is_not_woken_by_a_longer_key,
    check_wait_and_multi_get_wait_for_all_keys,
    check_time_outs_name_the_missing_keys_and_come_in_time,
    check_calls_use_the_time_out_of_the_store,
    check_watch_gives_every_change_of_a_key,
    check_watch_of_an_absent_key_begins_with_its_creation,
    check_barrier_holds_everybody_until_the_last_comes,
    check_barriers_of_other_names_are_other_barriers,
    check_barrier_names_the_absent_ranks,
    check_gather_gives_all_values_in_rank_order,
    check_gather_names_the_absent_ranks,
    check_one_member_alone_need_not_wait,
    check_barriers_do_not_pile_up,
)
