"""The etcd backend beyond the contract: outages, resent requests, compaction, limits, sharing, forks."""

import asyncio
import itertools
import os
import random
import socket
import threading
import time
from contextlib import asynccontextmanager

import pytest

from rallypoint.errors import HistoryGone, OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import Delete, Exists, Get, GotItem, Put, Range
from tests.patience import PATIENCE_S, script, until
from tests.server.proxy import Proxy

pytest.importorskip("grpc", reason="needs grpcio: pip install 'rallypoint[etcd]'")

from rallypoint.backends.etcd import cluster as clusters
from rallypoint.backends.etcd.backend import EtcdBackend
from rallypoint.backends.etcd.security import Security
from rallypoint.backends.etcd.shared_connection import SharedConnection
from rallypoint.rendezvous.watched_keys import WatchedKeys

_numbers = itertools.count(1)


def fresh() -> str:
    """A prefix that no other test uses."""
    return f"/fresh/{next(_numbers)}/"


@asynccontextmanager
async def open_at(*endpoints: str, timeout_s: float = 20.0):
    backend = EtcdBackend(SharedConnection.to(endpoints, Security()), call_timeout_s=timeout_s)
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def proxied(member):
    """A proxy in front of an etcd."""
    proxy = Proxy(int(member.endpoint.rpartition(":")[2]))
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.close()


def run(coroutine):
    async def limited():
        async with asyncio.timeout(PATIENCE_S * 2):
            return await coroutine

    return asyncio.run(limited())


@pytest.fixture
def hasty(monkeypatch):
    """Short time-outs of single attempts."""
    monkeypatch.setattr(clusters, "READ_S", 0.5)
    monkeypatch.setattr(clusters, "WRITE_S", 0.5)


# --- unknown outcomes and resent requests -----------------------------------------------------------------------------


def test_write_that_was_not_answered_in_time_has_an_unknown_outcome(etcd, hasty):
    async def check():
        key = fresh() + "a"
        async with proxied(etcd) as proxy, open_at(proxy.endpoint) as behind, open_at(etcd.endpoint) as direct:
            await behind.get(key)
            proxy.swallows = True
            with pytest.raises(OutcomeUnknown) as caught:
                await behind.txn([Exists(key, False)], [Put(key, b"1")])
            assert proxy.endpoint in str(caught.value)
            return (await direct.get(key)).item

    assert run(check()).value == b"1"  # it was executed, and the client could not know


def test_read_succeeds_once_the_network_works_again(etcd, hasty):
    async def check():
        key = fresh() + "a"
        async with proxied(etcd) as proxy, open_at(proxy.endpoint) as behind:
            await behind.txn((), [Put(key, b"1")])
            proxy.swallows = True
            with pytest.raises(Unavailable):  # the outcome of a read is never unknown
                await behind.get(key)
            proxy.cut()
            proxy.swallows = False
            return (await retry(lambda: behind.get(key))).item

    assert run(check()).value == b"1"


async def eventually(look):
    """Poll until it is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not await look():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.02)


async def is_there(backend, key):
    return (await backend.get(key)).item is not None


async def has(watched, key):
    return key in watched.items


async def as_many(some, others):
    return len(some) >= len(others)


def granted_by(member):
    return member.metrics()["etcd_debugging_lease_granted_total"]


async def retry(request):
    """Repeat the request until it is answered."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await request()
            except Unavailable:
                await asyncio.sleep(0.05)


def test_add_that_was_not_answered_counts_once(etcd, hasty):
    async def check():
        key = fresh() + "n"
        async with proxied(etcd) as proxy, open_at(proxy.endpoint) as behind, open_at(etcd.endpoint) as direct:
            await behind.add(key + "2", 1)
            proxy.swallows = True
            adding = asyncio.create_task(behind.add(key, 12))
            await eventually(lambda: is_there(direct, key))
            await direct.add(key, 100)  # another client adds to the result
            proxy.cut()
            proxy.swallows = False
            result = await adding
            return result, (await direct.get(key)).item.value

    result, value = run(check())
    assert (result.committed, result.value, value) == (True, 12, b"112")


def test_markers_of_add_do_not_accumulate_and_are_removed_with_the_connection(etcd):
    async def check():
        key = fresh() + "n"
        async with open_at(etcd.endpoint) as direct:
            before = len((await direct.scan("/rallypoint/:once/")).items)
            async with open_at(etcd.endpoint) as adding:
                for _ in range(20):
                    await adding.add(key, 1)
                during = len((await direct.scan("/rallypoint/:once/")).items) - before
            return during, len((await direct.scan("/rallypoint/:once/")).items) - before

    assert run(check()) == (1, 0)


