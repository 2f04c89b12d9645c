"""The conformance suite can fail: each backend here breaks one promise, and the check for it fails."""

import asyncio

import pytest

from rallypoint.backends.contract import Got, Watch
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.kv.engine import Engine
from rallypoint.kv.types import AddResult, Batch, GotItem, Item, Put, RangeEmpty, Revoke, TxnResult
from rallypoint.testing.conformance.backend import BACKEND_CHECKS, BackendKit, NotConforming, run_checks
from rallypoint.testing.loop import run

# --- broken engines ---------------------------------------------------------------------------------------------------


class KeyOutlivesItsLease(Engine):
    def _end(self, lease):
        if len(lease.keys) > 1:
            lease.keys.discard(min(lease.keys))
        super()._end(lease)


class LeaseEndsKeyByKey(Engine):
    def _end(self, lease):
        for key in sorted(lease.keys):
            changes = []
            self._delete([key], changes)
            self._commit(tuple(changes))


class LeaseEndsEarly(Engine):
    def apply(self, op, now, origin=None):
        return super().apply(op, now * 3, origin)


class WrongCreateRevision(Engine):
    def _put(self, key, value, lease, revision):
        change = super()._put(key, value, lease, revision)
        self.items[key] = Item(key, value, revision, revision, change.item.version, lease)
        return type(change)(key, self.items[key])


class VersionGoesOnAfterDelete(Engine):
    def __init__(self, history):
        super().__init__(history)
        self.versions = {}

    def _put(self, key, value, lease, revision):
        change = super()._put(key, value, lease, revision)
        self.versions[key] = self.versions.get(key, 0) + 1
        self.items[key] = Item(key, value, change.item.create_revision, revision, self.versions[key], lease)
        return change


class RevisionForNothing(Engine):
    def _txn(self, op):
        before = self.revision
        result = super()._txn(op)
        if self.revision == before:
            self.revision += 1
        return result


class LeaseIsNeverReplaced(Engine):
    def _detach(self, item):
        pass


class PrefixIsIgnoredByRangeEmpty(Engine):
    def _holds(self, compare):
        return super()._holds(RangeEmpty("")) if isinstance(compare, RangeEmpty) else super()._holds(compare)


class EndedLeaseIsAccepted(Engine):
    def _invalid(self, branch):
        failure = super()._invalid(branch)
        return None if failure is not None and failure.lease else failure

    def _put(self, key, value, lease, revision):
        return super()._put(key, value, lease if self.leases.get(lease) else 0, revision)


class KeyWrittenTwiceIsAccepted(Engine):
    def _invalid(self, branch):
        failure = super()._invalid(branch)
        return failure if failure is not None and failure.lease else None


# --- broken connections -----------------------------------------------------------------------------------------------


class LossyWatch(Watch):
    """Drops every fifth batch."""

    def __init__(self, inner):
        self._inner = inner
        self._count = 0

    async def __anext__(self):
        while True:
            batch = await anext(self._inner)
            self._count += 1
            if self._count % 5:
                return batch

    def ready(self):
        return None

    def cancel(self):
        self._inner.cancel()


class RepeatingWatch(LossyWatch):
    """Delivers every fifth batch twice."""

    async def __anext__(self):
        self._count += 1
        if self._count % 5 or self._count == 0:
            self._last = await anext(self._inner)
        return self._last


class SplittingWatch(LossyWatch):
    """Delivers each change in a batch of its own."""

    def __init__(self, inner):
        super().__init__(inner)
        self._left = []

    async def __anext__(self):
        if not self._left:
            batch = await anext(self._inner)
            self._left = [Batch(batch.revision, (change,)) for change in batch.changes]
        return self._left.pop(0)


class EndlessWatch(LossyWatch):
    """Cannot be cancelled."""

    async def __anext__(self):
        return await anext(self._inner)

    def cancel(self):
        pass


