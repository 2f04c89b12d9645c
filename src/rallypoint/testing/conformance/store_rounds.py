"""Checks of the store with respect to rounds: separate stores, fencing of non-members, outages, clean-up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rallypoint.errors import StoreFencedError, StoreTimeoutError
from rallypoint.store import AsyncStore
from rallypoint.testing.conformance.kit import NotConforming, expect, expect_error, expect_same
from rallypoint.testing.conformance.store_kit import SHORT_S, Group, StoreCheck, StoreKit, started


async def check_rounds_do_not_see_each_other(kit: StoreKit) -> None:
    """A new round starts with an empty store, and its writes are not visible through the old store."""
    async with kit.members(2) as group:
        old = group.stores
        await old[0].set("k", b"old")
        await asyncio.gather(*(store.barrier("b") for store in old))
        new = await group.next_round()
        expect("rounds have numbers that grow", new[0].round > old[0].round, (old[0].round, new[0].round))
        expect_same("a new round's store is empty", (await new[0].num_keys(), await new[1].check(["k"])), (0, False))
        await new[1].set("k", b"new")
        expect_same("the new value through the new store", await new[0].get("k"), b"new")
        expect_same("the old value through the old store", await old[0].get("k"), b"old")
        async with started(new[0].barrier("b")) as waiting:
            await kit.advance(SHORT_S)
            expect_same("who came to a barrier of the old round has not come here", waiting.done(), False)
            await kit.soon("the barrier of the new round", new[1].barrier("b"))
            await kit.soon("the barrier of the new round", waiting)


async def check_who_left_is_fenced(kit: StoreKit) -> None:
    """After a member has left, none of its writing calls has any effect."""
    async with kit.members(2) as group:
        await _prepare(group.stores[0])
        await group.leave_round(1)
        await _expect_fenced(kit, group.stores[1], group.stores[0])


async def check_who_joined_again_is_fenced_from_its_old_round(kit: StoreKit) -> None:
    """The store of the previous round can still be read by its members, but not written."""
    async with kit.members(2) as group:
        old = group.stores
        await _prepare(old[0])
        await group.next_round()
        await _expect_fenced(kit, old[0], old[1])
        await _expect_fenced(kit, old[1], old[0])


async def check_who_lost_its_session_is_fenced(kit: StoreKit) -> None:
    """When the backend has ended a member's session, none of its writes has any effect."""
    async with kit.members(2) as group:
        await _prepare(group.stores[0])
        await group.lose_session(1)
        await _expect_fenced(kit, group.stores[1], group.stores[0])
        await group.stores[0].set("k", b"still a member")


async def check_who_is_taken_for_dead_is_fenced(kit: StoreKit) -> None:
    """A member that was silent for its time to live cannot write, even if it continues later."""
    async with kit.members(2) as group:
        await _prepare(group.stores[0])
        group.crash(1)
        await kit.advance(kit.ttl_s + kit.lease_slack_s)
        await _expect_fenced(kit, group.stores[1], group.stores[0])


async def check_the_store_works_after_a_brief_outage(kit: StoreKit) -> None:
    """While the backend is unreachable calls wait; they are answered when it is back."""
    async with kit.members(2) as group:
        one, other = group.stores
        await other.set("there", b"1")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "set": lambda: one.set("k", b""),
            "get": lambda: one.get("there"),
            "check": lambda: one.check(["there"]),
            "add": lambda: one.add("n", 1),
            "append": lambda: one.append("a", b"1"),
            "compare_set": lambda: one.compare_set("there", "1", "1"),
            "delete_key": lambda: one.delete_key("nothing"),
            "num_keys": lambda: one.num_keys(),
            "multi_set": lambda: one.multi_set(["x"], [b""]),
            "multi_get": lambda: one.multi_get(["there"]),
            "wait": lambda: one.wait(["there"]),
        }
        for name, call in calls.items():
            with group.outage(0):
                task = asyncio.ensure_future(call())
                await kit.advance(SHORT_S)
                expect_same(f"{name} waits while the backend is away", task.done(), False)
            await kit.soon(f"{name} is answered when the backend is back", task)
        expect_same("it was executed once", (await other.get("n"), await other.get("a")), (b"1", b"1"))


