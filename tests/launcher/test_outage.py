"""A server that does not run is told apart from one that does not answer."""

import asyncio
import socket

from rallypoint.launcher.outage import endpoint_is_down, wait_while_endpoint_is_down
from rallypoint.settings import Settings


def settings(scheme: str, endpoint: str) -> Settings:
    return Settings.build(scheme=scheme, endpoints=endpoint, run_id="job", min_nodes=1, node_rank=0)


def test_endpoint_that_refuses_connections_is_down_until_a_server_listens():
    async def case() -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            here = settings("tcp", f"127.0.0.1:{one.getsockname()[1]}")
            assert await endpoint_is_down(here)
            waiting = asyncio.create_task(wait_while_endpoint_is_down(here))
            one.listen()
            async with asyncio.timeout(30):
                await waiting
            assert not await endpoint_is_down(here)

    asyncio.run(case())


def test_endpoint_whose_state_is_unknown_does_not_count_as_down():
    async def case() -> None:
        assert not await endpoint_is_down(settings("tcp", "no-such-host.invalid:1"))
        assert not await endpoint_is_down(settings("etcd", "127.0.0.1:1"))

    asyncio.run(case())
