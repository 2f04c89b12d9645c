"""Checks of the store's calls that do not wait: all members read what any member has written."""

from __future__ import annotations

import asyncio
from typing import Any

from rallypoint.errors import StoreError, StoreTimeoutError
from rallypoint.testing.conformance.kit import expect, expect_error, expect_same
from rallypoint.testing.conformance.store_kit import SHORT_S, StoreCheck, StoreKit

MANY = 300
"""More keys than the usual backend accepts in one transaction."""


async def check_what_one_member_sets_every_member_gets(kit: StoreKit) -> None:
    """A key that one member has set is visible to all members; setting it again replaces it."""
    async with kit.members(3) as group:
        await group.stores[1].set("key", b"one")
        for store in group.stores:
            expect_same("a key that was set", await store.get("key"), b"one")
        await group.stores[2].set("key", b"two")
        for store in group.stores:
            expect_same("a key that was set again", await store.get("key"), b"two")


async def check_values_of_all_kinds(kit: StoreKit) -> None:
    """A value is any bytes, also empty or large; a str is encoded as UTF-8."""
    values: dict[str, bytes | str] = {
        "empty": b"",
        "every": bytes(range(256)),
        "large": b"\xfe" * 500_000,
        "text": "größer ↑ 𝛼",
        "empty text": "",
        "number": "17",
    }
    async with kit.members(2) as group:
        one, other = group.stores
        for key, value in values.items():
            await one.set(key, value)
        for key, value in values.items():
            wanted = value.encode() if isinstance(value, str) else value
            expect_same(f"the value {key}", await other.get(key), wanted)


async def check_a_value_that_is_neither_bytes_nor_text_is_refused(kit: StoreKit) -> None:
    """A number is not a value (nor a number of zero bytes): TypeError, and nothing is written."""
    async with kit.members(1) as group:
        (store,) = group.stores
        for value in (5, None, 1.5, ["a"]):
            await expect_error("only bytes and text are values", TypeError, store.set("key", value))  # type: ignore[arg-type]
            await expect_error("only bytes and text are values", TypeError, store.append("key", value))  # type: ignore[arg-type]
        expect_same("nothing was written", await store.num_keys(), 0)
        await store.set("key", bytearray(b"ab"))  # type: ignore[arg-type]
        expect_same("any kind of bytes is a value", await store.get("key"), b"ab")


async def check_keys_of_all_kinds(kit: StoreKit) -> None:
    """A key is any text: with slashes, blanks, other alphabets, even empty; all of them are distinct."""
    names = ["a", "a/b", "a/b/c", "/a", "a/", "", "/", " ", "ключ", "a%2Fb", "a\nb", "a" * 500, "in/0", "..", "k/a"]
    async with kit.members(2) as group:
        one, other = group.stores
        for name in names:
            await one.set(name, f"value of {name}")
        for name in names:
            expect_same(f"the key {name!r}", await other.get(name), f"value of {name}".encode())
        expect_same("each of them is a key", await other.num_keys(), len(names))
        await one.delete_key("a/b")
        expect_same("only that one is deleted", await other.check([name for name in names if name != "a/b"]), True)
        expect_same("a deleted key is gone", await other.check(["a/b"]), False)


async def check_what_cannot_be_a_key_is_refused(kit: StoreKit) -> None:
    """Keys that are not text, or not valid UTF-8, raise TypeError or UnicodeEncodeError; the store still works."""
    async with kit.members(1) as group:
        (store,) = group.stores
        for key, error in ((5, TypeError), (None, TypeError), (b"key", TypeError), ("\ud800", UnicodeEncodeError)):
            name: Any = key
            calls = (
                store.set(name, b""),
                store.get(name, SHORT_S),
                store.wait([name], SHORT_S),
                store.check([name]),
                store.add(name, 1),
                store.compare_set(name, b"", b""),
                store.delete_key(name),
                store.append(name, b""),
                store.multi_get(["a", name], SHORT_S),
                store.multi_set(["a", name], [b"", b""]),
            )
            for call in calls:
                await expect_error(f"{key!r} is no key", error, call)
        expect_same("nothing was written", await store.num_keys(), 0)


async def check_check_tells_whether_all_keys_exist(kit: StoreKit) -> None:
    """`check` is true if all the keys exist now, does not wait, and is true without keys."""
    async with kit.members(2) as group:
        one, other = group.stores
        expect_same("check of an absent key", await one.check(["a"]), False)
        await one.multi_set(["a", "b"], [b"", b"1"])
        expect_same("check of keys that exist", await other.check(["a", "b"]), True)
        expect_same("check of one that does not", await other.check(["a", "b", "c"]), False)
        expect_same("check of no keys", await other.check([]), True)


