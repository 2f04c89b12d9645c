"""The server as a process: binds, says where it listens, stops in good order when it is told to."""

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

COLLECT = (50_000, 20, 100)
"""A server makes many objects that live long and hardly any cycles: looking for those often is all cost."""


class BindError(RallypointError):
    """The address cannot be served; the text says why and what to do."""


async def serve_until_told(
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
    """Serve until SIGTERM or SIGINT; SIGHUP reads the token and the certificates again. `page` serves its web page.

    `sinks` get its events beside stderr; `attach` is called with the server before it listens.

    BindError or Rejected, before anything is served: the address or a file cannot be used, or others could reach the
    address and would not be asked who they are (unless `insecure`).
    """
    credentials = Credentials(token_file, tls, is_client=False)
    one = bind_to(bind)
    notices = credentials.warnings() + _exposed(one, credentials, insecure)
    fitted, too_few = fit_open_files(limits or ServerLimits())
    emit = Emitter(print_event, *sinks)
    make: Callable[..., Server] = Server if data is None else _with_data(data, sync, emit)
    gc.freeze()  # what was read stays
    gc.set_threshold(*COLLECT)
    server = make(
        token=credentials.tokens,
        tls=credentials.server_context(),
        limits=fitted,
        emit=emit,
        is_dedicated=True,
    )
    attach(server)
    told = asyncio.Event()
    why = ["it was told to"]

    def tell(number: signal.Signals) -> None:
        why[0] = f"it got {number.name}"
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, tell, number)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, credentials.read_soon)
    await server.listen([one])
    for notice in [*notices, *([too_few] if too_few else [])]:
        server.emit(SecurityNotice(run_id="", by=server.name, reason=notice))
    keeps_fresh = credentials.keep_fresh(server)
    async with page(server, credentials) if page is not None else nullcontext():
        await told.wait()
    if keeps_fresh is not None:
        keeps_fresh.cancel()
    await server.stop(why[0])


def _exposed(one: socket.socket, credentials: Credentials, insecure: bool) -> list[str]:
    """What to say of an address that others reach. BindError if they would not be asked for anything."""
    address = str(one.getsockname()[0]).partition("%")[0]
    if ipaddress.ip_address(address).is_loopback:
        return []
    if credentials.authenticates:
        if credentials.tls is not None:
            return []
        return ["the token crosses the network as it is: give --tls-cert too where others can listen"]
    if not insecure:
        one.close()
        raise BindError(
            f"whoever reaches {address} could join and change every run there: give --token-file (make one with "
            f"`openssl rand -hex 32`), or --tls-ca for mutual TLS, or --insecure if everybody there may"
        )
    return [f"whoever reaches {address} can join and change every run here (--insecure)"]


def _with_data(data: str, sync: str, emit: Emitter) -> Callable[..., Server]:
    """A server that goes on from a directory. DataError says why it cannot."""
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
    """The server's own words, one line each."""
    if event.level >= 20:
        with suppress(OSError):
            print(event, file=sys.stderr, flush=True)
