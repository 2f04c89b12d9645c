"""The backends of the row tests: one `rallypoint serve`, or a real etcd cluster of three members."""

import itertools
import os
from dataclasses import dataclass

from tests.e2e.kit import Stage, loopback

_numbers = itertools.count(1)
QUICK = "last_call_timeout=0.3&local_addr=127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """A backend. `root`: scheme and endpoints; `ttl_s`: the time to live of sessions, unless a test sets another."""

    backend: str
    root: str
    ttl_s: float
    is_told_of_deaths: bool
    """Whether the death of a process is noticed at once, because its connection is closed."""

    @property
    def loss_s(self) -> float:
        """The time within which the death of a process is noticed."""
        return 0.8 if self.is_told_of_deaths else self.ttl_s + 1

    def run(self) -> str:
        """The URL of a new run, for commands."""
        return f"{self.root}/row-{os.getpid()}-{next(_numbers)}"

    def url(self, options: str, run: str | None = None, ttl_s: float | None = None) -> str:
        """The URL of a node of a run (default: a new one). The renewal interval is a third of the time to live."""
        each_s = (ttl_s or self.ttl_s) / 3
        timeouts = "" if "join_timeout" in options else "&join_timeout=120"
        return (
            f"{run or self.run()}?{options}&{QUICK}&keep_alive_interval={each_s:g}&keep_alive_max_attempt=3{timeouts}"
        )


def on_tcp(stage: Stage) -> Place:
    """A new server with default settings: a time to live of 15 s, and 1 s after a closed connection."""
    server = stage.serve(loopback())
    return Place("tcp", f"tcp://{server.wait_listening()}", 15.0, is_told_of_deaths=True)


def on_etcd(endpoints: str) -> Place:
    """A running cluster. The time to live is 6 s: short, because on etcd nothing else shows a death."""
    return Place("etcd", f"etcd://{endpoints}", 6.0, is_told_of_deaths=False)
