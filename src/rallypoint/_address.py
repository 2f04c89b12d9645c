"""The host name of this machine, with a bounded wait for the name server, and a free port."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from rallypoint.api import free_port
from rallypoint.backends.resolver_threads import run_in_thread
from rallypoint.rendezvous.membership import Identity

PATIENCE_S = 2.0
"""The longest wait for a name server."""

_found: str | None = None


async def own_address() -> str:
    """This machine's full name, or its short one if the look-up fails or takes too long. A full name is cached."""
    global _found
    if _found is not None:
        return _found
    try:
        async with asyncio.timeout(PATIENCE_S):
            _found = await run_in_thread(socket.getfqdn, "own address")
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return socket.gethostname()
    return _found


class FreePort:
    """Publishes a node's address, and a free port of it for every round that it is rank 0 of."""

    def __init__(self, identity: Identity) -> None:
        self._addr = identity.addr
        self._held: list[tuple[socket.socket, int]] = []

    async def __call__(self, number: int, size: int) -> tuple[str, int]:
        self.let_go()
        return self._addr, free_port()

    def hold(self) -> tuple[str, int]:
        if not self._held:
            one = socket.socket()
            try:
                one.bind(("", 0))
                self._held.append((one, one.getsockname()[1]))
            except BaseException:
                one.close()
                raise
        return self._addr, self._held[0][1]

    def let_go(self) -> None:
        with suppress(IndexError):
            while True:
                self._held.pop()[0].close()
