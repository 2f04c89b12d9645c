"""Shared by the inspect and operator commands: options, running a coroutine, errors as messages and exit codes.

Exit codes: 0 success; 1 something is wrong (a check failed, a record cannot be read, a drain needs --force); 2 wrong
usage; 3 no such run, node, round or key; 4 the backend cannot be reached; 5 it refused (token, version, not
Rallypoint); 130 Ctrl-C.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from rallypoint.cli.environment import TOKEN_FILE_VARIABLE, token_file_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rallypoint.backends.contract import Backend
    from rallypoint.observe.target import Target

T = TypeVar("T")

WRONG, NO_SUCH, UNREACHED, REFUSED, INTERRUPTED = 1, 3, 4, 5, 130
TIMEOUT_S = 10.0


class Failed(click.ClickException):
    """The failure of a command: a message that says what to do, and the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it on the class, and reads it from the instance


class OptionValue(click.ParamType):  # type: ignore[type-arg]
    """`name=value`, as in a URL."""

    name = "NAME=VALUE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, equals, content = str(value).partition("=")
        if not (name and equals):
            self.fail(f"{value!r} is not of the form option=value", param, ctx)
        return name, content


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, or a number with a unit: 90, 90s, 10m, 2h, 1d."""

    name = "TIME"
    UNITS: ClassVar = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        unit = self.UNITS.get(text[-1:])
        try:
            seconds = float(text[:-1]) * unit if unit is not None else float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            self.fail(f"{value!r} is not a time: give seconds, or for example 10m, 2h, 1d", param, ctx)
        return seconds


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of every command that takes a URL."""
    command = backend_options(command)
    for option in reversed(
        (
            click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text."),
            click.option(
                "--timeout",
                "timeout_s",
                type=click.FloatRange(min=0, min_open=True),
                default=TIMEOUT_S,
                show_default=True,
                metavar="SECONDS",
                help="How long to wait for an answer of the backend.",
            ),
        )
    ):
        command = option(command)
    return command


def backend_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say how the backend of the URL is reached."""
    for option in reversed(
        (
            click.option(
                "--token-file",
                metavar="FILE",
                help="The file with the server's token; the same as -o token_file=FILE. "
                f"Default: {TOKEN_FILE_VARIABLE}.",
            ),
            click.option(
                "-o",
                "--option",
                "options",
                type=OptionValue(),
                multiple=True,
                help="An option of the URL, for example tls_ca=FILE. It overrides the URL. May be repeated.",
            ),
        )
    ):
        command = option(command)
    return command


def target_of(url: str, timeout_s: float, token_file: str | None, options: tuple[tuple[str, str], ...]) -> Target:
    """The run that a command is about. Ends the command with code 2 if the URL is not valid."""
    from rallypoint.observe.target import read_target

    return _checked(lambda: read_target(url, **overrides(url, timeout_s, token_file, options)))


def backend_target_of(
    url: str, timeout_s: float, token_file: str | None, options: tuple[tuple[str, str], ...]
) -> Target:
    """The server or cluster that a command is about. Ends the command as `target_of`."""
    from rallypoint.observe.target import read_backend_target

    return _checked(lambda: read_backend_target(url, **overrides(url, timeout_s, token_file, options)))


def overrides(
    url: str, timeout_s: float, token_file: str | None, options: tuple[tuple[str, str], ...]
) -> dict[str, object]:
    """The options that override those of the URL."""
    found: dict[str, object] = {"read_timeout": timeout_s, **dict(options)}
    file = token_file_of(url, token_file, options)
    if file is not None:
        found["token_file"] = file
    return found


def _checked(make: Callable[[], Target]) -> Target:
    from rallypoint.errors import SettingsError

    try:
        return make()
    except SettingsError as error:
        raise Failed(str(error), 2) from None


def run_command(main: Coroutine[Any, Any, T], url: str) -> T:
    """Run the coroutine and return its result. Its errors end the command with a message and an exit code.

    `url` is shown in the advice.
    """
    from rallypoint.errors import (
        OutcomeUnknown,
        RallypointError,
        Rejected,
        RendezvousConnectionError,
        RendezvousTimeoutError,
        SettingsError,
        Unavailable,
    )
    from rallypoint.observe.operator_actions import NoSuchKey, NoSuchRun

    try:
        return asyncio.run(main)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except SettingsError as error:
        raise Failed(str(error), 2) from None
    except (NoSuchRun, NoSuchKey) as error:
        raise Failed(str(error), NO_SUCH) from None
    except (Unavailable, RendezvousTimeoutError) as error:
        hint = f"Is it running there, and can this machine reach it? `rallypoint doctor {url}` finds out"
        raise Failed(f"{error}. {hint}", UNREACHED) from None
    except OutcomeUnknown as error:
        raise Failed(f"{error}: check with `rallypoint status {url}` whether it has", UNREACHED) from None
    except (Rejected, RendezvousConnectionError) as error:
        raise Failed(str(error), REFUSED) from None
    except RallypointError as error:
        raise Failed(str(error), WRONG) from None


@asynccontextmanager
async def backend_of(target: Target, timeout_s: float) -> AsyncIterator[Backend]:
    """The backend of a target. Opening it does not wait until the backend can be reached."""
    from rallypoint.observe.target import open_backend

    async with open_backend(target, timeout_s) as backend:
        yield backend


async def within(limit_s: float, work: Coroutine[Any, Any, T], where: str) -> T:
    """The result of the coroutine. Unavailable if it takes longer than the limit."""
    from rallypoint.errors import Unavailable

    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError:
        causes = "it is paused or overloaded, it is a different kind of server, or the network drops packets"
        if where.startswith("file:"):
            causes = "the directory is missing or cannot be written, or its file system hangs"
        raise Unavailable(f"no answer from {where} within {limit_s:g} s: {causes}") from None


def print_json(value: object) -> None:
    """Print the value as one JSON document."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def operator_name() -> str:
    """The operator as recorded in the run: user@host:pid."""
    import getpass
    import os
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}:{os.getpid()}"


def confirm(question: str, is_sure: bool) -> None:
    """Ask for confirmation on a terminal, unless `is_sure`. Any answer but yes ends the command."""
    if not is_sure and can_ask():
        click.confirm(question, abort=True)


def can_ask() -> bool:
    """Whether a person is at the terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()
