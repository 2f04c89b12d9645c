"""Tests that take minutes: many cycles, and random faults. `pytest -m slow tests/integrations`."""

import random
import signal
import time

import pytest

from tests.integrations.kit import Agent, Job

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def test_second_agent_is_stopped_by_ctrl_c_and_started_again_twenty_times(served: Job):
    first = served.agent("a", "1:2", conf="last_call_timeout=60", restarts=0)
    second = served.agent("b", "1:2", conf="last_call_timeout=60", restarts=0)
    at = max(agent.started(2)["at"] for agent in (first, second))
    for _ in range(20):
        second.ctrl_c()
        second.wait_exit()
        at = first.started(1, after=at)["at"]
        second = served.agent("b", "1:2", conf="last_call_timeout=60", restarts=0)
        at = max(agent.started(2, after=at)["at"] for agent in (first, second))
    served.finish(first, second)
    served.check_agreement()
    assert {fact["restarts"] for fact in first.all("start")} == {0}


def test_host_that_is_stopped_by_ctrl_c_is_replaced_by_a_survivor(job: Job):
    host = job.agent("a", "1:3", conf="last_call_timeout=1")
    host.wait_line("serves this run itself")
    others = [job.agent(name, "1:3", conf="last_call_timeout=1") for name in ("b", "c")]
    at = max(agent.started(3)["at"] for agent in (host, *others))
    host.ctrl_c()
    host.wait_exit()
    deadline = time.monotonic() + 60.0
    while not any("serves this run itself" in agent.said for agent in others):
        assert time.monotonic() < deadline, "\n".join(agent.story for agent in others)
        time.sleep(0.05)
    back = job.agent("a", "1:3", conf="last_call_timeout=1")
    for agent in (*others, back):
        agent.started(3, after=at)
    job.finish(*others, back)
    job.check_agreement()


def test_four_agents_grow_and_shrink_with_collectives_all_the_time(served: Job):
    agents: list[Agent] = []
    at = 0.0
    for world, name in enumerate(("a", "b", "c", "d"), start=1):
        agents.append(served.agent(name, "1:4", mode="gloo", conf="last_call_timeout=0.1"))
        at = max(agent.met(world, after=at)["at"] for agent in agents)
    for world in (3, 2, 1):
        agents.pop(0).kill()
        at = max(agent.met(world, after=at)["at"] for agent in agents)
    served.finish(*agents)
    served.check_agreement()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_members_of_a_round_agree_under_random_faults(served: Job, seed: int):
    draw = random.Random(seed)
    conf = "last_call_timeout=0.5,hold_back_losses=0"

    def start(name: str) -> Agent:
        return served.agent(name, "2:4", conf=conf, restarts=1000, env={"PYTHONFAULTHANDLER": "1"})

    alive = {name: start(name) for name in "abcde"}
    struck: set[str] = set()
    ends_at = time.monotonic() + 60.0
    while time.monotonic() < ends_at:
        name = draw.choice("abcde")
        if name not in struck:
            alive[name].popen.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            struck.add(name)
        elif alive[name].popen.poll() is not None:
            alive[name] = start(name)
            struck.discard(name)
        _pause(list(alive.values()), draw.uniform(0.1, 3.0))
    for name in struck:
        _wait_end(alive[name])
        alive[name] = start(name)
    members = list(alive.values())
    _until_four_are_in(members)
    (served.folder / "finish").touch()
    for agent in members:
        agent.wait_exit()
    served.check_agreement()


def _wait_end(agent: Agent) -> None:
    """Wait until a signalled agent ends. If it does not, let it dump the stacks of its threads."""
    deadline = time.monotonic() + 60.0
    while agent.popen.poll() is None:
        if time.monotonic() > deadline:
            agent.popen.send_signal(signal.SIGABRT)
            agent.wait_exit()
            pytest.fail(f"{agent.name} did not end after a signal\n{agent.said[-20_000:]}")
        time.sleep(0.05)


def _pause(agents: list[Agent], pause_s: float) -> None:
    """Wait for the time of the next fault, or until a few workers have started."""
    deadline = time.monotonic() + pause_s
    before = sum(len(agent.all("start")) for agent in agents)
    while time.monotonic() < deadline and sum(len(agent.all("start")) for agent in agents) < before + 3:
        time.sleep(0.05)


def _until_four_are_in(members: list[Agent]) -> None:
    """Wait until four of the five agents are in a round."""
    deadline = time.monotonic() + 60.0
    while True:
        groups: dict[int, int] = {}
        for agent in members:
            for fact in agent.all("start"):
                if fact["nodes"] == 4:
                    groups[fact["port"]] = groups.get(fact["port"], 0) + 1
        if 4 in groups.values():
            return
        assert time.monotonic() < deadline, "\n".join(agent.story for agent in members)
        time.sleep(0.05)
