"""The words of the doctor, and which checks belong to which URL scheme."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import msgspec

from rallypoint.settings import Settings


class Verdict(enum.Enum):
    """How a check went."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check: `found` in a sentence, and for what is not well the `fix`."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""

    @property
    def is_bad(self) -> bool:
        return self.verdict is Verdict.FAILED


def ok(name: str, found: str) -> Check:
    return Check(name=name, verdict=Verdict.OK, found=found)


def warning(name: str, found: str, fix: str) -> Check:
    return Check(name=name, verdict=Verdict.WARNING, found=found, fix=fix)


def failed(name: str, found: str, fix: str) -> Check:
    return Check(name=name, verdict=Verdict.FAILED, found=found, fix=fix)


def skipped(name: str, found: str) -> Check:
    return Check(name=name, verdict=Verdict.SKIPPED, found=found)


PlaceChecks: TypeAlias = Callable[[Settings, float], AsyncIterator[Check]]
"""Checks of where the keys live: given the settings and the seconds that one step may take. A check that failed means
that the backend need not be tried."""

_checks: dict[str, PlaceChecks] = {}


def register_checks(scheme: str, checks: PlaceChecks) -> None:
    """The checks of places with URLs of this scheme."""
    _checks[scheme] = checks


def checks_of(scheme: str) -> PlaceChecks | None:
    """Those that were registered; None: there are none of their own."""
    return _checks.get(scheme)
