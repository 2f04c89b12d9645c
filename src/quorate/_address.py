"""What this machine is called, without waiting for a name server that does not answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

PATIENCE_S = 2.0
"""How long a name server may take."""

_found: str | None = None


async def own_address() -> str:
    """This machine's full name, or its short one if nobody says it in time. What was found is kept for the process."""
    global _found
    if _found is not None:
        return _found
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def tell(name: str) -> None:
        if not answer.done():
            answer.set_result(name)

    def ask() -> None:
        name = socket.getfqdn()
        with suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(tell, name)

    # A thread of its own: one of a pool would keep the process from ending while the name server is silent.
    threading.Thread(target=ask, name="own address", daemon=True).start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            _found = await answer
    except TimeoutError:
        return socket.gethostname()
    return _found
