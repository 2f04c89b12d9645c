"""Resent requests are answered again and never executed again."""

import pytest

from rallypoint.kv.dedupe import Dedupe
from rallypoint.kv.types import (
    Add,
    AddResult,
    Delete,
    Exists,
    Failure,
    FailureCode,
    Get,
    Grant,
    KeepAlive,
    LeaseResult,
    Origin,
    Put,
    Range,
    Revoke,
    Tick,
    Ticked,
    Txn,
    TxnResult,
)
from tests.kv.stores import Store, refusal


def test_a_request_sent_again_counts_once_and_gets_the_same_answer() -> None:
    store = Store()
    origin = Origin("client", 1)
    assert store.apply(Add("n", 5), origin) == AddResult(True, 2, 5)
    assert store.apply(Add("n", 5), origin) == AddResult(True, 2, 5)
    assert store.item("n").value == b"5"
    assert store.revision == 2


@pytest.mark.parametrize(
    "op",
    [
        Txn((), (Put("a", b""), Get("b"), Range(""))),
        Txn((Exists("b", wanted=False),), (Put("b", b""),)),
        Txn((), (Delete("b"),)),
        Add("n", 1),
        Grant(5.0),
        KeepAlive(1),
        Revoke(1),
        Tick(),
        Add("word", 1),
        Txn((), (Put("a", b"", 99),)),
        Grant(-1.0),
    ],
)
def test_the_first_answer_is_repeated_even_if_the_state_has_changed(op) -> None:
    store = Store()
    store.grant(100.0)
    store.put("b")
    store.put("word", b"no number")
    origin = Origin("client", 1)
    first = store.apply(op, origin)
    store.put("b", b"changed")
    store.put("word", b"1")
    store.txn(Delete("n"))
    revision, watch = store.revision, store.watch("")
    assert store.apply(op, origin) == first
    assert store.revision == revision
    assert store.told[watch] == []


def test_a_resent_request_with_other_content_gets_the_first_answer() -> None:
    store = Store()
    store.apply(Add("n", 5), Origin("client", 1))
    assert store.apply(Add("n", 7), Origin("client", 1)) == AddResult(True, 2, 5)


def test_leases_expire_also_when_a_request_is_only_answered_again() -> None:
    store = Store()
    store.apply(Add("n", 5), Origin("client", 1))
    store.put("a", lease=store.grant(1.0))
    store.now = 1.0
    assert store.apply(Add("n", 5), Origin("client", 1)) == AddResult(True, 2, 5)
    assert store.keys() == ["n"]


def test_a_resent_renewal_does_not_renew_again() -> None:
    store = Store()
    lease = store.grant(5.0)
    store.now = 1.0
    store.apply(KeepAlive(lease), Origin("client", 1))
    store.now = 3.0
    assert store.apply(KeepAlive(lease), Origin("client", 1)) == LeaseResult(lease, 5.0, True)
    assert store.engine.next_deadline() == 6.0


def test_a_lease_that_was_gone_stays_the_answer() -> None:
    store = Store()
    op = Txn((), (Put("a", b"", 1),))
    assert refusal(store.apply(op, Origin("client", 1))) is FailureCode.LEASE_GONE
    assert store.grant(5.0) == 1
    assert refusal(store.apply(op, Origin("client", 1))) is FailureCode.LEASE_GONE
    assert store.keys() == []
    assert store.apply(op, Origin("client", 2)) == TxnResult(True, 2, store.txn(Put("b", b"")).results)


def test_requests_of_different_clients_are_distinguished_by_client_id() -> None:
    store = Store()
    assert store.apply(Add("n", 1), Origin("a", 1)) == AddResult(True, 2, 1)
    assert store.apply(Add("n", 1), Origin("b", 1)) == AddResult(True, 3, 2)


def test_requests_without_an_origin_are_executed_each_time() -> None:
    store = Store()
    store.apply(Add("n", 1))
    assert store.apply(Add("n", 1)) == AddResult(True, 3, 2)


def test_requests_that_overtake_each_other_are_each_executed_once() -> None:
    store = Store()
    answers = {seq: store.apply(Add("n", 1), Origin("client", seq)) for seq in (3, 1, 2)}
    assert [answers[seq].value for seq in (3, 1, 2)] == [1, 2, 3]
    assert {seq: store.apply(Add("n", 1), Origin("client", seq)) for seq in (1, 2, 3)} == answers


def test_an_acknowledged_request_that_comes_late_is_not_executed() -> None:
    store = Store()
    store.apply(Add("n", 1), Origin("client", 1))
    store.apply(Tick(), Origin("client", 2, acked=1))
    assert refusal(store.apply(Add("n", 1), Origin("client", 1))) is FailureCode.TOO_OLD
    assert store.item("n").value == b"1"
    assert store.apply(Tick(), Origin("client", 2, acked=1)) == Ticked(0)


