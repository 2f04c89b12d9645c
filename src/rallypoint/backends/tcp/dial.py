"""Connecting to an endpoint over TCP: names, IPv4 and IPv6, several addresses for one name."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import TypeAlias

from rallypoint.backends.aside import addresses_of
from rallypoint.backends.tcp.connection import ClientConnection, Connector
from rallypoint.urls import parse_endpoint

ONE_ADDRESS_S = 3.0
"""How long one address of a name may take while there are others."""
KEEPALIVE_S = 10


Secure: TypeAlias = Callable[[ClientConnection, str], asyncio.Protocol]
"""What is put between a connection and the link above it, given the host that is to be on the other side."""


def dial(endpoint: str, default_port: int, secure: Secure | None = None) -> Connector:
    """A connector to an endpoint. A name is looked up for every attempt: it may come to mean another machine."""
    host, port = parse_endpoint(endpoint, default_port)
    literal = _literal(host)

    async def connect(make: Callable[[], ClientConnection]) -> None:
        loop = asyncio.get_running_loop()
        through = make if secure is None else lambda: secure(make(), host)
        found = [host] if literal else await addresses_of(host, port)
        trouble: OSError = OSError(f"{host!r} has no address")
        for address in found:
            try:
                async with asyncio.timeout(ONE_ADDRESS_S if len(found) > 1 else None):
                    transport, _ = await loop.create_connection(through, address, port)
            except TimeoutError:
                trouble = TimeoutError(f"no answer from {address} within {ONE_ADDRESS_S:g} s")
            except OSError as error:
                trouble = error
            else:
                tune(transport)
                return
        raise trouble

    return connect


def _literal(host: str) -> bool:
    """Whether the host is an address already, which nobody has to be asked about."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def tune(transport: asyncio.BaseTransport) -> None:
    """Small messages go out at once, and a machine that vanished is noticed some time."""
    one = transport.get_extra_info("socket")
    if one is not None and one.family in (socket.AF_INET, socket.AF_INET6):
        tune_socket(one)


def tune_socket(one: socket.socket) -> None:
    """The same for a TCP socket without a transport."""
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
