"""Ranks of workers, from what the nodes bring."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint import aio
from rallypoint.launcher.environment import RoundContext, worker_environment
from rallypoint.launcher.worker_ranks import NodeShare, RankPlan, agree, make_plan
from tests.patience import unique

shares = st.lists(
    st.builds(NodeShare, st.integers(1, 4), st.sampled_from(["trainer", "reader"])), min_size=1, max_size=12
)


@given(shares)
def test_every_worker_has_a_rank_of_its_own_and_one_in_its_role(nodes):
    plan = make_plan(nodes, restarts=1, max_restarts=3)
    ranks, by_role = [], {}
    for number, share in enumerate(nodes):
        own = plan.ranks_of(number)
        assert own.workers == share.workers
        ranks += range(own.rank, own.rank + own.workers)
        by_role.setdefault(share.role, []).extend(range(own.role_rank, own.role_rank + own.workers))
        assert own.role_size == sum(one.workers for one in nodes if one.role == share.role)
    assert ranks == list(range(plan.world_size))
    assert all(found == list(range(len(found))) for found in by_role.values())


def test_plan_of_a_thousand_equal_nodes_is_small():
    plan = make_plan([NodeShare(8, "default")] * 1000, restarts=0, max_restarts=0)
    assert len(msgspec.json.encode(plan)) < 100
    assert plan.ranks_of(999).rank == 7992


def test_node_that_is_not_in_the_plan_is_an_error():
    with pytest.raises(ValueError, match="none of rank 1"):
        make_plan([NodeShare(1, "default")], 0, 0).ranks_of(1)


def test_nodes_of_a_round_agree_on_one_plan():
    async def node(url: str, name: str, workers: int) -> tuple[int, RankPlan]:
        async with aio.join(url, name=name) as run:
            world = await run.handler.next_rendezvous()
            used = 2 if world.rank == 0 else 99
            plan = await agree(world.store, NodeShare(workers, "default"), used, 5, timeout_s=30)
            await world.store.barrier("read", 30)
            return world.rank, plan

    async def all_of_them() -> list[tuple[int, RankPlan]]:
        url = f"memory:///{unique()}?min_nodes=3"
        return await asyncio.gather(*(node(url, name, count) for name, count in (("a", 1), ("b", 4), ("c", 4))))

    found = dict(asyncio.run(all_of_them()))
    plans = set(found.values())
    assert len(plans) == 1
    (plan,) = plans
    assert (plan.world_size, plan.restarts, plan.max_restarts) == (9, 2, 5), "as the node of rank 0 knew it"


def test_environment_of_a_worker_has_all_names_and_nothing_of_an_outer_launcher():
    plan = make_plan([NodeShare(2, "default"), NodeShare(2, "default")], restarts=1, max_restarts=3)
    around = RoundContext(
        run_id="my-run",
        run_url="tcp://head:29400/my-run",
        node_name="b",
        node_rank=1,
        nodes=2,
        round=7,
        role="default",
        master_addr="10.0.0.1",
        master_port=4711,
        plan=plan,
    )
    found = worker_environment({"HOME": "/root", "RANK": "99", "OMP_NUM_THREADS": "4"}, around, 1, "/tmp/error.json")
    assert found == {
        "HOME": "/root",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "my-run",
        "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "RALLYPOINT_RUN_ID": "my-run",
        "RALLYPOINT_RUN_URL": "tcp://head:29400/my-run",
        "RALLYPOINT_ROUND": "7",
        "RALLYPOINT_NODE": "b",
        "RALLYPOINT_RESTARTS": "1",
        "RALLYPOINT_WORKER_OF": "my-run/b",
    }
    assert worker_environment({}, around, 0, "")["OMP_NUM_THREADS"] == "1"
