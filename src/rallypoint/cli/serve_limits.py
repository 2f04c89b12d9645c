"""The limits of `rallypoint serve` as options: one for each field of `ServerLimits`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rallypoint.server.admission.limits import ServerLimits

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Size(click.ParamType[int]):
    """A number of bytes, such as 512MiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d{1,15})\s*([a-zA-Z]*)", str(value).strip())
        unit = _UNITS.get(found[2].upper()) if found else None
        if found is None or unit is None or int(found[1]) == 0:
            self.fail(f"{value!r} is not a size: give bytes, or a number with KiB, MiB or GiB", param, ctx)
        return int(found[1]) * unit


_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)
_OPTIONS: tuple[tuple[str, Any, str, str], ...] = (
    ("max_connections", _COUNT, "15000", "Clients at a time."),
    ("max_pending", _COUNT, "4096", "Connections that have not said hello yet."),
    ("hello_timeout", _SECONDS, "10", "Seconds a connection has to say hello."),
    ("max_runs", _COUNT, "1000", "Runs at a time."),
    ("max_keys", _COUNT, "4000000", "Keys in total."),
    ("max_keys_per_run", _COUNT, "1000000", "Keys of one run."),
    ("max_bytes", Size(), "4GiB", "Bytes of keys and values in total."),
    ("max_bytes_per_run", Size(), "1GiB", "Bytes of keys and values of one run."),
    ("max_value", Size(), "16MiB", "The largest value."),
    ("max_frame", Size(), "32MiB", "The largest frame, either way."),
    ("max_leases", _COUNT, "200000", "Sessions and other leases at a time."),
    ("max_watches", _COUNT, "10000", "Watches of one connection."),
    ("max_waits", _COUNT, "1000000", "Keys that one connection waits for at a time."),
    (
        "max_failed_logins",
        _COUNT,
        "50",
        "Failed logins of one source within a minute, before it is refused for a while.",
    ),
    ("login_block", _SECONDS, "60", "Seconds for which such a source is refused."),
    ("log_interval", _SECONDS, "60", "Seconds within which one line is said for each source and kind of refusal."),
)
_IN_SECONDS = frozenset(name for name, kind, *_ in _OPTIONS if kind is _SECONDS)


def limit_options(*names: str, hidden: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for each limit, or for those named."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for name, kind, default, text in reversed(_OPTIONS):
            if not names or name in names:
                flag = f"--{name.replace('_', '-')}"
                option = click.option(flag, type=kind, default=default, show_default=True, help=text, hidden=hidden)
                command = option(command)
        return command

    return add


def limits_of(given: Mapping[str, float]) -> ServerLimits:
    """The limits from the values of the options."""
    from rallypoint.server.admission.limits import ServerLimits

    fields: dict[str, Any] = {f"{name}_s" if name in _IN_SECONDS else name: value for name, value in given.items()}
    return ServerLimits(**fields)
