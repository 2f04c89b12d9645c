"""The inspect and operator commands: help, completion, wrong usage."""

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from rallypoint.cli import main
from rallypoint.cli.common import Failed, operator_name

OPERATING = ("status", "why", "watch", "ls", "history", "events", "close", "reopen", "drain", "store", "doctor")


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, command in group.commands.items():
        found.append((*path, name))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


def test_all_operating_commands_are_there():
    assert set(OPERATING) <= set(main.commands)


@pytest.mark.parametrize("path", [path for path in commands(main) if path[0] in OPERATING], ids=" ".join)
def test_help_has_an_example(path):
    result = CliRunner().invoke(main, [*path, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"rallypoint {' '.join(path)}" in " ".join(result.output.split())


@pytest.mark.parametrize(
    "path", [path for path in commands(main) if path[0] in OPERATING and path != ("store",)], ids=" ".join
)
def test_every_command_prints_json_and_has_a_time_limit(path):
    help_text = CliRunner().invoke(main, [*path, "--help"]).output
    assert "--json" in help_text
    assert "--timeout" in help_text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "head:29400/run"], "it has no scheme such as tcp:// in front"),
        (["why", "tcp://head"], "it has no run id after the endpoint"),
        (["why", "tcp://head/run", "-o", "token_fiel=x"], "did you mean token_file?"),
        (["why", "tcp://head/run", "-o", "token_file"], "is not of the form option=value"),
        (["why", "gopher://head/run"], "no backend for scheme 'gopher'"),
        (["why", "tcp://head/run", "--timeout", "0"], "is not in the range"),
    ],
)
def test_wrong_usage_is_an_error_with_code_2(words, said):
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert said in result.output


def test_failure_has_its_exit_code():
    assert Failed("x", 4).exit_code == 4
    assert Failed("x", 5).exit_code == 5


def test_operator_is_named_by_user_host_and_process():
    user, at, rest = operator_name().partition("@")
    assert user
    assert at
    assert rest.rpartition(":")[2] == str(os.getpid())


def test_shell_completion_knows_commands_and_options():
    env = {**os.environ, "_RALLYPOINT_COMPLETE": "bash_complete", "COMP_WORDS": "rallypoint hist", "COMP_CWORD": "1"}
    code = "from rallypoint.cli import main; main(prog_name='rallypoint')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.split() == ["plain,history"], done.stderr
    env |= {"COMP_WORDS": "rallypoint events --fo", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.split() == ["plain,--follow"], done.stderr


def test_importing_the_commands_imports_no_backend_and_no_tables():
    modules = ("rich", "rallypoint.aio", "rallypoint.server.server")
    code = f"import sys, rallypoint.cli; print([module for module in {modules} if module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_listing_the_runs_of_a_directory_is_refused(tmp_path):
    result = CliRunner().invoke(main, ["ls", f"file://{tmp_path}"])
    assert result.exit_code == 2
    assert "list the directory" in result.output
