"""The client of the embedded server: time-outs, refusals, limits, restarts without data, and clean closing."""

import asyncio
import gc
import random
import time
import weakref
from contextlib import asynccontextmanager

import msgspec
import pytest

from rallypoint import aio
from rallypoint.backends.tcp import client as tcp
from rallypoint.backends.tcp.connection import ClientConnection
from rallypoint.backends.tcp.dial import dial
from rallypoint.errors import BackendError, HistoryGone, OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import Put
from rallypoint.rendezvous.records import ClaimRecord, encode
from rallypoint.server import runs
from rallypoint.testing import loop as virtual
from rallypoint.wire.frames import DEFAULT_LIMIT, GREETING, Framer, frame
from rallypoint.wire.handshake import Versions
from rallypoint.wire.messages import (
    Claim,
    Do,
    RefusalCode,
    Refused,
    Welcome,
    client_decoder,
    encoder,
    hello_decoder,
)
from tests.ports import free_port
from tests.server.kit import PATIENCE_S, client_of, eventually, put, run, serving, take
from tests.server.proxy import through
from tests.server.threaded import ThreadedServer

LATE_S = 5.0
"""How late a time-out may be on a busy machine."""


@asynccontextmanager
async def listening(handle, port=0):
    """A server on loopback that runs `handle` for each connection; its endpoint."""
    tasks = set()

    async def accept(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            await handle(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            tasks.discard(asyncio.current_task())

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks))
        await asyncio.sleep(0)


async def hang(reader, writer):
    """Read everything, send nothing."""
    while await reader.read(1 << 16):
        pass


def sends(*chunks: bytes):
    """Answer the first bytes with these, and close."""

    async def handle(reader, writer):
        await reader.read(1)
        for chunk in chunks:
            writer.write(chunk)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return handle


class Scripted:
    """A server that sends its welcome, records all messages, and answers none."""

    def __init__(self, generation="g", **fields):
        self.welcome = Welcome(1, generation, **fields)
        self.hellos = []
        self.messages = []

    async def handle(self, reader, writer):
        framer = Framer(DEFAULT_LIMIT)
        is_first = True
        while data := await reader.read(1 << 16):
            for payload in framer.feed(data):
                if is_first:
                    is_first = False
                    self.hellos.append(hello_decoder.decode(payload))
                    writer.write(GREETING + frame(encoder.encode(self.welcome)))
                else:
                    self.messages += client_decoder.decode(payload).messages


class Sink(asyncio.Transport):
    """A transport whose peer says nothing."""

    def write(self, data):
        pass

    def close(self):
        pass


@asynccontextmanager
async def takes(least_s: float):
    """Assert that the block takes at least this long, and not much longer."""
    began_at = time.monotonic()
    yield
    took_s = time.monotonic() - began_at
    assert least_s - 0.01 <= took_s <= least_s + LATE_S


def others() -> set[str]:
    """The names of all other tasks."""
    return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}


# --- time-outs --------------------------------------------------------------------------------------------------------

CALLS = {
    "get": lambda backend: backend.get("/a"),
    "scan": lambda backend: backend.scan("/"),
    "keep_alive": lambda backend: backend.keep_alive(1),
    "status": lambda backend: backend.status(),
    "put": lambda backend: put(backend, "/a"),
    "add": lambda backend: backend.add("/a", 1),
    "grant": lambda backend: backend.grant(1.0),
    "revoke": lambda backend: backend.revoke(1),
    "open_session": lambda backend: backend.open_session(5.0),
}
CHANGES = {"put", "add", "grant", "revoke", "open_session"}


@pytest.mark.parametrize("call", CALLS)
def test_call_ends_in_time_without_a_welcome(call):
    async def main():
        async with listening(hang) as endpoint, client_of(endpoint, call_timeout_s=0.2) as backend:
            async with takes(0.2):
                with pytest.raises(Unavailable) as caught:  # it was never sent, so it did not happen
                    await CALLS[call](backend)
            assert endpoint in str(caught.value)

    run(main())


