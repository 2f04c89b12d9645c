"""The result of detection, and helpers that read environment variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rallypoint.errors import SettingsError
from rallypoint.urls import shown

Environ: TypeAlias = Mapping[str, str]
"""The environment variables of a process, as in `os.environ`."""

MAX_DIGITS = 18
"""A longer number is an error."""


@dataclass(frozen=True, slots=True)
class Detected:
    """What the environment says about this node. A value that it does not contain is None; nothing is guessed.

    `endpoint` is a host, or host:port. `why` says which variables the values are from, and which values are missing.
    """

    source: str
    endpoint: str | None
    nodes: int | None
    node_rank: int | None
    run_id: str | None
    why: str


def number(environ: Environ, *names: str) -> int | None:
    """The number in the first of these variables that is set, or None. SettingsError if it is not a whole number."""
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
                raise invalid_variable(name, text, "is not a whole number")
            return int(text)
    return None


def text_of(environ: Environ, *names: str) -> str | None:
    """The value of the first of these variables that is set and not blank, or None."""
    return next((text for name in names if (text := environ.get(name, "").strip())), None)


def invalid_variable(name: str, value: str, problem: str) -> SettingsError:
    """The error for a variable of a scheduler with an impossible value."""
    return SettingsError(
        f"{name}={shown(value)} in the environment {problem}: unset it, or give the endpoint, the number of nodes, the "
        f"node rank and the run id explicitly",
        option=name,
        value=value,
    )


def wrong_start(name: str, value: str | None, problem: str, advice: str) -> SettingsError:
    """The error for a launcher that was not started exactly once on each node."""
    return SettingsError(f"{problem} ({name}={value}): {advice}", option=name, value=value)


def check_rank(rank: int | None, nodes: int | None, rank_name: str, nodes_name: str) -> None:
    """SettingsError if the rank is not below the number of nodes."""
    if rank is not None and nodes is not None and rank >= nodes:
        raise invalid_variable(rank_name, str(rank), f"is not below {nodes_name}={nodes}")
