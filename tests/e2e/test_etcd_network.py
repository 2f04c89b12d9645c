"""A run on etcd whose network breaks: seven machines as namespaces, three with an etcd member, three with a node."""

import time

import pytest

from tests.backends.etcd.kit import EtcdCluster, needs, ticks
from tests.e2e.etcd_world import SLACK_S, TTL_S, World
from tests.e2e.kit import Machine, Stage

pytest.importorskip("grpc", reason="needs grpcio: pip install 'rallypoint[etcd]'")

pytestmark = pytest.mark.slow

NOBODY = "02:00:00:00:00:01"
"""A hardware address that nobody has: what is sent there vanishes without a word."""


def cut(one: Machine, *others: Machine) -> None:
    """Nothing passes between them any more, in either direction."""
    for other in others:
        one.ip("neigh", "replace", other.address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
        other.ip("neigh", "replace", one.address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")


def heal(one: Machine, *others: Machine) -> None:
    """Everything passes again."""
    for other in others:
        one.ip("neigh", "del", other.address, "dev", "eth0")
        other.ip("neigh", "del", one.address, "dev", "eth0")


@pytest.fixture
def run(network: Stage, tmp_path):
    """A run of three nodes on a cluster of three: the world, the machines of etcd, and those of the nodes by name."""
    binary = needs("system")
    _, *machines = network.machines(7)
    etcds, theirs = machines[:3], dict(zip("abc", machines[3:], strict=True))
    prefixes = [["ip", "netns", "exec", machine.name] for machine in etcds]
    cluster = EtcdCluster(binary, tmp_path, 3, hosts=[machine.address for machine in etcds], prefixes=prefixes)
    try:
        cluster.start()
        yield World(network, cluster, "net", 2, theirs, theirs), etcds, theirs
    finally:
        cluster.stop()


def survive_without(world: World, name: str, number: int, since: float) -> int:
    """The others are told of the loss in time and go on; the number of their round."""
    others = [other for other in world.nodes if other != name]
    for other in others:
        told = world.nodes[other].wait("changed", lambda fact: fact["round"] == number)
        assert told["cause"] == "loss"
        assert told["at"] - since < TTL_S + 1 + SLACK_S
    return world.settled(number, others)


def test_node_and_coordinator_that_are_cut_off_lose_their_places_and_come_back(run):
    """First a node that only follows, then the coordinator: told in time, on both sides of the cut."""
    world, etcds, theirs = run
    number = world.settled()
    coordinator = world.coordinator()
    follower = next(name for name in theirs if name != coordinator)
    for name in (follower, coordinator):
        node, machine = world.nodes[name], theirs[name]
        lost_before = len(node.events("SessionLost"))
        cut_at = time.monotonic()
        cut(machine, *etcds)
        try:
            above = survive_without(world, name, number, cut_at)
            node.until(
                lambda node=node, before=lost_before: len(node.events("SessionLost")) > before, "it knows it is lost"
            )
            lost_at = node.events("SessionLost")[-1]["at"]
            assert lost_at - cut_at < TTL_S + SLACK_S  # and not later than the others, on an idle machine
        finally:
            heal(machine, *etcds)
        number = world.settled(above)
    world.check()


def test_members_of_etcd_that_are_cut_from_each_other_cost_no_round(run):
    """The leader alone, then everybody alone for longer than the time to live: whoever can be asked says so."""
    world, etcds, _ = run
    number = world.settled()
    world.nodes["a"].call("store.set", "kept", "yes")
    leader = next(n for n, member in enumerate(world.cluster.members) if member.is_leader())
    others = [machine for n, machine in enumerate(etcds) if n != leader]
    cut(etcds[leader], *others)
    try:
        time.sleep(TTL_S + 2)
        assert world.nodes["b"].call("store.get", "kept") == "yes"
    finally:
        heal(etcds[leader], *others)
    world.cluster.wait_ready()
    assert world.changes(number) == [], world.story("the round did not go on")

    pairs = [(etcds[0], etcds[1]), (etcds[0], etcds[2]), (etcds[1], etcds[2])]
    for one, other in pairs:
        cut(one, other)
    try:
        for _ in ticks():
            if not any(member.has_leader() for member in world.cluster.members):
                break
        time.sleep(TTL_S + 2)
    finally:
        for one, other in pairs:
            heal(one, other)
    world.cluster.wait_ready()
    assert world.nodes["c"].call("store.get", "kept") == "yes"
    assert world.changes(number) == [], world.story("the round did not go on")
    assert world.settled() == number
    world.check()