async def check_waits_go_on_through_an_outage(kit: StoreKit) -> None:
    """Waits for a key, a change or other ranks that are satisfied during an outage end after it."""
    async with kit.members(2) as group:
        one, other = group.stores
        for hanging in (False, True):
            name = f"hanging {hanging}"
            async with started(one.get(name)) as getting, started(one.barrier(name)) as meeting:
                await kit.advance(SHORT_S)
                with group.outage(0, hanging=hanging):
                    await other.set(name, b"meanwhile")
                    async with started(other.barrier(name)) as other_meeting:
                        await kit.advance(SHORT_S)
                        await kit.soon("the others are not held up", other_meeting)
                expect_same("get is told", await kit.soon("get is told", getting), b"meanwhile")
                await kit.soon("the barrier is told", meeting)


async def check_an_outage_longer_than_the_time_out_ends_in_time(kit: StoreKit) -> None:
    """A call times out also while the backend is unreachable, with an error that does not claim an outcome."""
    async with kit.members(2) as group:
        store = group.stores[0]
        store.timeout_s = SHORT_S
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "set": lambda: store.set("k", b""),
            "get": lambda: store.get("k"),
            "add": lambda: store.add("k", 1),
            "num_keys": lambda: store.num_keys(),
            "barrier": lambda: store.barrier("k"),
            "gather": lambda: store.gather("k", b""),
            "multi_set": lambda: store.multi_set(["x", "y"], [b"", b""]),
        }
        for hanging in (False, True):
            for name, call in calls.items():
                with group.outage(0, hanging=hanging):
                    async with kit.in_time(f"{name} ends in time", SHORT_S):
                        error = await expect_error(f"{name} times out", StoreTimeoutError, call())
                expect(f"{name} says that there was no answer", "no answer" in str(error), str(error))


async def check_old_rounds_are_collected(kit: StoreKit) -> None:
    """The store of a round is kept during the next round and removed after two."""
    async with kit.members(2) as group:
        first = group.stores[0].round
        await group.stores[0].multi_set(["a", "b"], ["1", "2"])
        await asyncio.gather(*(store.gather("g", b"x") for store in group.stores))
        await group.next_round()
        expect("the last round but one is kept", await _left(group, kit, first) > 0, "it is gone")
        await group.stores[0].set("a", b"second")
        second = group.stores[0].round
        await group.next_round()
        await _until_collected(group, kit, first)
        expect("the last round but one is kept", await _left(group, kit, second) > 0, "it is gone")
        await group.next_round()
        await _until_collected(group, kit, second)


async def _prepare(store: AsyncStore) -> None:
    await store.multi_set(["k", "n"], ["as it was", "1"])


async def _expect_fenced(kit: StoreKit, fenced: AsyncStore, reader: AsyncStore) -> None:
    """Check that every writing call of `fenced` is refused, and that `reader` sees no change."""
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "set": lambda: fenced.set("k", b"changed"),
        "add": lambda: fenced.add("n", 1),
        "append": lambda: fenced.append("k", b"changed"),
        "compare_set": lambda: fenced.compare_set("k", "as it was", "changed"),
        "compare_set of an absent key": lambda: fenced.compare_set("new", "", "changed"),
        "delete_key": lambda: fenced.delete_key("k"),
        "multi_set": lambda: fenced.multi_set(["k", "new"], ["changed", "changed"]),
        "barrier": lambda: fenced.barrier("b"),
        "gather": lambda: fenced.gather("g", b""),
    }
    for name, call in calls.items():
        error = await kit.soon(
            f"{name} is refused at once", expect_error(f"{name} is fenced", StoreFencedError, call())
        )
        expect("the error names the round", f"round {fenced.round}" in str(error), str(error))
    seen = (await reader.get("k"), await reader.get("n"), await reader.check(["new"]))
    expect_same("nothing was written", seen, (b"as it was", b"1", False))


async def _left(group: Group, kit: StoreKit, number: int) -> int:
    return len((await group.backend.scan(kit.keys.store(number))).items)


async def _until_collected(group: Group, kit: StoreKit, number: int) -> None:
    for _ in range(100):
        if await _left(group, kit, number) == 0:
            return
        await kit.advance(0.05)
    raise NotConforming("an old round's data is collected after two further rounds", f"round {number} is still there")


CHECKS: tuple[StoreCheck, ...] = (
    check_rounds_do_not_see_each_other,
    check_who_left_is_fenced,
    check_who_joined_again_is_fenced_from_its_old_round,
    check_who_lost_its_session_is_fenced,
    check_who_is_taken_for_dead_is_fenced,
    check_the_store_works_after_a_brief_outage,
    check_waits_go_on_through_an_outage,
    check_an_outage_longer_than_the_time_out_ends_in_time,
    check_old_rounds_are_collected,
)
