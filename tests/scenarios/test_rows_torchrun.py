"""Rows about torchrun, with real agents of torch 2.13 and the backend `rallypoint`."""

import random
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.kit import Fact, Node, Stage
from tests.integrations.kit import Agent, Job
from tests.scenarios.places import Place
from tests.scenarios.record import Recorder

pytest.importorskip("torch")
pytestmark = pytest.mark.scenarios

SECOND = "last_call_timeout=60"
"""A last call so long that a round which forms quickly cannot have waited for it."""


@pytest.fixture
def job(stage: Stage, place: Place, tmp_path: Path) -> Job:
    """A run of agents on the backend of the test."""
    endpoint = place.root.removeprefix("tcp://")
    return Job(stage, tmp_path, endpoint=endpoint)


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_row_01_second_agent_is_stopped_by_ctrl_c_and_started_again_twenty_times(row: Recorder, job: Job):
    first = job.agent("a", "1:2", conf=SECOND, restarts=0)
    second = job.agent("b", "1:2", conf=SECOND, restarts=0)
    at = max(agent.started(2)["at"] for agent in (first, second))
    gaps = []
    for _ in range(20):
        stopped_at = second.ctrl_c()
        second.wait_exit()
        at = first.started(1, after=at)["at"]
        gaps.append(at - stopped_at)
        second = job.agent("b", "1:2", conf=SECOND, restarts=0)
        at = max(agent.started(2, after=at)["at"] for agent in (first, second))
    job.finish(first, second)
    job.check_agreement()
    assert {fact["restarts"] for fact in first.all("start")} == {0}
    assert "Closed" not in first.said
    row(
        "20 times Ctrl-C and the same command again: 20 times a round of one and then of two, no error, no restart used"
    )
    row("the longest time from Ctrl-C until the first agent had a worker in a round of its own", max(gaps))


def test_row_02_node_that_becomes_rank_0_serves_the_store_of_the_new_round(row: Recorder, job: Job):
    agents = [job.agent(name, "1:2", mode="gloo", conf=SECOND) for name in ("a", "b")]
    assert {agent.name: agent.met(2)["rank"] for agent in agents} == {"a": 0, "b": 1}
    left_at = agents[0].terminate()
    alone = agents[1].met(1, after=left_at)
    assert alone["rank"] == 0
    row("rank 0 left until the other, now rank 0, had done a collective of its own", alone["at"] - left_at)
    agents[0].wait_exit()
    back = job.agent("a", "1:2", mode="gloo", conf=SECOND)
    again = [agent.met(2, after=alone["at"]) for agent in (agents[1], back)]
    assert sorted(fact["rank"] for fact in again) == [0, 1]
    row("the one that had left came back, and both met on the store that the new rank 0 serves")
    job.finish(agents[1], back)
    job.check_agreement()


def test_row_13_ranks_are_in_natural_order_as_asked_for_or_pinned(row: Recorder, stage: Stage, place: Place):
    """The rank policies with plain nodes; the next test uses the flags of torchrun."""
    asked = {"node10": "", "node2": "", "node1": ""}
    assert ranks_of(stage, place, asked, "") == {"node1": 0, "node2": 1, "node10": 2}
    row("node10, node2 and node1 got the ranks 2, 1 and 0")
    asked = {"a": "&node_rank=2", "b": "&node_rank=0", "c": "&node_rank=1"}
    assert ranks_of(stage, place, asked, "&ranks=node_rank") == {"a": 2, "b": 0, "c": 1}
    row("nodes that asked for the ranks 2, 0 and 1 got them")
    assert ranks_of(stage, place, dict.fromkeys("abc", ""), "&rank0=c")["c"] == 0
    row("the node that rank 0 is pinned to got it, though it is the last by name")


def ranks_of(stage: Stage, place: Place, asked: dict[str, str], options: str) -> dict[str, int]:
    """The ranks of nodes with these options in their first round."""
    url = place.url(f"min_nodes={len(asked)}{options}")
    nodes: dict[str, Node] = {name: stage.node(f"{url}{own}", name) for name, own in asked.items()}
    ranks = {name: node.round()["rank"] for name, node in nodes.items()}
    for node in nodes.values():
        node.kill()
    return ranks


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_row_13_torchrun_keeps_the_natural_order_and_the_rank_that_is_asked_for(
    row: Recorder, job: Job, tmp_path: Path
):
    agents = {name: job.agent(name, "3") for name in ("node10", "node2", "node1")}
    assert {name: agent.started(3)["node"] for name, agent in agents.items()} == {"node1": 0, "node2": 1, "node10": 2}
    job.finish(*agents.values())
    row("with torchrun, too: node1, node2 and node10 are the groups 0, 1 and 2")
    (tmp_path / "asked").mkdir()
    other = Job(job.stage, tmp_path / "asked", endpoint=job.endpoint)
    agents = {
        "a": other.agent("a", "2", env={"PET_NODE_RANK": "1"}),
        "b": other.agent("b", "2", conf="node_rank=0"),
    }
    assert {name: agent.started(2)["node"] for name, agent in agents.items()} == {"a": 1, "b": 0}
    other.finish(*agents.values())
    row("PET_NODE_RANK=1 and node_rank=0 in --rdzv-conf were honoured")


