"""The token and certificates of one process, for its connections as a client and for its server, if it has one.

The files are read at the start, where a bad file raises an error that names it, and again when they have changed. A
changed file that is bad must never replace credentials that work: it is reported, and the old ones stay in use.
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

POLL_S = 2.0
"""How often a server looks for changed files."""


class CredentialsUser(Protocol):
    """A server or dashboard that gets the current credentials."""

    name: str
    emit: Emitter
    token: str | tuple[str, ...] | None
    tls: ssl.SSLContext | None


class Credentials:
    """The credentials of a process. Reads the files when it is created; Rejected names a bad file."""

    def __init__(self, token_file: str | None = None, tls: TlsFiles | None = None, *, is_client: bool = True) -> None:
        self.tls = tls
        self._token = None if token_file is None else TokenFile(token_file)
        self._stamp = None if tls is None else tls.stamp()
        self._client = tls.client_context() if tls is not None and is_client else None
        self._server = tls.server_context() if tls is not None and (tls.cert is not None or not is_client) else None
        self._reload_now = asyncio.Event()

    @property
    def token(self) -> str:
        """The token to send as a client; "" if there is none."""
        return "" if self._token is None else self._token.first

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that a server accepts; () if it needs none."""
        return () if self._token is None else self._token.tokens

    @property
    def authenticates(self) -> bool:
        """Whether a server with these credentials authenticates its clients."""
        return self._token is not None or (self.tls is not None and self.tls.ca is not None)

    @property
    def can_serve(self) -> bool:
        """Whether a server can use these credentials: TLS needs a certificate."""
        return self.tls is None or self._server is not None

    def warnings(self) -> list[str]:
        """Risks of the files, such as a key that other users can read."""
        of_token = [] if self._token is None else self._token.warnings()
        return of_token + ([] if self.tls is None else self.tls.warnings())

    def secure(self, link: ClientConnection, host: str) -> asyncio.Protocol:
        """The TLS layer of a client connection to this host."""
        assert self._client is not None
        name = host.partition("%")[0].rstrip(".")
        return TlsPipe(self._client, link, host=name, on_opening=link.opening)

    def server_context(self) -> ssl.SSLContext | None:
        """None: plain text."""
        return self._server

    # --- files that change --------------------------------------------------------------------------------------------

    async def refresh(self) -> bool:
        """Reload changed files, before a client connects. Whether there are new credentials; bad files are ignored."""
        if self._token is None and self.tls is None:
            return False
        changed, _ = await asyncio.get_running_loop().run_in_executor(None, self._reload, False)
        return changed

    def _reload(self, even_unchanged: bool) -> tuple[bool, list[str]]:
        """Whether there are new credentials, and what is wrong with bad files. Blocks."""
        changed, troubles = False, []
        if self._token is not None and (even_unchanged or self._token.has_changed):
            try:
                changed = self._token.read_again()
            except Rejected as error:
                troubles.append(f"{error}; the token that was read before still counts")
        if self.tls is not None and (even_unchanged or self.tls.stamp() != self._stamp):
            self._stamp = self.tls.stamp()
            try:
                client = None if self._client is None else self.tls.client_context()
                server = None if self._server is None else self.tls.server_context()
            except Rejected as error:
                troubles.append(f"{error}; the certificate that was read before is still used")
            else:
                self._client, self._server, changed = client, server, True
        return changed, troubles

    def reload_now(self) -> None:
        """Have `watch_files` reload all files now, whether they have changed or not (on SIGHUP)."""
        self._reload_now.set()

    def watch_files(self, server: CredentialsUser) -> asyncio.Task[None] | None:
        """A task that gives new credentials to a server until it is cancelled; None if there are no files."""
        if self._token is None and self.tls is None:
            return None
        return asyncio.create_task(self._watch_files(server), name="reader of token and certificates")

    async def _watch_files(self, server: CredentialsUser) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(POLL_S):
                    await self._reload_now.wait()
            except TimeoutError:
                pass
            is_requested = self._reload_now.is_set()
            self._reload_now.clear()
            changed, troubles = await loop.run_in_executor(None, self._reload, is_requested)
            for trouble in troubles:
                server.emit(ServerTrouble(run_id="", by=server.name, reason=trouble))
            if changed:
                server.token, server.tls = self.tokens, self._server
                reason = "loaded changed files of its token and certificates"
                server.emit(SecurityNotice(run_id="", by=server.name, reason=reason))
