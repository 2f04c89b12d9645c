"""Parts of sentences that several layers say: names, counts, durations, the end of a round. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FEW = 5
"""Most names in one sentence."""


def listed(names: Sequence[str], total: int | None = None) -> str:
    """The first few names. `total`: how many there are, if `names` are only the first of them."""
    total = len(names) if total is None else total
    shown = ", ".join(names[:FEW])
    return shown if total <= FEW else f"{shown} and {total - FEW} more"


def of_at_least(count: int, least: int) -> str:
    """How many nodes there are of those that a round needs."""
    return f"{count} of at least {least} node{'s' * (least != 1)}"


def duration(seconds: float) -> str:
    """A duration in at most two units."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def round_ended(number: int, lasted_s: float | None, why: str) -> str:
    """That a round ended, after what time, and why."""
    after = "" if lasted_s is None else f" after {duration(lasted_s)}"
    return f"round {number} ended{after}: {why or 'no reason given'}"
