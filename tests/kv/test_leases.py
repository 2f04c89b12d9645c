"""Leases of the engine: when they end, and which keys are removed with them."""

import math
import tracemalloc

import pytest

from rallypoint.kv.leases import SPARE_ENTRIES
from rallypoint.kv.types import (
    Add,
    AddResult,
    Batch,
    Change,
    Delete,
    FailureCode,
    Grant,
    Item,
    KeepAlive,
    LeaseResult,
    Put,
    Revoke,
    Shorten,
    Tick,
    Ticked,
    Txn,
)
from tests.kv.stores import Store, refusal


def test_leases_are_numbered_and_numbers_are_not_used_again() -> None:
    store = Store()
    assert store.apply(Grant(5.0)) == LeaseResult(1, 5.0, True)
    store.apply(Revoke(1))
    assert store.apply(Grant(2.5)) == LeaseResult(2, 2.5, True)


def test_a_lease_has_the_number_that_was_chosen_for_it() -> None:
    store = Store()
    assert store.apply(Grant(5.0, 77)) == LeaseResult(77, 5.0, True)
    store.put("a", lease=77)
    assert store.apply(Grant(5.0)) == LeaseResult(1, 5.0, True)
    store.now = 5.0
    assert store.keys() == []


@pytest.mark.parametrize("chosen", [-1, 1, 77])
def test_an_id_that_is_taken_or_negative_is_refused(chosen: int) -> None:
    store = Store()
    store.apply(Grant(5.0))
    store.apply(Grant(5.0, 77))
    store.now = 2.0
    assert refusal(store.apply(Grant(60.0, chosen))) is FailureCode.INVALID
    assert store.engine.next_deadline() == 5.0


def test_chosen_ids_are_skipped_by_the_numbering() -> None:
    store = Store()
    for chosen in (1, 2, 4):
        store.apply(Grant(5.0, chosen))
    assert [store.grant(5.0) for _ in range(3)] == [3, 5, 6]


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_a_lease_without_a_positive_time_to_live_is_refused(ttl_s: float) -> None:
    store = Store()
    assert refusal(store.apply(Grant(ttl_s))) is FailureCode.INVALID
    assert store.engine.next_deadline() is None
    assert store.grant(1.0) == 1


def test_a_lease_and_its_keys_last_until_just_before_its_deadline() -> None:
    store = Store()
    store.now = 100.0
    store.put("a", lease=store.grant(5.0))
    store.now = 104.999
    assert store.apply(Tick()) == Ticked(0)
    assert store.keys() == ["a"]


def test_a_lease_ends_at_its_deadline_with_all_its_keys_in_one_revision() -> None:
    store = Store()
    lease = store.grant(5.0)
    for key in ["b", "a", "c"]:
        store.put(key, lease=lease)
    watch = store.watch("")
    store.now = 5.0
    assert store.apply(Tick()) == Ticked(1)
    assert store.keys() == []
    assert store.told[watch] == [Batch(5, (Change("a", None), Change("b", None), Change("c", None)))]


def test_a_lease_without_keys_ends_without_a_revision() -> None:
    store = Store()
    store.grant(5.0)
    store.now = 5.0
    assert store.apply(Tick()) == Ticked(1)
    assert store.revision == 1


def test_expired_leases_end_before_the_operation_is_executed() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.put("a", b"old", lease)
    store.now = 5.0
    assert store.get("a") is None
    assert store.revision == 3


def test_a_key_written_at_the_instant_its_lease_ends_is_a_new_key_without_it() -> None:
    store = Store()
    store.put("a", b"old", store.grant(5.0))
    watch = store.watch("a")
    store.now = 5.0
    assert store.put("a", b"new") == 4
    assert store.get("a") == Item("a", b"new", 4, 4, 1)
    assert store.told[watch] == [
        Batch(3, (Change("a", None),)),
        Batch(4, (Change("a", Item("a", b"new", 4, 4, 1)),)),
    ]


