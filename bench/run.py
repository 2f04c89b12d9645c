"""Runs every benchmark script of this directory, one after the other, each in a process of its own.

Arguments are passed on to all of them: `run.py --json` prints one JSON array. Exits with 1 if any of them failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def benches() -> list[Path]:
    """The benchmarks: every script here except this one."""
    return sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)


def main(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        print("Benchmarks here:", ", ".join(path.stem for path in benches()))
        return 0
    wants_json = "--json" in arguments
    failed = []
    found = []
    for path in benches():
        done = subprocess.run(
            [sys.executable, str(path), *arguments],
            stdout=subprocess.PIPE if wants_json else None,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            failed.append(path.stem)
        if wants_json and done.stdout:
            found.append(json.loads(done.stdout))
    if wants_json:
        print(json.dumps(found, indent=2))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