def test_grant_whose_answer_was_lost_is_not_executed_twice(etcd, hasty):
    async def check():
        async with proxied(etcd) as proxy, open_at(proxy.endpoint) as behind:
            await behind.get("a")
            before = await asyncio.to_thread(granted_by, etcd)
            proxy.swallows = True
            granting = asyncio.create_task(behind.grant(30))
            await eventually(lambda: asyncio.to_thread(lambda: granted_by(etcd) > before))
            proxy.cut()
            proxy.swallows = False
            lease = await granting
            granted = await asyncio.to_thread(granted_by, etcd) - before
            alive = await behind.keep_alive(lease)
            await behind.revoke(lease)
            return granted, alive

    assert run(check()) == (1, True)


def test_transaction_that_exceeds_the_limits_of_etcd_is_rejected_as_a_whole(etcd):
    async def check():
        prefix = fresh()
        async with open_at(etcd.endpoint) as backend:
            with pytest.raises(Rejected) as many:
                await backend.txn((), [Put(f"{prefix}{n}", b"") for n in range(129)])
            with pytest.raises(Rejected) as large:
                await backend.txn((), [Put(f"{prefix}a", b""), Put(f"{prefix}b", b"x" * 2_000_000)])
            return str(many.value), str(large.value), (await backend.scan(prefix)).items

    many, large, items = run(check())
    assert "128" in many
    assert "1.5 MB" in large
    assert items == ()


def test_empty_transaction_is_answered_by_the_whole_cluster(etcd):
    """Without a read in it, etcd would answer from the local state of one member."""

    async def check():
        async with open_at(etcd.endpoint) as backend:
            revision = (await backend.txn((), [Put(fresh() + "a", b"")])).revision
            result = await backend.txn((), ())
            return result.committed, result.revision >= revision, result.results

    assert run(check()) == (True, True, ())


def test_lease_that_has_ended_is_named_among_several(etcd):
    from rallypoint.errors import LeaseGone

    async def check():
        prefix = fresh()
        async with open_at(etcd.endpoint) as backend:
            alive, ended = await backend.grant(30), await backend.grant(30)
            await backend.revoke(ended)
            for order in ((alive, ended), (ended, alive)):
                with pytest.raises(LeaseGone) as caught:
                    await backend.txn((), [Put(f"{prefix}{lease}", b"", lease) for lease in order])
                assert caught.value.lease == ended
            await backend.revoke(alive)
            return (await backend.scan(prefix)).items

    assert run(check()) == ()


# --- watches ----------------------------------------------------------------------------------------------------------


async def values(watch, count):
    return [[c.item.value for c in (await anext(watch)).changes] for _ in range(count)]


def test_watch_moves_to_another_endpoint_without_gap_or_repetition(etcd):
    async def check():
        key = fresh() + "a"
        async with (
            proxied(etcd) as one,
            proxied(etcd) as other,
            open_at(one.endpoint, other.endpoint) as behind,
            open_at(etcd.endpoint) as direct,
        ):
            start = (await direct.txn((), [Put(key, b"0")])).revision
            watch = behind.watch(key, start)
            seen = []
            for n in range(1, 31):
                await direct.txn((), [Put(key, b"%d" % n)])
                if n % 5 == 0:
                    (one if n % 2 else other).cut()
                if n == 15:
                    one.refuse()
                if n % 3 == 0:
                    seen += await values(watch, 3)
            return seen

    assert run(check()) == [[b"%d" % n] for n in range(1, 31)]


def test_watch_whose_history_was_compacted_raises_history_gone(own_etcd):
    async def check():
        key = fresh() + "a"
        async with proxied(own_etcd) as proxy, open_at(proxy.endpoint) as behind, open_at(own_etcd.endpoint) as direct:
            start = (await direct.txn((), [Put(key, b"0")])).revision
            watch = behind.watch(key, start)
            await direct.txn((), [Put(key, b"1")])
            assert await values(watch, 1) == [[b"1"]]
            proxy.refuse()
            *_, last = [(await direct.txn((), [Put(key, b"%d" % n)])).revision for n in range(2, 9)]
            await asyncio.to_thread(own_etcd.ask, "kv/compaction", revision=last - 1)
            await proxy.listen()
            with pytest.raises(HistoryGone) as caught:
                await anext(watch)
            again = behind.watch(key, caught.value.oldest)
            return caught.value.oldest - last, await values(again, 1)

    assert run(check()) == (-1, [[b"8"]])


