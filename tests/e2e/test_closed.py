"""A run is closed, and the node that hosts its server goes: it stays closed for everybody who was told, in all faces.

`make closed` plays each case fifty times.
"""

import importlib.util

import pytest

from tests.e2e.closed import CASES, PLAYS
from tests.e2e.kit import Stage

SHUTDOWN_S = 5.0
"""About a second is promised; the rest is for a loaded machine."""


@pytest.mark.parametrize(("face", "how"), CASES, ids=["-".join(case) for case in CASES])
def test_closed_run_does_not_come_back_when_its_host_goes(stage: Stage, face: str, how: str, tmp_path):
    if face == "torchrun" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    end = PLAYS[face](stage, how, tmp_path)
    assert not end.came_back
    if face == "handler":
        assert end.host_s < SHUTDOWN_S, "shutdown() waits until the others have been told, not until they have left"
