"""The server as a process: binds, says where it listens, stops in good order when it is told to."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from quorate.errors import QuorateError
from quorate.events import Emitter, Event
from quorate.server.hosting import read_token
from quorate.server.server import Server
from quorate.settings import DEFAULT_PORTS
from quorate.urls import parse_endpoint

COLLECT = (50_000, 20, 100)
"""A server makes many objects that live long and hardly any cycles: looking for those often is all cost."""


class BindError(QuorateError):
    """The address cannot be served; the text says why and what to do."""


async def serve_until_told(bind: str, token_file: str | None) -> None:
    """Serve until SIGTERM or SIGINT."""
    token = read_token(token_file) or None
    one = bind_to(bind)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)
    server = Server(token=token, emit=Emitter(_print), is_dedicated=True)
    told = asyncio.Event()
    why = ["it was told to"]

    def tell(number: signal.Signals) -> None:
        why[0] = f"it got {number.name}"
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, tell, number)
    await server.listen([one])
    await told.wait()
    await server.stop(why[0])


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a process's main coroutine, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def bind_to(bind: str) -> socket.socket:
    """A listening socket on an address, which has to be one of this machine's. BindError says what is wrong."""
    host, port = parse_endpoint(bind, DEFAULT_PORTS["tcp"], lowest_port=0)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise BindError(f"{host!r} is not an address: {error}. Give one of this machine, or 0.0.0.0 for all") from error
    family, _, _, _, address = found[0]
    one = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
        one.listen()
    except OSError as error:
        one.close()
        raise BindError(_why_not(host, port, error)) from error
    one.setblocking(False)
    return one


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{host}:{port} is taken: another `quorate serve`, a node that hosts a run, or another program listens "
            f"there (see who with `ss -ltnp 'sport = :{port}'`). Use it as it is, one server takes any number of runs, "
            f"or give another port with --bind"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine: give one that is, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return f"port {port} may not be served by this user: give a port above 1023"
    return f"{host}:{port} cannot be served: {error}"


def _print(event: Event) -> None:
    """The server's own words, one line each."""
    if event.level >= 20:
        with suppress(OSError):
            print(event, file=sys.stderr, flush=True)
