"""Where the keys of a run are.

Control keys are under `/{prefix}/{run}/`: what the coordinator decides from, one range to watch. Everything that is
large, or written for one reader only, is under `/{prefix}/{run}:data/`, so that no control watch covers it. The run id
is percent-encoded, so no run's keys are under another's.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class RunKeys:
    """All keys of one run."""

    prefix: str
    run_id: str

    @property
    def control(self) -> str:
        """The range that the coordinator watches."""
        return f"/{self.prefix}/{quote(self.run_id, safe='')}/"

    @property
    def data(self) -> str:
        return f"/{self.prefix}/{quote(self.run_id, safe='')}:data/"

    @property
    def config(self) -> str:
        """Create-only, by the first node: the incarnation and the settings that all nodes share."""
        return self.control + "config"

    @property
    def coordinator(self) -> str:
        """Create-only, under the session of whoever decides."""
        return self.control + "coordinator"

    @property
    def nodes(self) -> str:
        return self.control + "nodes/"

    def node(self, node_id: str) -> str:
        """Written by that node alone, under its session."""
        return self.nodes + node_id

    @property
    def state(self) -> str:
        """The range that every node watches: small, whatever the size of the job."""
        return self.control + "state/"

    @property
    def round(self) -> str:
        return self.state + "round"

    @property
    def waiting(self) -> str:
        return self.state + "waiting"

    @property
    def closed(self) -> str:
        """Never deleted while the run lives: reopening rewrites it."""
        return self.state + "closed"

    @property
    def drains(self) -> str:
        return self.control + "drain/"

    def drain(self, node_id: str) -> str:
        return self.drains + node_id

    @property
    def healths(self) -> str:
        return self.control + "health/"

    def health(self, name: str) -> str:
        """By node name, not id: a node that comes back as a new process is still the same machine."""
        return self.healths + quote(name, safe="")

    def assign(self, node_id: str) -> str:
        return self.data + "assign/" + node_id

    def roster(self, number: int) -> str:
        return f"{self.data}roster/{number:012d}/"

    def roster_chunk(self, number: int, chunk: int) -> str:
        return f"{self.roster(number)}{chunk:06d}"

    @property
    def histories(self) -> str:
        return self.data + "history/"

    def history(self, number: int) -> str:
        return f"{self.histories}{number:012d}"

    def store(self, number: int) -> str:
        """The user's keys of one round."""
        return f"{self.data}store/{number:012d}/"