def watching_with(watch_type):
    class Broken(MemoryBackend):
        def watch(self, prefix, after_revision):
            return watch_type(super().watch(prefix, after_revision))

    return Broken


class WatchOfTheParentPrefix(MemoryBackend):
    def watch(self, prefix, after_revision):
        return super().watch(prefix[:-1], after_revision)


class WatchForgetsThePast(MemoryBackend):
    def watch(self, prefix, after_revision):
        return super().watch(prefix, max(after_revision, self._server.engine.revision))


class TxnIsNotAtomic(MemoryBackend):
    async def txn(self, compares, then, otherwise=()):
        checked = await super().txn(compares, ())
        if not checked.committed:
            return await super().txn(compares, then, otherwise)
        results = ()
        for step in then:
            one = await super().txn((), (step,))
            results += one.results
            checked = TxnResult(True, one.revision, results)
        return checked


class CompareIsCheckedTooEarly(MemoryBackend):
    async def txn(self, compares, then, otherwise=()):
        checked = await super().txn(compares, ())
        return await super().txn((), then) if checked.committed else await super().txn(compares, then, otherwise)


class RefusalSaysNothing(MemoryBackend):
    async def txn(self, compares, then, otherwise=()):
        result = await super().txn(compares, then, otherwise)
        return result if result.committed else TxnResult(False, result.revision, ())


class OtherwiseIsIgnored(MemoryBackend):
    async def txn(self, compares, then, otherwise=()):
        return await super().txn(compares, then)


class AddIsNotAtomic(MemoryBackend):
    async def add(self, key, amount, *, compares=(), lease=0):
        if compares or lease:
            return await super().add(key, amount, compares=compares, lease=lease)
        item = (await self.get(key)).item
        if item is not None and not item.value.lstrip(b"-").isdigit():
            return await super().add(key, amount)
        value = int(item.value if item else 0) + amount
        result = await self.txn((), (Put(key, b"%d" % value),))
        return AddResult(True, result.revision, value)


class AddIgnoresCompares(MemoryBackend):
    async def add(self, key, amount, *, compares=(), lease=0):
        return await super().add(key, amount, lease=lease)


class StaleRead(MemoryBackend):
    """Answers from a cache of this connection's last reads and writes."""

    def __init__(self, server):
        super().__init__(server)
        self._cache = {}

    async def get(self, key):
        got = self._cache.get(key) or await super().get(key)
        self._cache[key] = got
        return got

    async def txn(self, compares, then, otherwise=()):
        self._cache.clear()
        return await super().txn(compares, then, otherwise)


class DirtyRead(MemoryBackend):
    """Makes a write visible before its transaction is decided."""

    dirty: dict = {}  # noqa: RUF012

    async def txn(self, compares, then, otherwise=()):
        self.dirty |= {step.key: step for step in then if isinstance(step, Put)}
        await asyncio.sleep(0)
        result = await super().txn(compares, then, otherwise)
        self.dirty.clear()
        return result

    async def scan(self, prefix):
        scanned = await super().scan(prefix)
        items = tuple(Item(i.key, self._now(i), i.create_revision, i.mod_revision, i.version) for i in scanned.items)
        return type(scanned)(items[:1] + scanned.items[1:], scanned.revision)

    def _now(self, item):
        return self.dirty[item.key].value if item.key in self.dirty else item.value


class KeepAliveAlwaysSucceeds(MemoryBackend):
    async def keep_alive(self, lease):
        await super().keep_alive(lease)
        return True


class KeepAliveDoesNothing(MemoryBackend):
    async def keep_alive(self, lease):
        return bool(self._server.engine.leases.get(lease))


class RevokeDoesNothing(MemoryBackend):
    async def revoke(self, lease):
        pass


class SessionIsNotLost(MemoryBackend):
    async def open_session(self, ttl_s, **options):
        session = await super().open_session(ttl_s, **options)
        session.lost.set = lambda reason: None
        return session


