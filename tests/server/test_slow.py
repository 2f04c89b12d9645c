"""Clients that do not read: the server's buffer for them is bounded, and after a reconnect they have missed nothing."""

import asyncio
import tracemalloc

import pytest

from rallypoint.errors import OutcomeUnknown, Rejected
from rallypoint.events import ClientRefused, Emitter
from rallypoint.kv.types import Get, Grant, KeepAlive, Put, Range, Txn
from rallypoint.server import connection, observer_watches
from rallypoint.wire.messages import NOW, Do, Hold, WatchStart
from tests.server.kit import Raw, client_of, eventually, port_of, put, run, serving, take

BIG = bytes(256 * 1024)
MANY = 100
"""So many values of this size are more than the kernel buffers for one connection."""


def pausable(server):
    """A connector, and the list of transports it makes. Pausing one makes its client stop reading."""
    transports = []

    async def connect(make):
        transport, _ = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port_of(server))
        transports.append(transport)

    return connect, transports


def test_watcher_that_stops_reading_is_disconnected_and_resumes_without_gap_or_repetition(monkeypatch):
    monkeypatch.setattr(connection, "MOST_WAITING_MESSAGES", 10)

    async def main():
        seen = []
        async with serving(emit=Emitter(seen.append)) as server:
            connect, transports = pausable(server)
            async with client_of(server.addresses[0]) as writer, client_of(server.addresses[0]) as slow:
                slow._connector = connect
                written = [await put(writer, "/w/a")]
                watch = slow.watch("/w/", written[0] - 1)
                read = await take(watch, 1)
                transports[0].pause_reading()
                written += [await put(writer, "/w/a", BIG) for _ in range(MANY)]
                await eventually(lambda: server.traffic.slow == 1, "the slow connection is closed")
                transports[0].resume_reading()
                read += await take(watch, MANY)
                written.append(await put(writer, "/w/b"))
                read += await take(watch, 1)
                assert read == written
                assert len(transports) == 2
        (refused,) = [event for event in seen if isinstance(event, ClientRefused)]
        assert "does not read" in str(refused)

    run(main())


def test_watcher_that_is_disconnected_several_times_misses_nothing(monkeypatch):
    monkeypatch.setattr(connection, "MOST_WAITING_MESSAGES", 3)

    async def main():
        async with serving() as server:
            connect, transports = pausable(server)
            async with client_of(server.addresses[0]) as writer, client_of(server.addresses[0]) as slow:
                slow._connector = connect
                written = [await put(writer, "/w/a")]
                watch = slow.watch("/w/", written[0] - 1)
                read = await take(watch, 1)
                for drops in range(1, 4):
                    transports[-1].pause_reading()
                    while server.traffic.slow < drops:
                        written.append(await put(writer, "/w/a", BIG))
                        assert len(written) < 500
                    transports[-1].resume_reading()
                    read += await take(watch, len(written) - len(read))
                assert read == written

    run(main())


def test_slow_client_that_is_disconnected_keeps_its_session(monkeypatch):
    monkeypatch.setattr(connection, "MOST_WAITING_MESSAGES", 10)

    async def main():
        async with serving() as server, client_of(server.addresses[0]) as writer:
            raw, _ = await Raw.welcomed(server, "slow")
            raw.send(Do(1, Grant(60.0)))
            lease = (await raw.answer(1)).lease
            raw.send(
                Hold(lease, 0.05), WatchStart(1, "/w/", server.engine_host.engine.revision), Do(2, KeepAlive(lease))
            )
            await raw.answer(2)
            while server.traffic.slow == 0:
                await put(writer, "/w/a", BIG)
            await eventually(lambda: len(server.connections) == 1, "it is gone")
            marker = server.engine_host.execute(Grant(0.2)).lease
            await eventually(lambda: server.engine_host.engine.leases.get(marker) is None, "time passes")
            assert server.engine_host.engine.leases.get(lease) is not None
            raw.abort()

    run(main())


