"""Makes untrusted text safe for a terminal: names and reasons come from all clients of a run."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def one_line(text: str) -> str:
    """The text without control characters, which could move the cursor or change colours."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def plainly(value: T) -> T:
    """A copy of a value with `one_line` applied to every text in it."""
    return msgspec.convert(_plain(msgspec.to_builtins(value)), type(value), strict=False)


def _plain(value: Any) -> Any:
    match value:
        case str():
            return one_line(value)
        case dict():
            return {_plain(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value
