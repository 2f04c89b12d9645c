"""Checks and conversions of the arguments of store calls, before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import timedelta

from rallypoint.errors import StoreError

MAX_LISTED = 20
"""The most keys or ranks that an error lists."""
MAX_INT = 2**63 - 1


def as_key(key: str) -> str:
    """The key. TypeError if it is no str, UnicodeEncodeError if it cannot be encoded."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {type(key).__name__}: {key!r}")
    if not key.isascii():
        key.encode()
    return key


def as_amount(amount: int) -> int:
    """The amount. TypeError if it is no int, StoreError if it exceeds 64 bits."""
    number = operator.index(amount)
    if not -MAX_INT - 1 <= number <= MAX_INT:
        raise StoreError(f"{number} cannot be added: it does not fit into 64 bits")
    return number


def as_bytes(value: bytes | str) -> bytes:
    if type(value) is bytes:  # the usual case
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a value is bytes or a str, not {type(value).__name__}: encode it first")


def several(keys: Sequence[str]) -> Sequence[str]:
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"several keys are a list, not {keys!r}: write [{keys!r}]")
    return keys


def checked_s(timeout: timedelta | float) -> float:
    """A time-out in seconds. StoreError if it is not positive and finite."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < float("inf"):
        raise StoreError(f"a time-out must be a positive number of seconds, not {timeout!r}")
    return seconds


def listed(things: Sequence[object]) -> str:
    """A list for an error message, shortened to `MAX_LISTED` entries."""
    shown = ", ".join(str(thing) for thing in things[:MAX_LISTED])
    return shown if len(things) <= MAX_LISTED else f"{shown} and {len(things) - MAX_LISTED} more"
