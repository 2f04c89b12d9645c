import subprocess
import sys

import click
from click.testing import CliRunner

from rallypoint._version import __version__
from rallypoint.cli import SuggestingGroup, main


def test_version_option_prints_the_name_and_the_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"rallypoint {__version__}\n"


def test_help_says_what_rallypoint_is_for():
    for flag in ("--help", "-h"):
        result = CliRunner().invoke(main, [flag])
        assert result.exit_code == 0
        assert "gathers the nodes of a distributed job" in " ".join(result.output.split())


def test_without_arguments_it_prints_the_help():
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 0
    assert result.output == CliRunner().invoke(main, ["--help"]).output


def test_unknown_command_is_an_error_that_names_it():
    result = CliRunner().invoke(main, ["zzzyx"])
    assert result.exit_code == 2
    assert "No such command 'zzzyx'." in result.output


def test_unknown_option_is_an_error_that_names_it():
    result = CliRunner().invoke(main, ["--zzzyx"])
    assert result.exit_code == 2
    assert "No such option" in result.output
    assert "--zzzyx" in result.output


def test_unknown_command_is_answered_with_the_nearest_one():
    group = SuggestingGroup("rallypoint", commands=[click.Command("serve"), click.Command("history")])
    result = CliRunner().invoke(group, ["serv"])
    assert result.exit_code == 2
    assert "No such command 'serv'. Did you mean 'serve'?" in result.output


def test_known_command_of_a_suggesting_group_is_run():
    group = SuggestingGroup("rallypoint", commands=[click.Command("serve", callback=lambda: click.echo("served"))])
    result = CliRunner().invoke(group, ["serve"])
    assert (result.exit_code, result.output) == (0, "served\n")


def test_module_can_be_run_as_a_program():
    done = subprocess.run([sys.executable, "-m", "rallypoint", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"rallypoint {__version__}\n", "")


def test_importing_the_command_line_does_not_import_rich():
    code = "import sys, rallypoint.cli; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
