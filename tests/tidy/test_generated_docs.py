"""The generated pages agree with the definitions in the code. `--rewrite` generates them again."""

import inspect
from pathlib import Path

import click
import pytest

from rallypoint import aio
from rallypoint.backends import schemes
from rallypoint.cli import main
from rallypoint.observe.metrics.table import TABLE
from rallypoint.options import OPTIONS, Option
from tests.tidy.reference import errors_page, events_page, metrics_page

ROOT = Path(__file__).parents[2]

OPTIONS_HEAD = """# Options

Given in a URL (`scheme://endpoint/run-id?option=value`), as keyword arguments of `create_handler` and `join`, or in the
configuration of `RendezvousParameters`. Times are in seconds and may have decimals. An unknown option is an error that
suggests the nearest name, and so is an option of another scheme. *Shared* options must be the same on all nodes of a
run: a node with other values is refused, with an error that names both values.

| option | default | schemes | shared | meaning |
|---|---|---|---|---|
"""


def shown_default(option: Option) -> str:
    """The default in the form that a user would write, and those of single schemes."""
    others = [f"{scheme}: {_shown(default)}" for scheme, default in option.default_on]
    return "; ".join([_shown(option.default), *others])


def _shown(value: object) -> str:
    default = getattr(value, "value", value)
    if default is None or default == {} or default == "":
        return "-"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, int | float) else str(default)


def options_page(options: tuple[Option, ...], available: set[str]) -> str:
    """docs/options.md for the available schemes."""
    rows = []
    for option in options:
        if option.backends and not available & set(option.backends):
            continue
        names = ", ".join(f"`{name}`" for name in (option.name, *option.aliases))
        schemes_of = ", ".join(option.backends) or "all"
        shared = "yes" if option.shared else ""
        rows.append(f"| {names} | {shown_default(option)} | {schemes_of} | {shared} | {option.meaning} |")
    return OPTIONS_HEAD + "\n".join(rows) + "\n"


COMMANDS_HEAD = """# Commands

Every command of `rallypoint`, from its own help. Output of the operating commands, with examples, exit codes and the
fields of `--json`, is in [operating.md](operating.md).
"""


def commands_page(group: click.Group, path: str = "rallypoint") -> str:
    """docs/commands.md for these commands."""
    text = ""
    for name, command in sorted(group.commands.items()):
        text += _command_section(command, f"{path} {name}")
        if isinstance(command, click.Group):
            text += commands_page(command, f"{path} {name}")
    return text


def _command_section(command: click.Command, path: str) -> str:
    arguments = [param.human_readable_name for param in command.params if isinstance(param, click.Argument)]
    if isinstance(command, click.Group):
        arguments.append("COMMAND")
    epilog = inspect.cleandoc(command.epilog or "").replace("\b", "").strip()
    text = f"\n## {' '.join([path, *arguments])}\n\n{inspect.cleandoc(command.help or '')}\n"
    rows = []
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden:
            shown = param.metavar or ("" if param.is_flag else param.type.name.upper())
            names = ", ".join(f"`{name}`" for name in param.opts)
            default = f" *Default: {param.default}.*" if param.show_default and param.default is not None else ""
            rows.append(f"| {names} {shown}".rstrip() + f" | {param.help or ''}{default} |")
    if rows:
        text += "\n| option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
    return text + (f"\n```text\n{epilog}\n```\n" if epilog else "")


assert aio, "importing it registers the built-in schemes"

PAGES = {
    "docs/options.md": lambda: options_page(OPTIONS, set(schemes._openers)),
    "docs/commands.md": lambda: COMMANDS_HEAD + commands_page(main),
    "docs/metrics.md": lambda: metrics_page(TABLE),
    "docs/events.md": events_page,
    "docs/errors.md": errors_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name, request):
    page = ROOT / name
    if request.config.getoption("--rewrite"):
        page.write_text(PAGES[name](), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == PAGES[name](), "run: make check ARGS=--rewrite"


def test_a_changed_command_would_be_noticed():
    fewer = click.Group("rallypoint", commands=list(main.commands.values())[:-1])
    assert commands_page(fewer) != commands_page(main)


def test_a_changed_option_would_be_noticed():
    changed = (*OPTIONS[:-1], OPTIONS[0])
    assert options_page(changed, {"memory"}) != options_page(OPTIONS, {"memory"})
