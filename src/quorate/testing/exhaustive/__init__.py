"""Exhaustive worlds."""

from quorate.testing.exhaustive.explore import Explorer, Report, explore
from quorate.testing.exhaustive.values import Budget, Setup

__all__ = ["Budget", "Explorer", "Report", "Setup", "explore"]
