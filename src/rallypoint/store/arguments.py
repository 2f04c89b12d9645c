"""What the callers of a store give and get, checked and put into words before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import timedelta

from rallypoint.errors import StoreError

NAMED = 20
"""How many keys or ranks an error names."""
LARGEST = 2**63 - 1


def as_key(key: str) -> str:
    """TypeError, or UnicodeEncodeError for one that cannot be sent."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {type(key).__name__}: {key!r}")
    if not key.isascii():
        key.encode()
    return key


def as_amount(amount: int) -> int:
    """TypeError for what is no int, StoreError for one that is too large."""
    number = operator.index(amount)
    if not -LARGEST - 1 <= number <= LARGEST:
        raise StoreError(f"{number} cannot be added: it does not fit into 64 bits")
    return number


def as_bytes(value: bytes | str) -> bytes:
    if type(value) is bytes:  # most often
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
    """A time-out in seconds. StoreError for one that makes no sense."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < float("inf"):
        raise StoreError(f"a time-out must be a positive number of seconds, not {timeout!r}")
    return seconds


def listed(things: Sequence[object]) -> str:
    """A few of them, for an error."""
    shown = ", ".join(str(thing) for thing in things[:NAMED])
    return shown if len(things) <= NAMED else f"{shown} and {len(things) - NAMED} more"
