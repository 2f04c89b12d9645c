"""Limits of a server on real sockets: a client that exceeds one is told which, and other clients are not affected."""

import asyncio
import resource
import subprocess
import sys

import pytest
from click.testing import CliRunner

from rallypoint.cli.serve import serve
from rallypoint.cli.serve_limits import _OPTIONS, limits_of
from rallypoint.errors import Rejected, Unavailable
from rallypoint.events import ClientRefused, Emitter
from rallypoint.kv.types import Add, Delete, Grant, Put, Txn
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.admission.refusals import Refusal
from rallypoint.wire.frames import GREETING, frame
from rallypoint.wire.messages import (
    Await,
    Do,
    Going,
    Hello,
    RefusalCode,
    Refused,
    WatchStart,
    encoder,
    server_decoder,
    welcome_decoder,
)
from tests.server.kit import Raw, client_of, eventually, put, run, serving


def hello(**fields) -> bytes:
    return GREETING + frame(encoder.encode(Hello(**{"oldest": 1, "newest": 1, "client": "c", **fields})))


async def refused(server, sent: bytes) -> Refused:
    raw = await Raw.open(server)
    raw.send_bytes(sent)
    answer = await raw.rest()
    raw.close()
    assert answer.startswith(GREETING)
    refusal = welcome_decoder.decode(answer[len(GREETING) + 4 :])
    assert isinstance(refusal, Refused)
    return refusal


def count(server, kind: Refusal) -> int:
    return server.admission.refusals.counts[kind]


# --- connections ------------------------------------------------------------------------------------------------------


def test_client_beyond_the_limit_on_connections_is_rejected_and_a_known_one_may_reconnect():
    async def main():
        limits = ServerLimits(max_connections=2)
        async with serving(limits=limits) as server, client_of(server.addresses[0]) as first:
            await put(first, "/a")
            second, _ = await Raw.welcomed(server, "second")
            async with client_of(server.addresses[0]) as third:
                with pytest.raises(Rejected, match="the server has 2 clients, its limit: raise --max-connections"):
                    await third.get("/a")
            assert count(server, Refusal.CONNECTIONS) == 1
            again, _ = await Raw.welcomed(server, "second")
            second.abort()
            await put(first, "/a")
            again.close()
            await eventually(lambda: len(server.connections) == 1, "the second is closed")
            async with client_of(server.addresses[0]) as third:
                await third.get("/a")

    run(main())


def test_new_run_beyond_the_limit_is_rejected_and_existing_runs_are_not():
    async def main():
        async with serving(limits=ServerLimits(max_runs=2)) as server:
            first, _ = await Raw.welcomed(server, "a", run="one")
            second, _ = await Raw.welcomed(server, "b", run="two")
            refusal = await refused(server, hello(client="c", run="three"))
            assert refusal == Refused(RefusalCode.LIMIT, "the server has 2 runs, its limit: raise --max-runs")
            third, _ = await Raw.welcomed(server, "d", run="two")
            assert len(server.runs) == 2
            assert count(server, Refusal.RUNS) == 1
            for raw in (first, second, third):
                raw.close()

    run(main())


def test_idle_connections_do_not_starve_clients_that_authenticate(monkeypatch):
    monkeypatch.setattr("rallypoint.server.admission.admission.EVICT_AFTER_S", 0.05)

    async def main():
        limits = ServerLimits(max_pending=20, hello_timeout_s=60.0)
        async with serving(limits=limits) as server:
            idle = [await Raw.open(server) for _ in range(50)]
            async with client_of(server.addresses[0]) as client:
                for number in range(20):
                    await put(client, "/a", b"%d" % number)
                    assert len(server.admission.pending) <= 20
            async with client_of(server.addresses[0]) as another:
                await put(another, "/b")
            await eventually(lambda: count(server, Refusal.PENDING) >= 30, "idle connections are evicted")
            evicted = [raw for raw in idle[:10] if b"newer connections are waiting" in await raw.rest()]
            assert len(evicted) == 10
            for raw in idle:
                raw.abort()

    run(main())


