"""The memory backend fulfils the contract: on virtual time, on a real loop, and under `ChaosBackend` without faults."""

import asyncio
import random

import pytest

from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.testing.chaos import ChaosBackend, Faults
from rallypoint.testing.conformance.backend import BACKEND_CHECKS, BackendKit, backend_checks, run_checks
from rallypoint.testing.conformance.backend_random import check_random_history
from rallypoint.testing.loop import run

HISTORY = 500


def kit_of(server: MemoryServer, **changes) -> BackendKit:
    async def connect():
        return MemoryBackend(server)

    options = {"prefix": "/test/", "lease_slack_s": 0.0, "history_limit": HISTORY} | changes
    return BackendKit(options.pop("connect", connect), asyncio.sleep, **options)


@pytest.mark.parametrize("check", backend_checks(bounded_history=True))
def test_memory_backend_conforms_on_virtual_time(check):
    run(check(kit_of(MemoryServer(HISTORY))), limit_s=100.0)


@pytest.mark.parametrize("seed", range(10))
def test_memory_backend_conforms_in_any_order_of_tasks(seed):
    report = run(run_checks(kit_of(MemoryServer(HISTORY))), seed=seed, limit_s=1_000.0)
    assert report.conforming, str(report)
    assert len(report.passed) == len(BACKEND_CHECKS)


@pytest.mark.parametrize("seed", range(30))
def test_memory_backend_behaves_like_the_model(seed):
    run(check_random_history(kit_of(MemoryServer(), seed=seed)), limit_s=100.0)


@pytest.mark.parametrize("check", backend_checks(bounded_history=True))
def test_chaos_without_faults_conforms(check):
    server = MemoryServer(HISTORY)

    async def connect():
        return ChaosBackend(MemoryBackend(server), random.Random(0), Faults.none())

    run(check(kit_of(server, connect=connect)), limit_s=100.0)


def test_memory_backend_conforms_on_a_real_loop():
    async def check_all():
        # Each check has its own server, so that the checks can wait for leases concurrently.
        kits = [kit_of(MemoryServer(HISTORY), ttl_s=1.5, lease_slack_s=0.7) for _ in BACKEND_CHECKS]
        return await asyncio.gather(
            *(run_checks(kit, [check]) for kit, check in zip(kits, BACKEND_CHECKS, strict=True))
        )

    for report in asyncio.run(check_all()):
        assert report.conforming, str(report)


def test_checks_leave_no_keys_behind():
    server = MemoryServer(HISTORY)
    report = run(run_checks(kit_of(server)), limit_s=1_000.0)
    assert report.conforming, str(report)
    assert not server.engine.items


def test_every_check_documents_its_guarantee():
    for check in BACKEND_CHECKS:
        assert check.__name__.startswith("check_")
        assert check.__doc__.endswith("."), check.__name__
    assert len({check.__name__ for check in BACKEND_CHECKS}) == len(BACKEND_CHECKS)
