"""The page of `rallypoint serve --http`: a child process that runs `rallypoint dashboard`, supervised by the server.

The server binds the page's address: errors in it are known before anything is served, and browsers wait in its backlog
while a child that died is replaced. The child inherits that socket and a link to the server (`server_link.py`), and
ends with the link. Nothing here imports the web framework. Once the page was served, no failure of it ends the server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

from rallypoint._address import own_address
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.tls import TlsFiles
from rallypoint.dashboard.address import Address, bind_page, check_exposure
from rallypoint.dashboard.server_link import Exposition, PageLink
from rallypoint.errors import RallypointError
from rallypoint.events import DashboardListens, SecurityNotice, ServerTrouble
from rallypoint.server.admission.credentials import Credentials
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.server import Server
from rallypoint.urls import DEFAULT_PORTS, format_endpoint, parse_endpoint

NAME = "dashboard"
STOP_S = 3.0
"""The child has so long to end its streams; then it is killed."""
FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 30.0
LIVED_S = 60.0
"""A child that lived for so long is replaced without a growing pause."""
PACKAGES = ("starlette", "uvicorn")
LIMITS = {
    "max_pending": "--max-pending",
    "hello_timeout_s": "--hello-timeout",
    "max_failed_logins": "--max-failed-logins",
    "login_block_s": "--login-block",
    "log_interval_s": "--log-interval",
}
"""The limits of the server that hold for browsers too, and the options of `rallypoint dashboard` that set them."""


class PageError(RallypointError):
    """The page's process could not be started."""


def missing_package() -> str | None:
    """A package that the page needs and that is not installed."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is None), None)


def prepare_page(
    http: str,
    *,
    names: Sequence[str],
    token_file: str | None,
    tls: TlsFiles | None,
    insecure: bool,
    exposition: Exposition,
) -> Callable[[Server, Credentials], AbstractAsyncContextManager[None]]:
    """Bind the page's address. The context manager that is returned serves the page. BindError.

    Its body is cancelled, and PageError raised, if the first child ends before it has served anything.
    """
    address = bind_page(http)
    authenticates = token_file is not None or (tls is not None and tls.ca is not None)
    notices = check_exposure(address, authenticates=authenticates, has_tls=tls is not None, insecure=insecure)
    options = ["--http", format_endpoint(address.host, address.port)]
    options += [word for name in names for word in ("--http-name", name)]
    options += ["--insecure"] if insecure else []
    files = {"--http-token-file": token_file}
    if tls is not None:
        files |= {"--tls-cert": tls.cert, "--tls-key": tls.key, "--tls-ca": tls.ca}
    options += [word for name, file in files.items() if file is not None for word in (name, file)]

    @asynccontextmanager
    async def serving(server: Server, credentials: Credentials) -> AsyncIterator[None]:
        for notice in notices:
            server.emit(SecurityNotice(run_id="", by=NAME, reason=notice))
        child = _Child(server, address, options, exposition)
        with address.sock:
            try:
                async with asyncio.TaskGroup() as group:
                    supervisor = group.create_task(child.supervise(), name="supervisor of the page")
                    yield
                    supervisor.cancel()
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    return serving


class _Child:
    """One child at a time, for as long as `supervise` runs."""

    def __init__(self, server: Server, address: Address, options: Sequence[str], exposition: Exposition) -> None:
        self._server = server
        self._address = address
        self._options = options
        self._exposition = exposition
        self._has_served = False
        self._where = ""

    async def supervise(self) -> None:
        """Replace a child that has ended, until this is cancelled. PageError: the first one has served nothing."""
        backoff = Backoff(random.Random(), FIRST_PAUSE_S, MOST_PAUSE_S)
        loop = asyncio.get_running_loop()
        self._where = await advertised(self._server.addresses[0])
        while True:
            began_at = loop.time()
            why = await self._run()
            if not self._has_served:
                raise PageError(f"the page cannot be served on {self._address.shown}: its process {why}")
            if loop.time() - began_at > LIVED_S:
                backoff.reset()
            pause_s = backoff.next_s()
            trouble = f"the process of the page {why}: it is started again in {pause_s:.1f} s"
            self._server.emit(ServerTrouble(run_id="", by=NAME, reason=trouble))
            await asyncio.sleep(pause_s)

    async def _run(self) -> str:
        """Start a child and wait for its end; how it ended, or why it could not be started."""
        try:
            mine, its = socket.socketpair()
            link = PageLink(mine, self._server, self._exposition, self._serves)
            try:
                with its:
                    process = await self._start(its)
                try:
                    return _ending(await process.wait())
                finally:
                    link.close()
                    await _stop(process)
            finally:
                link.close()
        except OSError as error:
            return f"cannot be started with {sys.executable}: {error}"

    async def _start(self, link: socket.socket) -> asyncio.subprocess.Process:
        inherited = (self._address.sock.fileno(), link.fileno())
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "rallypoint",
            "dashboard",
            self._where,
            *self._options,
            *_limit_options(self._server.limits),
            "--from-server",
            ",".join(map(str, inherited)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=inherited,
            env={**os.environ, "PYTHONPATH": _import_path()},
            start_new_session=True,  # Ctrl-C is for the server, which stops the page
        )

    def _serves(self) -> None:
        if not self._has_served:
            self._has_served = True
            url = self._address.url(has_tls=self._server.tls is not None)
            self._server.emit(DashboardListens(run_id="", by=NAME, url=url, where=self._where))


async def advertised(address: str) -> str:
    """The URL under which others reach a server: with the machine's name, if the address stands for all of its own."""
    host, port = parse_endpoint(address, DEFAULT_PORTS["tcp"])
    if host in ("0.0.0.0", "::"):
        host = await own_address()
        host = socket.gethostname() if host.partition(".")[0] == "localhost" else host
    return f"tcp://{format_endpoint(host, port)}"


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Wait for a child whose link is closed; kill it if it does not end."""
    if process.returncode is not None:
        return
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _limit_options(limits: ServerLimits) -> list[str]:
    """Those that differ from the defaults."""
    usual = ServerLimits()
    words: list[str] = []
    for name, option in LIMITS.items():
        value = getattr(limits, name)
        if value != getattr(usual, name):
            words += [option, str(value)]
    return words


def _import_path() -> str:
    """The child runs the same code, wherever it is started."""
    found = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(one for one in found if one)


def _ending(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"has ended with exit status {code}"
