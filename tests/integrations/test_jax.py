"""JAX in two real processes on CPU: its coordinator, size and ids are those of the round. `make test-jax` runs it."""

import os
import sys

import pytest

from tests.e2e.kit import Process, Stage, loopback
from tests.integrations.kit import HERE
from tests.ports import free_port

pytest.importorskip("jax")

MEMBER = str(HERE / "jax_member.py")
CPU = ["env", "JAX_PLATFORMS=cpu", "XLA_FLAGS=--xla_force_host_platform_device_count=1"]


def python(stage: Stage, name: str, *words: str, variables: tuple[str, ...] = ()) -> Process:
    one = Process(name, [*CPU, *variables, sys.executable, *words])
    stage.processes.append(one)
    return one


def member(stage: Stage, name: str, *words: str, variables: tuple[str, ...] = ()) -> Process:
    return python(stage, name, MEMBER, *words, variables=variables)


def url(name: str, endpoint: str) -> str:
    return f"tcp://{endpoint}/jax?min_nodes=2&name={name}&local_addr=127.0.0.1&join_timeout=60"


def test_two_processes_get_ids_and_coordinator_from_a_round(stage: Stage):
    endpoint = loopback()
    pair = [member(stage, name, url(name, endpoint)) for name in ("a", "b")]
    joined = [one.wait("joined") for one in pair]
    assert sorted(fact["rank"] for fact in joined) == [0, 1]
    for one, place in zip(pair, joined, strict=True):
        told = one.wait("jax")
        assert (told["id"], told["count"], told["devices"]) == (place["rank"], 2, 2)
        assert place["size"] == 2
        assert one.wait("summed")["total"] == 3  # both processes took part
        one.wait("left")
        assert one.wait_exit() == 0, one.story


def test_survivor_is_told_of_a_killed_process(stage: Stage):
    endpoint = loopback()
    stage.serve(endpoint)
    pair = [member(stage, name, url(name, endpoint), "hold") for name in ("a", "b")]
    for one in pair:
        one.wait("summed")
    pair[1].kill()
    assert "b" in pair[0].wait("changed")["reason"]
    assert pair[0].wait_exit() == 7


def test_variables_of_a_worker_suffice_for_jax(stage: Stage):
    common = ("MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}", "WORLD_SIZE=2")
    pair = [member(stage, name, "environment", variables=(*common, f"RANK={rank}")) for rank, name in enumerate("ab")]
    for one in pair:
        assert one.wait("summed")["total"] == 3
        assert one.wait_exit() == 0, one.story


FAILS = """
import jax, rallypoint.integrations.jax as ours, rallypoint
jax.numpy.zeros(1).block_until_ready()  # now it is too late
try:
    ours.initialize("memory:///r?min_nodes=1")
except RuntimeError as error:
    print(type(error).__name__)
with rallypoint.join("memory:///r?min_nodes=1&join_timeout=20") as run:
    for world in run.rounds():
        print(world.world_size, len(world.members))
        break
print(ours._handler)
"""


def test_run_is_left_again_if_jax_refuses(stage: Stage):
    one = python(stage, "late", "-c", FAILS)
    assert one.wait_exit() == 0, one.story
    assert [fact["kind"] for fact in one.facts] == ["RuntimeError", "1 1", "None"]


def test_second_call_in_a_process_is_refused():
    from rallypoint.errors import RendezvousError
    from rallypoint.integrations import jax as ours

    os.environ["JAX_PLATFORMS"] = "cpu"
    ours.initialize("memory:///r?min_nodes=1&local_addr=127.0.0.1")
    try:
        with pytest.raises(RendezvousError) as caught:
            ours.initialize("memory:///s?min_nodes=1")
    finally:
        ours.shutdown()
        ours.shutdown()
    assert "initialized in this process already" in str(caught.value)
