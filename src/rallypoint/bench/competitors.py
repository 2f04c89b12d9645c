"""Which competitors are installed, in which Python, and in which version."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rallypoint._version import __version__
from rallypoint.bench.etcd_side import etcd_binary
from rallypoint.bench.plan import Side
from rallypoint.bench.runner import environment_for

TIMEOUT_S = 60.0
OWN_NEEDS = {"msgspec": "msgspec", "sortedcontainers": "sortedcontainers"}
"""What the process of a case needs in any Python."""
_QUESTION = """
import importlib.util, importlib.metadata, json, sys
found = {}
for module, package in json.loads(sys.argv[1]).items():
    try:
        if importlib.util.find_spec(module) is not None:
            found[module] = importlib.metadata.version(package)
    except (ImportError, ValueError):
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a side needs: modules and their packages, by the Python of that name; and how to install them."""

    python: str
    modules: Mapping[str, str]
    install: str
    needs_etcd: bool = False


_TORCH = Requirement("torch", {"torch": "torch"}, "pip install torch==2.13.0")
_TORCHFT = Requirement("torchft", {"torchft": "torchft"}, "pip install torchft==0.2.0")
_JAX = Requirement("jax", {"jax": "jax"}, "pip install jax==0.10.2")
_TORCH_ETCD = Requirement(
    "torch",
    {"torch": "torch", "etcd": "python-etcd"},
    "pip install torch==2.13.0 python-etcd==0.4.5, and an etcd 3.4 (Debian: apt-get install etcd-server)",
    needs_etcd=True,
)
_RALLYPOINT_ETCD = Requirement(
    "rallypoint",
    {"grpc": "grpcio"},
    "pip install 'rallypoint[etcd]', and an etcd (Debian: apt-get install etcd-server)",
    needs_etcd=True,
)
REQUIREMENTS = {
    Side.TORCH_STOCK: _TORCH,
    Side.TORCH_LEAN: _TORCH,
    Side.TORCH_UNSHARED: _TORCH,
    Side.TORCH_POLLING: _TORCH,
    Side.TORCHFT: _TORCHFT,
    Side.TORCHFT_TWICE: _TORCHFT,
    Side.JAX: _JAX,
    Side.TORCH_ETCD: _TORCH_ETCD,
    Side.TORCH_ETCD_V2: _TORCH_ETCD,
    Side.RALLYPOINT_ETCD: _RALLYPOINT_ETCD,
}


@dataclass(frozen=True, slots=True)
class Found:
    """The Python that runs each side; for each missing side, what is missing and how to install it; the versions."""

    pythons: dict[Side, str]
    missing: dict[Side, str]
    versions: dict[str, str]


def find(sides: Iterable[Side], pythons: Mapping[str, str]) -> Found:
    """Ask the Pythons what they have. `pythons`: those that are not this one, by `Requirement.python`."""
    here: dict[Side, str] = {}
    missing: dict[Side, str] = {}
    versions = {"Python": platform.python_version(), "rallypoint": __version__}
    answers: dict[tuple[str, str], dict[str, str]] = {}
    etcd: str | None = None
    for side in sides:
        if side not in REQUIREMENTS:
            here[side] = sys.executable
            continue
        needed = REQUIREMENTS[side]
        python = pythons.get(needed.python) or sys.executable
        question = json.dumps({**needed.modules, **OWN_NEEDS})
        if (python, question) not in answers:
            answers[python, question] = _ask(python, question)
        answer = answers[python, question]
        absent = [module for module in json.loads(question) if module not in answer]
        if needed.needs_etcd and not absent:
            etcd = etcd or _etcd_version()
            absent = [] if etcd else ["etcd"]
        if absent:
            own = "".join(f" {OWN_NEEDS[module]}" for module in absent if module in OWN_NEEDS)
            install = needed.install.replace("pip install", f"pip install{own}", 1)
            is_or_are, where = (
                "is" if len(absent) == 1 else "are",
                "this Python" if python == sys.executable else python,
            )
            missing[side] = f"{' and '.join(absent)} {is_or_are} not installed for {where}: {install}"
            continue
        here[side] = python
        versions.update({needed.modules[module]: answer[module] for module in needed.modules})
        if needed.needs_etcd and etcd:
            versions["etcd"] = etcd
    return Found(here, missing, versions)


def _ask(python: str, question: str) -> dict[str, str]:
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION, question],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            env=environment_for(python),
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def _etcd_version() -> str | None:
    binary = etcd_binary()
    if binary is None:
        return None
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].rpartition(" ")[2]
