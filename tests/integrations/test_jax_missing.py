"""Without jax there is a clear error, before joining."""

import subprocess
import sys

from tests.tidy.sources import ROOT

WITHOUT_JAX = """
import sys
sys.modules["jax"] = None  # importing it fails
from rallypoint.integrations.jax import initialize, shutdown
shutdown()  # nothing to do
try:
    initialize("tcp://127.0.0.1:1/never-asked?min_nodes=1&join_timeout=30")
except ModuleNotFoundError as error:
    assert error.name == "jax"
    print(error)
"""


def test_missing_jax_is_a_clear_error_and_no_run_is_joined():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'rallypoint[jax]'" in done.stdout
