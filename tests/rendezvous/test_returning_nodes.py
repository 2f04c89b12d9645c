"""Nodes that return to a server which has lost its data: how long nothing forms, and the next number."""

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.decide import Form, Wait
from rallypoint.rendezvous.records import ClaimRecord
from rallypoint.rendezvous.returning_nodes import ASSUMED_TTL_S, LOOK_AGAIN_S, ReturningNodes
from tests.rendezvous.fake_run import FakeRun

START = 100.0


def claim(node: str, number: int = 5, size: int = 3, *, member: bool = True, floor: int = 0, ttl_s: float = 6.0):
    return ClaimRecord(
        id=node, round=number, size=size, is_member=member, floor=max(floor, number if member else 0), ttl_s=ttl_s
    )


def returning(*nodes: str, **fields) -> ReturningNodes:
    """These nodes have returned and sent their claims."""
    found = ReturningNodes(START)
    for node in nodes:
        found.expect(f"client of {node}")
        found.claim(f"client of {node}", claim(node, **fields))
    return found


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_server_without_returning_nodes_does_not_wait():
    assert ReturningNodes(START).holds_until(START) is None


def test_nothing_forms_until_one_time_to_live_after_the_start():
    found = returning("a", ttl_s=6.0)
    assert found.holds_until(START) is not None
    assert found.holds_until(START + 5.999) == START + 6.0
    assert found.holds_until(START + 6.0) is None
    assert found.holds_until(START + 1_000.0) is None


def test_decision_is_repeated_soon_because_claims_change_no_key():
    found = returning("a")
    assert found.holds_until(START + 1.0) == START + 1.0 + LOOK_AGAIN_S


def test_wait_does_not_end_early_when_all_members_have_returned():
    found = returning("a", "b", "c")
    assert found.members == {"a", "b", "c"}
    assert found.holds_until(START + 5.999) == START + 6.0, "others may be in a later round that these do not know"


def test_wait_does_not_end_early_when_returned_nodes_know_no_round():
    found = returning("a", "b", number=0, size=0, member=False, ttl_s=6.0)
    assert found.holds_until(START + 5.9) == START + 6.0
    assert found.holds_until(START + 6.0) is None


def test_claim_of_a_read_only_client_ends_the_wait_for_it():
    found = ReturningNodes(START)
    found.expect("observer")
    assert found.holds_until(START) is not None
    found.claim("observer", ClaimRecord(id="observer"))
    assert found.holds_until(START) is None


def test_client_without_claim_is_waited_for_during_the_assumed_time_to_live():
    found = ReturningNodes(START)
    found.expect("silent")
    assert found.holds_until(START + ASSUMED_TTL_S - 0.01) is not None
    assert found.holds_until(START + ASSUMED_TTL_S) is None


def test_longest_reported_time_to_live_counts():
    found = returning("a", ttl_s=6.0)
    found.claim("client of b", claim("b", ttl_s=20.0))
    assert found.holds_until(START + 19.9) == START + 20.0


# --- numbers ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans())))
def test_floor_is_the_highest_reported_number(claims):
    found = ReturningNodes(START)
    for number, (at, floor, member) in enumerate(claims):
        found.claim(f"c{number}", ClaimRecord(id=f"n{number}", round=at, size=3, is_member=member, floor=floor))
    assert found.floor == max([0, *(max(at, floor) for at, floor, _ in claims)])
    assert found.round == max([0, *(at for at, _, _ in claims)])


def test_next_number_is_above_all_reported_floors():
    run = FakeRun(min_nodes=2, max_nodes=2)
    run.join("a", "b")
    assert run.view.next_number() == 1
    run.view.returning = returning("x", number=7, size=1, floor=9)
    assert run.view.next_number() == 10
    run.join("c", floor=12)
    assert run.view.next_number() == 13


# --- deciding ---------------------------------------------------------------------------------------------------------


def test_nothing_forms_while_nodes_may_be_working():
    run = FakeRun(min_nodes=2, max_nodes=2)
    run.view.returning = returning("a", "b", ttl_s=6.0)
    run.join("a", "b")
    decision = run.decide()
    assert isinstance(decision, Wait)
    assert decision.why == (
        "the server was restarted without its data: nothing forms for one time to live from its start, because "
        "nodes may still be working in a round; 2 of 3 members of round 5 are back"
    )
    assert decision.until == run.now + LOOK_AGAIN_S


def test_round_forms_without_nodes_that_never_return():
    run = FakeRun(min_nodes=2, max_nodes=2)
    run.view.returning = returning("a", "b", ttl_s=6.0)
    run.join("a", "b")
    assert isinstance(run.decide(), Wait)
    assert isinstance(run.decide(after_s=5.9), Wait)
    assert isinstance(run.decide(after_s=0.1), Form)


def test_last_call_ends_early_when_all_returned_members_joined():
    run = FakeRun(min_nodes=2, max_nodes=4, last_call_timeout=30)
    run.view.returning = returning("a", "b", ttl_s=6.0)
    run.join("a", "b")
    assert isinstance(run.decide(after_s=5.9), Wait)
    decision = run.decide(after_s=0.1)
    assert isinstance(decision, Form)
    assert decision.why == "every live node has joined: 2"


def test_last_call_waits_for_a_returned_member_that_has_not_joined():
    run = FakeRun(min_nodes=2, max_nodes=4, last_call_timeout=30)
    run.view.returning = returning("a", "b", "c", ttl_s=6.0)
    run.join("a", "b")
    decision = run.decide(after_s=6.0)
    assert isinstance(decision, Wait)
    assert decision.why.startswith("last call of 30 s: 2 of at most 4 nodes joined")
    run.join("c")
    assert isinstance(run.decide(), Form)


def test_last_call_does_not_end_early_when_returned_nodes_know_no_round():
    run = FakeRun(min_nodes=2, max_nodes=4, last_call_timeout=30)
    run.view.returning = returning("a", "b", number=0, size=0, member=False)
    run.join("a", "b")
    assert run.decide(after_s=6.0).why.startswith("last call")


def test_fixed_last_call_does_not_end_early_after_a_restart():
    run = FakeRun(min_nodes=2, max_nodes=4, last_call_timeout=30, last_call_mode="fixed")
    run.view.returning = returning("a", "b", size=2)
    run.join("a", "b")
    assert run.decide(after_s=6.0).why.startswith("last call")


def test_reason_before_the_first_claim():
    run = FakeRun(min_nodes=1, max_nodes=1)
    run.view.returning = ReturningNodes(run.now)
    run.view.returning.expect("client")
    run.join("a")
    assert run.why() == (
        "the server was restarted without its data: nothing forms for one time to live from its start, because "
        "nodes may still be working in a round"
    )
