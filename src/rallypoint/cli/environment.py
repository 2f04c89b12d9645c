"""The environment variables that all commands read: `RALLYPOINT_URL` and `RALLYPOINT_TOKEN_FILE`.

What is given to a command explicitly, as an argument, an option or in the URL, wins.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from typing import Any

import click

URL_VARIABLE = "RALLYPOINT_URL"
TOKEN_FILE_VARIABLE = "RALLYPOINT_TOKEN_FILE"


class UrlCommand(click.Command):
    """A command whose first argument is a URL. If that is missing, it is taken from the environment."""

    def __init__(self, name: str | None, *, help: str, **more: Any) -> None:
        super().__init__(
            name, help=f"{inspect.cleandoc(help)}\n\nWithout URL, it is the value of {URL_VARIABLE}.", **more
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        url = os.environ.get(URL_VARIABLE)
        if url and not ctx.resilient_parsing and self._lacks_one(ctx, args):
            args = [url, *args]
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            if error.param is None or error.param.name != "url":
                raise
            raise click.UsageError(f"the URL is missing: give it, or set {URL_VARIABLE}", ctx) from None

    def _lacks_one(self, ctx: click.Context, args: list[str]) -> bool:
        """Whether one positional argument is missing, and the first one given is not a URL."""
        names = [str(param.name) for param in self.params if isinstance(param, click.Argument)]
        try:
            found, _, _ = self.make_parser(ctx).parse_args(list(args))
        except click.UsageError:
            return False  # it is said by the proper parsing
        given = [found[name] for name in names if isinstance(found.get(name), str)]
        return len(given) == len(names) - 1 and not (given and "://" in given[0])


def token_file_of(url: str, given: str | None, options: Iterable[tuple[str, str]] = ()) -> str | None:
    """The token file given to a command, or that of the environment if neither URL nor options name one."""
    from rallypoint.options import find_option

    scheme, _, rest = url.strip().partition("://")
    named = {name for name, _ in options} | {part.partition("=")[0] for part in rest.partition("?")[2].split("&")}
    if given is not None or "token_file" in named:
        return given
    has_token = scheme.lower() in find_option("token_file", "tcp").backends
    return (os.environ.get(TOKEN_FILE_VARIABLE) or None) if has_token else None