@pytest.mark.parametrize("call", CALLS)
def test_call_ends_in_time_without_an_answer(call):
    async def main():
        scripted = Scripted()
        async with listening(scripted.handle) as endpoint, client_of(endpoint, call_timeout_s=0.2) as backend:
            async with takes(0.2):
                with pytest.raises(BackendError) as caught:
                    await CALLS[call](backend)
            assert type(caught.value) is (OutcomeUnknown if call in CHANGES else Unavailable)
            assert "did not answer within 0.2 s" in str(caught.value)
            assert scripted.messages

    run(main())


def test_attempt_to_connect_times_out(monkeypatch):
    monkeypatch.setattr(tcp, "CONNECT_S", 0.2)

    async def main():
        async with listening(hang) as endpoint, client_of(endpoint, call_timeout_s=30.0) as backend:
            async with takes(0.2):
                with pytest.raises(Unavailable) as caught:
                    await backend.get("/a")
            assert str(caught.value) == f"{endpoint} cannot be reached: no answer within 0.2 s"

    run(main())


def test_silent_connection_is_replaced():
    async def main():
        async with (
            serving() as server,
            through(server) as proxy,
            client_of(proxy.endpoint, stall_s=0.2, call_timeout_s=PATIENCE_S) as backend,
        ):
            await backend.get("/a")
            proxy.swallows = True
            adding = asyncio.create_task(backend.add("/n", 1))
            await eventually(lambda: "/n" in server.engine_host.engine.items, "the server executes it")
            proxy.swallows = False  # for new connections: swallowed data is lost
            assert (await adding).value == 1
            assert proxy.connections == 2

    run(main())


def test_connection_whose_data_is_acknowledged_gets_more_time():
    """The server may be overloaded: reconnects would add to the load."""

    async def main():
        async with serving() as server, through(server) as proxy:
            async with client_of(proxy.endpoint, stall_s=0.3, call_timeout_s=PATIENCE_S) as backend:
                await backend.get("/a")
                await asyncio.sleep(0.4)  # until the stall detector has no timer
                proxy.delay_s = 0.2
                await backend.get("/a")
            assert proxy.connections == 1

    run(main())


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_process_that_was_stopped_processes_received_answers_first(kind):
    """uvloop runs timers before it reads from sockets."""
    factory = None if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    async def main(served):
        async with client_of(served.proxy.endpoint, stall_s=0.3) as backend:
            await backend.get("/a")
            served.proxy.delay_s = 0.05
            asking = asyncio.create_task(backend.get("/a"))
            await asyncio.sleep(0)
            await asyncio.sleep(0.02)
            time.sleep(1.0)  # noqa: ASYNC251
            await asking

    with ThreadedServer() as served, asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(served))
        assert served.proxy.connections == 1


def test_silent_connection_without_pending_requests_is_kept():
    async def main():
        async with serving() as server, through(server) as proxy, client_of(proxy.endpoint, stall_s=0.05) as backend:
            lease = await backend.grant(0.4)
            await eventually(lambda: server.engine_host.engine.leases.get(lease) is None, "time passes")
            await backend.get("/a")
            assert proxy.connections == 1

    run(main())


def test_session_is_closed_in_bounded_time_without_an_answer():
    async def main():
        async with serving() as server, through(server) as proxy, client_of(proxy.endpoint) as backend:
            session = await backend.open_session(0.5)
            proxy.swallows = True
            async with takes(0.0):
                await session.close()

    run(main())


def test_watch_on_a_hanging_server_can_be_cancelled():
    async def main():
        async with listening(hang) as endpoint, client_of(endpoint) as backend:
            watch = backend.watch("/", 1)
            reading = asyncio.create_task(anext(watch, "over"))
            await asyncio.sleep(0)
            watch.cancel()
            async with asyncio.timeout(PATIENCE_S):
                assert await reading == "over"

    run(main())


