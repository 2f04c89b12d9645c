"""Whether other nodes can have formed a round while this node could not reach its backend.

A node that has heard nothing for its session's time to live must assume that its session is lost: the others may have
formed a round without it. But if the endpoint's own machine refuses connections, no server is running, so nothing was
decided, and the workers may go on until a server is back.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from rallypoint.backends.resolver_threads import resolve
from rallypoint.settings import Settings
from rallypoint.urls import DEFAULT_PORTS, parse_endpoint

PROBE_S = 2.0
PROBE_AGAIN_S = 0.5


async def endpoint_is_down(settings: Settings) -> bool:
    """Whether every address of the endpoint refuses connections. False if that is not known.

    A time-out counts as not known: a machine that is cut off from the network hears nothing either. Backends without
    an embedded server are never down in this sense.
    """
    if settings.scheme not in ("tcp", "static"):
        return False
    loop = asyncio.get_running_loop()
    host, port = parse_endpoint(settings.endpoints[0], DEFAULT_PORTS[settings.scheme])
    try:
        async with asyncio.timeout(PROBE_S):
            addresses = await resolve(host, port)
            for family, kind, protocol, _, address in addresses:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setblocking(False)
                    try:
                        await loop.sock_connect(probe, address)
                    except ConnectionRefusedError:
                        continue
                    return False
    except (OSError, TimeoutError):
        return False
    return bool(addresses)


async def wait_while_endpoint_is_down(settings: Settings, is_over: Callable[[], bool] = lambda: False) -> None:
    """Wait until the endpoint accepts connections, until it is no longer certain that it refuses them, or until
    `is_over`."""
    while not is_over() and await endpoint_is_down(settings):  # noqa: ASYNC110 - another machine decides
        await asyncio.sleep(PROBE_AGAIN_S)
