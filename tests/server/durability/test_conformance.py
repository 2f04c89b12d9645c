"""A server with data passes the backend conformance checks, also while it takes snapshots on a slow disk."""

import asyncio
import time

from rallypoint.server.durability.journal import Bounds
from rallypoint.testing.conformance.backend import BACKEND_CHECKS, run_checks
from rallypoint.testing.conformance.backend_random import check_random_history
from rallypoint.testing.disk import FaultyDisk, MemoryDisk
from tests.backends.tcp.test_conformance import ALL_S, HISTORY, assert_all_conform, kit_of
from tests.server.durability.kit import serving_from


def slow_disk() -> FaultyDisk:
    def before(call: str, name: str) -> None:
        if call == "sync":
            time.sleep(0.002)

    return FaultyDisk(MemoryDisk(), before)


def test_server_with_data_passes_the_conformance_checks():
    async def check_one(check, **changes):
        bounds = Bounds(log_entries=40)  # for frequent snapshots
        async with serving_from(slow_disk(), history=HISTORY, bounds=bounds) as server:
            return await run_checks(kit_of(server.addresses[0], ttl_s=2.5, lease_slack_s=2.0, **changes), [check])

    async def check_all():
        async with asyncio.timeout(ALL_S):
            return await asyncio.gather(
                *map(check_one, BACKEND_CHECKS), *(check_one(check_random_history, seed=seed) for seed in range(1, 6))
            )

    assert_all_conform(asyncio.run(check_all()))
