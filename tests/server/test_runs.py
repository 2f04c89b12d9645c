"""The runs of a server: creation, isolation, renewal, removal, failing coordinators, and the stop of the server."""

import asyncio
import socket
import subprocess
import sys
import textwrap

import pytest

from rallypoint import aio
from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.events import CoordinatorDeposed, CoordinatorElected, Emitter, ServerStopped
from rallypoint.kv.types import Grant, Put, Revoke, Txn
from rallypoint.rendezvous.coordinator import Coordinator
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import ClaimRecord, ConfigRecord, decode, encode
from rallypoint.server import runs
from rallypoint.server import server as serving_module
from rallypoint.server.server import Server
from rallypoint.settings import Timing
from rallypoint.wire.frames import GREETING, frame
from rallypoint.wire.handshake import Versions
from rallypoint.wire.messages import (
    NEWEST_VERSION,
    Answer,
    Do,
    Going,
    Held,
    Hello,
    Hold,
    MakeRun,
    WatchStart,
    encoder,
    welcome_decoder,
)
from tests.patience import PATIENCE_S as PROCESS_PATIENCE_S
from tests.ports import free_port
from tests.server.kit import Raw, client_of, eventually, put, run, serving
from tests.server.proxy import Proxy

FAST = {
    "last_call_timeout": 0.1,
    "admission_window": 0,
    "keep_alive_interval": 0.3,
    "disconnect_grace": 0.2,
    "is_host": False,
}


def node(server, run_id, name, min_nodes=1, **options):
    """A node of a run on this server."""
    url = f"tcp://{server.addresses[0]}/{run_id}"
    return aio.create_handler(url, name=name, min_nodes=min_nodes, **{**FAST, **options})


async def gather(*nodes):
    return await asyncio.gather(*(one.next_rendezvous() for one in nodes))


async def close(*nodes):
    await asyncio.gather(*(one.aclose() for one in nodes))


def keys_under(server, run_id):
    prefix = RunKeys("rallypoint", run_id).config.removesuffix("config")
    return [key for key in server.engine_host.engine.items if key.startswith(prefix)]


# --- creation of a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def waits_for_others(monkeypatch):
    """A node that is not to create the run waits for others to do so for longer than any test takes."""
    monkeypatch.setattr(TcpBackend, "make_run_delay_s", (600.0, 600.0))


@pytest.mark.parametrize("theirs", [Versions(), Versions(1, 2)], ids=["this server", "an older server"])
@pytest.mark.usefixtures("waits_for_others")
def test_first_node_that_joins_creates_the_run(theirs):
    async def main():
        async with serving(versions=theirs) as server:
            nodes = [node(server, "run", name, 3) for name in "abc"]
            await gather(*nodes)
            await close(*nodes)

    run(main())


def test_new_client_does_not_count_as_a_reconnect():
    async def main():
        async with serving() as server:
            nodes = [node(server, "run", name, 3) for name in "abc"]
            await gather(*nodes)
            assert server.clients.reconnects == 0
            await close(*nodes)

    run(main())


def test_session_that_is_cancelled_while_it_is_requested_is_revoked(monkeypatch):
    async def main():
        async with serving() as server, client_of(server.addresses[0], run="run") as one:
            opening = asyncio.create_task(one.open_session(600.0))
            welcomed = one._welcomed
            monkeypatch.setattr(one, "_welcomed", lambda *of: (welcomed(*of), opening.cancel()))
            await asyncio.gather(opening, return_exceptions=True)
            assert opening.cancelled()
            await eventually(lambda: sum(server.engine_host.executed.values()) >= 2, "the lease was there")
            await eventually(lambda: len(server.engine_host.engine.leases) == 0, "the lease is gone")
            assert not one._ungranted

    run(main())


@pytest.mark.usefixtures("waits_for_others")
def test_reading_node_does_not_prevent_others_from_creating_the_run():
    async def main():
        async with serving() as server:
            observer, one = node(server, "run", "observer"), node(server, "run", "one")
            assert not await observer.is_closed()
            await gather(one)
            await close(observer, one)

    run(main())


@pytest.mark.usefixtures("waits_for_others")
def test_nodes_that_have_read_first_join_without_waiting_for_each_other():
    async def main():
        async with serving() as server:
            nodes = [node(server, "run", name, 2) for name in "ab"]
            for one in nodes:
                assert not await one.is_closed()
            await gather(*nodes)
            await close(*nodes)

    run(main())