async def check_a_text_is_not_a_list_of_keys(kit: StoreKit) -> None:
    """Calls with several keys refuse a single text, instead of treating its letters as keys."""
    async with kit.members(1) as group:
        (store,) = group.stores
        promise = "several keys are a list, not a text"
        await expect_error(promise, TypeError, store.check("ab"))
        await expect_error(promise, TypeError, store.wait("ab", SHORT_S))
        await expect_error(promise, TypeError, store.multi_get("ab", SHORT_S))
        await expect_error(promise, TypeError, store.multi_set("ab", [b"", b""]))


async def check_add_counts_from_zero(kit: StoreKit) -> None:
    """`add` starts at 0, returns the new number, accepts negative amounts, and its value is decimal text."""
    async with kit.members(2) as group:
        one, other = group.stores
        expect_same("the first add", await one.add("n", 5), 5)
        expect_same("the second add", await other.add("n", 2), 7)
        expect_same("adding less than nothing", await one.add("n", -10), -3)
        expect_same("adding nothing reads", await other.add("n", 0), -3)
        expect_same("a number is decimal text", await other.get("n"), b"-3")
        await one.set("m", "41")
        expect_same("adding to a text that is a number", await other.add("m", 1), 42)


async def check_an_amount_is_a_whole_number_of_64_bits(kit: StoreKit) -> None:
    """`add` accepts integers (`operator.index`). Other types are a TypeError, too large numbers a StoreError."""
    async with kit.members(1) as group:
        (store,) = group.stores
        amounts: tuple[Any, ...] = (1.5, 2.0, "5", b"5", None)
        for amount in amounts:
            await expect_error(f"{amount!r} is no amount", TypeError, store.add("n", amount))
        for amount in (2**63, -(2**63) - 1, 2**70):
            await expect_error(f"{amount} does not fit", StoreError, store.add("n", amount))
        expect_same("nothing was written", await store.num_keys(), 0)
        expect_same("a bool is an int", await store.add("n", True), 1)
        expect_same("the least of 64 bits", await store.add("least", -(2**63)), -(2**63))
        expect_same("the greatest of 64 bits", await store.add("greatest", 2**63 - 1), 2**63 - 1)


async def check_add_to_what_is_no_number_is_an_error(kit: StoreKit) -> None:
    """`add` to a value that is not a number is a StoreError and changes nothing."""
    async with kit.members(1) as group:
        (store,) = group.stores
        await store.set("text", b"abc")
        error = await expect_error("adding to what is no number", StoreError, store.add("text", 1))
        expect("the error names the key", "text" in str(error), str(error))
        expect_same("nothing was written", await store.get("text"), b"abc")


async def check_adds_of_many_members_lose_nothing(kit: StoreKit) -> None:
    """All concurrent adds count, and no two of them return the same number."""
    async with kit.members(4) as group:

        async def count(rank: int) -> list[int]:
            return [await group.stores[rank].add("n", 1) for _ in range(25)]

        answers = await kit.soon("adds end", asyncio.gather(*(count(rank) for rank in range(4))))
        seen = sorted(number for numbers in answers for number in numbers)
        expect_same("every add is counted once", seen, list(range(1, 101)))
        expect_same("the sum", await group.stores[0].get("n"), b"100")


async def check_compare_set_in_all_five_cases(kit: StoreKit) -> None:
    """As in torch: writes if the key holds the expected value, or is absent and the expected value is empty."""
    async with kit.members(2) as group:
        one, other = group.stores
        expect_same("absent, something expected: the expected value", await one.compare_set("k", "x", "y"), b"x")
        expect_same("absent, something expected: nothing is written", await other.check(["k"]), False)
        expect_same("absent, nothing expected: written", await one.compare_set("k", "", "first"), b"first")
        expect_same("absent, nothing expected: it is there", await other.get("k"), b"first")
        expect_same("another value: what is there", await other.compare_set("k", "x", "y"), b"first")
        expect_same("another value: not written", await one.get("k"), b"first")
        expect_same("the value: written", await other.compare_set("k", b"first", b"second"), b"second")
        expect_same("the value: it is there", await one.get("k"), b"second")
        expect_same("nothing expected of a full key: what is there", await one.compare_set("k", "", "z"), b"second")
        expect_same("nothing expected of a full key: not written", await other.get("k"), b"second")
        await one.set("empty", b"")
        expect_same("nothing expected of an empty key: written", await other.compare_set("empty", "", "z"), b"z")
        expect_same("the same value again", await other.compare_set("empty", "z", "z"), b"z")


async def check_only_one_compare_set_wins(kit: StoreKit) -> None:
    """Of several concurrent writes with the same expected value one wins, and all of them return its value."""
    async with kit.members(4) as group:
        for expected in ("", "0"):
            if expected:
                await group.stores[0].set("k", expected)
            answers = await asyncio.gather(
                *(store.compare_set("k", expected, f"rank {store.rank}") for store in group.stores)
            )
            expect_same("all see the same winner", len(set(answers)), 1)
            expect_same("the winner is what the key holds", await group.stores[0].get("k"), answers[0])


