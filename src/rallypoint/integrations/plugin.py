"""What torchrun loads when it starts, whichever backend it is to use: it must import neither torch nor much of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def torchrun() -> Callable[[Any], Any]:
    """The entry of the group `torchrun.handlers`: the creator of handlers for `--rdzv-backend=rallypoint`."""
    return _create


def _create(params: Any) -> Any:
    from rallypoint.integrations.torchrun import create_handler  # with torch, and only if it is this backend

    return create_handler(params)
