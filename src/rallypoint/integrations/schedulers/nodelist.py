"""Slurm's lists of nodes: `gpu[001-004,7]-ib[0-1],login1` and the like, in the order in which Slurm counts them. Pure.

Names are separated by commas. Brackets hold numbers and ranges of numbers; a number that is written with zeros in front
keeps its width. A name may have several brackets: the last one counts fastest.
"""

from __future__ import annotations

import re
from itertools import islice, product

from rallypoint.errors import SettingsError
from rallypoint.urls import shown

MOST_NODES = 1 << 20
"""More than any cluster has. A list that is longer is refused before it is written out."""

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def expand(text: str) -> tuple[str, ...]:
    """All names of the list, in order. SettingsError if it is none."""
    names: list[str] = []
    for one in _entries(text):
        names += _names(text, one, MOST_NODES - len(names))
    return tuple(names)


def first(text: str) -> str:
    """The first name of the list; however long that is. SettingsError if it is none."""
    parts = [
        ranges if isinstance(ranges, str) else f"{ranges[0].start:0{ranges[0].width}d}" for ranges in _parsed(text)
    ]
    return "".join(parts)


def tasks_per_node(text: str) -> tuple[tuple[int, int], ...]:
    """Slurm's `2(x3),1` as ((2, 3), (1, 1)): how many tasks on how many nodes. SettingsError if it is no such list."""
    counts = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            raise _bad(text, f"{shown(part)} is not a number of tasks such as 2 or 2(x3)")
        counts.append((int(match[1]), int(match[2] or 1)))
    return tuple(counts)


class _Range:
    """Numbers from `start` to `end`, both included, with at least `width` digits."""

    __slots__ = ("end", "start", "width")

    def __init__(self, start: int, end: int, width: int) -> None:
        self.start, self.end, self.width = start, end, width

    def __len__(self) -> int:
        return self.end - self.start + 1

    def names(self) -> list[str]:
        return [f"{number:0{self.width}d}" for number in range(self.start, self.end + 1)]


def _parsed(text: str) -> list[str | list[_Range]]:
    return _pieces(text, next(iter(_entries(text))))


def _entries(text: str) -> list[str]:
    """The list, split at the commas that are outside of brackets. At least one, none of them empty."""
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


def _names(text: str, entry: str, room: int) -> list[str]:
    """The names that one entry stands for."""
    pieces = _pieces(text, entry)
    count = 1
    for piece in pieces:
        count *= 1 if isinstance(piece, str) else sum(len(one) for one in piece)
        if count > room:
            raise _bad(text, f"it has more than {MOST_NODES} names")
    choices = [[piece] if isinstance(piece, str) else [n for one in piece for n in one.names()] for piece in pieces]
    return ["".join(parts) for parts in islice(product(*choices), count)]


def _pieces(text: str, entry: str) -> list[str | list[_Range]]:
    pieces: list[str | list[_Range]] = []
    at = 0
    while at < len(entry):
        match = _PIECE.match(entry, at)
        if match is None:
            raise _bad(text, f"{shown(entry[at])} does not belong into a name")
        pieces.append(match[2] if match[1] is None else _ranges(text, match[1]))
        at = match.end()
    return pieces


def _ranges(text: str, inside: str) -> list[_Range]:
    ranges = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _bad(text, f"{shown(part)} is not a number or a range such as 001-004")
        start, end = int(match[1]), int(match[2] or match[1])
        if end < start:
            raise _bad(text, f"the range {shown(part)} goes backwards")
        ranges.append(_Range(start, end, len(match[1])))
    return ranges


def _bad(text: str, problem: str) -> SettingsError:
    return SettingsError(f"{shown(text)} is not a list of Slurm: {problem}", value=text)
