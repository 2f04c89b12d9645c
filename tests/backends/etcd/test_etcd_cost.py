"""The cost of a round on etcd by etcd's own metrics: writes and bytes per node do not grow with the number of nodes."""

import asyncio

import pytest

from tests.backends.etcd.kit import EtcdCluster, needs
from tests.patience import PATIENCE_S

pytest.importorskip("grpc", reason="needs grpcio: pip install 'rallypoint[etcd]'")

from rallypoint import aio

SIZES = (8, 32, 128)
PROPOSALS = "etcd_server_proposals_committed_total"
SENT = "etcd_network_client_grpc_sent_bytes_total"
RECEIVED = "etcd_network_client_grpc_received_bytes_total"


def addresses(count: int) -> list[str]:
    """One for each node, so that the nodes of one process do not share a connection."""
    return [f"127.0.1.{number}" for number in range(1, count + 1)]


async def rounds(member, port: str, count: int) -> list[dict[str, float]]:
    """The first three rounds of `count` nodes: etcd's counters per node and round."""
    options = "last_call_timeout=30&local_addr=127.0.0.1&keep_alive_interval=20"
    handlers = [
        aio.create_handler(
            f"etcd://{address}:{port}/cost-{count}?min_nodes={count}&max_nodes={count}&name=n{number}&{options}"
        )
        for number, address in enumerate(addresses(count))
    ]
    told = []
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            for _ in range(3):
                before = await asyncio.to_thread(member.metrics)
                worlds = await asyncio.gather(*(handler.next_rendezvous() for handler in handlers))
                assert sorted(world.rank for world in worlds) == list(range(count))
                await asyncio.sleep(0.5)  # the work just after a round is part of its cost
                after = await asyncio.to_thread(member.metrics)
                told.append({name: (after[name] - before[name]) / count for name in (PROPOSALS, SENT, RECEIVED)})
    finally:
        for handler in handlers:
            await handler.aclose()
    return told


def test_round_costs_at_most_six_writes_a_node_and_bytes_a_node_do_not_grow_with_the_number_of_nodes(tmp_path):
    cluster = EtcdCluster(needs("system"), tmp_path, 1)
    (member,) = cluster.members
    port = member.endpoint.rpartition(":")[2]
    places = ("127.0.0.1", *addresses(max(SIZES)))
    member.also("--listen-client-urls=" + ",".join(f"http://{one}:{port}" for one in places))
    try:
        cluster.start()
        told = {count: asyncio.run(rounds(member, port, count)) for count in SIZES}
    finally:
        cluster.stop()
    print({count: [[round(one, 1) for one in cost.values()] for cost in costs] for count, costs in told.items()})
    few, *more = told.values()
    assert all(cost[PROPOSALS] <= 6 for costs in told.values() for cost in costs)  # the first round, too
    for many in more:
        for early, late in zip(few, many, strict=True):
            assert late[SENT] + late[RECEIVED] < 1.25 * (early[SENT] + early[RECEIVED])
