"""The names of the keys of a run. Pure.

Control keys are under `/{prefix}/{run}/`: everything that the coordinator decides on, in one range that it watches.
Everything that is large, or for one reader only, is under `/{prefix}/{run}:data/`, so that no watch of the control keys
covers it. The run id is percent-encoded, so no run's keys are under those of another.
"""

from __future__ import annotations

from urllib.parse import quote, unquote


def runs_index(prefix: str) -> str:
    """The range that lists the runs, one key each. No run can be in its place: an encoded id has no colon."""
    return f"/{prefix}/:runs/"


def run_of_entry(prefix: str, key: str) -> str:
    """The run id of a key of `runs_index`."""
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
        "events",
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
        """Exists as long as `config`: a tool lists the runs without reading all of their keys."""
        self.returned = f"/{prefix}/:returned/{quote(run_id, safe='')}"
        """Claims of nodes on a server that lost its data, kept for one time to live: see `returning_nodes.py`."""
        self.config = self.control + "config"
        """Created by the first node: the incarnation and the settings that all nodes share."""
        self.coordinator = self.control + "coordinator"
        """Created by the elected coordinator under its session; its create revision is the term."""
        self.budget = self.control + "budget"
        """Written by the launchers, in transactions: restarts that the run has used, and how it ended."""
        self.nodes = self.control + "nodes/"
        self.state = self.control + "state/"
        """The range that every node watches: small for any number of nodes."""
        self.round = self.state + "round"
        self.waiting = self.state + "waiting"
        self.closed = self.state + "closed"
        """Never deleted while the run exists: reopening rewrites it."""
        self.drains = self.control + "drain/"
        self.healths = self.control + "health/"
        self.data = f"/{prefix}/{quote(run_id, safe='')}:data/"
        self.assigns = self.data + "assign/"
        self.rosters = self.data + "roster/"
        self.histories = self.data + "history/"
        self.events = self.data + "events/"
        self.refusals = self.data + "refused/"
        self.stores = self.data + "store/"

    def node(self, node_id: str) -> str:
        """Written only by that node, under its session."""
        return self.nodes + node_id

    def drain(self, node_id: str) -> str:
        return self.drains + node_id

    def health(self, name: str) -> str:
        """By node name, not id: after a restart the process has a new id, but runs on the same machine."""
        return self.healths + quote(name, safe="")

    def assign(self, node_id: str) -> str:
        return self.assigns + node_id

    def roster(self, number: int) -> str:
        return f"{self.rosters}{number:012d}/"

    def roster_chunk(self, number: int, chunk: int) -> str:
        return f"{self.roster(number)}{chunk:06d}"

    def history(self, number: int) -> str:
        return f"{self.histories}{number:012d}"

    def kept_events(self, first: int) -> str:
        """A batch of kept events, by the number of its first one."""
        return f"{self.events}{first:012d}"

    def refusal(self, name: str) -> str:
        """By node name: a node that retries leaves one record."""
        return self.refusals + quote(name, safe="")

    def store(self, number: int) -> str:
        """The store of one round: the keys of the user, and those of barriers and gathers."""
        return f"{self.stores}{number:012d}/"

    def user_data(self, number: int) -> str:
        """The keys that the user's program set in the store of one round."""
        return f"{self.store(number)}k/"