class ClosingLosesTheSession(MemoryBackend):
    async def open_session(self, ttl_s, **options):
        session = await super().open_session(ttl_s, **options)
        close = session.close

        async def close_and_lose():
            await close()
            session.lost.set("closed")

        session.close = close_and_lose
        return session


class CloseDoesNothing(MemoryBackend):
    async def close(self):
        pass


class CloseTakesLeasesAlongOfOthers(MemoryBackend):
    async def close(self):
        for lease in list(self._server.engine.leases):
            self._server.apply(Revoke(lease.id))
        await super().close()


class WrongReadRevision(MemoryBackend):
    async def get(self, key):
        got = await super().get(key)
        return Got(got.item, got.item.mod_revision if got.item else 1)


class EmptyValueIsAbsent(MemoryBackend):
    async def get(self, key):
        got = await super().get(key)
        return Got(got.item if got.item and got.item.value else None, got.revision)


class ScanIsNotSorted(MemoryBackend):
    async def scan(self, prefix):
        scanned = await super().scan(prefix)
        return type(scanned)(tuple(sorted(scanned.items, key=lambda item: item.mod_revision)), scanned.revision)


class RefusedReadsAreStale(MemoryBackend):
    """A refused transaction returns items without their lease."""

    async def txn(self, compares, then, otherwise=()):
        result = await super().txn(compares, then, otherwise)
        if result.committed:
            return result
        answers = tuple(
            GotItem(Item(a.item.key, a.item.value, a.item.create_revision, a.item.mod_revision, a.item.version))
            if isinstance(a, GotItem) and a.item
            else a
            for a in result.results
        )
        return TxnResult(False, result.revision, answers)


# --- the checks that are to catch them --------------------------------------------------------------------------------

BROKEN_ENGINES = {
    KeyOutlivesItsLease: "check_an_expired_lease_takes_all_keys_in_one_revision",
    LeaseEndsKeyByKey: "check_revoke_ends_a_lease_at_once",
    LeaseEndsEarly: "check_a_lease_ends_by_time_and_takes_its_keys_along",
    WrongCreateRevision: "check_revisions_and_versions_over_the_life_of_a_key",
    VersionGoesOnAfterDelete: "check_revisions_and_versions_over_the_life_of_a_key",
    RevisionForNothing: "check_nothing_changed_is_no_revision",
    LeaseIsNeverReplaced: "check_writing_a_key_replaces_its_lease",
    PrefixIsIgnoredByRangeEmpty: "check_every_compare_holds_and_fails_as_it_should",
    EndedLeaseIsAccepted: "check_a_write_under_an_ended_lease_raises_and_writes_nothing",
    KeyWrittenTwiceIsAccepted: "check_a_key_is_written_once_in_a_transaction",
}
BROKEN_CONNECTIONS = {
    watching_with(LossyWatch): "check_a_watch_has_no_gap_and_no_repetition",
    watching_with(RepeatingWatch): "check_a_watch_has_no_gap_and_no_repetition",
    watching_with(SplittingWatch): "check_a_batch_is_one_revision",
    watching_with(EndlessWatch): "check_cancel_ends_a_watch",
    WatchOfTheParentPrefix: "check_a_watch_sees_only_its_prefix",
    WatchForgetsThePast: "check_a_watch_starts_from_a_past_revision_and_goes_on",
    TxnIsNotAtomic: "check_a_transaction_has_one_revision",
    CompareIsCheckedTooEarly: "check_compare_and_set_loses_nothing",
    RefusalSaysNothing: "check_a_refusal_reads_what_was_compared",
    OtherwiseIsIgnored: "check_a_refusal_does_the_otherwise_branch",
    AddIsNotAtomic: "check_add_is_atomic",
    AddIgnoresCompares: "check_add_can_be_refused_by_compares",
    StaleRead: "check_a_read_sees_what_was_written_before_it",
    DirtyRead: "check_no_read_sees_half_a_transaction",
    KeepAliveAlwaysSucceeds: "check_keep_alive_of_an_ended_lease_is_false",
    KeepAliveDoesNothing: "check_a_session_lives_beyond_its_time_to_live",
    RevokeDoesNothing: "check_closing_a_session_takes_its_keys_along_at_once",
    SessionIsNotLost: "check_a_lost_session_says_so_to_everybody_who_waits",
    ClosingLosesTheSession: "check_closing_a_session_takes_its_keys_along_at_once",
    CloseDoesNothing: "check_a_closed_connection_is_unavailable",
    CloseTakesLeasesAlongOfOthers: "check_sessions_end_by_time_when_their_connection_is_closed",
    WrongReadRevision: "check_every_change_has_a_revision_of_its_own",
    EmptyValueIsAbsent: "check_values_of_all_kinds_are_kept",
    ScanIsNotSorted: "check_a_scan_gives_the_keys_under_a_prefix_in_order",
    RefusedReadsAreStale: "check_random_history",
}
# Errors that the random history must find by itself.
FOUND_BY_RANDOM_HISTORY = [WrongCreateRevision, RevisionForNothing, LeaseIsNeverReplaced, KeyOutlivesItsLease]
HISTORY = 10_000


