"""A server that has lost its data, and clients that were told that their run is closed."""

import asyncio

import msgspec
import pytest

from rallypoint import aio
from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.errors import RendezvousClosedError
from rallypoint.kv.types import Grant, Put, Txn
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import (
    ClaimRecord,
    ClosedMark,
    ClosedRecord,
    ConfigRecord,
    RoundPhase,
    RoundRecord,
    decode,
    encode,
)
from rallypoint.server.hosting import open_tcp
from rallypoint.server.server import Server
from rallypoint.settings import Settings
from tests.ports import free_port
from tests.server.kit import PATIENCE_S, client_of, eventually, run, serving

KEYS = RunKeys("rallypoint", "run")
FAST = "last_call_timeout=0.1&keep_alive_interval=1&admission_window=0&min_nodes=1"
CLOSED = ClosedRecord(closed=True, by="a", why="the work is done", outcome=3)


def config(incarnation: str) -> ConfigRecord:
    settings = Settings.from_url(f"tcp://host:1/run?{FAST}")
    return ConfigRecord(
        incarnation=incarnation,
        shared=settings.shared(),
        timing=settings.timing(),
        run_lease=1,
        data_lease=2,
        run_ttl_s=75.0,
    )


def told(incarnation: str = "one") -> bytes:
    """The claim of a client that was told."""
    mark = ClosedMark(config=config(incarnation), state=CLOSED, revision=7)
    return encode(ClaimRecord(id="b", floor=4, ttl_s=1.0, closed=mark))


def put(server: Server, key: str, record: msgspec.Struct) -> None:
    server.engine_host.execute(Txn((), (Put(key, encode(record)),)))  # type: ignore[arg-type]


def state(server: Server) -> ClosedRecord:
    return decode(ClosedRecord, server.engine_host.engine.items[KEYS.closed])


def test_run_that_nobody_has_made_is_made_closed_with_its_incarnation_and_reason():
    async def main():
        async with serving() as server:
            server.runs.claimed("run", "b", told())
            assert state(server) == CLOSED
            made = decode(ConfigRecord, server.engine_host.engine.items[KEYS.config])
            assert made.incarnation == "one"
            assert made.run_lease == server.engine_host.engine.items[KEYS.config].lease
            handler = aio.create_handler(f"tcp://{server.addresses[0]}/run?{FAST}&is_host=false", name="new")
            with pytest.raises(RendezvousClosedError, match="closed by a: the work is done") as caught:
                await handler.next_rendezvous()
            assert caught.value.outcome == 3
            assert await handler.reopen("once more")
            assert (await handler.next_rendezvous()).world_size == 1
            server.runs.claimed("run", "c", told())
            assert not state(server).closed, "this server knows more: the run was reopened here"
            await handler.aclose()

    run(main())


def test_run_that_others_are_making_is_closed_before_a_round_is_active():
    async def main():
        async with serving() as server:
            server.engine_host.execute(Grant(60.0, config("two").run_lease))
            put(server, KEYS.config, config("two"))
            put(server, KEYS.closed, ClosedRecord(closed=False))
            forming = RoundRecord(number=9, phase=RoundPhase.FORMING, incarnation="two", size=1, term=1)
            put(server, KEYS.round, forming)
            server.runs.claimed("run", "b", told())
            assert state(server) == CLOSED
            put(server, KEYS.closed, ClosedRecord(closed=False, by="operator"))
            server.runs.claimed("run", "c", told())
            assert not state(server).closed, "somebody has reopened it"

    run(main())


def test_run_of_others_that_has_had_a_round_is_left_alone():
    async def main():
        async with serving() as server:
            server.engine_host.execute(Grant(60.0, config("two").run_lease))
            put(server, KEYS.config, config("two"))
            put(server, KEYS.closed, ClosedRecord(closed=False))
            active = RoundRecord(number=9, phase=RoundPhase.ACTIVE, incarnation="two", size=1, term=1, last_active=9)
            put(server, KEYS.round, active)
            server.runs.claimed("run", "b", told())
            assert not state(server).closed

    run(main())


def test_run_that_is_closed_again_is_free_when_its_lease_ends():
    async def main():
        async with serving() as server:
            mark = ClosedMark(config=msgspec.structs.replace(config("one"), run_ttl_s=0.1), state=CLOSED, revision=7)
            server.runs.claimed("run", "b", encode(ClaimRecord(id="b", ttl_s=15.0, closed=mark)))
            await eventually(lambda: KEYS.config not in server.engine_host.engine.items, "the id is free")

    run(main())


def test_node_tells_the_next_server_and_joins_again_only_after_a_reopening():
    async def main():
        port = free_port()
        url = f"tcp://127.0.0.1:{port}/run?{FAST}&max_nodes=2&is_host=false"
        async with serving(port):
            a, b = (aio.create_handler(url, name=name) for name in "ab")
            await b.next_rendezvous()
            await a.set_closed("the work is done")
            await eventually(lambda: b.closed_now, "b is told")
            await a.aclose()
        with pytest.raises(RendezvousClosedError, match="closed by a: the work is done"):
            async with asyncio.timeout(PATIENCE_S):
                await b.next_rendezvous()
        assert await b.is_closed()
        async with serving(port) as second:
            await eventually(lambda: KEYS.closed in second.engine_host.engine.items, "the new server is told")
            assert state(second).closed
            c = aio.create_handler(url, name="c")
            for one in (b, c):
                with pytest.raises(RendezvousClosedError, match="closed by a: the work is done"):
                    await one.next_rendezvous()
            assert await c.reopen("once more")
            await eventually(lambda: not b.closed_now, "b is told of the reopening")
            assert (await b.next_rendezvous()).world_size == 1
            for one in (b, c):
                await one.aclose()

    run(main())


def test_node_that_was_told_of_a_close_does_not_serve_the_run():
    async def main():
        port = free_port()
        backend = await open_tcp(Settings.from_url(f"tcp://127.0.0.1:{port}/run?{FAST}"))
        backend.is_run_closed = True
        with pytest.raises(Exception, match="refused"):
            await backend.get("/key")
        backend.is_run_closed = False
        await backend.get("/key")
        await backend.close()

    run(main())


@pytest.mark.parametrize("is_reading", [True, False])
def test_host_of_a_closed_run_stops_when_its_clients_have_been_told(is_reading):
    """A client that does not read costs it a second, and not `close_timeout`."""

    async def main():
        endpoint = f"127.0.0.1:{free_port()}"
        host = await open_tcp(Settings.from_url(f"tcp://{endpoint}/run?{FAST}&close_timeout=600"))
        await host.get("/key")
        async with client_of(endpoint, call_timeout_s=PATIENCE_S) as other:
            watch = other.watch("/told", (await other.get("/told")).revision)
            reading = asyncio.create_task(anext(aiter(watch)))
            await other.get("/key")
            host.is_run_closed = True
            if not is_reading:
                assert isinstance(other, TcpBackend)
                assert other._link is not None
                assert other._link._transport is not None
                other._link._transport.pause_reading()
            await host.txn((), [Put("/told", b"closed")])
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            await host.close()
            assert loop.time() - began_at < 5.0
            if is_reading:
                assert (await reading).changes[0].key == "/told"
            reading.cancel()

    run(main())
