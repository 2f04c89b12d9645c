"""Who is there to be measured, in which Python, and in which version."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rallypoint.bench.plan import Side
from rallypoint.bench.runner import for_python

ASK_S = 60.0
ETCD_PLACES = "/usr/bin:/usr/local/bin:/opt/bin"
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
class Rival:
    """A competitor: what it is called in options, what it needs (module: package), and how to get it."""

    name: str
    needs: Mapping[str, str]
    install: str
    needs_etcd: bool = False


TORCH = Rival("torch", {"torch": "torch"}, "pip install torch==2.13.0")
TORCHFT = Rival("torchft", {"torchft": "torchft"}, "pip install torchft==0.2.0")
JAX = Rival("jax", {"jax": "jax"}, "pip install jax==0.10.2")
TORCH_ETCD = Rival(
    "torch",
    {"torch": "torch", "etcd": "python-etcd"},
    "pip install torch==2.13.0 python-etcd==0.4.5, and an etcd 3.4 (Debian: apt-get install etcd-server)",
    needs_etcd=True,
)
RALLYPOINT_ETCD = Rival(
    "rallypoint",
    {"grpc": "grpcio"},
    "pip install 'rallypoint[etcd]', and an etcd (Debian: apt-get install etcd-server)",
    needs_etcd=True,
)
RIVALS = {
    Side.TORCH_STOCK: TORCH,
    Side.TORCH_LEAN: TORCH,
    Side.TORCH_UNSHARED: TORCH,
    Side.TORCH_POLLING: TORCH,
    Side.TORCHFT: TORCHFT,
    Side.TORCHFT_TWICE: TORCHFT,
    Side.JAX: JAX,
    Side.TORCH_ETCD: TORCH_ETCD,
    Side.TORCH_ETCD_V2: TORCH_ETCD,
    Side.RALLYPOINT_ETCD: RALLYPOINT_ETCD,
}


@dataclass(frozen=True, slots=True)
class Present:
    """Which Python runs each side; of those that are not there, how to get them; and the versions of all."""

    pythons: dict[Side, str]
    skipped: dict[Side, str]
    versions: dict[str, str]


def look(pythons: Mapping[str, str]) -> Present:
    """Ask every Python what it has. `pythons`: those that competitors have of their own, by their names."""
    from rallypoint._version import __version__

    found: dict[Side, str] = {Side.RALLYPOINT: sys.executable}
    skipped: dict[Side, str] = {}
    versions = {"Python": platform.python_version(), "rallypoint": __version__}
    etcd = _etcd_version()
    if etcd is not None:
        versions["etcd"] = etcd
    answers: dict[tuple[str, str], dict[str, str]] = {}
    for side, rival in RIVALS.items():
        python = pythons.get(rival.name) or sys.executable
        question = json.dumps({**rival.needs, "msgspec": "msgspec", "sortedcontainers": "sortedcontainers"})
        if (python, question) not in answers:
            answers[python, question] = _ask(python, question)
        answer = answers[python, question]
        missing = [module for module in json.loads(question) if module not in answer]
        if missing or (rival.needs_etcd and etcd is None):
            what = " and ".join(missing) or "etcd"
            skipped[side] = f"{what} is not there for {Path(python).name}: {rival.install}"
            continue
        found[side] = python
        versions.update({rival.needs[module]: answer[module] for module in rival.needs})
    return Present(found, skipped, versions)


def _ask(python: str, question: str) -> dict[str, str]:
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION, question],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=True,
            env=for_python(python),
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def _etcd_version() -> str | None:
    binary = shutil.which("etcd", path=ETCD_PLACES) or shutil.which("etcd")
    if binary is None:
        return None
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].rpartition(" ")[2]


def machine() -> str:
    """The processor and the system, in a few words."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {platform.system()} {platform.release()}"


def memory_gib() -> float:
    """All of it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def commit() -> str:
    """What was measured, if that is known."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
