"""Reads Slurm's node lists, such as `gpu[001-004,7]-ib[0-1],login1`, and its lists of tasks a node. Pure.

Names are separated by commas. Brackets hold numbers and ranges; a number with leading zeros keeps its width.
"""

from __future__ import annotations

import re

from rallypoint.errors import SettingsError
from rallypoint.urls import shown

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def first(text: str) -> str:
    """The first name of the list. SettingsError if it is not a valid list."""
    entry = _entries(text)[0]
    parts: list[str] = []
    at = 0
    while at < len(entry):
        match = _PIECE.match(entry, at)
        if match is None:
            raise _bad(text, f"{shown(entry[at])} is not allowed in a name")
        parts.append(match[2] if match[1] is None else _first_number(text, match[1]))
        at = match.end()
    return "".join(parts)


def tasks_per_node(text: str) -> tuple[tuple[int, int], ...]:
    """Slurm's `2(x3),1` as ((2, 3), (1, 1)): (tasks, nodes with so many). SettingsError if it is not a valid list."""
    counts = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise _bad(text, f"{shown(part)} is not a number of tasks such as 2 or 2(x3)")
        counts.append((int(match[1]), int(match[2] or 1)))
    return tuple(counts)


def _entries(text: str) -> list[str]:
    """The list, split at the commas outside of brackets. At least one entry, none of them empty."""
    entries, depth, begun = [], 0, 0
    for at, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            entries.append(text[begun:at])
            begun = at + 1
        if not 0 <= depth <= 1:
            raise _bad(text, "its brackets do not match")
    if depth:
        raise _bad(text, "its brackets do not match")
    entries = [entry.strip() for entry in [*entries, text[begun:]]]
    if not all(entries):
        raise _bad(text, "a name is missing")
    return entries


def _first_number(text: str, inside: str) -> str:
    """The first number in a pair of brackets, as it is written there."""
    numbers = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _bad(text, f"{shown(part)} is not a number or a range such as 001-004")
        if match[2] is not None and int(match[2]) < int(match[1]):
            raise _bad(text, f"the range {shown(part)} is descending")
        numbers.append(match[1])
    return numbers[0]


def _bad(text: str, problem: str) -> SettingsError:
    return SettingsError(f"{shown(text)} is not a valid Slurm list: {problem}", value=text)
