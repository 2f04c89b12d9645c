"""Runs on a real etcd cluster of three, with real node processes: scenario 8, hand-over, and a short campaign."""

import time

import pytest

from rallypoint.kv.types import Put
from tests.backends.etcd.kit import ELECTION_S, needs
from tests.e2e.etcd_faults import NAMES, Campaign
from tests.e2e.etcd_world import SLACK_S, TTL_S, World, three
from tests.e2e.kit import Stage, members_agree

pytest.importorskip("grpc", reason="needs grpcio: pip install 'rallypoint[etcd]'")


@pytest.fixture
def cluster(tmp_path):
    """Three members."""
    one = three(needs("system"), tmp_path)
    try:
        yield one
    finally:
        one.stop()


def test_scenario_08_loss_of_any_machine_of_the_control_plane_loses_nothing(stage: Stage, cluster):
    """Row 8: the member that leads and the coordinator die one after the other; the store and the round go on."""
    world = World(stage, cluster, "scenario-8", 2, ("a", "b", "c"))
    number = world.settled()
    nodes = world.nodes
    nodes["a"].call("store.set", "checkpoint", "step 1000")

    cluster.leader.kill()
    assert nodes["b"].call("store.get", "checkpoint") == "step 1000"
    nodes["c"].call("store.set", "after", "the leader")
    assert world.changes(number) == []
    assert world.settled() == number

    name = world.coordinator()
    killed_at = nodes[name].kill()
    survivors = [node for other, node in nodes.items() if other != name]
    told = [node.wait("changed") for node in survivors]
    assert {fact["cause"] for fact in told} == {"loss"}
    assert max(fact["at"] for fact in told) - killed_at < TTL_S + ELECTION_S + 1 + SLACK_S
    second = [node.round(above=number) for node in survivors]
    members_agree(*second)
    assert max(fact["at"] for fact in second) - killed_at < TTL_S + ELECTION_S + 2 + SLACK_S
    elected = [fact for node in survivors for fact in node.events("CoordinatorElected")]
    assert len(elected) == 1
    world.check()


def test_coordinator_that_leaves_in_good_order_hands_over_at_once(stage: Stage, cluster):
    """Promised: not after its time to live, but at once."""
    world = World(stage, cluster, "hand-over", 2, ("a", "b", "c"))
    number = world.settled()
    name = world.coordinator()
    left_at = time.monotonic()
    world.nodes[name].call("leave", "it is told to")
    others = [other for other in world.nodes if other != name]
    elected = [fact for other in others for fact in [*world.nodes[other].events("CoordinatorElected")]]
    if not elected:
        world.nodes[others[0]].until(
            lambda: [fact for other in others for fact in world.nodes[other].events("CoordinatorElected")],
            "somebody else is elected",
        )
        elected = [fact for other in others for fact in world.nodes[other].events("CoordinatorElected")]
    assert elected[0]["at"] - left_at < TTL_S - 1  # it takes a third of a second on an idle machine
    world.settled(number, others)
    world.check()


def test_write_of_a_coordinator_whose_lease_has_ended_is_refused(cluster):
    """The fence, on a real etcd: the term is the create revision of a key that went with the lease."""
    import asyncio

    from rallypoint.backends.etcd.backend import EtcdBackend
    from rallypoint.backends.etcd.security import Security
    from rallypoint.backends.etcd.shared import Connection
    from rallypoint.rendezvous.fenced_writer import Deposed, FencedWriter
    from rallypoint.rendezvous.keys import RunKeys

    async def check():
        backend = EtcdBackend(Connection.to(tuple(cluster.endpoints.split(",")), Security()))
        keys = RunKeys("rallypoint", "fence")
        try:
            session = await backend.open_session(5.0)
            term = (await backend.txn((), [Put(keys.coordinator, b"old", session.lease)])).revision
            old = FencedWriter(backend, keys, term)
            written = await old.write(0, [Put(keys.round, b"1")])
            await backend.revoke(session.lease)
            await backend.txn((), [Put(keys.coordinator, b"new")])
            with pytest.raises(Deposed):
                await old.write(written.revision, [Put(keys.round, b"2")])
            return (await backend.get(keys.round)).item.value
        finally:
            await backend.close()

    assert asyncio.run(check()) == b"1"


@pytest.mark.slow
def test_short_campaign_of_faults_breaks_nothing(stage: Stage, cluster):
    """Most kinds of faults once. `make chaos-etcd` does a hundred."""
    world = World(stage, cluster, "campaign", 2, NAMES)
    campaign = Campaign(world, seed=1)
    campaign.run(6)
    safety = world.check()
    assert safety.picture.round is not None
    assert safety.picture.round.number >= 3  # a coordinator that is lost and comes back costs two
