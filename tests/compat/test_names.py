"""The compat package has the names of torch's package, with the same meaning."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rallypoint.compat.rendezvous as ours
from rallypoint.compat.rendezvous import etcd_rendezvous, etcd_rendezvous_backend, legacy_names, static_tcp_rendezvous

HERE = Path(__file__).parent
TORCHS = "torch.distributed.elastic.rendezvous"
OURS = "rallypoint.compat.rendezvous"
MODULES = ("", "api", "registry", "dynamic_rendezvous", "utils", "etcd_rendezvous", "static_tcp_rendezvous")
ONLY_THERE = {
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryableFailure",
    "EtcdRendezvousRetryImmediately",
    "StaticTCPRendezvous",
}
PATIENCE_S = 180


def module(package: str, name: str):
    return importlib.import_module(f"{package}.{name}" if name else package)


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_those_of_torch(name):
    pytest.importorskip("torch")
    theirs, here = module(TORCHS, name), module(OURS, name)
    assert set(here.__all__) == set(theirs.__all__) - ONLY_THERE
    for public in here.__all__:
        assert getattr(here, public) is not None


def test_names_of_modules_without_a_public_list_exist_too():
    pytest.importorskip("torch")
    for name, public in (
        ("c10d_rendezvous_backend", ("C10dRendezvousBackend", "create_backend", "DEFAULT_PORT")),
        ("dynamic_rendezvous", ("Token",)),
    ):
        for one in public:
            assert hasattr(module(TORCHS, name), one)
            assert hasattr(module(OURS, name), one)


@pytest.mark.parametrize("name", sorted(ONLY_THERE - {"StaticTCPRendezvous"}))
def test_import_of_a_name_that_exists_only_in_torch_says_what_to_use_instead(name):
    with pytest.raises(ImportError) as caught:
        exec(f"from rallypoint.compat.rendezvous.etcd_rendezvous import {name}")
    assert name in str(caught.value)
    assert "create_rdzv_handler" in str(caught.value) or "RendezvousTimeoutError" in str(caught.value)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (static_tcp_rendezvous, "StaticTCPRendezvous"),
        (etcd_rendezvous_backend, "EtcdRendezvousBackend"),
        (etcd_rendezvous_backend, "create_backend"),
    ],
)
def test_other_names_of_torch_say_what_to_use_instead(where, name):
    with pytest.raises(ImportError, match=r"rallypoint\.create_handler"):
        getattr(where, name)


@pytest.mark.parametrize("where", [static_tcp_rendezvous, etcd_rendezvous_backend, etcd_rendezvous])
def test_unknown_name_is_an_attribute_error(where):
    with pytest.raises(AttributeError, match="nonsense"):
        _ = where.nonsense


def test_legacy_names_are_aliases_of_their_successors():
    assert ours.RendezvousException is ours.RendezvousError
    assert ours.RendezvousClosedException is ours.RendezvousClosedError
    assert ours.RendezvousTimeoutException is ours.RendezvousTimeoutError
    assert issubclass(ours.RendezvousTimeoutError, legacy_names.RendezvousNonRetryableError)
    factory = ours.RendezvousHandlerFactory()
    factory.register("x", lambda params: None)


def run_script(package: str, folder: Path, *more: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "every_name.py"), package, str(folder), *more],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_script_that_uses_every_name_runs_on_both_packages_by_changing_only_the_import(tmp_path):
    pytest.importorskip("torch")
    assert run_script(OURS, tmp_path, "torch") == run_script(TORCHS, tmp_path, "torch")


def test_script_that_uses_every_name_needs_no_torch(tmp_path):
    """Runs the script where `torch` cannot be found."""
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch')")
    env = os.environ.get("PYTHONPATH", "")
    sys.path.insert(0, str(tmp_path))
    try:
        seen = run_script(OURS, tmp_path)
    finally:
        sys.path.remove(str(tmp_path))
        assert os.environ.get("PYTHONPATH", "") == env
    assert seen["ranks"] == [[0, 2], [1, 2]]
    assert seen["other round"] == "nothing"
