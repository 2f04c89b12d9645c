"""Shell completion as docs/operating.md describes it: a script for each shell, which calls `rallypoint`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "operating.md"
CODE = "from rallypoint.cli import main; main(prog_name='rallypoint')"
ASKED = {
    "bash": ("hist", {"COMP_WORDS": "rallypoint hist", "COMP_CWORD": "1"}, "plain,history"),
    "zsh": ("hist", {"COMP_WORDS": "rallypoint hist", "COMP_CWORD": "1"}, "plain\nhistory\n"),
    "fish": ("hist", {"COMP_WORDS": "rallypoint hist", "COMP_CWORD": "hist"}, "plain,history\t"),
}


def rallypoint(**env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False
    )
    assert not done.stderr
    return done.stdout


@pytest.fixture
def path(tmp_path) -> str:
    """A PATH with a `rallypoint` on it."""
    script = tmp_path / "rallypoint"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{CODE}" "$@"\n')
    script.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.mark.parametrize("shell", ASKED)
def test_completion_script_is_made_for_each_shell(shell):
    script = rallypoint(_RALLYPOINT_COMPLETE=f"{shell}_source")
    assert f"_RALLYPOINT_COMPLETE={shell}_complete" in script
    assert re.search(
        {"bash": r"complete .* rallypoint", "zsh": "compdef", "fish": "--command rallypoint"}[shell], script
    )
    assert f"_RALLYPOINT_COMPLETE={shell}_source rallypoint" in DOCS.read_text(), "as the page describes it"


@pytest.mark.parametrize("shell", ASKED)
def test_completions_have_the_format_of_each_shell(shell):
    _, env, expected = ASKED[shell]
    assert rallypoint(_RALLYPOINT_COMPLETE=f"{shell}_complete", **env).startswith(expected)


def test_bash_completes_commands_and_options_with_the_documented_line(path):
    line = next(line for line in DOCS.read_text().splitlines() if "bash_source" in line).partition("#")[0]
    typed = """
    offer() {
      COMPREPLY=(); COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rallypoint_completion rallypoint; echo "${COMPREPLY[@]}"
    }
    offer rallypoint re
    offer rallypoint events --fo
    complete -p rallypoint
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", line + typed],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": path},
        check=True,
    )
    commands, options, registered = done.stdout.splitlines()
    assert commands == "reopen"
    assert options == "--follow"
    assert "-F _rallypoint_completion rallypoint" in registered


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("zsh", "autoload -U compinit && compinit -D && {line} && print $_comps[rallypoint]"),
        ("fish", '{line}; complete -C "rallypoint hist"'),
    ],
)
def test_other_shells_accept_the_documented_line(shell, words, path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    line = next(line for line in DOCS.read_text().splitlines() if f"{shell}_source" in line).partition("#")[0]
    done = subprocess.run(
        [shell, "-c", words.format(line=line)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": path},
        check=True,
    )
    assert {"zsh": "_rallypoint_completion", "fish": "history"}[shell] in done.stdout
