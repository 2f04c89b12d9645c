"""Telling a server that is not there from one that cannot be heard."""

import asyncio
import socket

from rallypoint.launcher.outage import nobody_serves, wait_for_somebody
from rallypoint.settings import Settings


def settings(scheme: str, endpoint: str) -> Settings:
    return Settings.build(scheme=scheme, endpoints=endpoint, run_id="job", min_nodes=1, node_rank=0)


def test_endpoint_that_refuses_is_served_by_nobody_until_it_is():
    async def case() -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            here = settings("tcp", f"127.0.0.1:{one.getsockname()[1]}")
            assert await nobody_serves(here)
            waiting = asyncio.create_task(wait_for_somebody(here))
            one.listen()
            async with asyncio.timeout(30):
                await waiting
            assert not await nobody_serves(here)

    asyncio.run(case())


def test_what_cannot_be_known_is_not_taken_for_nobody():
    async def case() -> None:
        assert not await nobody_serves(settings("tcp", "no-such-host.invalid:1"))
        assert not await nobody_serves(settings("etcd", "127.0.0.1:1"))

    asyncio.run(case())
