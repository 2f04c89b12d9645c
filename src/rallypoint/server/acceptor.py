"""Accepting connections: all that wait, whenever there are any.

The system keeps a bounded number of connections that were made and not accepted yet, and drops what comes beyond; those
clients try again a second later. When thousands start together the server has other things to do than to accept one
connection a turn, so everything that waits is taken at once.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

MOST_AT_ONCE = 4_096
PAUSE_S = 0.5
"""When the process has no file descriptor left, it looks again after this."""
CROWDED_S = 0.02
"""When too many were accepted that have not said hello, it looks again after this."""
_GIVEN_UP = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.EPERM})
"""A connection that was gone before it was accepted: the next one may be fine."""


class Acceptor:
    """Accepts on one listening socket until `close`."""

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        on_trouble: Callable[[str], None],
        has_room: Callable[[int], bool] = lambda coming: True,
    ) -> None:
        self._listening = listening
        self._make = make
        self._on_trouble = on_trouble
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._adopting: set[asyncio.Task[object]] = set()
        self._is_closed = False
        self._has_said = False
        listening.setblocking(False)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more, and let go of the address."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listening.fileno())
            self._listening.close()

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            if not self._has_room(len(self._adopting)):
                self._wait(CROWDED_S)
                return
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GIVEN_UP:
                    continue
                self._pause(error)
                return
            self._has_said = False
            connection.setblocking(False)
            task = self._loop.create_task(self._adopt(connection))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError:
            connection.close()  # it has gone already

    def _pause(self, error: OSError) -> None:
        """No file descriptor or memory is left: those who wait have to wait."""
        if not self._has_said:
            self._has_said = True
            self._on_trouble(f"cannot accept connections: {error}. Raise the limit on open files (ulimit -n)")
        self._wait(PAUSE_S)

    def _wait(self, pause_s: float) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listening.fileno(), self._accept)
