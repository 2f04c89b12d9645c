"""Without torch, the package can be imported, and the plug-in imports little."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from rallypoint.errors import SettingsError
from rallypoint.integrations.plugin import torchrun
from rallypoint.parameters import RendezvousParameters
from tests.tidy.sources import ROOT

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
import rallypoint.integrations
from rallypoint.integrations.plugin import torchrun
assert callable(torchrun())
assert not any(name.startswith("rallypoint.integrations.torchrun") for name in sys.modules)
"""


def test_plugin_loads_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr


def test_plugin_is_registered_for_torchrun():
    (entry,) = entry_points(group="torchrun.handlers", name="rallypoint")
    assert entry.load() is torchrun


def test_missing_torch_is_an_error_that_names_it():
    if "torch" in sys.modules or _has_torch():
        pytest.skip("torch is here")
    with pytest.raises(ModuleNotFoundError) as caught:
        torchrun()(RendezvousParameters("rallypoint", "localhost", "run", 1, 1))
    assert caught.value.name == "torch"


def test_settings_error_is_a_value_error():
    assert issubclass(SettingsError, ValueError)


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True