def test_one_client_at_a_time_is_told_to_create_a_run_until_it_exists():
    async def main():
        async with serving() as server:
            first, second, third = [await connect(server, name) for name in "abc"]
            assert await received_on_joining(first, 1) == [Answer, MakeRun, Answer]
            assert await received_on_joining(second, 2) == [Answer, Answer]
            first.send(Do(3, Txn((), (Put(RunKeys("rallypoint", "run").config, b"{}"),))))
            await first.answer(3)
            server.runs.ensure_run("run")._turn_at -= runs.TURN_S
            assert await received_on_joining(third, 3) == [Answer, Answer]

    run(main())


def test_client_without_a_session_is_not_told_to_create_a_run():
    async def main():
        async with serving() as server:
            one, other = await connect(server, "a"), await connect(server, "b")
            one.send(Hold(1, 1.0), Do(1, Txn((), ())), Do(2, Txn((), ())))
            assert [type(await one.next_message()) for _ in range(2)] == [Answer, Answer]
            assert await received_on_joining(other, 1) == [Answer, MakeRun, Answer]

    run(main())


def test_client_that_resumes_its_session_is_told_again_to_create_the_run():
    async def main():
        async with serving() as server:
            one = await connect(server, "a")
            assert await received_on_joining(one, 1) == [Answer, MakeRun, Answer]
            await connect(server, "a", makes_run=True, sessions=(Held(1, 1.0),))
            await connect(server, "b")

    run(main())


async def connect(server, name, version=NEWEST_VERSION, makes_run=False, sessions=()):
    """A connected client of the run, after checking its welcome."""
    raw = await Raw.open(server)
    raw.send_bytes(GREETING + frame(encoder.encode(Hello(1, version, name, run="run", sessions=sessions))))
    welcome = welcome_decoder.decode(await raw.next_frame())
    assert (welcome.version, welcome.makes_run) == (version, makes_run)
    return raw


async def received_on_joining(raw, lease):
    """The types of messages that answer a new session and one more request."""
    raw.send(Do(1, Grant(60, lease)), Hold(lease, 1.0), Do(2, Txn((), ())))
    found = []
    while found.count(Answer) < 2:
        found.append(type(await raw.next_message()))
    return found


# --- isolation of runs ------------------------------------------------------------------------------------------------


def test_runs_of_one_server_are_isolated():
    async def main():
        async with serving() as server:
            runs = {run_id: [node(server, run_id, name, 2) for name in ("a", "b")] for run_id in ("one", "two", "2")}
            worlds = await asyncio.gather(*(gather(*nodes) for nodes in runs.values()))
            for pair in worlds:
                assert sorted(world.rank for world in pair) == [0, 1]
                assert {world.round for world in pair} == {1}
                assert [member.name for member in await pair[0].members()] == ["a", "b"]
            await worlds[0][0].store.set("key", b"of one")
            assert not await worlds[1][0].store.check(["key"])
            assert len(server.runs) == 3
            await runs["one"][0].set_closed()
            while not await runs["one"][1].is_closed():  # noqa: ASYNC110 - it is pushed, and `run` ends it in time
                await asyncio.sleep(0.002)
            assert not await runs["two"][1].is_closed()
            await close(*(one for nodes in runs.values() for one in nodes))

    run(main())


def test_run_id_that_is_a_prefix_of_another_is_a_different_run():
    async def main():
        async with serving() as server:
            nodes = [node(server, run_id, "a") for run_id in ("job", "job-1", "jo")]
            worlds = await gather(*nodes)
            assert [(world.rank, world.world_size) for world in worlds] == [(0, 1)] * 3
            await close(*nodes)

    run(main())


def test_read_only_client_creates_no_run():
    async def main():
        async with serving() as server, client_of(server.addresses[0]) as backend:
            status = await backend.status()
            assert status.details["runs"] == "0"
            assert status.details["connections"] == "1"
            assert server.engine_host.engine.items == {}

    run(main())


# --- renewal and removal of runs --------------------------------------------------------------------------------------


def test_run_that_all_nodes_left_is_removed_after_its_time_to_live():
    async def main():
        async with serving() as server:
            nodes = [node(server, "run", name, 2, reopen_after=0.6) for name in ("a", "b")]
            await gather(*nodes)
            tasks = {task.get_name() for task in asyncio.all_tasks()}
            assert "coordinator of run" in tasks
            await close(*nodes)
            await eventually(lambda: len(server.runs) == 0, "the coordinator is gone")
            await eventually(
                lambda: "coordinator of run" not in {task.get_name() for task in asyncio.all_tasks()}, "its task too"
            )
            left = keys_under(server, "run")
            assert not [key for key in left if "/coordinator" in key or "/config" in key or "/nodes" in key]
            assert len(server.clients) == 0

    run(main())


