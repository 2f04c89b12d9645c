"""Sockets and forks: a child must not hold what its parent talks through.

A connection is closed when the last process that has it lets go of it. A child that inherited one would keep it open
after its parent has died, and nobody would notice the death; one that inherited a listening socket would keep the
address. So in a child every socket that was registered here is replaced by one that leads nowhere.
"""

from __future__ import annotations

import os
import socket
from typing import Protocol
from weakref import WeakSet


class HasSockets(Protocol):
    """Whatever owns sockets for a while."""

    def filenos(self) -> list[int]:
        """Those that are open now."""


_owners: WeakSet[HasSockets] = WeakSet()
_forks = 0


def count() -> int:
    """How many forks this process is away from where Rallypoint was first imported: another number, another process.

    Asked for every call of a store; asking the system for the number of the process would cost more.
    """
    return _forks


def guard(owner: HasSockets) -> None:
    """Do not let children keep the sockets of this one."""
    _owners.add(owner)


def fileno_of(transport: object) -> list[int]:
    """The file descriptor of a transport, if it has one that is open."""
    extra = getattr(transport, "get_extra_info", None)
    one = extra("socket") if extra is not None else None
    number = one.fileno() if one is not None else -1
    return [number] if number >= 0 else []


def _let_go() -> None:
    """In a child. The descriptors stay in use, or whoever closes them later would close somebody else's."""
    global _forks
    _forks += 1
    owners = list(_owners)
    _owners.clear()
    if not owners:
        return
    nowhere = socket.socket(socket.AF_UNIX)
    try:
        for owner in owners:
            for number in owner.filenos():
                os.dup2(nowhere.fileno(), number, inheritable=False)
    finally:
        nowhere.close()


os.register_at_fork(after_in_child=_let_go)
