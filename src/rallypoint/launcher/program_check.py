"""Whether the program of the workers is on this machine, found out before the node joins.

A missing script would otherwise cost the run a round and a restart, on each node that lacks it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.launcher.worker_guardian import NOT_EXECUTABLE, NOT_FOUND

USAGE = 2


@dataclass(frozen=True, slots=True)
class Missing:
    """Why the program cannot be started, and the exit code: 2 for a script, as Python's; a shell's for a program."""

    why: str
    code: int


def find_missing(argv: Sequence[str], path: str | None = None) -> Missing | None:
    """None if the program is there, or if that can be known only by starting it. `path`: the search path (PATH)."""
    match argv:
        case [python, "-u", script, *_] if python == sys.executable:
            if script.startswith("-") or os.path.exists(script):
                return None
            return Missing(f"the script {script!r} does not exist{_here(script)}", USAGE)
        case [program, *_]:
            if shutil.which(program, path=path) is not None:
                return None
            if os.path.dirname(program) and os.path.exists(program):
                return Missing(f"cannot start {program!r}: it is not executable", NOT_EXECUTABLE)
            return Missing(f"cannot start {program!r}: there is no such program{_here(program)}", NOT_FOUND)
        case _:
            return None


def _here(name: str) -> str:
    """Where a relative path was looked for."""
    if os.path.isabs(name) or not (os.path.dirname(name) or name.endswith(".py")):
        return ""
    return f" in {os.getcwd()}"
