"""Ports for servers that are started later: of this worker alone, and none of them given twice."""

import os
import random
import re
import socket
from collections.abc import Iterator

FIRST, END = 10_000, 29_000
"""Below what Linux gives to those who connect or ask for any port: nobody takes them by chance."""


def _of_this_worker() -> Iterator[int]:
    """Every worker of a run has its own; runs beside each other begin at different places."""
    number = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(range(FIRST + number, END, workers))
    random.SystemRandom().shuffle(ports)
    return iter(ports)


_ports = _of_this_worker()


def _is_free(port: int) -> bool:
    """On every address of this machine."""
    try:
        if socket.has_dualstack_ipv6():
            socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """A port that nobody has."""
    return next(port for port in _ports if _is_free(port))


def free_ports(count: int) -> list[int]:
    """Some of them."""
    return [free_port() for _ in range(count)]
