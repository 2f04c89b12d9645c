"""The tcp backend keeps the contract: against a server in this process, and against one in another."""

import asyncio
import socket

import pytest

from quorate.backends.dial import dial
from quorate.backends.tcp import TcpBackend
from quorate.server.server import Server
from quorate.testing.conformance.backend import BACKEND_CHECKS, BackendKit, run_checks
from quorate.testing.conformance.backend_random import check_random_history

HISTORY = 500


async def serve(**options) -> tuple[Server, str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(**options)
    await server.listen([listening])
    return server, server.addresses[0]


def kit_of(endpoint: str, **changes) -> BackendKit:
    async def connect():
        return TcpBackend(endpoint, dial(endpoint, 29400))

    options = {"prefix": "/test/", "ttl_s": 0.5, "lease_slack_s": 0.3, "history_limit": HISTORY} | changes
    return BackendKit(connect, asyncio.sleep, **options)


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_tcp_backend_conforms_in_process(check):
    async def main():
        server, endpoint = await serve(history=HISTORY)
        try:
            return await run_checks(kit_of(endpoint), [check])
        finally:
            await server.stop()

    report = asyncio.run(main())
    assert report.conforming, str(report)


@pytest.mark.parametrize("seed", range(10))
def test_tcp_backend_gives_the_answers_of_the_model(seed):
    async def main():
        server, endpoint = await serve()
        try:
            await check_random_history(kit_of(endpoint, seed=seed, history_limit=None))
        finally:
            await server.stop()

    asyncio.run(main())
