"""Imports `grpc` and protects forked children: gRPC does not survive a fork.

Use of etcd in a child raises an error, and inherited gRPC objects are kept alive and never used. All modules here
import `grpc` from this one, because an environment variable has to be set during the import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.errors import Rejected

__all__ = ["check_fork", "grpc", "keep_in_children"]

SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


@contextmanager
def _quietly() -> Iterator[None]:
    """Set the variable that gRPC reads when it is imported; without it, gRPC writes to stderr at every fork."""
    if "grpc" in sys.modules or SUPPORT in os.environ:
        yield
        return
    os.environ[SUPPORT] = "false"
    try:
        yield
    finally:
        del os.environ[SUPPORT]


with _quietly():
    import grpc

_pid: int | None = None
"""The process that first used gRPC here."""
_kept: set[object] = set()
_inherited: list[object] = []


def check_fork() -> None:
    """Rejected in a child of a process that uses etcd: gRPC's threads do not exist there, and every call would hang."""
    global _pid
    if _pid is None:
        _pid = os.getpid()
    if _pid != os.getpid():
        raise Rejected(
            f"this process was forked from one that uses etcd (process {_pid}), and gRPC does not survive a fork: "
            f"start a new process (subprocess, or multiprocessing with spawn), or fork before etcd is first used"
        )


@contextmanager
def keep_in_children(thing: object) -> Iterator[None]:
    """During the block, a forked child keeps the object alive: destroying gRPC's objects there may crash it."""
    _kept.add(thing)
    try:
        yield
    finally:
        _kept.discard(thing)


def _inherit() -> None:
    _inherited.extend(_kept)


os.register_at_fork(after_in_child=_inherit)
