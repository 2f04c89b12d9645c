"""Checks the blocking handler on a backend, in four lines:

    @pytest.mark.parametrize("check", HANDLER_CHECKS)
    def test_handlers_conform_on_my_backend(check):
        check(HandlerKit.at("mine://somewhere", run_id=str(uuid4())))

Without pytest, `print(run_handler_checks(kit))`. Time is real; the default time-outs are short, and can be changed in
the kit if they are too short for a backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rallypoint.testing.conformance import handler_closing, handler_rounds
from rallypoint.testing.conformance.handler_kit import HandlerCheck, HandlerKit
from rallypoint.testing.conformance.kit import Report

__all__ = ["HANDLER_CHECKS", "HandlerCheck", "HandlerKit", "run_handler_checks"]

HANDLER_CHECKS: tuple[HandlerCheck, ...] = (*handler_rounds.CHECKS, *handler_closing.CHECKS)


def run_handler_checks(kit: HandlerKit, checks: Iterable[HandlerCheck] = HANDLER_CHECKS) -> Report:
    """Run all checks one after the other, each in a run of its own; a failing check does not stop the others."""
    passed: list[str] = []
    failed: dict[str, Exception] = {}
    for check in checks:
        name = check.__name__
        try:
            check(replace(kit, run_id=f"{kit.run_id}-{name}"))
        except Exception as error:
            failed[name] = error
        else:
            passed.append(name)
    return Report(tuple(passed), failed)