def test_run_is_renewed_while_it_has_a_live_session():
    async def main():
        async with serving() as server:
            one = node(server, "run", "a", reopen_after=0.6)
            await one.next_rendezvous()
            config = server.engine_host.engine.items[RunKeys("rallypoint", "run").config]
            marker = await asyncio.wait_for(_lease(server, 2.0), 10)
            await eventually(
                lambda: server.engine_host.engine.leases.get(marker) is None, "more than its time to live passes"
            )
            assert server.engine_host.engine.items[RunKeys("rallypoint", "run").config] == config
            await one.aclose()

    run(main())


async def _lease(server, ttl_s):
    async with client_of(server.addresses[0]) as backend:
        return await backend.grant(ttl_s)


def test_new_run_is_renewed_in_time():
    async def main():
        async with serving() as server, client_of(server.addresses[0], run="run") as backend:
            session = await backend.open_session(30)
            await asyncio.sleep(0.5)  # the server has looked for a config and found none
            ttl_s = 2.0
            lease = await backend.grant(ttl_s)
            config = ConfigRecord(
                incarnation="x", shared={}, timing=Timing(), run_lease=lease, data_lease=lease, run_ttl_s=ttl_s
            )
            await put(backend, RunKeys("rallypoint", "run").config, encode(config), lease)
            marker = await backend.grant(ttl_s + 1)
            await eventually(
                lambda: server.engine_host.engine.leases.get(marker) is None, "more than its time to live passes"
            )
            assert RunKeys("rallypoint", "run").config in server.engine_host.engine.items
            await session.close()

    run(main())


def test_data_lease_that_ended_is_replaced_and_rounds_form_again(monkeypatch):
    monkeypatch.setattr(runs, "MOST_PAUSE_S", 0.2)

    async def main():
        async with serving() as server:
            first, second = (node(server, "run", name, 2) for name in ("a", "b"))
            waiting = asyncio.create_task(first.next_rendezvous())
            config = RunKeys("rallypoint", "run").config
            await eventually(lambda: config in server.engine_host.engine.items, "the run is created")
            before = decode(ConfigRecord, server.engine_host.engine.items[config])
            server.engine_host.execute(Revoke(before.data_lease))
            worlds = await asyncio.wait_for(asyncio.gather(waiting, second.next_rendezvous()), PROCESS_PATIENCE_S)
            assert {world.round for world in worlds} == {1}
            for number, world in enumerate(worlds):
                await world.store.set(f"k{number}", b"1")  # this found a bug: nodes that had joined kept the old lease
            after = decode(ConfigRecord, server.engine_host.engine.items[config])
            assert after.data_lease != before.data_lease
            assert after.incarnation == before.incarnation
            await close(first, second)

    run(main())


def test_restarted_server_still_waits_for_nodes_of_an_earlier_generation():
    async def main():
        async with serving() as server:
            server.runs.claimed("run", "c", encode(ClaimRecord(id="x", round=7, size=2, floor=9, ttl_s=60.0)))
            server.runs.claimed("other", "c", b"junk")
            engine = server.engine_host.engine
        async with serving(engine=engine, generation=server.generation) as again:
            returning = again.runs.ensure_run("run").returning
            assert returning.holds_until(asyncio.get_running_loop().time()) is not None
            assert (returning.floor, returning.round, returning.size) == (9, 7, 2)
            assert again.runs.ensure_run("other").returning.holds_until(asyncio.get_running_loop().time()) is None

    run(main())


def test_restarted_server_waits_for_clients_that_reconnected_and_sent_no_claim():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server, "back", run="run", generation="an earlier generation")
            assert server.runs.ensure_run("run").returning.holds_until(asyncio.get_running_loop().time()) is not None
            engine = server.engine_host.engine
            raw.close()
        async with serving(engine=engine, generation=server.generation) as again:
            # This found a bug: only received claims were stored, and the server died before one arrived.
            assert again.runs.ensure_run("run").returning.holds_until(asyncio.get_running_loop().time()) is not None

    run(main())


def test_returning_observer_does_not_delay_rounds_after_a_restart():
    async def main():
        async with serving() as server:
            await Raw.welcomed(server, "observer", run="run", generation="an earlier generation")
            server.runs.claimed("run", "observer", b"")
            engine = server.engine_host.engine
            assert RunKeys("rallypoint", "run").returned not in engine.items
        async with serving(engine=engine, generation=server.generation) as again:
            assert again.runs.ensure_run("run").returning.holds_until(asyncio.get_running_loop().time()) is None

    run(main())