# --- unreachable ------------------------------------------------------------------------------------------------------


def test_calls_fail_soon_with_the_cause_if_the_connection_is_refused():
    async def main():
        endpoint = f"127.0.0.1:{free_port()}"
        async with client_of(endpoint, call_timeout_s=60.0) as backend:
            async with takes(0.0):
                errors = await asyncio.gather(backend.get("/a"), put(backend, "/a"), return_exceptions=True)
            for error in errors:
                assert type(error) is Unavailable
                assert str(error) == f"{endpoint} cannot be reached: connection refused"

    run(main())


def test_error_names_a_host_that_does_not_exist():
    async def main():
        async with client_of("no-such-host.invalid:29400") as backend:
            with pytest.raises(Unavailable, match=r"no-such-host\.invalid:29400 cannot be reached: \w+"):
                await backend.get("/a")

    run(main())


def test_listener_is_called_when_the_server_becomes_unreachable_and_reachable():
    async def main():
        port = free_port()
        reported = []
        async with client_of(f"127.0.0.1:{port}") as backend:
            backend.on_reachability(reported.append)
            with pytest.raises(Unavailable):
                await backend.get("/a")
            assert "connection refused" in str(reported[-1])
            async with serving(port):
                await eventually(lambda: reported[-1] is None, "it is reachable")
                await backend.get("/a")
                assert all(isinstance(error, Unavailable) for error in reported[:-1])

    run(main())


def test_call_that_was_sent_waits_until_the_server_is_reachable_again():
    async def main():
        async with serving() as server, through(server) as proxy, client_of(proxy.endpoint) as backend:
            await backend.get("/a")
            proxy.swallows = True
            adding = asyncio.create_task(backend.add("/n", 1))
            await eventually(lambda: "/n" in server.engine_host.engine.items, "the server executes it")
            reported = []
            backend.on_reachability(reported.append)
            proxy.refuse()
            proxy.swallows = False
            await eventually(lambda: reported, "it notices that the connection is refused")
            with pytest.raises(Unavailable):  # this one was not sent
                await backend.get("/a")
            assert not adding.done()
            await proxy.listen()
            assert (await adding).value == 1

    run(main())


@pytest.mark.parametrize("grace_s", [0.3, 2.0])
def test_client_that_lost_its_connection_tries_several_times_within_its_grace(grace_s):
    async def main():
        loop = asyncio.get_running_loop()
        tried_at = []

        async def connect(make):
            tried_at.append(loop.time())
            if len(tried_at) > 1:
                raise ConnectionRefusedError
            link = make()
            link.connection_made(Sink())
            link.data_received(GREETING + frame(encoder.encode(Welcome(1, "g"))))
            loop.call_later(1.0, link.connection_lost, None)

        backend = tcp.TcpBackend("a:1", connect, grace_s=grace_s, rng=random.Random(1))
        backend._start()
        await asyncio.sleep(1.0 + grace_s)
        again = [at - 1.0 for at in tried_at[1:]]
        assert 0 <= again[0] < 0.03, "the first attempt is at once"
        assert len(again) >= tcp.TRIES_IN_GRACE
        await asyncio.sleep(60.0)
        assert len(tried_at) < 60, "later there are fewer"
        await backend.close()

    virtual.run(main())


def test_node_joins_a_server_that_starts_after_it():
    async def main():
        port = free_port()
        url = f"tcp://127.0.0.1:{port}/run"
        node = aio.create_handler(url, name="a", min_nodes=1, last_call_timeout=0.1, is_host=False)
        joining = asyncio.create_task(node.next_rendezvous())
        with pytest.raises(Unavailable):
            async with client_of(f"127.0.0.1:{port}") as backend:
                await backend.get("/a")
        assert not joining.done()
        async with serving(port):
            world = await joining
            assert (world.rank, world.world_size) == (0, 1)
            await node.aclose()

    run(main())


