"""Checks of leases and sessions: they end on time, never earlier, and their keys are removed at once."""

from __future__ import annotations

import asyncio

from rallypoint.backends.loss_signal import LossSignal
from rallypoint.errors import LeaseGone
from rallypoint.kv.types import Delete, Put
from rallypoint.testing.conformance.backend_watch import take
from rallypoint.testing.conformance.kit import (
    BackendKit,
    Check,
    changes_of,
    expect,
    expect_error,
    expect_same,
    item_of,
    put,
    value_of,
)


async def check_a_lease_ends_by_time_and_takes_its_keys_along(kit: BackendKit) -> None:
    """Keys under a lease exist until it expires and are gone afterwards; other keys stay."""
    async with kit.connection() as backend:
        lease, another = await backend.grant(kit.ttl_s), await backend.grant(kit.ttl_s * 10)
        expect("a lease has an id of its own", lease > 0 and another > 0 and lease != another, (lease, another))
        mine, plain, other = kit.key("mine"), kit.key("plain"), kit.key("other")
        for key, under in ((mine, lease), (plain, 0), (other, another)):
            await put(backend, key, b"x", under)
            expect_same("an item says under which lease it is", (await item_of(backend, key)).lease, under)
        await kit.advance(kit.ttl_s / 2)
        expect_same("a lease does not end before its time", await value_of(backend, mine), b"x")
        await kit.advance(kit.ttl_s / 2 + kit.lease_slack_s)
        expect_same("the key goes when its lease ends", await value_of(backend, mine), None)
        expect_same("a key without a lease stays", await value_of(backend, plain), b"x")
        expect_same("a key under another lease stays", await value_of(backend, other), b"x")
        await backend.revoke(another)


async def check_keep_alive_renews_a_lease(kit: BackendKit) -> None:
    """A renewed lease has its full time again, whichever connection renews it."""
    async with kit.two_connections() as (one, other):
        lease = await one.grant(kit.ttl_s)
        await put(one, kit.key("a"), b"x", lease)
        for backend in (one, other, one):
            await kit.advance(kit.ttl_s * 0.6)
            expect_same("a living lease can be renewed", await backend.keep_alive(lease), True)
        expect_same("a renewed lease keeps its keys", await value_of(other, kit.key("a")), b"x")
        await kit.until_expired()
        expect_same("it ends when it is no longer renewed", await value_of(other, kit.key("a")), None)
        expect_same("an ended lease is not renewed", await one.keep_alive(lease), False)


async def check_revoke_ends_a_lease_at_once(kit: BackendKit) -> None:
    """Revoking a lease removes all its keys in one revision; revoking it again has no effect."""
    async with kit.two_connections() as (one, other):
        lease = await one.grant(kit.ttl_s * 10)
        keys = [kit.key(name) for name in ("a", "b", "c")]
        *_, start = [await put(one, key, b"x", lease) for key in keys]
        await other.revoke(lease)
        scanned = await one.scan(kit.prefix)
        expect_same("the keys are gone at once", scanned.items, ())
        watch = one.watch(kit.prefix, start)
        (batch,) = await take(kit, watch, 1)
        seen = (batch.revision, changes_of(batch))
        expect_same("they went in one revision", seen, (scanned.revision, dict.fromkeys(keys)))
        watch.cancel()
        expect_same("a revoked lease is not renewed", await one.keep_alive(lease), False)
        await one.revoke(lease)
        expect_same("revoking again changes nothing", (await one.get(keys[0])).revision, scanned.revision)


async def check_an_expired_lease_takes_all_keys_in_one_revision(kit: BackendKit) -> None:
    """When a lease expires, its keys, written one by one, are removed in one revision."""
    async with kit.connection() as backend:
        lease = await backend.grant(kit.ttl_s)
        keys = [kit.key(f"{n}") for n in range(10)]
        *_, start = [await put(backend, key, b"x", lease) for key in keys]
        await kit.until_expired()
        expect_same("no key outlives its lease", (await backend.scan(kit.prefix)).items, ())
        watch = backend.watch(kit.prefix, start)
        (batch,) = await take(kit, watch, 1)
        expect_same("all keys went in one revision", changes_of(batch), dict.fromkeys(keys))
        watch.cancel()


async def check_a_write_under_an_ended_lease_raises_and_writes_nothing(kit: BackendKit) -> None:
    """A put under an ended lease raises LeaseGone, and its transaction is not executed."""
    async with kit.connection() as backend:
        expired, revoked = await backend.grant(kit.ttl_s), await backend.grant(kit.ttl_s * 10)
        await kit.until_expired()
        await backend.revoke(revoked)
        before = await put(backend, kit.key("kept"), b"before")
        for lease in (expired, revoked):
            branch = (Put(kit.key("first"), b"1"), Delete(kit.key("kept")), Put(kit.key("a"), b"2", lease))
            promise = "a put under an ended lease raises LeaseGone"
            error = await expect_error(promise, LeaseGone, backend.txn((), branch))
            expect_same("LeaseGone says which lease", error.lease, lease)
            scanned = await backend.scan(kit.prefix)
            seen = ([item.key for item in scanned.items], scanned.revision)
            expect_same("and nothing is executed", seen, ([kit.key("kept")], before))


async def check_writing_a_key_replaces_its_lease(kit: BackendKit) -> None:
    """A key has only the lease of its last write; without one, none."""
    async with kit.connection() as backend:
        first, second = await backend.grant(kit.ttl_s * 10), await backend.grant(kit.ttl_s * 10)
        moved, freed, again = kit.key("moved"), kit.key("freed"), kit.key("again")
        for key in (moved, freed, again):
            await put(backend, key, b"1", first)
        await put(backend, moved, b"2", second)
        await put(backend, freed, b"2")
        await backend.txn((), (Delete(again),))
        await put(backend, again, b"2")
        await backend.revoke(first)
        items = (await backend.scan(kit.prefix)).items
        wanted = sorted([(moved, second), (freed, 0), (again, 0)])
        expect_same("only the last write counts", [(item.key, item.lease) for item in items], wanted)
        await backend.revoke(second)
        expect_same("the key goes with its last lease", await value_of(backend, moved), None)


