"""Whether anybody can have taken a node's place while its backend was away.

A node that has heard nothing for its session's time to live must take its session for lost: the others may have formed
a round without it. But where the endpoint's own machine says that nobody listens, nobody has decided anything: its
workers may go on until somebody does.
"""

from __future__ import annotations

import asyncio
import socket

from rallypoint.backends.resolver_threads import resolve
from rallypoint.settings import Settings
from rallypoint.urls import DEFAULT_PORTS, parse_endpoint

LOOK_S = 2.0
AGAIN_S = 0.5


async def nobody_serves(settings: Settings) -> bool:
    """Whether every address of the endpoint refuses connections. False if that is not known, or it is no such backend.

    Silence is no answer: a machine that is cut off hears nothing either.
    """
    if settings.scheme not in ("tcp", "static"):
        return False
    loop = asyncio.get_running_loop()
    host, port = parse_endpoint(settings.endpoints[0], DEFAULT_PORTS[settings.scheme])
    try:
        async with asyncio.timeout(LOOK_S):
            found = await resolve(host, port)
            for family, kind, protocol, _, address in found:
                with socket.socket(family, kind, protocol) as one:
                    one.setblocking(False)
                    try:
                        await loop.sock_connect(one, address)
                    except ConnectionRefusedError:
                        continue
                    return False
    except (OSError, TimeoutError):
        return False
    return bool(found)


async def wait_for_somebody(settings: Settings) -> None:
    """Until somebody serves the endpoint, or it is not known any more whether anybody does."""
    while await nobody_serves(settings):  # noqa: ASYNC110 - it is not ours to tell
        await asyncio.sleep(AGAIN_S)
