"""The entry point that torchrun loads at every start, whichever backend it uses.

It must stay quick to import: no torch, and nothing else of Rallypoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def torchrun() -> Callable[[Any], Any]:
    """The entry point of the group `torchrun.handlers`: returns the handler creator of `--rdzv-backend=rallypoint`."""
    return _create


def _create(params: Any) -> Any:
    from rallypoint.integrations.torchrun import create_handler  # imports torch

    return create_handler(params)
