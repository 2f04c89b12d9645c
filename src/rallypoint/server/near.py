"""A shorter way in for clients on the same machine: a Unix socket with a name that no file system knows.

A request over it takes the kernel about half of what it takes over loopback TCP. A client that comes for a run over TCP
is told the name in its welcome, if both ends of its connection have the same address; it decides whether to use it, for
its store. The name is drawn at random for every server, so that nobody can have it first; it is no secret, and is gone
with the server. Such names belong to a network namespace, as loopback does: who can reach the one can reach the other.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
from contextlib import suppress

from rallypoint.urls import format_endpoint


class Near:
    """The socket of one server, if the system has such sockets. `open` makes it."""

    def __init__(self) -> None:
        self.name = ""
        """Without the zero byte before it; empty: there is none."""

    def open(self, backlog: int) -> socket.socket | None:
        """A socket to accept connections on; None: there is to be none."""
        if sys.platform != "linux":
            return None
        name = f"rallypoint-{secrets.token_hex(16)}"
        with suppress(OSError):  # some sandboxes forbid it, and everybody can come over TCP
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                one.bind("\0" + name)
                one.listen(backlog)
            except OSError:
                one.close()
                raise
            self.name = name
            return one
        return None

    def told_to(self, transport: asyncio.BaseTransport | None) -> tuple[str, str]:
        """The name for whoever is at the other side, and the address it has to have come to; empty: not for it."""
        if not self.name or transport is None:
            return "", ""
        own, peer = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        if not isinstance(own, tuple) or not isinstance(peer, tuple) or own[0] != peer[0]:
            return "", ""
        return self.name, format_endpoint(*own[:2])
