"""Connecting to an endpoint over TCP: DNS names, IPv4 and IPv6, several addresses for one name.

It must never resolve names on the event loop, and never cache them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import TypeAlias

from rallypoint.backends.resolver_threads import addresses_of
from rallypoint.backends.tcp.connection import ClientConnection, Connector
from rallypoint.urls import parse_endpoint

ONE_ADDRESS_S = 3.0
"""The limit for one address of a name with several addresses."""
KEEPALIVE_S = 10


Secure: TypeAlias = Callable[[ClientConnection, str], asyncio.Protocol]
"""Wraps a connection in TLS; the second argument is the host name to verify."""


def dial(endpoint: str, default_port: int, secure: Secure | None = None) -> Connector:
    """A connector to an endpoint. A name is looked up for every attempt: its addresses may change."""
    host, port = parse_endpoint(endpoint, default_port)
    is_literal = _is_literal(host)

    async def connect(make: Callable[[], ClientConnection]) -> None:
        loop = asyncio.get_running_loop()
        factory = make if secure is None else lambda: secure(make(), host)
        addresses = [host] if is_literal else await addresses_of(host, port)
        trouble: OSError = OSError(f"{host!r} has no address")
        for address in addresses:
            try:
                async with asyncio.timeout(ONE_ADDRESS_S if len(addresses) > 1 else None):
                    transport, _ = await loop.create_connection(factory, address, port)
            except TimeoutError:
                trouble = TimeoutError(f"no answer from {address} within {ONE_ADDRESS_S:g} s")
            except OSError as error:
                trouble = error
            else:
                tune(transport)
                return
        raise trouble

    return connect


def _is_literal(host: str) -> bool:
    """Whether the host is an IP address, which needs no look-up."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def tune(transport: asyncio.BaseTransport) -> None:
    """Send small messages at once, and detect a machine that disappeared (TCP keep-alive)."""
    one = transport.get_extra_info("socket")
    if one is not None and one.family in (socket.AF_INET, socket.AF_INET6):
        tune_socket(one)


def tune_socket(one: socket.socket) -> None:
    """As `tune`, for a TCP socket without a transport."""
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