def test_client_repeats_its_claim_until_it_is_received():
    async def main():
        claim = ClaimRecord(id="a", round=7, size=2, floor=7, is_member=True, ttl_s=15.0)
        port = free_port()
        proxy = Proxy(port)
        await proxy.listen()
        async with client_of(proxy.endpoint, run="run") as backend:
            backend.on_data_loss(lambda: encode(claim))
            async with serving(port=port) as first:
                await backend.get("/a")
            hello = len(GREETING + frame(encoder.encode(backend._hello())))
            proxy.limits = lambda number: (hello + 1, float("inf"))  # cuts the connection after the hello
            async with serving(port=port) as second:
                await eventually(lambda: backend._generation == second.generation, "it is accepted")
                engine = second.engine_host.engine
            assert first.generation != second.generation
            proxy.limits = lambda number: (float("inf"), float("inf"))
            async with serving(port=port, engine=engine, generation=second.generation) as third:
                await backend.get("/a")
                # This found a bug: the claim was sent once only, and after its loss round numbers started again.
                assert third.runs.ensure_run("run").returning.floor == 7
        await proxy.close()

    run(main())


def test_removed_run_can_be_used_again():
    async def main():
        async with serving() as server:
            for _ in range(2):
                one = node(server, "run", "a", reopen_after=0.5)
                world = await one.next_rendezvous()
                assert world.round == 1
                await one.set_closed()
                await one.aclose()
                await eventually(lambda: len(server.runs) == 0, "it is collected")

    run(main())


def test_run_without_sessions_is_removed(monkeypatch):
    monkeypatch.setattr(runs, "MOST_PAUSE_S", 0.2)

    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server, "observer", run="looked-at")
            await eventually(lambda: keys_under(server, "looked-at"), "it has a coordinator")
            raw.close()
            await eventually(lambda: len(server.runs) == 0, "it is collected")
            assert keys_under(server, "looked-at") == []

    run(main())


# --- coordinators that fail -------------------------------------------------------------------------------------------


def test_failed_coordinator_is_restarted_with_an_event(monkeypatch):
    whole, calls = Coordinator.run, []

    async def failing(self):
        calls.append(self)
        if len(calls) == 1:
            raise ZeroDivisionError("a defect")
        return await whole(self)

    monkeypatch.setattr(Coordinator, "run", failing)

    async def main():
        seen = []
        async with serving(emit=Emitter(seen.append)) as server:
            one = node(server, "run", "a")
            assert (await one.next_rendezvous()).rank == 0
            await one.aclose()
        elected = [event.term for event in seen if isinstance(event, CoordinatorElected)]
        deposed = [event for event in seen if isinstance(event, CoordinatorDeposed)]
        assert len(calls) == len(elected) == 2
        assert elected[0] < elected[1]
        assert "ZeroDivisionError('a defect')" in str(deposed[0])

    run(main())


def test_failing_coordinator_does_not_affect_other_runs(monkeypatch):
    whole = Coordinator.run

    async def failing(self):
        if self._keys.run_id == "bad":
            raise ZeroDivisionError
        return await whole(self)

    monkeypatch.setattr(Coordinator, "run", failing)

    async def main():
        async with serving() as server:
            bad, good = node(server, "bad", "a", join_timeout=30), node(server, "good", "a")
            waiting = asyncio.create_task(bad.next_rendezvous())
            assert (await good.next_rendezvous()).world_size == 1
            assert not waiting.done()
            waiting.cancel()
            await asyncio.wait([waiting])
            await close(bad, good)

    run(main())


# --- the stop of a server ---------------------------------------------------------------------------------------------


def test_stopping_server_tells_all_clients_quickly():
    async def main():
        loop = asyncio.get_running_loop()
        seen = []
        async with serving(emit=Emitter(seen.append)) as server:
            raws = [(await Raw.welcomed(server, f"c{number}", run=f"r{number % 5}"))[0] for number in range(50)]
            silent = await Raw.open(server)
            began_at = loop.time()
            await server.stop("maintenance")
            assert loop.time() - began_at < serving_module.SHUTDOWN_S + 5.0
            for raw in raws:
                assert await raw.next_message() == Going("maintenance")
                assert await raw.rest() == b""
                raw.close()
            assert await silent.rest() == b""
            silent.close()
            assert not server.connections
        assert "maintenance" in str(next(event for event in seen if isinstance(event, ServerStopped)))
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not [name for name in names if name.startswith(("coordinator", "renewal"))]

    run(main())


