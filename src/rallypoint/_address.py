"""The host name of this machine, with a bounded wait for the name server."""

from __future__ import annotations

import asyncio
import socket

from rallypoint.backends.resolver_threads import run_in_thread

LOOKUP_TIMEOUT_S = 2.0
"""The longest wait for a name server."""

_found: str | None = None


async def own_address() -> str:
    """This machine's full name, or its short one if the look-up fails or takes too long. A full name is cached."""
    global _found
    if _found is not None:
        return _found
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            _found = await run_in_thread(socket.getfqdn, "own address")
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return socket.gethostname()
    return _found