def test_time_to_live_of_a_session_counts_from_the_sending_of_its_request():
    """Connecting does not count: it takes long if thousands of clients connect at once."""

    async def main():
        async with serving() as server:
            endpoint = server.addresses[0]

            async def connect_late(make):
                await asyncio.sleep(1.0)
                await dial(endpoint, 1)(make)

            backend = tcp.TcpBackend(endpoint, connect_late)
            session = await backend.open_session(0.9)
            await asyncio.sleep(0.3)
            assert session.lost.reason is None
            await backend.close()

    run(main())


def test_round_forms_although_answers_take_longer_than_the_time_to_live():
    """As on an overloaded machine. All renewals arrive; until there is a round, that is sufficient."""

    async def main():
        async with serving() as server, through(server) as proxy:
            url = f"tcp://{proxy.endpoint}/run?is_host=0&keep_alive_interval=0.5&keep_alive_max_attempt=3"
            nodes = [aio.create_handler(url, name=name, min_nodes=2, max_nodes=2) for name in "ab"]
            await asyncio.gather(*(node.next_rendezvous() for node in nodes))
            proxy.delay_s = 0.8
            worlds = await asyncio.gather(*(node.next_rendezvous() for node in nodes))
            assert {world.round for world in worlds} == {2}
            proxy.delay_s = 0.0
            for node in nodes:
                await node.aclose()

    run(main())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "TLS"),
        (b"-ERR unknown command\r\n"[:20], "'-ERR unknown command'"),
    ],
)
def test_other_protocol_on_the_port_is_rejected_and_named(answer, named):
    async def main():
        async with listening(sends(answer)) as endpoint, client_of(endpoint) as backend:
            with pytest.raises(Rejected) as caught:
                await backend.get("/a")
            assert str(caught.value).startswith(f"{endpoint} is not a Rallypoint server: it answered with {named}")
            assert str(caught.value).endswith("Is the port right?")

    run(main())


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [GREETING],
        [GREETING[:3]],
        [GREETING, frame(b"\xc1")],
        [GREETING, frame(b"")],
        [GREETING, b"\xff\xff\xff\xff"],
        [GREETING, frame(encoder.encode(Refused(RefusalCode.BUSY, "come back later")))],
        [GREETING, frame(b"\x92\x01" + b"\x91" * 50_000 + b"\xc0")],
    ],
)
def test_server_that_disconnects_or_sends_garbage_is_unavailable_and_retried(chunks):
    async def main():
        port = free_port()
        async with client_of(f"127.0.0.1:{port}") as backend:
            async with listening(sends(*chunks), port):
                with pytest.raises(Unavailable) as caught:
                    await backend.get("/a")
                assert "cannot be reached: " in str(caught.value)
            async with serving(port):
                while True:
                    try:
                        await backend.get("/a")
                    except Unavailable:  # refused before the server listened
                        continue
                    return

    run(main())


@pytest.mark.parametrize("token", ["", "wrong"])
def test_wrong_token_is_rejected_with_the_remedy(token):
    async def main():
        async with serving(token="right") as server:
            async with client_of(server.addresses[0], token=token) as backend:
                for _ in range(2):  # the second call retries and gets the same error
                    with pytest.raises(Rejected, match=r"refused: .*token") as caught:
                        await put(backend, "/a")
                    assert "token_file" in str(caught.value)
            async with client_of(server.addresses[0], token="right") as backend:
                await put(backend, "/a")

    run(main())


def test_unsupported_version_is_rejected():
    async def main():
        async with serving() as server, client_of(server.addresses[0], versions=Versions(7, 9)) as backend:
            with pytest.raises(Rejected, match=r"speaks versions 7 to 9 .* upgrade the server"):
                await backend.get("/a")

    run(main())


def test_session_of_a_client_that_is_refused_on_reconnect_is_lost_with_the_reason():
    async def main():
        async with serving() as server, through(server) as proxy, client_of(proxy.endpoint) as backend:
            session = await backend.open_session(60.0, interval_s=0.05)
            server.token = "new"
            proxy.cut()
            async with asyncio.timeout(PATIENCE_S):
                assert "token" in await session.lost

    run(main())


