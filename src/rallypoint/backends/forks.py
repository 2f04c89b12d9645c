"""Sockets and forks: a forked child must not keep the sockets of its parent open.

A connection ends when the last process with its descriptor closes it. A child that inherited one would keep it open
after the death of its parent, which would then go unnoticed; an inherited listening socket would keep the address in
use. So in a child every registered socket is replaced by an unconnected one.
"""

from __future__ import annotations

import os
import socket
from typing import Protocol
from weakref import WeakSet


class HasSockets(Protocol):
    """An owner of sockets."""

    def filenos(self) -> list[int]:
        """The descriptors of the sockets that are open now."""


_owners: WeakSet[HasSockets] = WeakSet()
_forks = 0


def count() -> int:
    """The number of forks between the process that imported Rallypoint and this one; it differs in every descendant.

    Read on every call of a store: it is faster than `os.getpid()`.
    """
    return _forks


def guard(owner: HasSockets) -> None:
    """Close the sockets of this owner in forked children."""
    _owners.add(owner)


def fileno_of(transport: object) -> list[int]:
    """The file descriptor of a transport, if it is open."""
    extra = getattr(transport, "get_extra_info", None)
    one = extra("socket") if extra is not None else None
    number = one.fileno() if one is not None else -1
    return [number] if number >= 0 else []


def _replace_sockets() -> None:
    """In a child: replace the sockets. The descriptors stay in use, so that a later `close` closes nothing else."""
    global _forks
    _forks += 1
    owners = list(_owners)
    _owners.clear()
    if not owners:
        return
    unconnected = socket.socket(socket.AF_UNIX)
    try:
        for owner in owners:
            for number in owner.filenos():
                os.dup2(unconnected.fileno(), number, inheritable=False)
    finally:
        unconnected.close()


os.register_at_fork(after_in_child=_replace_sockets)
