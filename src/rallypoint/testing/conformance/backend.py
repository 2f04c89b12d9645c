"""Checks a backend against the whole contract of `rallypoint.backends.contract`, in five lines:

    @pytest.mark.parametrize("check", backend_checks())
    def test_my_backend_conforms(check):
        async def connect(): return await MyBackend.open("somewhere")
        kit = BackendKit(connect, asyncio.sleep, prefix=f"/test/{uuid4()}/", lease_slack_s=1.0)
        asyncio.run(check(kit))

Without pytest, `print(await run_checks(kit))`. A backend that uses the loop's time (like `memory`) is checked without
waiting with `rallypoint.testing.loop.run` instead of `asyncio.run`.
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.testing.conformance import (
    backend_concurrency,
    backend_keys,
    backend_lease,
    backend_random,
    backend_txn,
    backend_watch,
)
from rallypoint.testing.conformance.kit import BackendKit, Check, NotConforming, Report, run_each

__all__ = ["BACKEND_CHECKS", "BackendKit", "Check", "NotConforming", "Report", "backend_checks", "run_checks"]

BACKEND_CHECKS: tuple[Check, ...] = (
    *backend_keys.CHECKS,
    *backend_txn.CHECKS,
    *backend_watch.CHECKS,
    *backend_watch.BOUNDED_HISTORY_CHECKS,
    *backend_lease.CHECKS,
    *backend_concurrency.CHECKS,
    *backend_random.CHECKS,
)


def backend_checks(*, bounded_history: bool = False) -> tuple[Check, ...]:
    """The checks, for `pytest.mark.parametrize`; with `bounded_history` including those that need `history_limit`."""
    left_out = () if bounded_history else backend_watch.BOUNDED_HISTORY_CHECKS
    return tuple(check for check in BACKEND_CHECKS if check not in left_out)


async def run_checks(kit: BackendKit, checks: Iterable[Check] | None = None) -> Report:
    """Run checks, by default all that apply, each under its own prefix below the kit's. Does not raise."""
    if checks is None:
        checks = backend_checks(bounded_history=kit.history_limit is not None)
    return await run_each(kit, checks)