def test_outcome_of_a_request_that_was_sent_before_the_client_was_refused_is_unknown():
    async def main():
        async with serving() as server, through(server) as proxy, client_of(proxy.endpoint) as backend:
            await backend.get("/a")
            proxy.swallows = True
            adding = asyncio.create_task(backend.add("/n", 1))
            reading = asyncio.create_task(backend.get("/n"))
            await eventually(lambda: "/n" in server.engine_host.engine.items, "the server executes it")
            server.token = "new"
            proxy.swallows = False
            proxy.cut()
            # Regression: Rejected was raised, which means that it was not executed.
            with pytest.raises(OutcomeUnknown, match="token"):
                await adding
            with pytest.raises(Rejected, match="token"):
                await reading

    run(main())


# --- limits -----------------------------------------------------------------------------------------------------------


def test_request_that_is_too_large_is_rejected_with_the_limit_and_the_connection_stays_open():
    async def main():
        async with serving() as server, through(server) as proxy:
            server.max_frame = 10_000
            async with client_of(proxy.endpoint) as backend:
                await put(backend, "/a")
                results = await asyncio.gather(
                    put(backend, "/b", bytes(9_000)),
                    put(backend, "/c", bytes(10_001)),
                    put(backend, "/d", bytes(9_000)),
                    return_exceptions=True,
                )
                assert isinstance(results[1], Rejected)
                assert "too large: the server accepts at most 10000" in str(results[1])
                assert sorted(server.engine_host.engine.items) == ["/a", "/b", "/d"]
                assert (await backend.get("/d")).item.mod_revision == results[2]
                assert (proxy.connections, server.describe()["refused"]) == (1, "0")

    run(main())


def test_requests_that_are_too_large_for_one_frame_are_sent_in_several():
    async def main():
        async with serving() as server, client_of(server.addresses[0]) as backend:
            server.max_frame = 10_000
            await asyncio.gather(*(put(backend, f"/{number}", bytes(800)) for number in range(100)))
            assert len(server.engine_host.engine.items) == 100
            assert server.describe()["refused"] == "0"

    run(main())


# --- restarts without data --------------------------------------------------------------------------------------------


def test_restart_without_data_loses_sessions_and_ends_watches():
    async def main():
        port = free_port()
        async with client_of(f"127.0.0.1:{port}") as backend:
            async with serving(port):
                session = await backend.open_session(60.0)
                watch = backend.watch("/w", await put(backend, "/w", b"old") - 1)
                await take(watch, 1)
                reading = asyncio.create_task(anext(watch))
            async with serving(port) as server:
                async with asyncio.timeout(PATIENCE_S):
                    assert await session.lost == f"127.0.0.1:{port} was restarted without its data"
                    with pytest.raises(HistoryGone, match="scan again"):
                        await reading
                scanned = await backend.scan("/w")
                assert scanned.items == ()
                again = backend.watch("/w", scanned.revision)
                written = await put(backend, "/w", b"new")
                assert await take(again, 1) == [written]
                assert len(server.engine_host.engine.leases) == 0
                assert server.clients.session_count == 0

    run(main())


def test_watch_that_continues_after_a_restart_without_data_gets_the_oldest_revision():
    async def main():
        port = free_port()
        async with client_of(f"127.0.0.1:{port}") as backend:
            async with serving(port):
                watch = backend.watch("/w", await put(backend, "/w") - 1)
                await take(watch, 1)
                reading = asyncio.create_task(anext(watch))
            async with serving(port):
                with pytest.raises(HistoryGone):
                    await reading
                with pytest.raises(HistoryGone) as caught:  # again without a scan, now with the oldest revision
                    await anext(watch)
                assert caught.value.oldest > 0

    run(main())