def test_writing_under_a_lease_at_the_instant_it_ends_is_refused() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.now = 5.0
    result = store.apply(Txn((), (Put("b", b""), Put("a", b"", lease))))
    assert refusal(result) is FailureCode.LEASE_GONE
    assert result.lease == lease
    assert store.keys() == []


@pytest.mark.parametrize("lease", [1, 7, -1])
def test_writing_under_a_lease_that_was_never_granted_is_refused(lease: int) -> None:
    store = Store()
    assert refusal(store.apply(Txn((), (Put("a", b"", lease),)))) is FailureCode.LEASE_GONE
    assert refusal(store.apply(Add("a", 1, lease))) is FailureCode.LEASE_GONE
    assert store.revision == 1


def test_a_renewed_lease_has_its_full_time_again() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.put("a", lease=lease)
    store.now = 4.0
    assert store.apply(KeepAlive(lease)) == LeaseResult(lease, 5.0, True)
    assert store.engine.next_deadline() == 9.0
    store.now = 8.9
    assert store.keys() == ["a"]
    store.now = 9.0
    assert store.keys() == []


def test_a_renewal_changes_no_key() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.put("a", lease=lease)
    watch = store.watch("")
    store.apply(KeepAlive(lease))
    assert store.revision == 2
    assert store.told[watch] == []


def test_a_renewal_at_the_deadline_comes_too_late() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.now = 5.0
    assert store.apply(KeepAlive(lease)) == LeaseResult(lease, 0.0, False)


def test_a_lease_that_ended_stays_ended() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.apply(Revoke(lease))
    assert store.apply(KeepAlive(lease)) == LeaseResult(lease, 0.0, False)
    assert store.apply(Revoke(lease)) == LeaseResult(lease, 0.0, False)


def test_revoking_a_lease_removes_its_keys_at_once() -> None:
    store = Store()
    lease, other = store.grant(5.0), store.grant(5.0)
    store.txn(Put("b", b"", lease), Put("a", b"", lease), Put("c", b"", other), Put("d", b""))
    watch = store.watch("")
    assert store.apply(Revoke(lease)) == LeaseResult(lease, 0.0, False)
    assert store.keys() == ["c", "d"]
    assert store.told[watch] == [Batch(3, (Change("a", None), Change("b", None)))]


def test_a_revoked_lease_does_not_end_again_by_time() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.put("a", lease=lease)
    store.apply(Revoke(lease))
    store.put("a")
    store.now = 5.0
    assert store.apply(Tick()) == Ticked(0)
    assert store.keys() == ["a"]


def test_a_key_that_moved_to_another_lease_is_not_removed_with_the_first() -> None:
    store = Store()
    first, second = store.grant(5.0), store.grant(9.0)
    store.put("a", lease=first)
    store.put("a", lease=second)
    assert store.item("a").lease == second
    store.now = 5.0
    assert store.keys() == ["a"]
    store.now = 9.0
    assert store.keys() == []


def test_a_key_written_without_a_lease_loses_the_one_it_had() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.put("a", lease=lease)
    store.put("a")
    assert store.item("a").lease == 0
    store.now = 5.0
    assert store.keys() == ["a"]


def test_a_key_written_again_under_the_same_lease_is_removed_with_it_once() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.put("a", lease=lease)
    store.put("a", lease=lease)
    watch = store.watch("a")
    store.now = 5.0
    store.apply(Tick())
    assert store.told[watch] == [Batch(4, (Change("a", None),))]


def test_a_key_that_moved_back_to_its_first_lease_is_removed_with_that() -> None:
    store = Store()
    first, second = store.grant(5.0), store.grant(1.0)
    store.put("a", lease=first)
    store.put("a", lease=second)
    store.put("a", lease=first)
    store.now = 1.0
    assert store.keys() == ["a"]
    store.now = 5.0
    assert store.keys() == []