def test_source_with_too_many_failed_logins_is_refused_before_its_hello_is_read():
    async def main():
        seen = []
        limits = ServerLimits(max_failed_logins=5, login_block_s=1.0)
        async with serving(token="right", limits=limits, emit=Emitter(seen.append)) as server:
            async with client_of(server.addresses[0], token="right") as admitted:
                await put(admitted, "/a")
                for _ in range(5):
                    assert (await refused(server, hello(token="wrong"))).code is RefusalCode.TOKEN
                frames = server.traffic.frames_in
                refusal = await refused(server, b"")
                assert refusal.code is RefusalCode.BUSY
                assert refusal.message.startswith("too many failed logins from 127.0.0.1: it is blocked for ")
                async with client_of(server.addresses[0], token="right") as blocked:
                    with pytest.raises(Unavailable, match=r"too many failed logins from 127\.0\.0\.1"):
                        await blocked.get("/a")
                    assert server.traffic.frames_in == frames
                    await put(admitted, "/a")  # open connections are not affected
                    loop = asyncio.get_running_loop()

                    def over():
                        return server.admission.logins.blocked_s("127.0.0.1", loop.time()) == 0

                    await eventually(over, "the block is over")
                    await blocked.get("/a")
            assert count(server, Refusal.TOKEN) == 5
            assert count(server, Refusal.BLOCKED) >= 2
        lines = [str(event) for event in seen if isinstance(event, ClientRefused)]
        assert len(lines) == 2  # one for the tokens, one for the block

    run(main())


def test_same_refusal_is_logged_once_an_interval_with_the_number_of_repetitions():
    async def main():
        seen = []
        limits = ServerLimits(log_interval_s=0.5, max_failed_logins=1_000_000)
        async with serving(token="right", limits=limits, emit=Emitter(seen.append)) as server:

            def lines():
                return [str(event) for event in seen if isinstance(event, ClientRefused)]

            loop = asyncio.get_running_loop()
            began_at = loop.time()
            while len(lines()) < 2:
                await refused(server, hello(token="wrong"))
            assert loop.time() - began_at >= 0.5
            assert lines()[1].endswith(
                f"(and {count(server, Refusal.TOKEN) - 2} more of this address since the last message)"
            )
            status = server.describe()
            assert status["refused_token"] == str(count(server, Refusal.TOKEN))

    run(main())


# --- quotas -----------------------------------------------------------------------------------------------------------


def quota_case(limits: ServerLimits, *allowed, then, message: str, kind: Refusal):
    """The `allowed` operations are executed, `then` is refused, and deleting and reading are still possible."""

    async def main():
        async with serving(limits=limits) as server, client_of(server.addresses[0]) as backend:
            for op in allowed:
                backend.checked(await backend.execute(op))
            with pytest.raises(Rejected, match=message):
                backend.checked(await backend.execute(then))
            assert count(server, kind) == 1
            assert (await backend.get("/rallypoint/r/0")).item is not None
            await backend.txn((), (Delete("/rallypoint/r/0"),))
            return server.engine_host.engine.usage

    return run(main())


def puts(*keys: str, size: int = 1) -> Txn:
    return Txn((), tuple(Put(key, bytes(size)) for key in keys))


def test_keys_of_a_run_are_limited():
    limits = ServerLimits(max_keys_per_run=3)
    allowed = [
        puts("/rallypoint/r/0", "/rallypoint/r:data/1"),
        puts("/rallypoint/r/2"),
        puts("/rallypoint/r/2"),
        puts("/rallypoint/s/0"),
    ]
    message = "run 'r' may hold 3 keys at most.*--max-keys-per-run"
    quota_case(limits, *allowed, then=puts("/rallypoint/r/3"), message=message, kind=Refusal.KEYS)
    quota_case(limits, *allowed, then=Add("/rallypoint/r:data/n", 1), message=message, kind=Refusal.KEYS)


def test_keys_of_a_server_are_limited():
    limits = ServerLimits(max_keys=3)
    allowed = [puts("/rallypoint/r/0", "/rallypoint/s/1"), puts("/elsewhere")]
    message = "the server holds 3 keys at most.*--max-keys"
    quota_case(limits, *allowed, then=puts("/rallypoint/t/3"), message=message, kind=Refusal.KEYS)


def test_bytes_of_a_run_and_of_a_server_are_limited():
    allowed = [puts("/rallypoint/r/0", size=400), puts("/rallypoint/s/0", size=400)]
    limits = ServerLimits(max_bytes_per_run=1_000)
    message = "run 'r' may hold 1000 bytes at most.*--max-bytes-per-run"
    quota_case(limits, *allowed, then=puts("/rallypoint/r/1", size=600), message=message, kind=Refusal.BYTES)
    limits = ServerLimits(max_bytes=1_000)
    message = "the server holds 1000 bytes of keys and values at most"
    usage = quota_case(limits, *allowed, then=puts("/rallypoint/r/1", size=200), message=message, kind=Refusal.BYTES)
    assert usage.size == 400 + len("/rallypoint/s/0")


