"""Connecting to an endpoint over TCP: names, IPv4 and IPv6, several addresses for one name."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from quorate.backends.tcp import Connector
from quorate.backends.tcp_link import Link
from quorate.urls import parse_endpoint

ONE_ADDRESS_S = 3.0
"""How long one address of a name may take while there are others."""
KEEPALIVE_S = 10


AddressInfo: TypeAlias = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
"""What `socket.getaddrinfo` says of an address: family, kind, protocol, canonical name, and the address itself."""
Secure: TypeAlias = Callable[[Link, str], asyncio.Protocol]
"""What is put between a connection and the link above it, given the host that is to be on the other side."""


def dial(endpoint: str, default_port: int, secure: Secure | None = None) -> Connector:
    """A connector to an endpoint. A name is looked up for every attempt: it may come to mean another machine."""
    host, port = parse_endpoint(endpoint, default_port)
    literal = _literal(host)

    async def connect(make: Callable[[], Link]) -> None:
        loop = asyncio.get_running_loop()
        through = make if secure is None else lambda: secure(make(), host)
        found = [host] if literal else await look_up(host, port)
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


async def look_up(host: str, port: int) -> list[str]:
    """The addresses of a name, in the order to try them."""
    return list(dict.fromkeys(str(address[0]) for *_, address in await resolve(host, port)))


async def resolve(host: str, port: int, flags: int = 0) -> list[AddressInfo]:
    """As `socket.getaddrinfo`, on a thread of its own.

    Not by the loop: uvloop asks on threads of libuv, and a child that is forked from this process then crashes when it
    ends, because it waits for threads that it does not have. Nor on one of a pool, which would keep the process from
    ending while the name server is silent.
    """
    answer: concurrent.futures.Future[list[AddressInfo]] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()

    def ask() -> None:
        try:
            found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
            answer.set_result(found)
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="addresses", daemon=True).start()
    return await asyncio.wrap_future(answer)


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
    if one is None or one.family not in (socket.AF_INET, socket.AF_INET6):
        return
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