def test_a_deleted_key_that_is_written_again_without_a_lease_has_none() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.put("a", lease=lease)
    store.txn(Delete("a"))
    store.put("a")
    store.apply(Revoke(lease))
    assert store.keys() == ["a"]


def test_a_counter_can_have_a_lease_and_every_add_sets_it() -> None:
    store = Store()
    lease = store.grant(5.0)
    assert store.apply(Add("n", 1, lease)) == AddResult(True, 2, 1)
    assert store.item("n").lease == lease
    store.apply(Add("n", 1))
    assert store.item("n").lease == 0
    store.apply(Add("m", 1, lease))
    store.now = 5.0
    assert store.keys() == ["n"]


def test_leases_end_in_order_of_their_deadlines_and_then_of_their_numbers() -> None:
    store = Store()
    late, first, second, renewed = (store.grant(ttl_s) for ttl_s in (9.0, 5.0, 5.0, 1.0))
    for key, lease in [("late", late), ("second", second), ("first", first), ("renewed", renewed)]:
        store.put(key, lease=lease)
    store.now = 0.5
    for _ in range(3):
        store.apply(KeepAlive(renewed))
    watch = store.watch("")
    store.now = 20.0
    assert store.apply(Tick()) == Ticked(4)
    assert [[change.key for change in batch.changes] for batch in store.told[watch]] == [
        ["renewed"],
        ["first"],
        ["second"],
        ["late"],
    ]


def test_the_next_deadline_is_the_earliest_of_the_leases_alive() -> None:
    store = Store()
    assert store.engine.next_deadline() is None
    long, short = store.grant(9.0), store.grant(5.0)
    assert store.engine.next_deadline() == 5.0
    store.now = 3.0
    store.apply(KeepAlive(short))
    assert store.engine.next_deadline() == 8.0
    store.apply(Revoke(short))
    assert store.engine.next_deadline() == 9.0
    store.apply(Revoke(long))
    assert store.engine.next_deadline() is None


def test_a_tick_at_the_next_deadline_always_ends_a_lease() -> None:
    store = Store()
    for ttl_s in (0.3, 0.1, 0.7, 1e-9, 1e9, 1 / 3):
        store.grant(ttl_s)
    for _ in range(6):
        deadline = store.engine.next_deadline()
        assert deadline is not None
        store.now = deadline
        assert store.apply(Tick()) == Ticked(1)
    assert store.engine.next_deadline() is None


def test_time_that_goes_back_ends_nothing_and_renews_from_the_latest_time() -> None:
    store = Store()
    store.now = 100.0
    lease = store.grant(5.0)
    store.put("a", lease=lease)
    store.now = 3.0
    assert store.apply(KeepAlive(lease)) == LeaseResult(lease, 5.0, True)
    assert store.engine.next_deadline() == 105.0
    store.now = 105.0
    assert store.keys() == []