def test_row_25_late_node_that_is_not_rank_0_gets_the_address_of_the_new_round(row: Recorder, job: Job):
    quick = "last_call_timeout=0.3"
    first = [job.agent(name, "2:3", mode="gloo", conf=quick, restarts=0) for name in ("a", "b")]
    ports = {agent.started(2)["port"] for agent in first}
    for agent in first:
        agent.met(2)
    late = job.agent("c", "2:3", mode="gloo", conf=quick, restarts=0)
    asked_at = late.wait_line("asks to join") and time.monotonic()
    start = late.started(3)
    assert start["rank"] == 2
    assert start["port"] not in ports, "each round has a store of its own"
    met = [agent.met(3) for agent in (*first, late)]
    row(
        "a late agent, rank 2, asked to join until its worker was started with the address of the new round",
        start["at"] - asked_at,
    )
    row("until all three had done a collective", max(fact["at"] for fact in met) - asked_at)
    job.finish(*first, late)
    job.check_agreement()
    assert {fact["restarts"] for agent in job.agents for fact in agent.all("start")} == {0}


# --- row 28 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_row_28_workers_of_torchrun_are_told_the_same_size_whoever_is_killed_when(row: Recorder, job: Job):
    draw = random.Random(28)
    conf = "last_call_timeout=0.5,hold_back_losses=0"

    def start(name: str) -> Agent:
        return job.agent(name, "2:3", conf=conf, restarts=1000)

    alive = {name: start(name) for name in "abcd"}
    for _ in range(12):
        for agent in alive.values():
            agent.wait_line("asks to join")
        time.sleep(draw.uniform(0.0, 2.0))  # a random moment
        name = draw.choice("abcd")
        alive[name].kill()
        alive[name] = start(name)
    job.check_agreement()
    starts = [fact for agent in job.agents for fact in agent.all("start")]
    rounds = {fact["port"] for fact in starts}
    assert len(rounds) > 5, "there was nothing to agree on"
    row(
        f"12 agents killed at random moments: {len(starts)} workers in {len(rounds)} rounds, told what their peers were"
    )


def test_row_28_members_agree_whoever_is_killed_at_the_wrong_moment(row: Recorder, stage: Stage, place: Place):
    draw = random.Random(28)
    url = place.url("min_nodes=2&max_nodes=3&admission_window=0&hold_back_losses=0", ttl_s=3.0)
    alive = {name: stage.node(url, name) for name in "abc"}
    for node in alive.values():
        node.round()
    alive["d"] = stage.node(url, "d")
    everybody = list(alive.values())
    kills = 20
    for _ in range(kills):
        name = draw.choice("abcd")
        alive[name].kill()
        time.sleep(draw.uniform(0.0, 1.5))  # a random moment
        alive[name] = stage.node(url, name)
        everybody.append(alive[name])
        alive[name].event("JoinStarted")
        time.sleep(draw.uniform(0.0, 1.0))
    healed_at = time.monotonic()
    deadline = healed_at + 60
    while not full_round(list(alive.values())):
        assert time.monotonic() < deadline, "\n".join(node.story for node in alive.values())
        time.sleep(0.05)
    rounds = agreed(everybody)
    row(f"{kills} kills at random moments, {len(rounds)} rounds that somebody was in: one list of members for each")
    row("the last kill's node asked to join until there was a round of three", time.monotonic() - healed_at)


def full_round(nodes: list[Node]) -> bool:
    """Whether the last rounds of three nodes are the same round of three."""
    groups: dict[int, int] = defaultdict(int)
    for node in nodes:
        for fact in node.all("round")[-1:]:
            groups[fact["round"]] += fact["size"] == 3
    return 3 in groups.values()


def agreed(nodes: list[Node]) -> dict[int, list[Fact]]:
    """The returned rounds, by number. Checks that all members returned the same members, with different ranks."""
    rounds: dict[int, list[Fact]] = defaultdict(list)
    for node in nodes:
        for fact in node.all("round"):
            rounds[fact["round"]].append({**fact, "name": node.name})
    for number, facts in rounds.items():
        assert len({fact["size"] for fact in facts}) == 1, (number, facts)
        assert len({fact["rank"] for fact in facts}) == len(facts), (number, facts)
        lists = {tuple(fact["members"]) for fact in facts if "too soon" not in str(fact["members"])}
        assert len(lists) <= 1, (number, facts)
        for members in lists:
            assert all(members[fact["rank"]] == fact["name"] for fact in facts), (number, facts)
    return rounds
