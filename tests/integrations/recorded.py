"""Recorded environments of processes that real launchers started: one file a start, one section a process.

They were recorded with `env` as the program, on a cluster of three Slurm daemons and on one machine. Variables that do
not concern the launcher were removed. None are from Kubernetes: tests compose those.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "environments"
NAMES = sorted(path.stem for path in FOLDER.glob("*.env"))


def recorded(name: str) -> list[dict[str, str]]:
    """The environments of one start, in the order of its processes."""
    processes: list[dict[str, str]] = []
    for line in (FOLDER / f"{name}.env").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            processes.append({})
        elif not line.startswith("#"):
            variable, _, value = line.partition("=")
            processes[-1][variable] = value
    assert processes, name
    return processes
