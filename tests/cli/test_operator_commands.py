"""The inspect and operator commands: help, completion, wrong usage."""

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from rallypoint.cli import main
from rallypoint.cli.common import Failed, operator_name
from rallypoint.cli.environment import TOKEN_FILE_VARIABLE, URL_VARIABLE, token_file_of

OPERATING = ("status", "why", "watch", "ls", "history", "events", "close", "reopen", "drain", "free", "store", "doctor")


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


# --- the environment --------------------------------------------------------------------------------------------------


def url_commands() -> list[tuple[str, ...]]:
    """The commands that take a URL."""
    return [
        path
        for path in commands(main)
        if any(isinstance(param, click.Argument) and param.name == "url" for param in at(path).params)
    ]


def at(path: tuple[str, ...]) -> click.Command:
    found: click.Command = main
    for name in path:
        assert isinstance(found, click.Group)
        found = found.commands[name]
    return found


def parsed(path: tuple[str, ...], *words: str) -> dict[str, object]:
    with at(path).make_context(path[-1], list(words)) as context:
        return context.params


WORDS = {("drain",): ["n"], ("free",): ["n"], ("store", "get"): ["n"], ("store", "watch"): ["n"]}
WORDS |= {("store", "set"): ["n", "tcp://a/value"]}


@pytest.mark.parametrize("path", url_commands(), ids=" ".join)
def test_missing_url_is_that_of_the_environment_and_a_given_one_wins(path, monkeypatch):
    words = WORDS.get(path, [])
    monkeypatch.setenv(URL_VARIABLE, "tcp://there/run")
    assert parsed(path, *words)["url"] == "tcp://there/run"
    assert parsed(path, "tcp://here/run", *words)["url"] == "tcp://here/run"
    assert parsed(path, "-o", "token_file=x", *words)["url"] == "tcp://there/run"
    if words:
        assert (
            parsed(
                path,
                *words,
                "--",
            )["url"]
            == "tcp://there/run"
        )
        with pytest.raises(click.UsageError):
            parsed(path, "tcp://here/run", *words[1:])
    assert URL_VARIABLE in CliRunner().invoke(main, [*path, "--help"]).output


@pytest.mark.parametrize("path", url_commands(), ids=" ".join)
def test_missing_url_is_an_error_that_names_the_variable(path, monkeypatch):
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    result = CliRunner().invoke(main, [*path])
    assert result.exit_code == 2
    assert f"the URL is missing: give it, or set {URL_VARIABLE}" in result.output


@pytest.mark.parametrize(
    ("url", "given", "options", "found"),
    [
        ("tcp://h/r", None, (), "from-env"),
        ("static://h/r", None, (), "from-env"),
        ("tcp://h", None, (), "from-env"),
        ("tcp://h/r", "given", (), "given"),
        ("tcp://h/r?token_file=x", None, (), None),
        ("tcp://h/r", None, (("token_file", "x"),), None),
        ("etcd://h/r", None, (), None),
        ("file:///d/r", None, (), None),
        ("nonsense", None, (), None),
    ],
)
def test_token_file_of_the_environment_is_used_where_nothing_else_names_one(monkeypatch, url, given, options, found):
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, "from-env")
    assert token_file_of(url, given, options) == found
    monkeypatch.delenv(TOKEN_FILE_VARIABLE)
    assert token_file_of(url, given, options) == given


def test_unknown_scheme_suggests_the_nearest_and_lists_the_known():
    result = CliRunner().invoke(main, ["status", "tpc://head/run"])
    assert (
        "no backend for scheme 'tpc': did you mean tcp://? There are etcd, file, memory, static, tcp;" in result.output
    )
