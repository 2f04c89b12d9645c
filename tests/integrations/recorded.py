"""Environments that real launchers gave to real processes, one file for each start, one section for each process.

They were recorded with `env` in place of the program, on a cluster of three Slurm daemons and on one machine;
variables that have nothing to do with the launcher were left out. None are of Kubernetes: tests compose those.
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
