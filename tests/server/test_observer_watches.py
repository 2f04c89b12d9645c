"""Read-only clients share one watch for each prefix, and each gets all changes in order and once, as from its own."""

import asyncio
import random

import pytest

from rallypoint.kv.types import KeepAlive, Put, Txn
from rallypoint.server import observer_watches, outbox
from rallypoint.server.connection import Connection
from rallypoint.testing.disk import MemoryDisk
from rallypoint.wire.messages import NOW, Answer, Do, Going, WatchRefused, WatchStart, WatchStop, encoder
from tests.server.durability.kit import serving_from
from tests.server.kit import Raw, client_of, eventually, put, run, serving


def test_read_only_clients_share_one_watch_and_nodes_have_their_own():
    async def main():
        async with serving() as server:
            raws = [(await Raw.welcomed(server, client=f"observer{number}"))[0] for number in range(5)]
            for raw in raws:
                raw.send(WatchStart(1, "/w/", NOW), WatchStart(2, "/other/", NOW))
            await eventually(lambda: len(server.observer_watches) == 10, "all watch")
            assert server.engine_host.watch_count == 2
            coordinator = server.engine_host.watch_count
            node, _ = await Raw.welcomed(server, client="node", run="r")
            node.send(WatchStart(1, "/w/", NOW), WatchStart(2, "/w/", NOW), Do(1, KeepAlive(1)))
            await node.answer(1)
            assert server.engine_host.watch_count >= coordinator + 2
            assert len(server.observer_watches) == 10
            raws[0].send(WatchStop(1))
            for raw in raws[1:]:
                raw.close()
            await eventually(lambda: len(server.observer_watches) == 1, "one watch is left")
            raws[0].send(WatchStop(2))
            await eventually(lambda: len(server.observer_watches) == 0, "no watch is left")

    run(main())


def test_first_change_is_sent_at_once_and_later_ones_are_collected_until_a_client_joins(monkeypatch):
    monkeypatch.setattr(observer_watches, "GATHER_S", 3600.0)

    async def main():
        async with serving() as server:
            one, _ = await Raw.welcomed(server, client="one")
            one.send(WatchStart(1, "/w/", NOW))
            await eventually(lambda: len(server.observer_watches) == 1, "it watches")
            async with client_of(server.addresses[0]) as writer:
                first = await put(writer, "/w/a")
                assert [(push.watch, push.batch.revision) for push in await pushes(one, 1)] == [(1, first)]
                later = [await put(writer, "/w/b"), await put(writer, "/w/c")]
                other, _ = await Raw.welcomed(server, client="other")
                other.send(WatchStart(7, "/w/", first))
                assert [push.batch.revision for push in await pushes(one, 2)] == later
                assert [(push.watch, push.batch.revision) for push in await pushes(other, 2)] == [
                    (7, later[0]),
                    (7, later[1]),
                ]

    run(main())


async def pushes(raw, count):
    return [await raw.next_message() for _ in range(count)]


def test_watch_from_a_compacted_revision_is_refused_and_leaves_nothing_behind():
    async def main():
        async with serving(history=2) as server:
            async with client_of(server.addresses[0]) as writer:
                for _ in range(5):
                    last = await put(writer, "/w/a")
            raw, _ = await Raw.welcomed(server)
            raw.send(WatchStart(1, "/w/", last - 4))
            refused = await raw.next_message()
            assert isinstance(refused, WatchRefused)
            assert (len(server.observer_watches), server.engine_host.watch_count) == (0, 0)
            raw.send(WatchStart(2, "/w/", last + 2))  # a watch from a future revision is not shared
            await eventually(lambda: server.engine_host.watch_count == 1, "it watches")
            assert len(server.observer_watches) == 0
            async with client_of(server.addresses[0]) as writer:
                revisions = [await put(writer, "/w/a") for _ in range(3)]
            (push,) = await pushes(raw, 1)
            assert push.batch.revision == revisions[2]

    run(main())


def test_collected_batches_larger_than_a_frame_are_split(monkeypatch):
    monkeypatch.setattr(observer_watches, "GATHER_S", 0.2)

    async def main():
        async with serving() as server:
            server.max_frame = server.observer_watches._max_frame = 1000
            raw, _ = await Raw.welcomed(server)
            raw.send(WatchStart(1, "/w/", NOW))
            await eventually(lambda: len(server.observer_watches) == 1, "it watches")
            async with client_of(server.addresses[0]) as writer:
                revisions = [await put(writer, "/w/a", bytes(300)) for _ in range(20)]
            assert [push.batch.revision for push in await pushes(raw, 20)] == revisions

    run(main())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_data", [False, True])
