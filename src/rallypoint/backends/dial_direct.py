"""Connecting to an endpoint from a thread that blocks: within a deadline for all addresses of a name together."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from rallypoint.backends.dial import KEEPALIVE_S, ONE_ADDRESS_S

TICK_S = 0.25
"""How often whoever waits looks whether to go on."""


def connect(host: str, port: int, until: float, check: Callable[[], None]) -> socket.socket:
    """A socket that is connected, and blocks. OSError if there is none; what `check` raises, which is asked each tick.

    A name is looked up for every attempt, and that takes what it takes.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    trouble = OSError(f"{host!r} has no address")
    for family, kind, protocol, _, address in found:
        within = until if len(found) == 1 else min(until, time.monotonic() + ONE_ADDRESS_S)
        one = socket.socket(family, kind, protocol)
        try:
            one.setblocking(False)
            _connect(one, address, within, check)
            _tune(one)
        except OSError as error:
            one.close()
            trouble = error
        except BaseException:
            one.close()
            raise
        else:
            return one
    raise trouble


def connect_near(name: str) -> socket.socket:
    """A socket to a server on this machine that blocks, by the name that the server gave. OSError, at once."""
    if not name:
        raise OSError("a socket without a name may be anybody's")
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        one.setblocking(False)  # a server that accepts nobody now is none
        one.connect("\0" + name)
        one.setblocking(True)
    except BaseException:
        one.close()
        raise
    return one


def _connect(one: socket.socket, address: object, until: float, check: Callable[[], None]) -> None:
    failed = one.connect_ex(address)  # type: ignore[arg-type]  # it is what getaddrinfo gave
    if failed == errno.EINPROGRESS:
        wait_for(one, select.POLLOUT, until, check)
        failed = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed:
        raise OSError(failed, os.strerror(failed))


def wait_for(one: socket.socket, events: int, until: float, check: Callable[[], None]) -> None:
    """Until the socket is ready for that. TimeoutError at `until`."""
    ready = select.poll()
    ready.register(one, events)
    while True:
        left_s = until - time.monotonic()
        if ready.poll(max(0.0, min(TICK_S, left_s)) * 1000):
            return
        check()
        if left_s <= 0:
            raise TimeoutError("no answer in time")


def _tune(one: socket.socket) -> None:
    one.setblocking(True)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)


def look(sock: socket.socket, most_bytes: int, within_s: float) -> tuple[bytes | None, bool]:
    """What arrives within that time, without sleeping, None if nothing does; and whether the time is over."""
    until = time.monotonic() + within_s
    data = None
    while True:
        with suppress(BlockingIOError):
            data = sock.recv(most_bytes, socket.MSG_DONTWAIT)
        is_late = time.monotonic() >= until
        if data is not None or is_late:
            return data, is_late
        os.sched_yield()  # the server may need this very core


def tick(sock: socket.socket, tick_s: float) -> None:
    """Have every read end after that. Where it can be, by the kernel: Python's own costs another system call each."""
    if sys.platform != "linux":
        sock.settimeout(max(1e-6, tick_s))
        return
    micros = max(1, int(tick_s * 1e6))  # none at all would mean for ever
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(micros, 1_000_000)))
