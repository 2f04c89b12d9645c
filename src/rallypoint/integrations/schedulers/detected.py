"""What was found out about a node, and how variables are read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rallypoint.errors import SettingsError
from rallypoint.urls import shown

Environ: TypeAlias = Mapping[str, str]
"""Variables of a process, as in `os.environ`."""

MOST_DIGITS = 18
"""More are no number that anybody means."""


@dataclass(frozen=True, slots=True)
class Detected:
    """What the environment says about this node. None: it does not say; nothing here is guessed.

    `endpoint` is a host, or host:port; `why` says in one sentence which variables it is from, and what is missing.
    """

    source: str
    endpoint: str | None
    nodes: int | None
    node_rank: int | None
    run_id: str | None
    why: str


def number(environ: Environ, *names: str) -> int | None:
    """The whole number in the first of the variables that is set; None: none is. SettingsError if it is none."""
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
                raise unusable(name, text, "is not a whole number")
            return int(text)
    return None


def text_of(environ: Environ, *names: str) -> str | None:
    """The first of the variables that is set and not blank."""
    return next((text for name in names if (text := environ.get(name, "").strip())), None)


def unusable(name: str, value: str, problem: str) -> SettingsError:
    """The error for a variable that a scheduler sets and that cannot be what it set."""
    return SettingsError(
        f"{name}={shown(value)} in the environment {problem}: unset it, or say the endpoint, the number of nodes, the "
        f"node rank and the run id yourself",
        option=name,
        value=value,
    )


def misplaced(name: str, value: str | None, problem: str, advice: str) -> SettingsError:
    """The error for a launcher that was started where it does not belong."""
    return SettingsError(f"{problem} ({name}={value}): {advice}", option=name, value=value)


def placed(rank: int | None, nodes: int | None, rank_name: str, nodes_name: str) -> None:
    """SettingsError if there is no such rank among so many nodes."""
    if rank is not None and nodes is not None and rank >= nodes:
        raise unusable(rank_name, str(rank), f"is not below {nodes_name}={nodes}")
