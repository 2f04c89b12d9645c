"""`rallypoint run` with workers that communicate: a lost node is not taken for the failure of its peers' workers."""

import pytest

from tests.e2e.kit import HERE, Stage, loopback
from tests.e2e.launching import Run

RING = str(HERE / "ring_worker.py")
DDP = str(HERE / "ddp_worker.py")


@pytest.fixture
def endpoint(stage: Stage) -> str:
    return stage.serve(loopback()).wait_listening()


@pytest.mark.parametrize("program", [RING, DDP], ids=["sockets", "DDP"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_kill_of_a_launcher_ends_no_job_and_costs_no_restart(stage, endpoint, tmp_path, restarts, program):
    run = Run(stage, endpoint, tmp_path, "1:3", "--max-restarts", str(restarts))
    launchers = [run.start(name, program=program) for name in "abc"]
    number = max(one.workers(3)[0]["RALLYPOINT_ROUND"] for one in launchers)
    killed_at = launchers.pop().kill()
    again = [one.workers(2, above=number)[0] for one in launchers]
    print(f"kill -9 to the first line of the new round's workers: {min(w['at'] for w in again) - killed_at:.2f} s")
    assert {fact["TORCHELASTIC_RESTART_COUNT"] for fact in again} == {0}
    run.finish(*launchers)
