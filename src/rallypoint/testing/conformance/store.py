"""Checks the round's store on a backend, in five lines:

    @pytest.mark.parametrize("check", STORE_CHECKS)
    def test_the_store_conforms_on_my_backend(check):
        async def connect(): return await MyBackend.open("somewhere")
        kit = StoreKit(connect, asyncio.sleep, run_id=str(uuid4()), lease_slack_s=1.0)
        asyncio.run(check(kit))

Without pytest, `print(await run_store_checks(kit))`. A backend that uses the loop's time (like `memory`) is checked
without waiting with `rallypoint.testing.loop.run` instead of `asyncio.run`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rallypoint.testing.conformance import store_keys, store_rounds, store_waits
from rallypoint.testing.conformance.kit import Report
from rallypoint.testing.conformance.store_kit import StoreCheck, StoreKit

__all__ = ["STORE_CHECKS", "StoreCheck", "StoreKit", "run_store_checks"]

STORE_CHECKS: tuple[StoreCheck, ...] = (*store_keys.CHECKS, *store_waits.CHECKS, *store_rounds.CHECKS)


async def run_store_checks(kit: StoreKit, checks: Iterable[StoreCheck] = STORE_CHECKS) -> Report:
    """Run all checks one after the other, each in a run of its own; a failing check does not stop the others."""
    passed: list[str] = []
    failed: dict[str, Exception] = {}
    for check in checks:
        name = check.__name__
        try:
            await check(replace(kit, run_id=f"{kit.run_id}-{name}"))
        except Exception as error:
            failed[name] = error
        else:
            passed.append(name)
    return Report(tuple(passed), failed)
