"""`bench/watching.py`, small, with each kind of watcher. No test depends on how long anything took."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.tidy.sources import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
no_page = pytest.mark.skipif(find_spec("rallypoint.dashboard") is None, reason="there is no page")


@pytest.mark.parametrize(
    ("watchers", "count"),
    [
        ("followers", 2),
        ("followers", 0),
        pytest.param("pages", 2, marks=no_page),
        pytest.param("outside", 2, marks=no_page),
    ],
)
def test_pairs_are_measured_and_everything_has_ended_afterwards(watchers, count):
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "bench" / "watching.py", "--json", "--nodes", "3", "--repetitions", "2"),
            *("--rounds", "1", "--watchers", watchers, "--count", str(count)),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["nodes"], found["watchers"]) == (3, f"{count} {watchers}")
    assert [len(found["alone_s"]), len(found["watched_s"])] == [2, 2]
    assert all(one > 0 for one in (*found["alone_s"], *found["watched_s"], found["ratio"]))
    spread = found["ratio_of_pairs"]
    assert spread["least"] <= spread["median"] <= spread["most"]
