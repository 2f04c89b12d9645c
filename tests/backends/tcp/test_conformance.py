"""The tcp backend, and the store and handlers on top of it, pass the conformance suites, also across processes.

Time is real here. All checks run concurrently, each with its own server, because most of their time is waiting.
"""

import asyncio
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.dial import dial
from rallypoint.server.admission.credentials import Credentials
from rallypoint.server.server import Server
from rallypoint.testing.conformance.backend import BACKEND_CHECKS, BackendKit, backend_checks, run_checks
from rallypoint.testing.conformance.backend_random import check_random_history
from rallypoint.testing.conformance.handler import HANDLER_CHECKS, HandlerKit, run_handler_checks
from rallypoint.testing.conformance.store import STORE_CHECKS, StoreKit, run_store_checks
from tests.patience import until_let_go, users
from tests.server.kit import PATIENCE_S, serving
from tests.server.tls_kit import Certificates, files

HISTORY = 500
SLACK_S = 0.7
PROCESSES = 6
ALL_S = 90.0
"""The time limit of a suite."""


def connector(endpoint: str, run: str = ""):
    async def connect():
        return TcpBackend(endpoint, dial(endpoint, 29400), run=run)

    return connect


A_FEW = 12


def kit_of(endpoint: str, **changes) -> BackendKit:
    options = {"prefix": "/test/", "ttl_s": 1.5, "lease_slack_s": SLACK_S, "history_limit": HISTORY} | changes
    return BackendKit(connector(endpoint), asyncio.sleep, **options)


def assert_all_conform(reports) -> None:
    failed = [str(report) for report in reports if not report.conforming]
    assert not failed, "\n".join(failed)


async def check_backends(seeds=()):
    """All checks of the contract and random histories of these seeds, each with its own server."""

    async def check_one(check, **changes):
        async with serving(history=HISTORY) as server:
            return await run_checks(kit_of(server.addresses[0], **changes), [check])

    async with asyncio.timeout(ALL_S):
        return await asyncio.gather(
            *map(check_one, BACKEND_CHECKS), *(check_one(check_random_history, seed=seed) for seed in seeds)
        )


def test_tcp_backend_conforms_in_process_and_behaves_like_the_model():
    assert_all_conform(asyncio.run(check_backends(range(1, 11))))


def test_tcp_backend_conforms_over_mutual_tls_with_a_token(tmp_path):
    certificates = Certificates(tmp_path)
    server_tls = files(certificates.authority.path, certificates.server).server_context()
    secure = Credentials(tls=files(certificates.authority.path, certificates.client)).secure
    a_few = asyncio.Semaphore(A_FEW)  # more TLS handshakes at once would take longer than a time to live

    async def check_one(check):
        async with a_few, serving(history=HISTORY, tls=server_tls, token="secret") as server:
            endpoint = server.addresses[0]

            async def connect():
                return TcpBackend(endpoint, dial(endpoint, 29400, secure), token="secret")

            kit = BackendKit(
                connect, asyncio.sleep, prefix="/test/", ttl_s=0.7, lease_slack_s=SLACK_S, history_limit=HISTORY
            )
            return await run_checks(kit, [check])

    async def check_all():
        async with asyncio.timeout(ALL_S):
            return await asyncio.gather(*map(check_one, BACKEND_CHECKS))

    assert_all_conform(asyncio.run(check_all()))


def test_tcp_backend_conforms_on_uvloop():
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert_all_conform(runner.run(check_backends()))


# --- a server in another process --------------------------------------------------------------------------------------


def endpoint_of(serves: subprocess.Popen[str]) -> str:
    """The address that a server reports."""
    line = serves.stderr.readline()
    found = re.search(r"listening on (127\.0\.0\.1:\d+)", line)
    assert found, line
    return found[1]


@contextmanager
def served_by_other_processes(count: int):
    """The endpoints of `rallypoint serve` processes."""
    command = [sys.executable, "-m", "rallypoint", "serve", "--bind", "127.0.0.1:0"]
    serve = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [endpoint_of(one) for one in serve]
    finally:
        for one in serve:
            one.terminate()
        said = [one.communicate(timeout=PATIENCE_S)[1] for one in serve]
    assert [one.returncode for one in serve] == [0] * count, said
    assert all("SIGTERM" in words and "Traceback" not in words for words in said), said


def test_tcp_backend_conforms_against_a_server_in_another_process():
    checks = backend_checks()

    async def check_all(endpoints):
        async with asyncio.timeout(ALL_S):
            return await asyncio.gather(
                *(
                    run_checks(kit_of(endpoint, history_limit=None), checks[start::PROCESSES])
                    for start, endpoint in enumerate(endpoints)
                )
            )

    with served_by_other_processes(PROCESSES) as endpoints:
        reports = asyncio.run(check_all(endpoints))
    assert_all_conform(reports)
    assert sum(len(report.passed) for report in reports) == len(checks)


# --- store and handlers -----------------------------------------------------------------------------------------------


def test_store_conforms_on_tcp():
    async def check_one(check):
        async with serving() as server:
            kit = StoreKit(
                connector(server.addresses[0], f"run-{check.__name__}"),
                asyncio.sleep,
                run_id="run",
                lease_slack_s=SLACK_S,
                ttl_s=1.5,
                late_s=4.0,
            )
            return await run_store_checks(kit, [check])

    async def check_all():
        async with asyncio.timeout(ALL_S):
            return await asyncio.gather(*map(check_one, STORE_CHECKS))

    assert_all_conform(asyncio.run(check_all()))


@contextmanager
def served_by_another_thread():
    """The endpoint of a server on another event loop in this process."""
    ready, loop, endpoint = threading.Event(), asyncio.new_event_loop(), []
    over = asyncio.Event()

    async def serve():
        server = Server()
        await server.listen([socket.create_server(("127.0.0.1", 0))])
        endpoint.append(server.addresses[0])
        ready.set()
        await over.wait()
        await server.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="server of a test")
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield endpoint[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(PATIENCE_S)
        loop.close()


def test_handlers_conform_on_tcp():
    before = users()
    with served_by_another_thread() as endpoint, ThreadPoolExecutor(8) as threads:
        kit = HandlerKit.at(f"tcp://{endpoint}", "run", is_host=False, keep_alive_max_attempt=10)
        calls = [threads.submit(run_handler_checks, kit, [check]) for check in HANDLER_CHECKS]
        reports = [call.result(ALL_S) for call in calls]
    until_let_go(before)
    assert_all_conform(reports)
