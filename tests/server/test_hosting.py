"""Which addresses a node binds that is told to host, and what it needs for that."""

import asyncio
import socket

import pytest

from rallypoint import aio
from rallypoint.errors import RendezvousConnectionError
from rallypoint.events import Hosting, NobodyServes, SecurityNotice
from rallypoint.server import hosting
from rallypoint.server.hosting import NotOurs, Unguarded, bind_endpoint, open_tcp
from rallypoint.server.server import Server
from rallypoint.settings import Settings
from tests.ports import free_port
from tests.server.kit import PATIENCE_S, client_of, eventually, run

NOT_OURS = "192.0.2.1"
"""For documentation: no machine has it."""
DEBIANS = "127.0.1.1"


@pytest.fixture
def names(monkeypatch):
    """Names that mean what they mean on machines that are not this one."""
    real = socket.getaddrinfo

    def getaddrinfo(host, port, **more):
        if host == "nowhere":
            raise socket.gaierror("no such name")
        return real({"service": NOT_OURS, "debian": DEBIANS}.get(host, host), port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def bound(host: str, *, forced: bool, everywhere: bool) -> str:
    """The address that is bound for an endpoint."""

    async def main():
        one = await bind_endpoint(host, free_port(), forced=forced, everywhere=everywhere)
        with one:
            return str(one.getsockname()[0])

    return asyncio.run(main())


@pytest.mark.parametrize("host", ["service", "debian", "nowhere"])
def test_every_address_is_bound_only_by_those_who_may(names, host):
    assert bound(host, forced=True, everywhere=True) == "0.0.0.0"
    with pytest.raises(NotOurs if host == "nowhere" else Unguarded):
        bound(host, forced=True, everywhere=False)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_address_that_is_the_machines_own_needs_nothing(names, forced, everywhere):
    assert bound("127.0.0.1", forced=forced, everywhere=everywhere) == "127.0.0.1"


def test_who_is_not_told_to_host_never_binds_every_address(names):
    with pytest.raises(NotOurs):
        bound("service", forced=False, everywhere=True)
    assert bound("debian", forced=False, everywhere=True) == DEBIANS


def joined(url: str) -> list:
    """The events of a node that joined alone."""
    events = []

    async def main():
        async with asyncio.timeout(30), aio.join(url, sinks=[events.append]) as run:
            async for _ in run.rounds():
                break

    asyncio.run(main())
    return events


@pytest.mark.parametrize("scheme", ["tcp", "static"])
def test_node_that_is_told_to_host_for_anybody_is_refused_at_once_and_told_what_to_do(names, scheme):
    option = "is_host=true" if scheme == "tcp" else "node_rank=0"
    url = f"{scheme}://service:{free_port()}/run?min_nodes=1&join_timeout=25&{option}"
    with pytest.raises(RendezvousConnectionError) as caught:
        joined(url)
    for word in ("service", "every address", "token_file", "tls_ca", "insecure=true"):
        assert word in str(caught.value)


@pytest.fixture
def leads_here(names, monkeypatch):
    """What a service does: it leads to the machine behind it."""
    real = asyncio.BaseEventLoop.create_connection

    async def create_connection(loop, factory, host=None, port=None, **more):
        return await real(loop, factory, "127.0.0.1" if host == NOT_OURS else host, port, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", create_connection)


def test_node_that_was_served_by_another_goes_on_when_that_is_gone(leads_here, monkeypatch):
    monkeypatch.setattr(hosting, "NOBODY_S", 0.0)
    port, events = free_port(), []
    url = f"tcp://service:{port}/run?min_nodes=1&last_call_timeout=0.1&is_host=true&close_timeout=1"

    async def main():
        server = Server()
        await server.listen([await bind_endpoint("127.0.0.1", port, forced=False, everywhere=False)])
        async with asyncio.timeout(30), aio.join(url, sinks=[events.append]) as run:
            async for world in run.rounds():
                await server.stop("over")
                await eventually(lambda: any(isinstance(event, NobodyServes) for event in events), "it is told")
                assert not world.changed.is_set()
                break

    asyncio.run(main())
    assert "insecure=true" in next(event.reason for event in events if isinstance(event, NobodyServes))


def test_node_that_is_told_to_host_for_anybody_and_to_be_insecure_does_and_warns(leads_here):
    port = free_port()
    url = f"tcp://service:{port}/run?min_nodes=1&last_call_timeout=0.1&join_timeout=25&is_host=true&insecure=true"
    events = joined(url)
    (said,) = [event for event in events if isinstance(event, Hosting)]
    assert said.address == f"0.0.0.0:{port}"
    assert "anybody who reaches the port can join" in said.waits_for
    assert not [event for event in events if isinstance(event, SecurityNotice)]


def test_host_that_is_not_waited_for_stops_serving_although_others_are_there():
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


def test_host_in_a_hurry_does_not_wait_for_others():
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
