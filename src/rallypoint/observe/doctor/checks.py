"""The result of a check, and the registry of backend checks by URL scheme."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import msgspec

from rallypoint.settings import Settings


class Verdict(enum.Enum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check that was made. `found` is the finding in a sentence; `fix` says what to do about a problem."""

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


BackendChecks: TypeAlias = Callable[[Settings, float], AsyncIterator[Check]]
"""The checks of a backend. The arguments are the settings and the time limit of one step, in seconds. If a check fails,
the doctor does not open the backend."""

_checks: dict[str, BackendChecks] = {}


def register_checks(scheme: str, checks: BackendChecks) -> None:
    """Register the checks of backends whose URLs have this scheme."""
    _checks[scheme] = checks


def checks_of(scheme: str) -> BackendChecks | None:
    """The checks registered for a scheme, or None."""
    return _checks.get(scheme)
