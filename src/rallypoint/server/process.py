"""The embedded server as a process of its own: `rallypoint serve`.

It must never serve without authentication an address that other machines can reach, unless it is told to.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from rallypoint.backends.tls import TlsFiles
from rallypoint.errors import RallypointError
from rallypoint.events import Emitter, Event, SecurityNotice, Sink
from rallypoint.server.admission.credentials import Credentials
from rallypoint.server.admission.limits import ServerLimits, fit_open_files
from rallypoint.server.server import Server, first_revision
from rallypoint.settings import DEFAULT_PORTS
from rallypoint.urls import parse_endpoint

GC_THRESHOLD = (50_000, 20, 100)
"""A server creates many long-lived objects and few cycles. When 2,000 clients join, Python's defaults cost 5 % of its
time and pauses of 50 to 140 ms; with these thresholds it is 0.5 % and 20 ms."""


class BindError(RallypointError):
    """The address cannot be served; the text says why and what to do."""


async def serve_until_signal(
    bind: str,
    token_file: str | None,
    *,
    tls: TlsFiles | None = None,
    limits: ServerLimits | None = None,
    insecure: bool = False,
    data: str | None = None,
    sync: str = "always",
    sinks: Iterable[Sink] = (),
    attach: Callable[[Server], None] = lambda _: None,
    page: Callable[[Server, Credentials], AbstractAsyncContextManager[None]] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads the token and the certificates. `page` serves the dashboard.

    Events go to stderr and `sinks`. `attach` is called with the server before it listens.

    BindError, Rejected or DataError before anything is served: the address, a file or the data cannot be used, or
    other machines could reach the address without authentication (and not `insecure`).
    """
    credentials = Credentials(token_file, tls, is_client=False)
    listening = bind_to(bind)
    notices = credentials.warnings() + _exposure(listening, credentials, insecure)
    fitted, open_files_warning = fit_open_files(limits or ServerLimits())
    emit = Emitter(print_event, *sinks)
    make: Callable[..., Server] = Server if data is None else _with_data(data, sync, emit)
    gc.freeze()  # modules are never garbage
    gc.set_threshold(*GC_THRESHOLD)
    server = make(
        token=credentials.tokens,
        tls=credentials.server_context(),
        limits=fitted,
        emit=emit,
        is_dedicated=True,
    )
    attach(server)
    signalled = stop_signal()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, credentials.reload_now)
    await server.listen([listening])
    for notice in [*notices, *([open_files_warning] if open_files_warning else [])]:
        server.emit(SecurityNotice(run_id="", by=server.name, reason=notice))
    reloading = credentials.watch_files(server)
    async with page(server, credentials) if page is not None else nullcontext():
        why = await signalled
    if reloading is not None:
        reloading.cancel()
    await server.stop(why)


def stop_signal() -> asyncio.Future[str]:
    """A future with the reason to stop, set by SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[str] = loop.create_future()

    def set_reason(number: signal.Signals) -> None:
        if not signalled.done():
            signalled.set_result(f"it got {number.name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, set_reason, number)
    return signalled


def _exposure(listening: socket.socket, credentials: Credentials, insecure: bool) -> list[str]:
    """Warnings for an address that other machines can reach. BindError if they would need no authentication."""
    address = str(listening.getsockname()[0]).partition("%")[0]
    if ipaddress.ip_address(address).is_loopback:
        return []
    if credentials.authenticates:
        if credentials.tls is not None:
            return []
        return ["the token crosses the network unencrypted: give --tls-cert too where others can listen"]
    if not insecure:
        listening.close()
        raise BindError(
            f"anybody who reaches {address} could join and change every run there: give --token-file (make one with "
            f"`openssl rand -hex 32`), or --tls-ca for mutual TLS, or --insecure if everybody there may"
        )
    return [f"anybody who reaches {address} can join and change every run here (--insecure)"]


def _with_data(data: str, sync: str, emit: Emitter) -> Callable[..., Server]:
    """Makes a server with the data of a directory. DataError if it cannot be used."""
    from rallypoint.server.durability.data import open_data
    from rallypoint.server.durability.disk import Directory
    from rallypoint.server.durability.journal import Sync
    from rallypoint.server.durability.server import DurableServer

    engine, journal = open_data(Directory(data), sync=Sync(sync), emit=emit, first_revision=first_revision())
    return partial(DurableServer, engine, journal)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a process's main coroutine, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def bind_to(bind: str) -> socket.socket:
    """A listening socket on an address of this machine. BindError if it cannot be bound."""
    host, port = parse_endpoint(bind, DEFAULT_PORTS["tcp"], lowest_port=0)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise BindError(f"{host!r} is not an address: {error}. Give one of this machine, or 0.0.0.0 for all") from error
    family, _, _, _, address = found[0]
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise BindError(_bind_failure(host, port, error)) from error
    listening.setblocking(False)
    return listening


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{host}:{port} is taken: another `rallypoint serve`, a node that hosts a run, or another program listens "
            f"there (see who with `ss -ltnp 'sport = :{port}'`). Use it as it is, one server takes any number of runs, "
            f"or give another port with --bind"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine: give one that is, or 0.0.0.0 for all of them"
    if error.errno == errno.EACCES:
        return f"port {port} may not be served by this user: give a port above 1023"
    return f"{host}:{port} cannot be served: {error}"


def print_event(event: Event) -> None:
    """Print an event of level INFO or higher to stderr, as one line."""
    if event.level >= 20:
        with suppress(OSError):
            print(event, file=sys.stderr, flush=True)