def test_mirror_scans_again_after_a_compaction_and_misses_nothing(own_etcd):
    async def check():
        prefix = fresh()
        async with proxied(own_etcd) as proxy, open_at(proxy.endpoint) as behind, open_at(own_etcd.endpoint) as direct:
            for name in "abc":
                await direct.txn((), [Put(prefix + name, b"old")])
            watched = WatchedKeys(behind, [prefix], random.Random(1), lambda: None, lambda error: None)
            await watched.synced.wait()
            proxy.refuse()
            await direct.txn((), [Delete(prefix + "a")])
            await direct.txn((), [Put(prefix + "b", b"new")])
            last = (await direct.txn((), [Put(prefix + "d", b"new")])).revision
            await asyncio.to_thread(own_etcd.ask, "kv/compaction", revision=last)
            await proxy.listen()
            await eventually(lambda: has(watched, prefix + "d"))
            await direct.txn((), [Put(prefix + "e", b"new")])
            await eventually(lambda: has(watched, prefix + "e"))
            watched.stop()
            return {key.removeprefix(prefix): item.value for key, item in watched.items.items()}

    assert run(check()) == {"b": b"new", "c": b"old", "d": b"new", "e": b"new"}


def test_large_changes_arrive_whole_though_etcd_sends_them_in_pieces(etcd):
    async def check():
        prefix = fresh()
        async with open_at(etcd.endpoint) as backend:
            start = (await backend.scan(prefix)).revision
            for n in range(6):
                await backend.txn((), [Put(f"{prefix}{n}/{k:03}", b"x" * 9_000) for k in range(100)])
            watch = backend.watch(prefix, start)
            batches = [await anext(watch) for _ in range(6)]
            watch.cancel()
            return [(len(batch.changes), {change.key[len(prefix)] for change in batch.changes}) for batch in batches]

    assert run(check()) == [(100, {str(n)}) for n in range(6)]


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_session_is_lost_at_the_client_before_etcd_ends_it(etcd):
    async def check():
        key = fresh() + "a"
        loop = asyncio.get_running_loop()
        async with proxied(etcd) as proxy, open_at(proxy.endpoint) as behind, open_at(etcd.endpoint) as direct:
            session = await behind.open_session(3.0)
            revision = (await behind.txn((), [Put(key, b"", session.lease)])).revision
            gone = direct.watch(key, revision)
            await asyncio.sleep(1.5)  # it is renewed
            proxy.deafens = True
            reason, batch = await asyncio.gather(timed(session.lost, loop), timed(anext(gone), loop))
            return reason, batch

    (reason, lost_at), (batch, gone_at) = run(check())
    assert "not renewed" in reason
    assert batch.changes[0].item is None
    assert lost_at <= gone_at < lost_at + 6


async def timed(awaitable, loop):
    return await awaitable, loop.time()


def test_session_that_etcd_ended_is_lost_at_the_client(etcd):
    async def check():
        async with open_at(etcd.endpoint) as one, open_at(etcd.endpoint) as other:
            session = await one.open_session(3.0)
            await other.revoke(session.lease)
            return await session.lost

    assert "ended the session" in run(check())


def test_all_sessions_and_watches_of_a_process_share_two_streams(own_etcd):
    def streams():
        told = own_etcd.metrics()
        return [
            told.get(f'grpc_server_started_total{{grpc_method="{method}",grpc_service="etcdserverpb.{service}",'
                     f'grpc_type="bidi_stream"}}', 0)
            for method, service in (("LeaseKeepAlive", "Lease"), ("Watch", "Watch"))
        ]  # fmt: skip

    async def check():
        prefix = fresh()
        backends = [EtcdBackend(SharedConnection.to((own_etcd.endpoint,), Security())) for _ in range(20)]
        sessions = [await backend.open_session(3.0, interval_s=0.3) for backend in backends]
        watches = [backend.watch(prefix, 1) for backend in backends for _ in range(3)]
        told = []
        for watch in watches:
            watch.follow(lambda: told.append(1))
        await asyncio.sleep(4.0)
        lost = [session.lost.reason for session in sessions if session.lost.is_set()]
        await backends[0].txn((), [Put(prefix + "a", b"")])
        await eventually(lambda: as_many(told, watches))
        seen = await asyncio.to_thread(streams)
        for backend in backends:
            await backend.close()
        return lost, seen

    assert run(check()) == ([], [1, 1])


