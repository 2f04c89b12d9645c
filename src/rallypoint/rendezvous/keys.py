"""Where the keys of a run are.

Control keys are under `/{prefix}/{run}/`: what the coordinator decides from, one range to watch. Everything that is
large, or written for one reader only, is under `/{prefix}/{run}:data/`, so that no control watch covers it. The run id
is percent-encoded, so no run's keys are under another's.
"""

from __future__ import annotations

from urllib.parse import quote, unquote


def runs_index(prefix: str) -> str:
    """Where the runs are listed, one key each: no run id begins with a colon once it is encoded."""
    return f"/{prefix}/:runs/"


def run_of_entry(prefix: str, key: str) -> str:
    """The run id that a key of the index stands for."""
    return unquote(key.removeprefix(runs_index(prefix)))


class RunKeys:
    """All keys of one run."""

    __slots__ = (
        "assigns",
        "budget",
        "closed",
        "config",
        "control",
        "coordinator",
        "data",
        "drains",
        "healths",
        "histories",
        "listed_run",
        "nodes",
        "prefix",
        "refusals",
        "returned",
        "rosters",
        "round",
        "run_id",
        "state",
        "stores",
        "waiting",
    )

    def __init__(self, prefix: str, run_id: str) -> None:
        self.prefix = prefix
        self.run_id = run_id
        self.control = f"/{prefix}/{quote(run_id, safe='')}/"
        """The range that the coordinator watches."""
        self.listed_run = runs_index(prefix) + quote(run_id, safe="")
        """There as long as `config` is: lets a tool list the runs without reading all of their keys."""
        self.returned = f"/{prefix}/:returned/{quote(run_id, safe='')}"
        """What nodes told a server that had lost its memory, for one time to live: see `returning.py`."""
        self.config = self.control + "config"
        """Create-only, by the first node: the incarnation and the settings that all nodes share."""
        self.coordinator = self.control + "coordinator"
        """Create-only, under the session of whoever decides."""
        self.budget = self.control + "budget"
        """Written by the launchers, by transaction: restarts that the run has used, and how it ended."""
        self.nodes = self.control + "nodes/"
        self.state = self.control + "state/"
        """The range that every node watches: small, whatever the size of the job."""
        self.round = self.state + "round"
        self.waiting = self.state + "waiting"
        self.closed = self.state + "closed"
        """Never deleted while the run lives: reopening rewrites it."""
        self.drains = self.control + "drain/"
        self.healths = self.control + "health/"
        self.data = f"/{prefix}/{quote(run_id, safe='')}:data/"
        self.assigns = self.data + "assign/"
        self.rosters = self.data + "roster/"
        self.histories = self.data + "history/"
        self.refusals = self.data + "refused/"
        self.stores = self.data + "store/"

    def node(self, node_id: str) -> str:
        """Written by that node alone, under its session."""
        return self.nodes + node_id

    def drain(self, node_id: str) -> str:
        return self.drains + node_id

    def health(self, name: str) -> str:
        """By node name, not id: a node that comes back as a new process is still the same machine."""
        return self.healths + quote(name, safe="")

    def assign(self, node_id: str) -> str:
        return self.assigns + node_id

    def roster(self, number: int) -> str:
        return f"{self.rosters}{number:012d}/"

    def roster_chunk(self, number: int, chunk: int) -> str:
        return f"{self.roster(number)}{chunk:06d}"

    def history(self, number: int) -> str:
        return f"{self.histories}{number:012d}"

    def refusal(self, name: str) -> str:
        """By node name: one that tries again and again leaves one note."""
        return self.refusals + quote(name, safe="")

    def store(self, number: int) -> str:
        """The user's keys of one round."""
        return f"{self.stores}{number:012d}/"