def test_an_acknowledged_request_that_was_never_seen_is_not_executed() -> None:
    store = Store()
    store.apply(Tick(), Origin("client", 9, acked=8))
    assert refusal(store.apply(Add("n", 1), Origin("client", 5))) is FailureCode.TOO_OLD
    assert store.get("n") is None


def test_acknowledgements_do_not_go_back() -> None:
    store = Store()
    store.apply(Add("n", 1), Origin("client", 1))
    store.apply(Tick(), Origin("client", 2, acked=1))
    store.apply(Tick(), Origin("client", 3, acked=0))
    assert refusal(store.apply(Add("n", 1), Origin("client", 1))) is FailureCode.TOO_OLD


@pytest.mark.parametrize("acked", [1, 2, 2**63])
def test_a_request_cannot_acknowledge_itself_or_what_comes_after_it(acked: int) -> None:
    store = Store()
    origin = Origin("client", 1, acked)
    assert store.apply(Add("n", 1), origin) == AddResult(True, 2, 1)
    assert store.apply(Add("n", 1), origin) == AddResult(True, 2, 1)
    assert store.apply(Add("n", 1), Origin("client", 2, 1)) == AddResult(True, 3, 2)


@pytest.mark.parametrize("seq", [0, -1])
def test_requests_are_numbered_from_one(seq: int) -> None:
    store = Store()
    for _ in range(2):
        assert refusal(store.apply(Add("n", 1), Origin("client", seq))) is FailureCode.INVALID
    assert store.get("n") is None
    assert store.apply(Add("n", 1), Origin("client", 1)) == AddResult(True, 2, 1)


# Bounds


def test_a_client_that_acknowledges_nothing_keeps_its_last_answers() -> None:
    store = Store()
    for seq in range(1, 1_101):
        store.apply(Add("n", 1), Origin("client", seq))
    assert refusal(store.apply(Add("n", 1), Origin("client", 1_100 - 1_024))) is FailureCode.TOO_OLD
    for seq in (1_100 - 1_023, 1_100):
        assert store.apply(Add("n", 1), Origin("client", seq)).value == seq
    assert store.item("n").value == b"1100"


def answered(dedupe: Dedupe, client: str, seq: int, acked: int = 0) -> None:
    origin = Origin(client, seq, acked)
    assert dedupe.lookup(origin) is None
    dedupe.remember(origin, Ticked(seq))


def test_the_least_recently_active_client_is_dropped_first() -> None:
    dedupe = Dedupe(max_clients=3)
    for client in ("a", "b", "c"):
        answered(dedupe, client, 1)
    answered(dedupe, "a", 2)
    answered(dedupe, "d", 1)
    assert list(dedupe.clients) == ["c", "a", "d"]
    assert dedupe.lookup(Origin("a", 1)) == Ticked(1)
    assert dedupe.lookup(Origin("b", 1)) is None


def test_the_lowest_numbers_of_a_client_are_dropped_first_in_any_order_of_arrival() -> None:
    dedupe = Dedupe(max_answers=3)
    for seq in (7, 2, 9, 4):
        answered(dedupe, "a", seq)
    assert sorted(dedupe.clients["a"].answers) == [4, 7, 9]
    assert isinstance(dedupe.lookup(Origin("a", 2)), Failure)
    assert isinstance(dedupe.lookup(Origin("a", 1)), Failure)
    assert dedupe.lookup(Origin("a", 3)) is None


def test_memory_stays_within_bounds_whatever_clients_do() -> None:
    dedupe = Dedupe(max_clients=5, max_answers=4)
    for number in range(1, 500):
        answered(dedupe, f"client{number % 17}", number, acked=number - 30 if number % 3 else 0)
        assert len(dedupe.clients) <= 5
        assert all(len(known.answers) <= 4 for known in dedupe.clients.values())


def test_acknowledging_a_far_number_costs_at_most_the_kept_answers() -> None:
    dedupe = Dedupe()
    answered(dedupe, "a", 1)
    answered(dedupe, "a", 2**62, acked=2**62 - 1)
    assert list(dedupe.clients["a"].answers) == [2**62]


def test_answers_of_sixty_five_thousand_clients_are_kept() -> None:
    dedupe = Dedupe()
    for number in range(65_537):
        answered(dedupe, f"client{number}", 1)
    assert dedupe.lookup(Origin("client0", 1)) is None
    assert dedupe.lookup(Origin("client1", 1)) == Ticked(1)
    assert dedupe.lookup(Origin("client65536", 1)) == Ticked(1)
