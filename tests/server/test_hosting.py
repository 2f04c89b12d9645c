"""Nodes that serve: which addresses they bind, the authentication that needs, and how long they serve."""

import asyncio
import socket

import pytest

from rallypoint import aio
from rallypoint.errors import RendezvousConnectionError
from rallypoint.events import Hosting, NobodyServes, SecurityNotice
from rallypoint.server import hosting
from rallypoint.server.hosting import NeedsAuthentication, NotLocal, bind_endpoint, open_tcp
from rallypoint.server.server import Server
from rallypoint.settings import Settings
from tests.ports import free_port
from tests.server.kit import PATIENCE_S, client_of, eventually, run

NOT_LOCAL = "192.0.2.1"
"""Reserved for documentation, so no machine has it."""
DEBIAN_HOST_NAME = "127.0.1.1"
"""What /etc/hosts gives for the machine's own name on Debian."""


@pytest.fixture
def names(monkeypatch):
    """Host names that resolve as on other machines."""
    real = socket.getaddrinfo

    def getaddrinfo(host, port, **more):
        if host == "nowhere":
            raise socket.gaierror("no such name")
        return real({"service": NOT_LOCAL, "debian": DEBIAN_HOST_NAME}.get(host, host), port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def bound(host: str, *, forced: bool, everywhere: bool) -> str:
    """The address that is bound for an endpoint."""

    async def main():
        with await bind_endpoint(host, free_port(), forced=forced, everywhere=everywhere) as sock:
            return str(sock.getsockname()[0])

    return asyncio.run(main())


@pytest.mark.parametrize("host", ["service", "debian", "nowhere"])
def test_all_addresses_are_bound_only_if_allowed(names, host):
    assert bound(host, forced=True, everywhere=True) == "0.0.0.0"
    with pytest.raises(NotLocal if host == "nowhere" else NeedsAuthentication):
        bound(host, forced=True, everywhere=False)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_local_address_of_the_endpoint_is_bound_without_authentication(names, forced, everywhere):
    assert bound("127.0.0.1", forced=forced, everywhere=everywhere) == "127.0.0.1"


def test_node_without_is_host_never_binds_all_addresses(names):
    with pytest.raises(NotLocal):
        bound("service", forced=False, everywhere=True)
    assert bound("debian", forced=False, everywhere=True) == DEBIAN_HOST_NAME


def joined(url: str) -> list:
    """The events of a node that joins alone."""
    events = []

    async def main():
        async with asyncio.timeout(30), aio.join(url, sinks=[events.append]) as run:
            async for _ in run.rounds():
                break

    asyncio.run(main())
    return events


@pytest.mark.parametrize("scheme", ["tcp", "static"])
def test_host_that_must_bind_all_addresses_needs_authentication(names, scheme):
    option = "is_host=true" if scheme == "tcp" else "node_rank=0"
    url = f"{scheme}://service:{free_port()}/run?min_nodes=1&join_timeout=25&{option}"
    with pytest.raises(RendezvousConnectionError) as caught:
        joined(url)
    for part in ("service", "every address", "token_file", "tls_ca", "insecure=true"):
        assert part in str(caught.value)


@pytest.fixture
def forwarded(names, monkeypatch):
    """Connections to `service` are forwarded to this machine, as a load balancer does."""
    real = asyncio.BaseEventLoop.create_connection

    async def create_connection(loop, factory, host=None, port=None, **more):
        return await real(loop, factory, "127.0.0.1" if host == NOT_LOCAL else host, port, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", create_connection)


def test_connected_node_that_cannot_replace_its_server_keeps_running(forwarded, monkeypatch):
    monkeypatch.setattr(hosting, "NO_SERVER_S", 0.0)
    port, events = free_port(), []
    url = f"tcp://service:{port}/run?min_nodes=1&last_call_timeout=0.1&is_host=true&close_timeout=1"

    async def main():
        server = Server()
        await server.listen([await bind_endpoint("127.0.0.1", port, forced=False, everywhere=False)])
        async with asyncio.timeout(30), aio.join(url, sinks=[events.append]) as run:
            async for world in run.rounds():
                await server.stop("over")
                await eventually(lambda: any(isinstance(event, NobodyServes) for event in events), "it is reported")
                assert not world.changed.is_set()
                break

    asyncio.run(main())
    assert "insecure=true" in next(event.reason for event in events if isinstance(event, NobodyServes))


def test_insecure_host_binds_all_addresses_and_warns(forwarded):
    port = free_port()
    url = f"tcp://service:{port}/run?min_nodes=1&last_call_timeout=0.1&join_timeout=25&is_host=true&insecure=true"
    events = joined(url)
    (hosting_event,) = [event for event in events if isinstance(event, Hosting)]
    assert hosting_event.address == f"0.0.0.0:{port}"
    assert "anybody who reaches the port can join" in hosting_event.waits_for
    assert not [event for event in events if isinstance(event, SecurityNotice)]


def test_host_whose_close_is_cancelled_stops_serving():
    endpoint = f"127.0.0.1:{free_port()}"

    async def main():
        host = await open_tcp(Settings.from_url(f"tcp://{endpoint}/run?min_nodes=1&close_timeout=600"))
        await host.get("/key")
        async with client_of(endpoint, call_timeout_s=PATIENCE_S) as other:
            await other.get("/key")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await host.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*endpoint.split(":"))

    run(main())


def test_hurried_host_does_not_wait_for_clients():
    endpoint = f"127.0.0.1:{free_port()}"

    async def main():
        host = await open_tcp(Settings.from_url(f"tcp://{endpoint}/run?min_nodes=1&close_timeout=600"))
        await host.get("/key")
        async with client_of(endpoint, call_timeout_s=PATIENCE_S) as other:
            await other.get("/key")
            host.shorten_close()
            async with asyncio.timeout(PATIENCE_S):
                await host.close()

    run(main())
