"""`rallypoint store`: reads and writes the key-value store of a round."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from rallypoint._plain import one_line
from rallypoint.cli.common import (
    NO_SUCH,
    Failed,
    backend_of,
    common_options,
    print_json,
    run_command,
    target_of,
    within,
)
from rallypoint.cli.environment import UrlCommand

if TYPE_CHECKING:
    from rallypoint.observe.target import Target

URL = click.argument("url", metavar="URL")
KEY = click.argument("key", metavar="KEY")
ROUND = click.option("--round", "number", type=click.IntRange(min=1), help="The number of a round; default: current.")
EXAMPLES = """\b
Examples:
  rallypoint store ls tcp://head:29400/my-run
  rallypoint store get tcp://head:29400/my-run MASTER_ADDR
  rallypoint store set tcp://head:29400/my-run stop-after-epoch 12
"""


@click.group(epilog=EXAMPLES)
def store() -> None:
    """Read and write the key-value store of a run's round.

    It holds the members' keys of the current round. Of earlier rounds, only the last one is kept.
    """


@store.command(cls=UrlCommand, name="get", epilog="Example: rallypoint store get tcp://head:29400/my-run MASTER_ADDR")
@URL
@KEY
@ROUND
@common_options
def get(url: str, key: str, number: int | None, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Print the value of a key, byte for byte. Does not wait: the exit code is 3 if there is no such key."""
    target = target_of(url, timeout_s, **how)

    async def ask() -> tuple[int, bytes | None]:
        async with backend_of(target, timeout_s) as backend:
            found = await within(timeout_s, _store(backend, target, number), target.where)
            return found.number, await within(timeout_s, found.get(key), target.where)

    current, value = run_command(ask(), target.url)
    if value is None:
        raise Failed(f"round {current} of run {target.settings.run_id!r} has no key {key!r} in its store", NO_SUCH)
    if as_json:
        print_json({"schema": 1, "round": current, "key": key, **_shown(value)})
    else:
        _print_bytes(value)


@store.command(
    cls=UrlCommand, name="set", epilog="Example: rallypoint store set tcp://head:29400/my-run stop-after-epoch 12"
)
@URL
@KEY
@click.argument("value", metavar="VALUE")
@common_options
def set_(url: str, key: str, value: str, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Write a key of the current round. VALUE - reads the value from stdin. Fails if the round has just ended."""
    target = target_of(url, timeout_s, **how)
    content = sys.stdin.buffer.read() if value == "-" else value.encode()

    async def write() -> int:
        async with backend_of(target, timeout_s) as backend:
            found = await within(timeout_s, _store(backend, target, None), target.where)
            await within(timeout_s, found.set(key, content), target.where)
            return int(found.number)

    number = run_command(write(), target.url)
    if as_json:
        print_json({"schema": 1, "round": number, "key": key, "bytes": len(content)})
    else:
        click.echo(f"wrote {len(content)} bytes to {key!r} in round {number}")


@store.command(cls=UrlCommand, name="ls", epilog="Example: rallypoint store ls tcp://head:29400/my-run")
@URL
@ROUND
@common_options
def ls(url: str, number: int | None, as_json: bool, timeout_s: float, **how: Any) -> None:
    """List the keys of a round's store, with the sizes of their values."""
    target = target_of(url, timeout_s, **how)

    async def ask() -> tuple[int, list[tuple[str, int, int]]]:
        async with backend_of(target, timeout_s) as backend:
            found = await within(timeout_s, _store(backend, target, number), target.where)
            items = await within(timeout_s, found.items(), target.where)
            return found.number, [(key, len(item.value), item.version) for key, item in items]

    current, keys = run_command(ask(), target.url)
    if as_json:
        listed = [{"key": key, "bytes": size, "version": version} for key, size, version in keys]
        print_json({"schema": 1, "round": current, "keys": listed})
    elif not keys:
        click.echo(f"the store of round {current} is empty")
    else:
        for key, size, _ in keys:
            click.echo(f"{size:>10}  {one_line(key)}")


@store.command(cls=UrlCommand, name="watch", epilog="Example: rallypoint store watch tcp://head:29400/my-run progress")
@URL
@KEY
@common_options
def watch(url: str, key: str, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Print the value of a key of the current round, now and after every change, one line each, until Ctrl-C."""
    target = target_of(url, timeout_s, **how)

    async def follow() -> None:
        async with backend_of(target, timeout_s) as backend:
            found = await within(timeout_s, _store(backend, target, None), target.where)
            async for value in found.watch(key):
                if as_json:
                    import msgspec

                    click.echo(msgspec.json.encode({"key": key, **_shown(value)}).decode())
                elif value is None:
                    click.echo("(removed)")
                else:
                    _print_bytes(value)

    run_command(follow(), target.url)


async def _store(backend: Any, target: Target, number: int | None) -> Any:
    from rallypoint.observe.operator_actions import RoundStore

    return await RoundStore.of(backend, target, number)


def _shown(value: bytes | None) -> dict[str, object]:
    """The value for JSON: as text if it is valid UTF-8, else as base64."""
    import base64

    if value is None:
        return {"value": None}
    try:
        return {"value": value.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _print_bytes(value: bytes) -> None:
    """Write the bytes unchanged to stdout, followed by a line end."""
    sys.stdout.flush()
    sys.stdout.buffer.write(value)
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