def test_stopping_server_does_not_wait_for_a_client_that_does_not_read():
    async def main():
        async with serving() as server, client_of(server.addresses[0]) as writer:
            raw, _ = await Raw.welcomed(server, "slow")
            raw.send(WatchStart(1, "/w/", server.engine_host.engine.revision))
            for _ in range(60):
                await put(writer, "/w/a", bytes(256 * 1024))
            began_at = asyncio.get_running_loop().time()
            await server.stop()
            assert asyncio.get_running_loop().time() - began_at < serving_module.SHUTDOWN_S + 5.0
            await eventually(lambda: not server.connections, "it is closed")
            raw.abort()

    run(main())


def test_stopped_server_refuses_connections_and_frees_its_port():
    async def main():
        async with serving() as server:
            port = int(server.addresses[0].rpartition(":")[2])
            await server.stop()
            with pytest.raises(OSError):  # noqa: PT011 - refused, in the words of the system
                await asyncio.open_connection("127.0.0.1", port)
        async with serving(port) as again, client_of(again.addresses[0]) as backend:
            await put(backend, "/a")

    run(main())


def test_revisions_of_a_restarted_server_are_higher_than_before():
    async def main():
        revisions, generations = [], set()
        for _ in range(3):
            async with serving() as server, client_of(server.addresses[0]) as backend:
                revisions += [await put(backend, "/a") for _ in range(50)]
                generations.add(server.generation)
        assert revisions == sorted(set(revisions))
        assert len(generations) == 3

    run(main())


def test_ipv6_address_is_shown_as_an_endpoint_that_clients_accept():
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def main():
        server = Server()
        await server.listen([listening])
        assert server.addresses == (f"[::1]:{listening.getsockname()[1]}",)
        async with client_of(server.addresses[0]) as backend:
            await put(backend, "/a")
        await server.stop()

    run(main())


def test_server_describes_itself_in_figures():
    async def main():
        async with serving(name="me") as server, client_of(server.addresses[0], run="r") as backend:
            await put(backend, "/a")
            await backend.grant(5.0)
            watch = backend.watch("/a", 1 << 60)
            waiting = asyncio.create_task(anext(watch))
            await eventually(lambda: server.engine_host.watch_count > 1, "it watches")
            details = (await backend.status()).details
            assert details["generation"] == server.generation
            assert (details["connections"], details["runs"], details["leases"]) == ("1", "1", "1")
            assert int(details["keys"]) >= 2
            assert int(details["bytes_in"]) > 0 < int(details["bytes_out"])
            watch.cancel()
            await asyncio.wait([waiting])
            assert isinstance(waiting.exception(), StopAsyncIteration)
        assert isinstance(server, Server)

    run(main())


# --- no DNS look-ups --------------------------------------------------------------------------------------------------

SERVER_WITHOUT_DNS = """
    import asyncio, socket, sys
    from rallypoint.events import Emitter
    from rallypoint.server.server import Server

    def raises(name):
        def call(*args, **options):
            called.append(name)
            raise AssertionError(f"{name} was called: {args}")
        return call

    called = []

    async def main():
        listening = socket.create_server(("127.0.0.1", 0))
        server = Server(emit=Emitter(lambda event: print(event, flush=True)))
        await server.listen([listening])
        loop = asyncio.get_running_loop()
        for name in ("getaddrinfo", "gethostbyaddr", "gethostbyname", "gethostbyname_ex", "getfqdn", "getnameinfo"):
            setattr(socket, name, raises(name))
        loop.getaddrinfo = loop.getnameinfo = raises("loop")
        await loop.run_in_executor(None, sys.stdin.read)
        await server.stop("the test is over")
        assert not called, called

    asyncio.run(main())
"""


def test_server_makes_no_dns_lookup():
    serves = subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(SERVER_WITHOUT_DNS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    async def main(endpoint):
        reader, writer = await asyncio.open_connection(*endpoint.split(":"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"400 Bad Request" in await reader.read()
        writer.close()
        nodes = [
            aio.create_handler(f"tcp://{endpoint}/run", name=name, min_nodes=2, local_addr="127.0.0.1", **FAST)
            for name in ("a", "b")
        ]
        worlds = await gather(*nodes)
        await worlds[0].store.set("k", b"v")
        assert await worlds[1].store.get("k") == b"v"
        await nodes[0].abandon()
        async with asyncio.timeout(PROCESS_PATIENCE_S):
            await worlds[1].changed.wait()
        await nodes[1].aclose()

    try:
        line = serves.stdout.readline()
        assert "listening on 127.0.0.1:" in line, line
        run(main(line.split()[-1]))
    finally:
        out, err = serves.communicate("", timeout=PROCESS_PATIENCE_S)
    assert serves.returncode == 0, err
    assert "failed" not in out
    assert [line for line in err.splitlines() if not line.startswith("Executing <")] == []