async def check_delete_key_tells_whether_it_was_there(kit: StoreKit) -> None:
    """`delete_key` deletes the key and returns whether it existed."""
    async with kit.members(2) as group:
        one, other = group.stores
        expect_same("deleting an absent key", await one.delete_key("a"), False)
        await one.set("a", b"")
        expect_same("deleting a key", await other.delete_key("a"), True)
        expect_same("deleting it again", await one.delete_key("a"), False)
        expect_same("a deleted key does not exist", await one.check(["a"]), False)
        await expect_error("a deleted key is waited for", StoreTimeoutError, one.get("a", SHORT_S))
        expect_same("a number starts anew", await other.add("a", 1), 1)


async def check_num_keys_counts_what_the_user_wrote(kit: StoreKit) -> None:
    """`num_keys` counts the keys that user code wrote in the round, not those of barriers and gathers."""
    async with kit.members(2) as group:
        one, other = group.stores
        expect_same("keys of a fresh round", await one.num_keys(), 0)
        await asyncio.gather(*(store.barrier("b") for store in group.stores))
        await asyncio.gather(*(store.gather("g", b"1") for store in group.stores))
        expect_same("a barrier is no key", await one.num_keys(), 0)
        await one.multi_set(["a", "b", "c/d"], ["", "", ""])
        await other.add("n", 1)
        await other.set("a", b"again")
        expect_same("keys that were written", await other.num_keys(), 4)
        await one.delete_key("b")
        expect_same("keys after one was deleted", await other.num_keys(), 3)


async def check_append_adds_at_the_end(kit: StoreKit) -> None:
    """`append` creates a key or appends to it; concurrent appends lose nothing."""
    async with kit.members(3) as group:
        await group.stores[0].append("log", b"ab")
        await group.stores[1].append("log", "ç")
        expect_same("what was appended", await group.stores[2].get("log"), "abç".encode())
        await asyncio.gather(*(store.append("all", f"{store.rank}{n};") for store in group.stores for n in range(5)))
        entries = (await group.stores[0].get("all")).decode().split(";")[:-1]
        wanted = sorted(f"{rank}{n}" for rank in range(3) for n in range(5))
        expect_same("everything that was appended, in some order", sorted(entries), wanted)


async def check_many_keys_in_one_call(kit: StoreKit) -> None:
    """`multi_set` and `multi_get` keep the order and accept more keys than one request of the backend."""
    async with kit.members(2) as group:
        one, other = group.stores
        names = [f"key {n}" for n in range(MANY)]
        await one.multi_set(names, [f"{n}" for n in range(MANY)])
        backwards = await other.multi_get(names[::-1])
        expect_same("values in the order of the keys", backwards, [b"%d" % n for n in range(MANY)][::-1])
        expect_same("check of many keys", await other.check(names), True)
        expect_same("multi_get of no keys", await other.multi_get([]), [])
        await one.multi_set([], [])
        expect_same("the same key twice", await other.multi_get(["key 1", "key 1"]), [b"1", b"1"])
        await one.multi_set(["a", "b", "a"], [b"1", b"2", b"3"])
        expect_same("a key that is written twice holds the last", await other.multi_get(["a", "b"]), [b"3", b"2"])


async def check_large_values_in_one_call(kit: StoreKit) -> None:
    """`multi_set` accepts more bytes than one request of the backend, as long as each value fits."""
    async with kit.members(2) as group:
        one, other = group.stores
        values = [bytes([n]) * 400_000 for n in range(6)]
        await one.multi_set([f"{n}" for n in range(6)], values)
        seen = await other.multi_get([f"{n}" for n in range(6)])
        expect("large values are read as they were written", seen == values, [len(value) for value in seen])


async def check_multi_set_needs_as_many_values_as_keys(kit: StoreKit) -> None:
    """`multi_set` with different numbers of keys and values is a StoreError, and nothing is written."""
    async with kit.members(1) as group:
        (store,) = group.stores
        await expect_error("as many values as keys", StoreError, store.multi_set(["a", "b"], [b""]))
        expect_same("nothing was written", await store.num_keys(), 0)


CHECKS: tuple[StoreCheck, ...] = (
    check_what_one_member_sets_every_member_gets,
    check_values_of_all_kinds,
    check_a_value_that_is_neither_bytes_nor_text_is_refused,
    check_keys_of_all_kinds,
    check_what_cannot_be_a_key_is_refused,
    check_check_tells_whether_all_keys_exist,
    check_a_text_is_not_a_list_of_keys,
    check_add_counts_from_zero,
    check_an_amount_is_a_whole_number_of_64_bits,
    check_add_to_what_is_no_number_is_an_error,
    check_adds_of_many_members_lose_nothing,
    check_compare_set_in_all_five_cases,
    check_only_one_compare_set_wins,
    check_delete_key_tells_whether_it_was_there,
    check_num_keys_counts_what_the_user_wrote,
    check_append_adds_at_the_end,
    check_many_keys_in_one_call,
    check_large_values_in_one_call,
    check_multi_set_needs_as_many_values_as_keys,
)