def test_revoked_leases_leave_no_heap_entries() -> None:
    store = Store()

    def grant_and_revoke(times: int) -> None:
        for _ in range(times):
            store.apply(Revoke(store.grant(1e9)))

    store.grant(1e9)
    grant_and_revoke(1_000)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        grant_and_revoke(5_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000


# Shortened leases


def test_a_shortened_lease_ends_within_the_time_with_its_keys() -> None:
    store = Store()
    lease = store.grant(15.0)
    store.put("a", lease=lease)
    store.now = 4.0
    assert store.apply(Shorten(lease, 1.0)) == LeaseResult(lease, 15.0, True)
    assert store.engine.next_deadline() == 5.0
    store.now = 4.999
    assert store.keys() == ["a"]
    store.now = 5.0
    assert store.keys() == []


def test_shortening_never_lengthens() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.now = 4.0
    for within_s in (1.0, 1.5, 100.0, math.inf):
        assert store.apply(Shorten(lease, within_s)) == LeaseResult(lease, 5.0, True)
        assert store.engine.next_deadline() == 5.0
    store.apply(Shorten(lease, 0.25))
    store.apply(Shorten(lease, 0.5))
    assert store.engine.next_deadline() == 4.25


def test_a_shortened_lease_that_is_renewed_has_its_full_time_again() -> None:
    store = Store()
    lease = store.grant(15.0)
    store.put("a", lease=lease)
    store.apply(Shorten(lease, 1.0))
    store.now = 0.9
    assert store.apply(KeepAlive(lease)) == LeaseResult(lease, 15.0, True)
    assert store.engine.next_deadline() == 15.9
    store.now = 15.8
    assert store.keys() == ["a"]
    store.now = 15.9
    assert store.keys() == []


@pytest.mark.parametrize("within_s", [0.0, -1.0, -math.inf, math.nan])
def test_a_lease_shortened_to_nothing_ends_with_the_next_operation(within_s: float) -> None:
    store = Store()
    lease = store.grant(5.0)
    store.put("a", lease=lease)
    watch = store.watch("")
    store.now = 2.0
    assert store.apply(Shorten(lease, within_s)) == LeaseResult(lease, 5.0, True)
    assert store.engine.next_deadline() == 2.0
    assert store.apply(Tick()) == Ticked(1)
    assert store.told[watch] == [Batch(3, (Change("a", None),))]


@pytest.mark.parametrize("lease", [0, 7, -1])
def test_shortening_a_lease_that_is_not_alive_changes_nothing(lease: int) -> None:
    store = Store()
    gone = store.grant(5.0)
    store.apply(Revoke(gone))
    for unknown in (lease, gone):
        assert store.apply(Shorten(unknown, 1.0)) == LeaseResult(unknown, 0.0, False)
    assert store.engine.next_deadline() is None
    assert store.revision == 1


def test_shortening_at_the_deadline_comes_too_late() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.now = 5.0
    assert store.apply(Shorten(lease, 1.0)) == LeaseResult(lease, 0.0, False)


def test_shortening_changes_no_key_and_no_other_lease() -> None:
    store = Store()
    lease, other = store.grant(5.0), store.grant(5.0)
    store.put("a", lease=lease)
    store.put("b", lease=other)
    watch = store.watch("")
    store.apply(Shorten(lease, 1.0))
    assert (store.revision, store.told[watch]) == (3, [])
    store.now = 1.0
    assert store.keys() == ["b"]
    store.now = 5.0
    assert store.keys() == []


def test_a_shortened_lease_that_was_revoked_does_not_end_again() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.put("a", lease=lease)
    store.apply(Shorten(lease, 1.0))
    store.apply(Revoke(lease))
    store.put("a")
    for now in (1.0, 5.0):
        store.now = now
        assert store.apply(Tick()) == Ticked(0)
    assert store.keys() == ["a"]


@pytest.mark.parametrize("alive", [1, 100])
def test_cycles_of_shortening_and_renewing_leave_no_more_entries_than_leases(alive: int) -> None:
    store = Store()
    leases = [store.grant(1e6) for _ in range(alive)]
    most = 0
    for cycle in range(2_000):
        store.now += 0.001
        lease = leases[cycle % alive]
        store.apply(Shorten(lease, 10.0))
        store.apply(KeepAlive(lease))
        most = max(most, len(store.engine.leases._heap))
    assert most <= 2 * alive + SPARE_ENTRIES + 1
    assert store.engine.next_deadline() is not None
    store.now = 1e9
    assert store.apply(Tick()) == Ticked(alive)
    assert store.engine.next_deadline() is None


def test_a_lease_with_several_entries_ends_once() -> None:
    store = Store()
    lease = store.grant(10.0)
    store.put("a", lease=lease)
    for within_s in (8.0, 6.0, 4.0):
        store.apply(Shorten(lease, within_s))
    store.now = 3.0
    store.apply(KeepAlive(lease))
    watch = store.watch("")
    store.now = 50.0
    assert store.apply(Tick()) == Ticked(1)
    assert store.told[watch] == [Batch(3, (Change("a", None),))]
