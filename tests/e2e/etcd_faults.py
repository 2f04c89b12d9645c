"""A campaign of faults against a run on a real etcd cluster of three. The seed draws which, when and how long.

    python -m tests.e2e.etcd_faults --faults 100 --seed 1

After every fault everything is healed, and the run has to stand as it should: what happens to etcd alone must not touch
a running round or its store; what happens to a node costs its place, no sooner and not much later than promised.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.backends.etcd.kit import needs
from tests.chaos.stalls import TICK_S, Stalls, Waited
from tests.e2e.etcd_world import INTERVAL_S, SLACK_S, TTL_S, World, three
from tests.e2e.kit import Stage

NAMES = ("a", "b", "c", "d")
STARVED_S = 2.0
"""A node or a member that had to wait for a processor for so long in one fault cannot be blamed for being late."""


class Campaign:
    """One fault after the other."""

    def __init__(self, world: World, seed: int, say: Callable[[str], None] = lambda text: None) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.say = say
        self.done: Counter[str] = Counter()
        self.took: dict[str, list[float]] = {}
        self.number = world.settled()
        self._count = 0
        self._stalls = Stalls()
        self._calm = 0
        """How many stalls there had been when everything was last known to stand as it should."""

    def run(self, faults: int) -> None:
        """So many faults, all kinds of them in turn and in any order."""
        kinds = [
            self.kill_leader,
            self.pause_leader,
            self.pause_leader_long,
            self.kill_follower,
            self.lose_quorum,
            self.kill_coordinator,
            self.pause_coordinator,
        ]
        waiting: list[Callable[[], None]] = []
        done = 0
        try:
            while done < faults:
                if not waiting:
                    waiting = self.rng.sample(kinds, len(kinds))
                done += self._one(waiting.pop())
        finally:
            self._stalls.end()

    def _one(self, fault: Callable[[], None]) -> bool:
        """Whether it counts. On a machine that stood still meanwhile it does not, nor does what came of it."""
        name, before = fault.__name__, self.number
        began_at = time.monotonic()
        self._count += 1
        waited, is_excused = Waited(self._pids()), False
        try:
            fault()
            took_s = time.monotonic() - began_at
            time.sleep(2.5 * INTERVAL_S)  # everybody renews: one fault at a time is what is promised
        except (AssertionError, pytest.fail.Exception):
            time.sleep(2 * TICK_S)
            is_excused = any(waited.of(pid) > STARVED_S for pid in self._pids())
            if self._stalls.count == self._calm and not is_excused:
                raise
            took_s = 0.0
        if self._stalls.count > self._calm or is_excused:
            self.done["(machine stood still: not counted)"] += 1
            self.say(f"     {name:18} did not count: the machine stood still")
            self._recover()
            return False
        self.done[name] += 1
        number = sum(count for kind, count in self.done.items() if kind[0] != "(")
        self.say(f"{number:4} {name:18} round {before} -> {self.number}  {took_s:5.1f} s")
        return True

    def _pids(self) -> list[int]:
        """Of the nodes and members that live."""
        nodes = [node.popen.pid for node in self.world.nodes.values() if node.popen.poll() is None]
        return nodes + [member.pid for member in self.world.cluster.members if member.is_running]

    def _recover(self) -> None:
        """Whatever is paused goes on, whatever is dead is started; again, if the machine stands still meanwhile."""
        world, is_calm = self.world, False
        while not is_calm:
            stalls = self._stalls.count
            for member in world.cluster.members:
                member.resume()
                if not member.is_running:
                    member.start()
            world.cluster.wait_ready()
            for name, node in list(world.nodes.items()):
                if node.popen.poll() is None:
                    node.go_on()
                else:
                    world.start(name)
            time.sleep(TTL_S + 2)  # until everybody knows what it cost
            self.number = world.settled()
            time.sleep(2 * TICK_S)
            is_calm = self._stalls.count == stalls
            self._calm = stalls

    # --- what happens to etcd -----------------------------------------------------------------------------------------

    def kill_leader(self) -> None:
        leader = self.world.cluster.leader
        self._etcd_only(leader.kill, self.rng.uniform(0.0, 2 * TTL_S), leader.start)

    def pause_leader(self) -> None:
        """For less than what is left of any lease: nothing is noticed."""
        leader = self.world.cluster.leader
        self._etcd_only(leader.pause, self.rng.uniform(0.5, TTL_S - 2 * INTERVAL_S), leader.resume)

    def pause_leader_long(self) -> None:
        """For longer than a lease: there is a new leader long since, and everybody renews with it.

        When the old one wakes up, etcd 3.4.23 may take its word that leases have ended which were renewed since: then
        their nodes are lost, though nobody died. That is told as any other loss, and a new round forms.
        """
        world, leader, before = self.world, self.world.cluster.leader, self.number
        leader.pause()
        try:
            time.sleep(self.rng.uniform(TTL_S, 2 * TTL_S))
            assert world.changes(before) == [], world.story(f"round {before} did not go on without the old leader")
        finally:
            leader.resume()
        world.cluster.wait_ready()
        time.sleep(1.0)
        if world.changes(before):
            self.done["(etcd ended leases that were renewed)"] += 1
            self.number = world.settled(before)
        assert world.settled() == self.number

    def kill_follower(self) -> None:
        leader = self.world.cluster.leader
        follower = self.rng.choice([member for member in self.world.cluster.members if member is not leader])
        self._etcd_only(follower.kill, self.rng.uniform(0.0, TTL_S), follower.start)

    def lose_quorum(self) -> None:
        """For twice the time to live: etcd ends no lease meanwhile, and everybody who can see that goes on."""
        two = self.rng.sample(self.world.cluster.members, 2)

        def break_it() -> None:
            for member in two:
                member.kill()

        def heal() -> None:
            for member in two:
                member.start()

        self._etcd_only(break_it, 2 * TTL_S, heal)

    def _etcd_only(self, break_it: Callable[[], None], for_s: float, heal: Callable[[], None]) -> None:
        """No node has died: the round goes on, and its store has all that it had."""
        world = self.world
        writer, reader = self.rng.sample(sorted(world.nodes), 2)
        key, value = f"fault-{self._count}", f"{self.rng.getrandbits(64):x}"
        world.nodes[writer].call("store.set", key, value)
        during = world.nodes[reader].ask("store.add", "count", 1)
        break_it()
        try:
            time.sleep(for_s)
        finally:
            heal()
        world.cluster.wait_ready()
        counted = world.nodes[reader].outcome(during)
        assert world.nodes[reader].call("store.get", key) == value, "the store has lost something"
        after = world.nodes[writer].call("store.add", "count", 0)
        if counted["kind"] == "done":
            assert after == counted["result"], "it was added twice, or not at all"
        time.sleep(0.3)
        assert world.changes(self.number) == [], world.story(f"round {self.number} did not go on")
        assert world.settled() == self.number

    # --- what happens to nodes ----------------------------------------------------------------------------------------

    def kill_coordinator(self) -> None:
        """The others know within the time to live and a second, and go on without it; then it comes back."""
        world = self.world
        name = world.coordinator()
        killed_at = world.nodes[name].kill()
        self._without(name, killed_at)
        world.start(name)
        self.number = world.settled(self.number)

    def pause_coordinator(self) -> None:
        """Beyond its lease: it loses its place, and whatever it still wants to write is refused."""
        world = self.world
        name = world.coordinator()
        node = world.nodes[name]
        lost_before = len(node.events("SessionLost"))
        deposed_before = len(node.events("CoordinatorDeposed"))
        stopped_at = node.stop()
        try:
            self._without(name, stopped_at)
        finally:
            node.go_on()
        node.until(lambda: len(node.events("SessionLost")) > lost_before, "it was told that its session is lost")
        self.number = world.settled(self.number)
        for fact in node.events("CoordinatorDeposed")[deposed_before:]:
            self.done["(late write refused by the fence)"] += "refused by the fence" in fact["text"]

    def _without(self, name: str, since: float) -> None:
        """The survivors are told in time, and hold a round of their own."""
        world = self.world
        before = self.number
        survivors = [other for other in world.nodes if other != name]
        for other in survivors:
            told = world.nodes[other].wait("changed", lambda fact: fact["round"] == before)
            assert told["cause"] == "loss", world.story(f"{other} was told {told}")
            after_s = told["at"] - since
            self.took.setdefault("told of a loss", []).append(after_s)
            assert after_s < TTL_S + 1 + SLACK_S, f"{other} was told after {after_s:.1f} s"
        self.number = world.settled(before, survivors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rallypoint-etcd-") as directory, Stage() as stage:
        cluster = three(needs("system"), Path(directory))
        try:
            world = World(stage, cluster, "chaos", 2, NAMES)
            campaign = Campaign(world, options.seed, lambda text: print(text, flush=True))
            campaign.run(options.faults)
            safety = world.check()
        finally:
            cluster.stop()
    told = sorted(campaign.took.get("told of a loss", [0.0]))
    print(f"{options.faults} faults of seed {options.seed}, no guarantee broken: {dict(campaign.done)}")
    print(f"survivors were told of a loss after {told[len(told) // 2]:.1f} s (median), {told[-1]:.1f} s (most)")
    print(f"rounds up to {safety.picture.round.number if safety.picture.round else 0}")


if __name__ == "__main__":
    sys.exit(main())
