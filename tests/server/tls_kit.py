"""Servers and clients with TLS, for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.dial import dial
from rallypoint.backends.tls import TlsFiles
from rallypoint.events import ClientRefused, Emitter
from rallypoint.server.admission.credentials import Credentials
from rallypoint.server.server import Server
from tests.certificates import Authority, Pair
from tests.server.kit import serving


class Certificates:
    """An authority with certificates for a server and a client, and a foreign authority."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.server = self.authority.issue("server", "127.0.0.1", "localhost", "::1")
        self.client = self.authority.issue("client")
        self.foreign = Authority(folder, "foreign")


def files(ca: Path | None = None, pair: Pair | None = None) -> TlsFiles:
    return TlsFiles(str(ca) if ca else None, str(pair.cert) if pair else None, str(pair.key) if pair else None)


@asynccontextmanager
async def serving_tls(tls: TlsFiles, **options: Any) -> AsyncIterator[tuple[Server, list[ClientRefused]]]:
    """A server with TLS, and its events of refused clients, updated as they are emitted."""
    seen: list[Any] = []
    async with serving(tls=tls.server_context(), emit=Emitter(seen.append), **options) as server:
        yield server, _Refusals(seen)


class _Refusals(list[ClientRefused]):
    """The refusals in a list of events that grows."""

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def __iter__(self) -> Any:
        return (event for event in self._seen if isinstance(event, ClientRefused))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@asynccontextmanager
async def tls_client_of(endpoint: str, tls: TlsFiles, **options: Any) -> AsyncIterator[TcpBackend]:
    """A client with TLS, closed afterwards."""
    secure = Credentials(tls=tls).secure
    backend = TcpBackend(endpoint, dial(endpoint, 1, secure), **options)
    try:
        yield backend
    finally:
        await backend.close()