def test_all_clients_get_all_changes_once_and_in_order(seed, has_data, monkeypatch):
    monkeypatch.setattr(observer_watches, "GATHER_S", 0.01)
    rng = random.Random(seed)

    async def main():
        async with (
            serving_from(MemoryDisk()) if has_data else serving() as server,
            client_of(server.addresses[0]) as writer,
        ):
            first = await put(writer, "/w/begin")
            received = {}
            clients, watches, tasks = [], [], []

            async def collect(name, watch):
                async for batch in watch:
                    received[name].append(batch.revision)

            revisions = []
            for step in range(60):
                revisions.append(
                    await put(writer, rng.choice(["/w/a", "/w/b", "/elsewhere"]), b"x" * rng.randrange(2000))
                )
                if rng.random() < 0.3:
                    client = client_of(server.addresses[0])
                    backend = await client.__aenter__()
                    clients.append(client)
                    after = rng.choice([first, revisions[-1], rng.choice(revisions)])
                    received[step] = []
                    watches.append((step, after, backend.watch("/w/", after)))
                    tasks.append(asyncio.create_task(collect(step, watches[-1][2])))
                if rng.random() < 0.1:
                    rng.choice(list(server.connections)).abort()  # its client reconnects and resumes
                await asyncio.sleep(rng.choice([0, 0, 0.01]))
            end = await put(writer, "/w/end")
            await eventually(
                lambda: all(seen and seen[-1] == end for seen in received.values()), "all have seen the end"
            )
            items = server.engine_host.engine.history.after(first - 1, "/w/")
            for name, after, _ in watches:
                assert received[name] == [batch.revision for batch in items if batch.revision > after]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for client in clients:
                await client.__aexit__(None, None, None)

    run(main())


def test_read_only_client_gets_a_change_before_any_answer_that_reflects_it(monkeypatch):
    monkeypatch.setattr(observer_watches, "GATHER_S", 3600.0)

    async def main():
        async with serving() as server, client_of(server.addresses[0]) as writer:
            raw, _ = await Raw.welcomed(server)
            raw.send(WatchStart(1, "/w/", NOW), WatchStart(2, "/w/a", NOW))
            await eventually(lambda: len(server.observer_watches) == 2, "it watches")
            revisions = [await put(writer, "/w/a") for _ in range(3)]
            raw.send(Do(1, Txn((), (Put("/w/a", b"mine"),))))
            received = []
            while not isinstance(message := await raw.next_message(), Answer):
                received.append((message.watch, message.batch.revision))
            own = message.result.revision
            assert [revision for watch, revision in received if watch == 1] == [*revisions, own]
            assert [revision for watch, revision in received if watch == 2] == [*revisions, own]

    run(main())


def test_continuous_writes_do_not_delay_pushes(monkeypatch):
    monkeypatch.setattr(observer_watches, "GATHER_BYTES", 1000)

    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(WatchStart(1, "/w/", NOW))
            await eventually(lambda: len(server.observer_watches) == 1, "it watches")
            frames = server.traffic.frames_out

            async def write():
                for _ in range(50):
                    server.engine_host.execute(Txn((), (Put("/w/a", bytes(1000)),)))
                    await asyncio.sleep(0)  # and again in the next iteration of the loop

            await asyncio.gather(*(write() for _ in range(3)))
            # This found a bug: each change postponed a flush that was due at once.
            assert server.traffic.frames_out - frames > 40

    run(main())


def test_batch_for_slow_clients_is_encoded_once(monkeypatch):
    monkeypatch.setattr(observer_watches, "GATHER_S", 3600.0)
    encoded = []

    class Counting:
        def encode(self, value):
            encoded.append(value)
            return encoder.encode(value)

    async def main():
        async with serving() as server:
            monkeypatch.setattr(outbox, "encoder", Counting())
            observers = [Connection(server) for _ in range(5)]
            for observer in observers:
                observer.pause_writing()
                server.observer_watches.add(observer, 1, "/w/", server.engine_host.engine.revision)
            for _ in range(10):
                server.engine_host.execute(Txn((), (Put("/w/a", b"x"),)))
            server.observer_watches.flush()
            assert [observer.lag[0] for observer in observers] == [10] * 5
            assert len(encoded) == 10
            for observer in observers:
                server.observer_watches.remove(observer, 1, "/w/")

    run(main())


@pytest.mark.parametrize("has_data", [False, True])
def test_collected_batches_are_sent_before_the_server_stops(has_data, monkeypatch):
    monkeypatch.setattr(observer_watches, "GATHER_S", 3600.0)

    async def main():
        async with serving_from(MemoryDisk()) if has_data else serving() as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(WatchStart(1, "/w/", NOW))
            await eventually(lambda: len(server.observer_watches) == 1, "it watches")
            async with client_of(server.addresses[0]) as writer:
                revisions = [await put(writer, "/w/a") for _ in range(3)]
        assert [push.batch.revision for push in await pushes(raw, 3)] == revisions
        assert isinstance(await raw.next_message(), Going)

    run(main())
