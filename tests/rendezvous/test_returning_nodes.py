"""Those who come back to a server that has lost its memory: how long nothing forms, and above which numbers."""

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.decide import Form, Wait
from rallypoint.rendezvous.records import ClaimRecord
from rallypoint.rendezvous.returning_nodes import LOOK_AGAIN_S, UNTOLD_TTL_S, ReturningNodes
from tests.rendezvous.board import Board

START = 100.0


def claim(node: str, number: int = 5, size: int = 3, *, member: bool = True, floor: int = 0, ttl_s: float = 6.0):
    return ClaimRecord(
        id=node, round=number, size=size, is_member=member, floor=max(floor, number if member else 0), ttl_s=ttl_s
    )


def returning(*nodes: str, **fields) -> ReturningNodes:
    """These nodes are back and have said where they stood."""
    found = ReturningNodes(START)
    for node in nodes:
        found.expect(f"client of {node}")
        found.claim(f"client of {node}", claim(node, **fields))
    return found


# --- how long ---------------------------------------------------------------------------------------------------------


def test_server_that_nobody_knew_holds_nothing():
    assert ReturningNodes(START).holds_until(START) is None


def test_nothing_forms_until_one_time_to_live_after_the_start():
    found = returning("a", ttl_s=6.0)
    assert found.holds_until(START) is not None
    assert found.holds_until(START + 5.999) == START + 6.0
    assert found.holds_until(START + 6.0) is None
    assert found.holds_until(START + 1_000.0) is None


def test_it_is_looked_at_again_soon_as_claims_come_without_a_change_of_keys():
    found = returning("a")
    assert found.holds_until(START + 1.0) == START + 1.0 + LOOK_AGAIN_S


def test_hold_does_not_end_early_although_all_members_have_said_that_they_know():
    found = returning("a", "b", "c")
    assert found.members == {"a", "b", "c"}
    assert found.holds_until(START + 5.999) == START + 6.0, (
        "others may be in a round of a life that they know nothing of"
    )


def test_those_who_came_back_and_know_of_no_round_prove_nothing():
    found = returning("a", "b", number=0, size=0, member=False, ttl_s=6.0)
    assert found.holds_until(START + 5.9) == START + 6.0
    assert found.holds_until(START + 6.0) is None


def test_one_who_only_looks_on_holds_nothing_once_it_has_said_so():
    found = ReturningNodes(START)
    found.expect("observer")
    assert found.holds_until(START) is not None
    found.claim("observer", ClaimRecord(id="observer"))
    assert found.holds_until(START) is None


def test_one_who_never_says_it_is_waited_for_as_long_as_a_time_to_live_usually_is():
    found = ReturningNodes(START)
    found.expect("silent")
    assert found.holds_until(START + UNTOLD_TTL_S - 0.01) is not None
    assert found.holds_until(START + UNTOLD_TTL_S) is None


def test_longest_time_to_live_that_was_told_counts():
    found = returning("a", ttl_s=6.0)
    found.claim("client of b", claim("b", ttl_s=20.0))
    assert found.holds_until(START + 19.9) == START + 20.0


# --- numbers ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans())))
def test_floor_is_the_highest_number_that_anybody_told(told):
    found = ReturningNodes(START)
    for number, (at, floor, member) in enumerate(told):
        found.claim(f"c{number}", ClaimRecord(id=f"n{number}", round=at, size=3, is_member=member, floor=floor))
    assert found.floor == max([0, *(max(at, floor) for at, floor, _ in told)])
    assert found.round == max([0, *(at for at, _, _ in told)])


def test_next_number_is_above_all_floors_that_were_shown():
    board = Board(min_nodes=2, max_nodes=2)
    board.join("a", "b")
    assert board.view.next_number() == 1
    board.view.returning = returning("x", number=7, size=1, floor=9)
    assert board.view.next_number() == 10
    board.join("c", floor=12)
    assert board.view.next_number() == 13


# --- deciding ---------------------------------------------------------------------------------------------------------


def test_nothing_is_formed_while_somebody_may_be_at_work():
    board = Board(min_nodes=2, max_nodes=2)
    board.view.returning = returning("a", "b", ttl_s=6.0)
    board.join("a", "b")
    decision = board.decide()
    assert isinstance(decision, Wait)
    assert decision.why == (
        "the server was restarted without its data: nothing forms for one time to live from its start, because "
        "somebody may still be at work in a round; 2 of 3 members of round 5 are back"
    )
    assert decision.until == board.now + LOOK_AGAIN_S


def test_round_is_formed_without_those_who_never_came_back():
    board = Board(min_nodes=2, max_nodes=2)
    board.view.returning = returning("a", "b", ttl_s=6.0)
    board.join("a", "b")
    assert isinstance(board.decide(), Wait)
    assert isinstance(board.decide(after_s=5.9), Wait)
    assert isinstance(board.decide(after_s=0.1), Form)


def test_survivors_of_a_server_without_its_data_do_not_wait_out_a_last_call():
    board = Board(min_nodes=2, max_nodes=4, last_call_timeout=30)
    board.view.returning = returning("a", "b", ttl_s=6.0)
    board.join("a", "b")
    assert isinstance(board.decide(after_s=5.9), Wait)
    decision = board.decide(after_s=0.1)
    assert isinstance(decision, Form)
    assert decision.why == "every live node has joined: 2"


def test_survivor_that_is_back_and_has_not_joined_yet_is_waited_for_until_the_last_call_is_over():
    board = Board(min_nodes=2, max_nodes=4, last_call_timeout=30)
    board.view.returning = returning("a", "b", "c", ttl_s=6.0)
    board.join("a", "b")
    decision = board.decide(after_s=6.0)
    assert isinstance(decision, Wait)
    assert decision.why.startswith("last call of 30 s: 2 of at most 4 nodes joined")
    board.join("c")
    assert isinstance(board.decide(), Form)


def test_last_call_is_not_cut_short_when_nobody_who_came_back_knew_of_a_round():
    board = Board(min_nodes=2, max_nodes=4, last_call_timeout=30)
    board.view.returning = returning("a", "b", number=0, size=0, member=False)
    board.join("a", "b")
    assert board.decide(after_s=6.0).why.startswith("last call")


def test_fixed_last_call_is_waited_out_after_a_restart_too():
    board = Board(min_nodes=2, max_nodes=4, last_call_timeout=30, last_call_mode="fixed")
    board.view.returning = returning("a", "b", size=2)
    board.join("a", "b")
    assert board.decide(after_s=6.0).why.startswith("last call")


def test_sentence_before_anybody_has_said_where_it_stood():
    board = Board(min_nodes=1, max_nodes=1)
    board.view.returning = ReturningNodes(board.now)
    board.view.returning.expect("client")
    board.join("a")
    assert board.why() == (
        "the server was restarted without its data: nothing forms for one time to live from its start, because "
        "somebody may still be at work in a round"
    )
