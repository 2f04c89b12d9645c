"""What this machine is called, without waiting for a name server that does not answer."""

from __future__ import annotations

import asyncio
import socket

from rallypoint.backends.aside import aside

PATIENCE_S = 2.0
"""How long a name server may take."""

_found: str | None = None


async def own_address() -> str:
    """This machine's full name, or its short one if nobody says it in time. What was found is kept for the process."""
    global _found
    if _found is not None:
        return _found
    try:
        async with asyncio.timeout(PATIENCE_S):
            _found = await aside(socket.getfqdn, "own address")
    except (OSError, UnicodeError):  # nobody said it in time, or it cannot be asked for
        return socket.gethostname()
    return _found