def kit_for(engine_type, backend_type, **options) -> BackendKit:
    server = MemoryServer(HISTORY)
    server.engine = engine_type(HISTORY)

    async def connect():
        return backend_type(server)

    return BackendKit(connect, asyncio.sleep, prefix="/test/", lease_slack_s=0.0, **options)


def failures(engine_type, backend_type, name) -> dict[str, Exception]:
    (check,) = [check for check in BACKEND_CHECKS if check.__name__ == name]
    return run(run_checks(kit_for(engine_type, backend_type), [check]), limit_s=10_000.0).failed


@pytest.mark.parametrize(("engine_type", "name"), BROKEN_ENGINES.items())
def test_broken_engine_is_caught_by_its_check(engine_type, name):
    failed = failures(engine_type, MemoryBackend, name)
    assert isinstance(failed[name], NotConforming)


@pytest.mark.parametrize(("backend_type", "name"), BROKEN_CONNECTIONS.items())
def test_broken_connection_is_caught_by_its_check(backend_type, name):
    failed = failures(Engine, backend_type, name)
    assert isinstance(failed[name], NotConforming)


@pytest.mark.parametrize("name", sorted({*BROKEN_ENGINES.values(), *BROKEN_CONNECTIONS.values()}))
def test_correct_backend_is_not_caught(name):
    assert failures(Engine, MemoryBackend, name) == {}


@pytest.mark.parametrize("engine_type", FOUND_BY_RANDOM_HISTORY)
def test_random_history_finds_a_broken_engine(engine_type):
    failed = failures(engine_type, MemoryBackend, "check_random_history")
    assert isinstance(failed["check_random_history"], NotConforming)


def test_report_names_the_promise_and_what_was_seen():
    report = run(run_checks(kit_for(WrongCreateRevision, MemoryBackend)), limit_s=10_000.0)
    assert not report.conforming
    assert f"{len(report.passed)} of {len(report.passed) + len(report.failed)} checks passed" in str(report)
    assert "promised: a rewritten key; seen: Item(" in str(report)
    assert "check_a_scan_of_nothing_is_empty" in report.passed


def test_failing_check_does_not_stop_the_others():
    async def check_that_fails(kit):
        raise ZeroDivisionError

    async def check_that_passes(kit):
        assert kit.prefix == "/test/check_that_passes/"

    report = run(run_checks(kit_for(Engine, MemoryBackend), [check_that_fails, check_that_passes]))
    assert list(report.failed) == ["check_that_fails"]
    assert report.passed == ("check_that_passes",)