def test_claim_is_made_before_sessions_are_lost_and_sent_before_anything_else():
    async def main():
        port = free_port()
        first, second = Scripted("first"), Scripted("second")
        order = []
        async with client_of(f"127.0.0.1:{port}", run="run") as backend:
            backend.on_data_loss(lambda: order.append("claim") or b"state of the run")
            async with serving(port):
                session = await backend.open_session(60.0)
                session.lost.add_callback(lambda reason: order.append("lost"))
            async with listening(second.handle, port):
                await eventually(lambda: second.messages, "it claims")
                assert second.messages[0] == Claim(b"state of the run")
                assert order == ["claim", "lost"]
                (hello,) = second.hellos
                assert hello.run == "run"
                assert hello.generation not in ("", "second")
                assert [held.lease for held in hello.sessions] == [session.lease]
            async with listening(first.handle, port):
                await eventually(lambda: first.hellos, "it connects to the next server")
                assert first.hellos[0].generation == "second"
                assert first.hellos[0].sessions == ()

    run(main())


def test_outcome_of_sent_requests_is_unknown_after_a_restart_without_data():
    async def main():
        port = free_port()
        first = Scripted("first")
        async with client_of(f"127.0.0.1:{port}", call_timeout_s=PATIENCE_S) as backend:
            async with listening(first.handle, port):
                adding = asyncio.create_task(backend.add("/n", 1))
                reading = asyncio.create_task(backend.get("/n"))
                await eventually(lambda: len(first.messages) == 2, "both are sent")
                assert all(isinstance(message, Do) for message in first.messages)
            async with serving(port):
                with pytest.raises(OutcomeUnknown, match="restarted without its data"):
                    await adding
                assert (await reading).item is None  # a read can always be repeated

    run(main())


def test_round_numbers_continue_after_a_restart_without_data():
    async def main():
        port = free_port()
        options = {"last_call_timeout": 0.1, "keep_alive_interval": 0.5, "is_host": False, "min_nodes": 2}
        nodes = [aio.create_handler(f"tcp://127.0.0.1:{port}/run", name=name, **options) for name in ("a", "b")]
        async with serving(port):
            for expected in (1, 2):
                worlds = await asyncio.gather(*(node.next_rendezvous() for node in nodes))
                assert {world.round for world in worlds} == {expected}
        async with serving(port):
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(world.changed.wait() for world in worlds))
                worlds = await asyncio.gather(*(node.next_rendezvous() for node in nodes))
            assert {world.round for world in worlds} == {3}
            await asyncio.gather(*(node.aclose() for node in nodes))

    run(main())


def test_members_that_left_their_round_during_the_restart_count_as_returned():
    async def main():
        port = free_port()
        options = {"last_call_timeout": 0.1, "keep_alive_interval": 0.5, "is_host": False, "min_nodes": 2}
        nodes = [aio.create_handler(f"tcp://127.0.0.1:{port}/run", name=name, **options) for name in ("a", "b")]
        async with serving(port):
            await asyncio.gather(*(node.next_rendezvous() for node in nodes))
        calls = [asyncio.create_task(node.next_rendezvous()) for node in nodes]
        await asyncio.sleep(0)  # now they have left the round
        async with serving(port) as server:
            # Regression: "0 of 2 members of round 1 are back", although both waited.
            wanted = "2 of 2 members of round 1 are back"
            await eventually(lambda: wanted in server.runs.ensure_run("run").returning.sentence(), "both are back")
            async with asyncio.timeout(PATIENCE_S):
                worlds = await asyncio.gather(*calls)
            assert {world.round for world in worlds} == {2}
            await asyncio.gather(*(node.aclose() for node in nodes))

    run(main())


