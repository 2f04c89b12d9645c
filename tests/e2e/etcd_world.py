"""A run of real node processes on a real etcd cluster, with everything that happened to it, for the checkers.

The members of etcd are killed, paused and cut off, and so are the nodes. What was committed is read back from etcd's
own history, what the nodes returned from their words; the checkers are those of the simulator.
"""

import asyncio
import base64
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.kv.types import Batch, Put
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.rendezvous.records import RoundPhase
from rallypoint.testing.checkers import BrokeBarrier, Safety
from tests.backends.etcd.kit import EtcdCluster, ticks
from tests.e2e.kit import PATIENCE_S, Fact, Machine, Node, Stage

TTL_S = 5.0
INTERVAL_S = 1.0
SLACK_S = 6.0
"""How much later than promised something may come on a machine that others use, too."""
OPTIONS = (
    "keep_alive_interval=1&keep_alive_max_attempt=5&heartbeat_timeout=2&last_call_timeout=0.5&admission_window=0.2"
    "&hold_back_losses=0&join_timeout=120&local_addr=127.0.0.1"
)


class World:
    """Nodes by name, and the etcd that they use."""

    def __init__(
        self,
        stage: Stage,
        cluster: EtcdCluster,
        run_id: str,
        min_nodes: int,
        names: Iterable[str],
        machines: Mapping[str, Machine] | None = None,
    ) -> None:
        names = list(names)
        self.machines = machines or {}
        self.stage = stage
        self.cluster = cluster
        self.keys = RunKeys("rallypoint", run_id)
        self.sizes = (min_nodes, len(names))
        self.url = f"etcd://{cluster.endpoints}/{run_id}?min_nodes={min_nodes}&max_nodes={len(names)}&{OPTIONS}"
        self.nodes: dict[str, Node] = {}
        self.gone: list[Node] = []
        """Processes that were killed; what they said counts."""
        for name in names:
            self.start(name)

    def start(self, name: str) -> Node:
        """A new process of this name."""
        if name in self.nodes:
            self.gone.append(self.nodes[name])
        self.nodes[name] = self.stage.node(self.url, name, machine=self.machines.get(name))
        return self.nodes[name]

    # --- how it stands ------------------------------------------------------------------------------------------------

    def settled(self, above: int = 0, names: Iterable[str] = (), patience_s: float = PATIENCE_S) -> int:
        """Until all these nodes (all) are in one round above that number, of just them; its number."""
        nodes = [self.nodes[name] for name in names or self.nodes]
        for _ in ticks(patience_s):
            last = [node.all("round")[-1:] for node in nodes]
            if all(last):
                rounds = [facts[0] for facts in last]
                numbers = {fact["round"] for fact in rounds}
                sizes = {fact["size"] for fact in rounds}
                if len(numbers) == 1 and sizes == {len(nodes)} and min(numbers) > above:
                    return int(rounds[0]["round"])
        raise AssertionError(self.story(f"no round of {[node.name for node in nodes]} above {above}"))

    def coordinator(self) -> str:
        """The name of the node that decides."""
        return str(msgspec.json.decode(base64.b64decode(self._coordinator()["value"]))["name"])

    def coordinator_lease(self) -> int:
        """The lease that its office hangs on: that of its session."""
        return int(self._coordinator()["lease"])

    def _coordinator(self) -> dict[str, Any]:
        """The key of the node that decides, as etcd tells it."""
        key = base64.b64encode(self.keys.coordinator.encode()).decode()
        for _ in ticks():
            kvs = self.cluster.leader.ask("kv/range", key=key).get("kvs", [])
            if kvs:
                return dict(kvs[0])
        raise AssertionError(self.story("nobody is coordinator"))

    def changes(self, number: int) -> list[tuple[str, Fact]]:
        """Who was told that the round of this number is not what it was."""
        return [
            (name, fact) for name, node in self.nodes.items() for fact in node.all("changed") if fact["round"] == number
        ]

    def story(self, what: str) -> str:
        return "\n".join([what, *(node.story for node in self.nodes.values())])

    # --- what happened ------------------------------------------------------------------------------------------------

    def check(self) -> Safety:
        """Every safety guarantee, over everything that was committed and returned so far."""
        compared = 125
        safety = Safety(self.keys, *self.sizes, compared=compared)
        returned: dict[int, list[tuple[Node, Fact]]] = {}
        for node in (*self.gone, *self.nodes.values()):
            for fact in node.all("round"):
                returned.setdefault(fact["round"], []).append((node, fact))
        machine = next(iter(self.machines.values()), None)
        for batch in history(self.cluster.endpoints, f"/rallypoint/{self.keys.run_id}", machine):
            safety.committed(batch.revision, batch.changes)
            record = safety.picture.round
            wrote = any(change.key == self.keys.round and change.item is not None for change in batch.changes)
            if wrote and record is not None and record.phase is RoundPhase.ACTIVE:
                members = safety.picture.members(record)
                for node, fact in returned.pop(record.number, []):
                    (own,) = [member for member in members if member.name == node.name]
                    joined = Joined(
                        number=fact["round"], rank=fact["rank"], size=fact["size"], addr="", port=0, own_revision=0,
                        data_lease=0,
                    )  # fmt: skip
                    safety.returned(f"{node.name} {node.popen.pid}", own.id, joined)
                    if "too soon" not in str(fact["members"]):
                        assert fact["members"] == [member.name for member in members]
        if returned:
            raise BrokeBarrier(f"nodes returned from rounds that were never active: {sorted(returned)}")
        return safety


def history(endpoints: str, prefix: str, machine: Machine | None = None) -> list[Batch]:
    """Everything that etcd ever committed under a prefix. Asked in a process of its own, on that machine."""
    within = ["ip", "netns", "exec", machine.name] if machine is not None else []
    done = subprocess.run(
        [*within, sys.executable, "-m", "tests.e2e.etcd_world", endpoints, prefix],
        capture_output=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=list[Batch])


async def read_history(endpoints: str, prefix: str) -> list[Batch]:
    """What `history` gives."""
    from rallypoint.backends.etcd.backend import EtcdBackend
    from rallypoint.backends.etcd.security import Security
    from rallypoint.backends.etcd.shared_connection import SharedConnection

    backend = EtcdBackend(SharedConnection.to(tuple(endpoints.split(",")), Security()), call_timeout_s=PATIENCE_S)
    try:
        async with asyncio.timeout(PATIENCE_S):
            last = (await backend.txn((), [Put(f"{prefix}:end", b"")])).revision  # so that the end is known
            batches = []
            watch = backend.watch(prefix, 0)
            async for batch in watch:
                if batch.revision >= last:
                    break
                batches.append(batch)
            watch.cancel()
            return batches
    finally:
        await backend.close()


def three(binary: str, directory: Path) -> EtcdCluster:
    """A cluster of three that is ready."""
    cluster = EtcdCluster(binary, directory, 3)
    cluster.start()
    return cluster


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(read_history(*sys.argv[1:]))))