def test_idle_sessions_rewrite_no_key(own_etcd):
    async def check():
        async with open_at(own_etcd.endpoint) as backend:
            await backend.open_session(2.0, interval_s=0.2)
            before = (await backend.status()).revision
            await asyncio.sleep(3.0)
            return (await backend.status()).revision - before

    assert run(check()) == 0


# --- endpoints --------------------------------------------------------------------------------------------------------


def test_endpoint_that_starts_late_is_used_once_it_runs(own_etcd, tmp_path):
    async def check():
        own_etcd.kill()
        async with open_at(own_etcd.endpoint) as backend:
            told = []
            backend.on_reachability(told.append)
            with pytest.raises(Unavailable) as caught:
                await backend.get("a")
            own_etcd.start()
            await retry(lambda: backend.get("a"))
            return str(caught.value), told

    text, told = run(check())
    assert "connection refused" in text
    assert isinstance(told[0], Unavailable)
    assert told[-1] is None


def test_dead_endpoint_among_others_is_skipped(etcd):
    async def check():
        for _ in range(4):  # the order is random
            async with open_at("127.0.0.1:1", etcd.endpoint, "127.0.0.1:2") as backend:
                assert (await backend.txn((), [Get("a"), Range("/nothing/")])).results[0] == GotItem(None)

    run(check())


def test_silent_endpoint_among_others_is_skipped_soon(etcd):
    async def check(endpoint):
        began_at = time.monotonic()
        async with open_at(endpoint, etcd.endpoint) as backend:
            await backend.get("a")
            return time.monotonic() - began_at

    with socket.create_server(("127.0.0.1", 0)) as silent:  # never accepts
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        took = [run(check(endpoint)) for _ in range(4)]  # the order is random
    assert max(took) < 3  # it takes 0.3 s on an idle machine


def test_two_loops_of_one_process_do_not_disturb_each_other(etcd):
    async def work():
        key = fresh() + "n"
        async with open_at(etcd.endpoint) as backend:
            for _ in range(50):
                last = await backend.add(key, 1)
            return last.value

    results = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(work()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == [50, 50, 50]


# --- processes --------------------------------------------------------------------------------------------------------


def test_importing_rallypoint_does_not_import_grpc():
    script("import sys, rallypoint, rallypoint.aio; assert 'grpc' not in sys.modules and 'google' not in sys.modules")


def test_without_grpc_the_error_says_what_to_install():
    done = script("""
        import sys
        sys.modules["grpc"] = None
        import rallypoint
        handler = rallypoint.create_handler("etcd://127.0.0.1:1/run?min_nodes=1")
        try:
            handler.next_rendezvous()
        except rallypoint.RendezvousConnectionError as error:
            print(error)
        handler.close()
    """)
    assert "pip install 'rallypoint[etcd]'" in done.stdout


def test_forked_child_of_a_process_that_uses_etcd_gets_an_error_and_its_parent_continues(etcd):
    done = script(
        """
        import os, rallypoint
        url = os.environ["URL"]
        handler = rallypoint.create_handler(url)
        world = handler.next_rendezvous()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rallypoint.create_handler(url + "&name=child").next_rendezvous()
            except rallypoint.RendezvousConnectionError as error:
                status = 0 if "fork" in str(error) else 2
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        world.store.set("still", "here")
        print(world.store.get("still").decode(), handler.shutdown())
        """,
        "-W",
        "ignore::DeprecationWarning",  # of forking with threads
        URL=f"etcd://{etcd.endpoint}/fork-{os.getpid()}?min_nodes=1&last_call_timeout=0.1",
    )
    assert done.stdout.split() == ["0", "here", "True"]


def test_all_keys_of_a_run_are_under_leases_and_disappear_after_the_run(etcd):
    import rallypoint

    url = f"etcd://{etcd.endpoint}/tidy?min_nodes=1&last_call_timeout=0.1&reopen_after=0&etcd_prefix=/some/where/"
    options = "&keep_alive_interval=1&keep_alive_max_attempt=2"
    handler = rallypoint.create_handler(url + options)
    world = handler.next_rendezvous()
    world.store.set("a", "b")
    world.store.add("n", 1)

    async def keys():
        async with open_at(etcd.endpoint) as backend:
            return {item.key: item.lease for item in (await backend.scan("/some/where/")).items}

    found = run(keys())
    assert "/some/where/tidy/config" in found
    assert all(found.values()), found
    handler.close()
    until(lambda: not any(key.startswith("/some/where/tidy/") for key in run(keys())), "the run is gone")
    with rallypoint.join(url + options) as again:
        assert next(again.rounds()).round == 1
