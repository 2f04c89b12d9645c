"""The commands of `rallypoint` as processes, as an operator runs them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.kit import HERE, PATIENCE_S


def command(*words: str, stdin: str = "", patience_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, without a terminal."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", "rallypoint", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=patience_s,
        env=env,
        check=False,
    )


def ask(*words: str, code: int = 0) -> str:
    """The output of a command, including errors. Fails unless it exits with this code."""
    done = command(*words)
    assert done.returncode == code, f"rallypoint {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert "\x1b" not in done.stdout + done.stderr, "no colour without a terminal"
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


def ask_json(*words: str, code: int = 0) -> Any:
    """The JSON document that a command prints with --json."""
    done = command(*words, "--json")
    assert done.returncode == code, f"rallypoint {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return json.loads(done.stdout)


def until_said(*words: str, parts: tuple[str, ...], code: int = 0) -> str:
    """Repeat a command until its output contains all parts. Returns the output."""
    deadline, said = time.monotonic() + PATIENCE_S, ""
    while time.monotonic() < deadline:
        done = command(*words)
        said = f"{done.returncode}: {done.stdout}{done.stderr}"
        if done.returncode == code and all(part in said for part in parts):
            return done.stdout + done.stderr
    pytest.fail(f"rallypoint {' '.join(words)}: never {parts} with code {code}, but {said}")


def checks(document: Any) -> dict[str, Any]:
    """The checks of `doctor --json`, by name."""
    return {check["name"]: check for check in document["checks"]}


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)