def test_slow_client_is_disconnected_when_too_many_bytes_are_buffered(monkeypatch):
    monkeypatch.setattr(connection, "MOST_WAITING_BYTES", 1 << 20)

    async def main():
        async with serving() as server, client_of(server.addresses[0]) as writer:
            raw, _ = await Raw.welcomed(server, "slow")
            raw.send(WatchStart(1, "/w/", server.engine_host.engine.revision), Do(1, KeepAlive(1)))
            await raw.answer(1)
            for _ in range(MANY):
                if not server.traffic.slow:
                    await put(writer, "/w/a", BIG)
            assert server.traffic.slow == 1
            raw.abort()

    run(main())


def test_client_that_reads_too_slowly_is_disconnected(monkeypatch):
    monkeypatch.setattr(connection, "MOST_WAITING_BYTES", 16 << 20)

    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server, "slow", run="r")
            raw.send(WatchStart(1, "/w/", server.engine_host.engine.revision), Do(1, KeepAlive(1)))
            await raw.answer(1)
            for _ in range(MANY):
                for _ in range(4):
                    server.engine_host.execute(Txn((), (Put("/w/a", BIG),)))
                if server.traffic.slow:
                    break
                await raw.reader.readexactly(len(BIG))
            assert server.traffic.slow == 1
            raw.abort()

    run(main())


@pytest.mark.parametrize("small", [0, 1_000])
def test_buffer_of_a_slow_client_is_not_encoded_all_at_once(small):
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server, "slow", run="r")
            raw.send(WatchStart(1, "/w/", server.engine_host.engine.revision), Do(1, KeepAlive(1)))
            await raw.answer(1)
            (accepted,) = server.connections
            accepted.pause_writing()
            values = [b""] * small + [BIG] * MANY
            written = [server.engine_host.execute(Txn((), (Put("/w/a", value),))).revision for value in values]
            assert accepted.lag[0] == len(values)
            tracemalloc.start()
            try:
                accepted.resume_writing()
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert most < MANY * len(BIG) / 3
            assert [(await raw.next_message()).batch.revision for _ in values] == written
            raw.abort()

    run(main())


def test_many_small_answers_arrive_in_order():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server, "quick")
            raw.send(*(Do(seq, Txn((), (Get("/a"),))) for seq in range(1, 1_001)))
            assert [(await raw.next_message()).seq for _ in range(1_000)] == list(range(1, 1_001))
            raw.close()

    run(main())


def test_slow_client_does_not_delay_others(monkeypatch):
    monkeypatch.setattr(connection, "MOST_WAITING_MESSAGES", 1_000)

    async def main():
        async with (
            serving() as server,
            client_of(server.addresses[0]) as writer,
            client_of(server.addresses[0]) as quick,
        ):
            raw, _ = await Raw.welcomed(server, "slow")
            first = await put(writer, "/w/a")
            raw.send(WatchStart(1, "/w/", first - 1), Do(1, KeepAlive(1)))
            await raw.answer(1)
            watch = quick.watch("/w/", first - 1)
            written = [first] + [await put(writer, "/w/a", BIG) for _ in range(MANY)]
            assert await take(watch, MANY + 1) == written
            assert server.traffic.slow == 0
            raw.abort()

    run(main())


def test_client_that_reads_no_answers_is_disconnected(monkeypatch):
    monkeypatch.setattr(connection, "MOST_WAITING_MESSAGES", 20)

    async def main():
        async with serving() as server, client_of(server.addresses[0]) as writer:
            await put(writer, "/big", BIG)
            raw, _ = await Raw.welcomed(server, "greedy")
            for seq in range(1, 2_000):
                if server.traffic.slow:
                    break
                raw.send(Do(seq, Txn((), (Get("/big"),))))
                await asyncio.sleep(0)
            await eventually(lambda: server.traffic.slow == 1, "it is closed")
            raw.abort()
            await put(writer, "/a")

    run(main())


def test_node_that_reads_no_answers_is_disconnected(monkeypatch):
    monkeypatch.setattr(connection, "MOST_WAITING_MESSAGES", 20)

    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server, "greedy", run="run")
            (accepted,) = server.connections
            accepted.pause_writing()
            # This found a bug: answers to writes of a node's key were buffered without bound.
            raw.send(*(Do(seq, Txn((), (Put("/rallypoint/run/nodes/a", b""),))) for seq in range(1, 100)))
            await eventually(lambda: server.traffic.slow == 1, "it is closed")
            raw.abort()

    run(main())


