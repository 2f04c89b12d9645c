"""Pairs of sockets that are connected with each other, for who needs one now and then: opened once, and used again."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TypeAlias

Pair: TypeAlias = tuple[socket.socket, socket.socket]


class Pairs:
    """May be used from any thread, without a lock: who takes a pair out owns it."""

    def __init__(self) -> None:
        self._free: list[Pair] = []
        self._is_closed = False

    def take(self) -> Pair:
        """One that nobody else uses, until it is given back or let go. OSError: no file is left for it."""
        try:
            return self._free.pop()
        except IndexError:
            return socket.socketpair()

    def give_back(self, pair: Pair) -> None:
        """Whoever took it has left nothing in it."""
        self._free.append(pair)
        if self._is_closed:  # looked at last: whoever closed it meanwhile did not see this one
            self.let_go_of_all()

    def close(self) -> None:
        """Keep none any more."""
        self._is_closed = True
        self.let_go_of_all()

    def let_go_of_all(self) -> None:
        """Close those that nobody uses."""
        with suppress(IndexError):
            while True:
                let_go(self._free.pop())


def let_go(pair: Pair) -> None:
    """Close both ends."""
    for one in pair:
        one.close()