def test_size_of_a_value_and_number_of_leases_are_limited():
    message = r"the value of '/rallypoint/r/1' has 1001 bytes, and the server takes 1000 at most \(--max-value\)"
    one = puts("/rallypoint/r/0", size=1_000)
    quota_case(
        ServerLimits(max_value=1_000),
        one,
        then=puts("/rallypoint/r/1", size=1_001),
        message=message,
        kind=Refusal.VALUE,
    )
    message = "the server holds 2 leases at most.*--max-leases"
    quota_case(
        ServerLimits(max_leases=2), one, Grant(9.0), Grant(9.0), then=Grant(9.0), message=message, kind=Refusal.LEASES
    )


def test_resend_of_an_executed_request_gets_its_first_answer_although_a_quota_is_reached():
    async def main():
        async with serving(limits=ServerLimits(max_keys_per_run=1)) as server:
            raw, _ = await Raw.welcomed(server, "same")
            raw.send(Do(1, puts("/rallypoint/r/0")))
            first = await raw.answer(1)
            raw.abort()
            raw, _ = await Raw.welcomed(server, "same")
            raw.send(Do(1, puts("/rallypoint/r/0")), Do(2, puts("/rallypoint/r/1")))
            assert await raw.answer(1) == first
            assert "may hold 1 keys" in (await raw.answer(2)).message
            raw.close()

    run(main())


def test_connection_with_too_many_watches_is_closed():
    async def main():
        async with serving(limits=ServerLimits(max_watches=3)) as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(*(WatchStart(number % 3, "/a", -1) for number in range(9)))
            raw.send(Do(1, puts("/b")))
            await raw.answer(1)
            raw.send(WatchStart(3, "/a", -1))
            answer = await raw.rest()
            (going,) = server_decoder.decode(answer[4:])
            assert isinstance(going, Going)
            assert going.why == "a connection may watch 3 prefixes at most (--max-watches)"
            assert count(server, Refusal.WATCHES) == 1
            raw.close()

    run(main())


def test_wait_for_too_many_keys_is_refused_and_other_waits_continue():
    async def main():
        async with serving(limits=ServerLimits(max_waits=3)) as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, ("/a",), 60.0), Await(2, ("/b", "/c"), 60.0), Await(3, ("/d",), 60.0))
            assert (await raw.answer(3)).message == (
                "a connection may wait for 3 keys at most at a time, and this would be 4: ask for fewer, or raise "
                "--max-waits"
            )
            assert count(server, Refusal.WAITS) == 1
            raw.send(Await(1, ("/x",), 60.0))  # replaces the first
            raw.send(Do(4, puts("/x")))
            assert (await raw.answer(1)).results[0].item is not None
            raw.send(Await(5, ("/d",), 60.0))  # there is room again
            raw.send(Do(6, puts("/d")))
            assert (await raw.answer(5)).results[0].item is not None
            raw.send(Await(7, ("/x", "/d", "/x", "/d"), 60.0))  # all exist, so it does not wait
            assert len((await raw.answer(7)).results) == 4
            raw.close()

    run(main())


def test_too_many_waits_of_one_connection_are_refused():
    async def main():
        async with serving(limits=ServerLimits(max_watches=2)) as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(*(Await(number, ("/a",), 60.0) for number in (1, 2, 3)))
            refusal = await raw.answer(3)
            assert "may have 2 requests wait at most at a time, and this would be 3" in refusal.message
            assert "--max-watches" in refusal.message
            raw.close()

    run(main())


# --- options and the machine ------------------------------------------------------------------------------------------


def test_options_of_the_command_are_the_limits_with_the_same_defaults():
    context = serve.make_context("serve", [])
    names = {name for name, *_ in _OPTIONS}
    given = {name: value for name, value in context.params.items() if name in names}
    assert limits_of(given) == ServerLimits()
    assert len(names) == len(ServerLimits.__slots__)


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("2KiB", 2048), ("3 mib", 3 << 20), ("1G", 1 << 30)])
def test_size_may_have_a_unit(text, size):
    assert serve.make_context("serve", ["--max-value", text]).params["max_value"] == size


@pytest.mark.parametrize("text", ["", "0", "-5", "2 TB", "lots"])
def test_invalid_size_is_refused_with_the_valid_units(text):
    done = CliRunner().invoke(serve, ["--max-value", text])
    assert done.exit_code == 2
    assert "KiB, MiB or GiB" in done.output


def test_server_warns_at_its_start_that_too_few_files_may_be_open():
    script = "ulimit -n 300; exec " + f"{sys.executable} -m rallypoint serve --bind 127.0.0.1:0"
    serves = subprocess.Popen(["sh", "-c", script], stderr=subprocess.PIPE, text=True)
    try:
        assert "listening on" in serves.stderr.readline()
        line = serves.stderr.readline()
    finally:
        serves.terminate()
        serves.communicate(timeout=20)
    assert "only 300 files may be open (ulimit -n), so at most 177 connections are accepted, not 15000" in line
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