def test_node_claims_the_round_that_it_left_until_it_has_a_new_session():
    """Later, a round of the same number may be another one, of a server that was restarted without its data."""

    async def main():
        async with serving() as server:
            options = {"min_nodes": 1, "last_call_timeout": 0.1, "is_host": False}
            handler = aio.create_handler(f"tcp://{server.addresses[0]}/run", name="a", **options)
            await handler.next_rendezvous()
            node = handler._node

            def claimed() -> tuple[int, bool]:
                claim = msgspec.json.decode(node._make_claim(), type=ClaimRecord)
                return claim.round, claim.is_member

            assert claimed() == (1, True)
            await node.leave("for a while")
            assert claimed() == (1, True)
            await node._node_session.ensure()
            assert claimed() == (1, False)
            await handler.aclose()

    run(main())


def test_reconnecting_observer_does_not_delay_the_nodes():
    async def main():
        port = free_port()
        async with client_of(f"127.0.0.1:{port}", run="run") as observer:
            async with serving(port):
                await observer.get("/a")
            async with serving(port):
                await eventually(lambda: observer._link is not None, "the observer is back")
                node = aio.create_handler(f"tcp://127.0.0.1:{port}/run", name="a", min_nodes=1, last_call_timeout=0.1)
                # Regression: the observer sent no claim, so the run waited for it for a time to live.
                async with asyncio.timeout(8.0):
                    assert (await node.next_rendezvous()).rank == 0
                await node.aclose()

    run(main())


def test_claim_of_a_member_counts_after_the_member_has_disconnected(monkeypatch):
    monkeypatch.setattr(runs, "MOST_PAUSE_S", 0.05)
    monkeypatch.setattr(runs, "UNMADE_PAUSE_S", 0.05)

    async def main():
        port = free_port()
        claim = ClaimRecord(id="x", round=7, size=2, is_member=True, floor=7, ttl_s=1.0)
        async with client_of(f"127.0.0.1:{port}", run="run") as member:
            member.on_data_loss(lambda: encode(claim))
            async with serving(port):
                await member.get("/a")
            async with serving(port) as server:
                await eventually(
                    lambda: "run" in server.runs and server.runs.ensure_run("run").returning.floor, "a claim"
                )
                await member.close()
                await asyncio.sleep(0.5)
                # Regression: the claim was dropped together with the idle run, and round 1 was formed.
                node = aio.create_handler(f"tcp://127.0.0.1:{port}/run", name="a", min_nodes=1, last_call_timeout=0.1)
                assert (await node.next_rendezvous()).round == 8
                await node.aclose()

    run(main())


def test_claim_of_a_member_makes_the_new_server_wait_for_the_others():
    async def main():
        port = free_port()
        claim = ClaimRecord(id="x", round=7, size=1, is_member=True, floor=7, ttl_s=1.0)
        async with client_of(f"127.0.0.1:{port}", run="run") as member:
            member.on_data_loss(lambda: encode(claim))
            async with serving(port):
                await member.get("/a")
            async with serving(port):
                node = aio.create_handler(f"tcp://127.0.0.1:{port}/run", name="a", min_nodes=1, last_call_timeout=0.1)
                await eventually(lambda: member._link is not None, "the member is back")
                assert (await node.next_rendezvous()).round == 8
                await node.aclose()

    run(main())


def test_welcome_after_a_cancelled_attempt_is_ignored():
    async def main():
        link = ClientConnection(lambda: None, lambda messages: None, lambda link, why: None)
        link.welcome.cancel()
        link.data_received(GREETING + frame(encoder.encode(Welcome(version=1, generation="x"))))
        assert link.welcome.cancelled()

    run(main())


# --- cancelling and closing -------------------------------------------------------------------------------------------


def test_failed_request_creates_no_reference_cycle():
    async def main():
        async with (
            serving() as server,
            through(server) as proxy,
            client_of(proxy.endpoint, call_timeout_s=0.2) as backend,
        ):
            await backend.get("/a")
            proxy.swallows = True
            errors = []
            gc.disable()
            try:
                for call in (CALLS["put"], CALLS["get"], lambda backend: backend.scan_and_watch(["/"])):
                    try:
                        await call(backend)
                    except (Unavailable, OutcomeUnknown) as error:
                        errors.append(weakref.ref(error))
                await asyncio.sleep(0)
                assert [error() for error in errors] == [None] * 3
            finally:
                gc.enable()

    run(main())


