"""Accepting connections from a listening socket.

The operating system keeps a bounded number of established connections that are not accepted yet, and drops any more;
those clients retry a second later. Thousands may connect at the same time, so each call accepts all that are ready
instead of one per iteration of the event loop. It must never accept beyond the limit on pending connections.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

MAX_ACCEPTED_AT_ONCE = 4_096
NO_RESOURCES_PAUSE_S = 0.5
"""Pause when the process has no file descriptor or memory left."""
LIMIT_PAUSE_S = 0.02
"""Pause when the limit on pending connections is reached."""
_ALREADY_CLOSED = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.EPERM})
"""Errors that concern only the connection being accepted."""


class Acceptor:
    """Accepts connections on one listening socket until `close`.

    `has_room` gets the number of connections that are accepted but have no protocol yet. `on_trouble` gets the reason
    why none can be accepted, once for each time of trouble.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        on_trouble: Callable[[str], None],
        has_room: Callable[[int], bool],
    ) -> None:
        self._listening = listening
        self._make = make
        self._on_trouble = on_trouble
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[object]] = set()
        self._is_closed = False
        self._has_reported = False
        listening.setblocking(False)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections and close the listening socket."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listening.fileno())
            self._listening.close()

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED_AT_ONCE):
            if not self._has_room(len(self._starting)):
                self._pause(LIMIT_PAUSE_S)
                return
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _ALREADY_CLOSED:
                    continue
                self._report(error)
                self._pause(NO_RESOURCES_PAUSE_S)
                return
            self._has_reported = False
            connection.setblocking(False)
            task = self._loop.create_task(self._start(connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError:
            connection.close()  # the peer has closed it already

    def _report(self, error: OSError) -> None:
        if not self._has_reported:
            self._has_reported = True
            self._on_trouble(f"cannot accept connections: {error}. Raise the limit on open files (ulimit -n)")

    def _pause(self, pause_s: float) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listening.fileno(), self._accept)