def test_slow_read_only_client_is_disconnected_once(monkeypatch):
    monkeypatch.setattr(connection, "MOST_WAITING_MESSAGES", 3)
    monkeypatch.setattr(observer_watches, "GATHER_S", 3600.0)

    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server, "slow")
            raw.send(WatchStart(1, "/w/", NOW))
            await eventually(lambda: len(server.observer_watches) == 1, "it watches")
            (accepted,) = server.connections
            accepted.pause_writing()
            for _ in range(10):
                server.engine_host.execute(Txn((), (Put("/w/a", b""),)))
            server.observer_watches.flush()
            assert server.traffic.slow == 1
            raw.abort()

    run(main())


# --- large answers ----------------------------------------------------------------------------------------------------


def test_answers_larger_than_a_frame_are_sent_in_several():
    async def main():
        async with serving() as server, client_of(server.addresses[0], call_timeout_s=10.0) as backend:
            for number in range(3):
                await put(backend, f"/k{number}", bytes(12 << 20))
            # This found a bug: all answers went into one frame that no client accepts.
            got = await asyncio.gather(*(backend.get(f"/k{number}") for number in range(3)))
            assert [len(one.item.value) for one in got] == [12 << 20] * 3

    run(main())


def test_backlog_of_a_watch_larger_than_a_frame_is_sent_in_several():
    async def main():
        async with serving() as server, client_of(server.addresses[0]) as backend:
            written = [await put(backend, "/w/a", bytes(12 << 20)) for _ in range(3)]
            assert await take(backend.watch("/w/", written[0] - 1), 3) == written

    run(main())


def test_single_answer_larger_than_a_frame_is_replaced_by_a_failure():
    async def main():
        async with serving() as server, client_of(server.addresses[0], call_timeout_s=10.0) as backend:
            for number in range(3):
                await put(backend, f"/k{number}", bytes(12 << 20))
            with pytest.raises(Rejected) as caught:
                await backend.scan("/k")
            assert "the answer is too large" in str(caught.value)
            with pytest.raises(OutcomeUnknown):  # it was executed, although it could not be answered
                await backend.txn((), (Put("/a", b""), Range("/k")))
            assert (await backend.get("/k0")).item.version == (await backend.get("/a")).item.version == 1

    run(main())


def test_many_large_answers_do_not_count_as_a_slow_client(monkeypatch):
    monkeypatch.setattr(connection, "MOST_WAITING_BYTES", 1 << 20)

    async def main():
        async with serving() as server, client_of(server.addresses[0], call_timeout_s=10.0) as backend:
            await put(backend, "/big", bytes(4 << 20))
            # This found a bug: a connection with more answers than the bound was closed before the peer could read.
            got = await asyncio.gather(*(backend.get("/big") for _ in range(10)))
            assert {len(one.item.value) for one in got} == {4 << 20}
            assert server.traffic.slow == 0

    run(main())


def test_push_of_one_revision_to_many_watches_reaches_each():
    async def main():
        async with serving() as server, client_of(server.addresses[0]) as writer:
            raw, _ = await Raw.welcomed(server, "many", run="r")
            raw.send(*(WatchStart(number, "/w/", 1 << 60) for number in range(5)), Do(1, KeepAlive(1)))
            await raw.answer(1)
            raw.send(*(WatchStart(number, "/w/", server.engine_host.engine.revision) for number in range(5)))
            raw.send(Do(2, Txn((), (Put("/w/a", b"1"), Put("/w/b", b"2"), Put("/x", b"3")))))
            pushed = [await raw.next_message() for _ in range(5)]
            assert sorted(push.watch for push in pushed) == list(range(5))
            assert {tuple(change.key for change in push.batch.changes) for push in pushed} == {("/w/a", "/w/b")}
            before = server.engine_host.watch_count
            raw.close()
            await put(writer, "/w/a")
            await eventually(lambda: server.engine_host.watch_count == before - 5, "its watches are removed")

    run(main())