async def check_keep_alive_of_an_ended_lease_is_false(kit: BackendKit) -> None:
    """Renewing a lease that expired, was revoked or never existed returns False and restores nothing."""
    async with kit.connection() as backend:
        expired, revoked = await backend.grant(kit.ttl_s), await backend.grant(kit.ttl_s * 10)
        await put(backend, kit.key("a"), b"x", expired)
        await kit.until_expired()
        await backend.revoke(revoked)
        for lease in (expired, revoked, max(expired, revoked) + 1_000_000):
            expect_same("an ended lease is not renewed", await backend.keep_alive(lease), False)
        expect_same("it brings nothing back", await value_of(backend, kit.key("a")), None)


# --- sessions ---------------------------------------------------------------------------------------------------------


async def check_a_session_lives_beyond_its_time_to_live(kit: BackendKit) -> None:
    """A session is renewed automatically while it is open."""
    async with kit.two_connections() as (one, other):
        session = await one.open_session(kit.ttl_s)
        expect_same("a session says its time to live", session.ttl_s, kit.ttl_s)
        await put(one, kit.key("a"), b"x", session.lease)
        for _ in range(6):
            await kit.advance(kit.ttl_s / 2)
        expect_same("a session keeps its keys", await value_of(other, kit.key("a")), b"x")
        expect_same("a living session is not lost", (session.lost.is_set(), session.lost.reason), (False, None))
        await session.close()


async def check_closing_a_session_takes_its_keys_along_at_once(kit: BackendKit) -> None:
    """After `close` the keys are gone; a closed session does not count as lost, and another session lives on."""
    async with kit.two_connections() as (one, other):
        session, another = await one.open_session(kit.ttl_s), await one.open_session(kit.ttl_s)
        await put(one, kit.key("a"), b"x", session.lease)
        await put(one, kit.key("b"), b"x", another.lease)
        await session.close()
        expect_same("the keys of a closed session are gone", await value_of(other, kit.key("a")), None)
        await kit.until_expired()
        expect_same("closing is not losing", session.lost.is_set(), False)
        expect_same("another session lives on", await value_of(other, kit.key("b")), b"x")
        expect_same("another session is not lost", another.lost.is_set(), False)
        await another.close()


async def check_a_lost_session_says_so_to_everybody_who_waits(kit: BackendKit) -> None:
    """A session that the backend ended is lost, with a reason, for any number of waiters."""
    async with kit.two_connections() as (one, other):
        session = await one.open_session(kit.ttl_s)
        waiters = [asyncio.create_task(_wait_lost(session.lost), name=f"wait lost {n}") for n in range(3)]
        await kit.advance(0)
        waiters[0].cancel()
        await other.revoke(session.lease)
        await kit.until_expired()
        reasons = [await kit.soon("a lost session wakes its waiters", waiter) for waiter in waiters[1:]]
        expect("a lost session has a reason", all(reasons), reasons)
        late = await kit.soon("a lost session can be awaited later", _wait_lost(session.lost))
        expect_same("the reason is the same for all", {*reasons, late, session.lost.reason}, {late})
        expect_same("a lost session says so", session.lost.is_set(), True)
        await session.close()


async def check_an_abandoned_session_ends_by_time(kit: BackendKit) -> None:
    """After `abandon` nothing is renewed: the keys stay until the lease expires."""
    async with kit.two_connections() as (one, other):
        session = await one.open_session(kit.ttl_s)
        await put(one, kit.key("a"), b"x", session.lease)
        session.abandon()
        await kit.advance(kit.ttl_s * 0.3)
        expect_same("a session that was just abandoned has not ended", await value_of(other, kit.key("a")), b"x")
        await kit.until_expired()
        expect_same("an abandoned session ends", await value_of(other, kit.key("a")), None)


async def check_sessions_end_by_time_when_their_connection_is_closed(kit: BackendKit) -> None:
    """Closing a connection ends its sessions, at the latest when their leases expire."""
    async with kit.two_connections() as (one, other):
        closed = await kit.connect()
        session = await closed.open_session(kit.ttl_s)
        kept = await one.open_session(kit.ttl_s)
        await put(closed, kit.key("a"), b"x", session.lease)
        await put(one, kit.key("b"), b"x", kept.lease)
        await closed.close()
        await kit.until_expired()
        expect_same("a closed connection renews nothing", await value_of(other, kit.key("a")), None)
        expect_same("other connections still work", await value_of(other, kit.key("b")), b"x")
        await kept.close()


async def _wait_lost(lost: LossSignal) -> str:
    return await lost


CHECKS: tuple[Check, ...] = (
    check_a_lease_ends_by_time_and_takes_its_keys_along,
    check_keep_alive_renews_a_lease,
    check_revoke_ends_a_lease_at_once,
    check_an_expired_lease_takes_all_keys_in_one_revision,
    check_a_write_under_an_ended_lease_raises_and_writes_nothing,
    check_writing_a_key_replaces_its_lease,
    check_keep_alive_of_an_ended_lease_is_false,
    check_a_session_lives_beyond_its_time_to_live,
    check_closing_a_session_takes_its_keys_along_at_once,
    check_a_lost_session_says_so_to_everybody_who_waits,
    check_an_abandoned_session_ends_by_time,
    check_sessions_end_by_time_when_their_connection_is_closed,
)
