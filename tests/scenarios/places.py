"""Where a run lives: on one `rallypoint serve`, or on a real etcd cluster of three. A row is played on either alike."""

import itertools
import os
from dataclasses import dataclass

from tests.e2e.kit import Stage, loopback

_numbers = itertools.count(1)
QUICK = "last_call_timeout=0.3&local_addr=127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """`root`: scheme and endpoints. `ttl_s`: of the sessions, unless a test asks for another."""

    backend: str
    root: str
    ttl_s: float
    is_told_of_deaths: bool
    """Whether a process that dies is missed at once, because its connection ends."""

    @property
    def loss_s(self) -> float:
        """Within what time the death of a process is known."""
        return 1.5 if self.is_told_of_deaths else self.ttl_s + 1

    def run(self) -> str:
        """A new run, as the commands name it."""
        return f"{self.root}/row-{os.getpid()}-{next(_numbers)}"

    def url(self, options: str, run: str | None = None, ttl_s: float | None = None) -> str:
        """The URL of a node of a run (a new one). A third of the time to live is the interval of renewals."""
        each_s = (ttl_s or self.ttl_s) / 3
        timeouts = "" if "join_timeout" in options else "&join_timeout=120"
        return (
            f"{run or self.run()}?{options}&{QUICK}&keep_alive_interval={each_s:g}&keep_alive_max_attempt=3{timeouts}"
        )


def on_tcp(stage: Stage) -> Place:
    """A server of its own, whose defaults are kept: 15 s, but a second for whose connection ends."""
    server = stage.serve(loopback())
    return Place("tcp", f"tcp://{server.wait_listening()}", 15.0, is_told_of_deaths=True)


def on_etcd(endpoints: str) -> Place:
    """A cluster that is there. 6 s, as one would choose who has only the time to live to notice a death by."""
    return Place("etcd", f"etcd://{endpoints}", 6.0, is_told_of_deaths=False)