def test_call_that_is_cancelled_leaves_nothing_pending():
    async def main():
        async with serving() as server, through(server) as proxy, client_of(proxy.endpoint) as backend:
            await backend.get("/a")
            proxy.swallows = True
            calls = [asyncio.create_task(CALLS[name](backend)) for name in CALLS if name != "open_session"]
            await asyncio.sleep(0)
            assert len(backend._requests._pending) == len(calls)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            assert not backend._requests._pending
            proxy.swallows = False
            proxy.cut()
            await backend.get("/a")
            assert not backend._requests._pending

    run(main())


def test_call_that_is_cancelled_before_the_connection_exists_is_never_sent():
    async def main():
        async with serving() as server, client_of(server.addresses[0]) as backend:
            putting = asyncio.create_task(put(backend, "/a"))
            await asyncio.sleep(0)
            putting.cancel()
            await asyncio.wait([putting])
            await put(backend, "/b")
            assert set(server.engine_host.engine.items) == {"/b"}

    run(main())


def test_closing_fails_pending_requests_and_leaves_no_task():
    async def main():
        async with serving() as server, through(server) as proxy:
            before = others()
            async with client_of(proxy.endpoint) as backend:
                await backend.open_session(60.0)
                watch = backend.watch("/", server.engine_host.engine.revision)
                proxy.swallows = True
                reading = asyncio.create_task(anext(watch, "over"))
                calls = {name: asyncio.create_task(CALLS[name](backend)) for name in ("get", "add", "status")}
                await eventually(lambda: "/a" in server.engine_host.engine.items, "the server executes them")
                await backend.close()
                async with asyncio.timeout(PATIENCE_S):
                    assert await reading == "over"
                    await asyncio.wait(calls.values())
                kinds = {name: type(call.exception()) for name, call in calls.items()}
                assert kinds == {"get": Unavailable, "add": OutcomeUnknown, "status": Unavailable}
                await backend.close()
            await eventually(
                lambda: not [name for name in others() - before if not name.startswith("Task-")], "its tasks are gone"
            )

    run(main())


@pytest.mark.parametrize("where", ["connected", "connecting", "refused", "never used"])
def test_closing_at_any_time_leaves_no_task(where):
    async def main():
        async with serving() as server, listening(hang) as hanging:
            places = {"connecting": hanging, "refused": f"127.0.0.1:{free_port()}"}
            before = asyncio.all_tasks()
            async with client_of(places.get(where, server.addresses[0])) as backend:
                if where != "never used":
                    getting = asyncio.create_task(backend.get("/a"))
                    if where == "connecting":
                        await eventually(lambda: len(asyncio.all_tasks() - before) >= 3, "it is connecting")
                    else:
                        await asyncio.wait([getting])
                await backend.close()
                if where == "connecting":
                    with pytest.raises(Unavailable, match="was closed"):
                        await getting
                elif where != "never used":
                    getting.exception()
                await eventually(
                    lambda: not [t for t in asyncio.all_tasks() - before if "connection to" in t.get_name()],
                    "all ended",
                )
                with pytest.raises(Unavailable, match="was closed"):
                    await backend.get("/a")
                with pytest.raises(Unavailable, match="was closed"):
                    backend.watch("/", 1)

    run(main())


def test_closing_delivers_requests_of_the_same_loop_iteration():
    async def main():
        async with serving() as server, client_of(server.addresses[0]) as backend:
            await backend.get("/a")
            sending = asyncio.create_task(backend.txn((), (Put("/a", b""),)))
            await asyncio.sleep(0)
            await backend.close()
            with pytest.raises(OutcomeUnknown):
                await sending
            await eventually(lambda: "/a" in server.engine_host.engine.items, "it arrives")

    run(main())
