"""The token and the certificates of one process, for both of its parts: as a client, and as a server if it becomes one.

They are read at the start, where what is wrong with a file is an error that names it, and again when a file has
changed. A change that cannot be used changes nothing, and is told.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Protocol

from rallypoint.backends.tcp.connection import ClientConnection
from rallypoint.backends.tls import TlsFiles
from rallypoint.backends.tls_pipe import TlsPipe
from rallypoint.backends.token import TokenFile
from rallypoint.errors import Rejected
from rallypoint.events import Emitter, SecurityNotice, ServerTrouble

LOOK_S = 2.0
"""How soon a server notices that a file has changed."""


class Served(Protocol):
    """What asks for a token and shows a certificate: a server, or a page."""

    name: str
    emit: Emitter
    token: str | tuple[str, ...] | None
    tls: ssl.SSLContext | None


class Credentials:
    """What a process shows, and whom it trusts. Reads files when it is made: Rejected says what is wrong with one."""

    def __init__(self, token_file: str | None = None, tls: TlsFiles | None = None, *, is_client: bool = True) -> None:
        self.tls = tls
        self._token = None if token_file is None else TokenFile(token_file)
        self._stamp = None if tls is None else tls.stamp()
        self._client = tls.client_context() if tls is not None and is_client else None
        self._server = tls.server_context() if tls is not None and (tls.cert is not None or not is_client) else None
        self._again = asyncio.Event()

    @property
    def token(self) -> str:
        """The one to send; "": none."""
        return "" if self._token is None else self._token.first

    @property
    def tokens(self) -> tuple[str, ...]:
        """Those that a server accepts; (): it asks for none."""
        return () if self._token is None else self._token.tokens

    @property
    def authenticates(self) -> bool:
        """Whether a server with these lets in only those who can show something."""
        return self._token is not None or (self.tls is not None and self.tls.ca is not None)

    @property
    def can_serve(self) -> bool:
        """A node that is to speak TLS and has no certificate cannot be a server."""
        return self.tls is None or self._server is not None

    def warnings(self) -> list[str]:
        """What an operator should know of the files."""
        of_token = [] if self._token is None else self._token.warnings()
        return of_token + ([] if self.tls is None else self.tls.warnings())

    def secure(self, link: ClientConnection, host: str) -> asyncio.Protocol:
        """TLS between a connection to this host and the link above it."""
        assert self._client is not None
        name = host.partition("%")[0].rstrip(".")
        return TlsPipe(self._client, link, host=name, on_opening=link.opening)

    def server_context(self) -> ssl.SSLContext | None:
        """None: plain text."""
        return self._server

    # --- files that change --------------------------------------------------------------------------------------------

    async def refresh(self) -> bool:
        """Before a client connects: whether something was read again. What cannot be used is left for the next time."""
        if self._token is None and self.tls is None:
            return False
        changed, _ = await asyncio.get_running_loop().run_in_executor(None, self._read_again, False)
        return changed

    def _read_again(self, in_any_case: bool) -> tuple[bool, list[str]]:
        """Whether something is different now, and what could not be used. Blocks."""
        changed, troubles = False, []
        if self._token is not None and (in_any_case or self._token.has_changed):
            try:
                changed = self._token.read_again()
            except Rejected as error:
                troubles.append(f"{error}; the token that was read before still counts")
        if self.tls is not None and (in_any_case or self.tls.stamp() != self._stamp):
            self._stamp = self.tls.stamp()
            try:
                client = None if self._client is None else self.tls.client_context()
                server = None if self._server is None else self.tls.server_context()
            except Rejected as error:
                troubles.append(f"{error}; the certificate that was read before is still used")
            else:
                self._client, self._server, changed = client, server, True
        return changed, troubles

    def read_soon(self) -> None:
        """Read the files again now, whether they have changed or not (a server was told to)."""
        self._again.set()

    def keep_fresh(self, server: Served) -> asyncio.Task[None] | None:
        """Give a server what is new in the files, until it is cancelled; None: there are no files."""
        if self._token is None and self.tls is None:
            return None
        return asyncio.create_task(self._keep_fresh(server), name="reader of token and certificates")

    async def _keep_fresh(self, server: Served) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._again.wait()
            except TimeoutError:
                pass
            was_told = self._again.is_set()
            self._again.clear()
            changed, troubles = await loop.run_in_executor(None, self._read_again, was_told)
            for trouble in troubles:
                server.emit(ServerTrouble(run_id="", by=server.name, reason=trouble))
            if changed:
                server.token, server.tls = self.tokens, self._server
                reason = "took up what is new in the files of its token and certificates"
                server.emit(SecurityNotice(run_id="", by=server.name, reason=reason))
