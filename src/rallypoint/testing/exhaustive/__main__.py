"""Explore tiny worlds: one line per world, and a trace of the first broken guarantee."""

from __future__ import annotations

import argparse
import sys

from rallypoint.testing.exhaustive.explore import MOST_STATES, explore
from rallypoint.testing.exhaustive.worlds import QUICK, WORLDS


def main() -> int:
    """The exit status: 1 if a guarantee is broken."""
    parser = argparse.ArgumentParser(prog="python -m rallypoint.testing.exhaustive", description=__doc__)
    parser.add_argument("--world", action="append", choices=WORLDS, help="only this world; may be given several times")
    parser.add_argument("--quick", action="store_true", help="only the worlds of the test suite")
    parser.add_argument("--list", action="store_true", help="list the worlds without exploring")
    parser.add_argument("--max-states", type=int, default=MOST_STATES, help="limit of states per world")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of time per world")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the reports")
    given = parser.parse_args()
    setups = list(QUICK) if given.quick else [WORLDS[name] for name in given.world or WORLDS]
    for setup in setups:
        if given.list:
            print(f"{setup.name:28} {setup.description()}")
            continue
        on_progress = None if given.quiet else (lambda line: print(f"  {line}", file=sys.stderr, flush=True))
        report = explore(setup, max_states=given.max_states, seconds=given.seconds, on_progress=on_progress)
        print(f"{setup.name}: {report}", flush=True)
        if report.broke is not None:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
