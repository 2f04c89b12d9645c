"""Decisions: every branch with its reason, and the guarantees after any history."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.kv.types import Delete, Put
from rallypoint.rendezvous.decide import (
    LONGEST_ADMISSION_S,
    Activate,
    Decision,
    Forgive,
    Form,
    GiveUp,
    Hold,
    Wait,
    summarise,
)
from rallypoint.rendezvous.records import NodePhase, RosterMember, RoundPhase, WaitingRecord, encode
from tests.rendezvous.board import KEYS, Board, config, node, round_record


def formed(decision: Decision) -> list[str]:
    """The names of a new attempt, in rank order."""
    assert isinstance(decision, Form), decision
    return [candidate.name for candidate in decision.ranked]


def last_call_over(board: Board) -> Decision:
    board.decide()
    return board.decide(after_s=30)


# No decision possible


def test_run_without_config_waits() -> None:
    board = Board()
    board.write(Delete(KEYS.config))
    assert board.why() == "the run has no config yet: no node has joined"


@pytest.mark.parametrize("key", [KEYS.config, KEYS.round, KEYS.closed, KEYS.waiting])
def test_unreadable_key_of_the_run_stops_all_decisions_and_is_named(key: str) -> None:
    board = Board()
    board.join("a", "b", "c", "d")
    board.write(Put(key, b"damaged"))
    assert board.why().startswith(f"{key} cannot be read: {key} holds no ")


def test_reason_of_a_closed_run_names_the_closing_node_and_its_reason() -> None:
    board = Board()
    board.join("a", "b", "c", "d")
    board.close(by="ops", why="maintenance")
    assert board.why() == "the run is closed by ops: maintenance"
    board.close()
    assert board.why() == "the run is closed by an unknown node: no reason given"
    board.close(closed=False)
    assert formed(board.decide()) == ["a", "b", "c", "d"]


def test_attempt_is_given_up_when_the_run_is_closed() -> None:
    board = Board()
    board.join("a", "b")
    board.plan(1, "a", "b")
    board.confirm(1, "a", "b")
    board.close(by="ops", why="enough")
    assert board.decide() == GiveUp((), "the run was closed while it was forming")
    board.view.give_up((), board.now)
    assert board.why() == "the run is closed by ops: enough"


def test_nothing_forms_until_members_above_the_known_round_have_left() -> None:
    board = Board()
    board.join("a", "b", "c", "d")
    board.confirm(5, "x", "y")
    assert board.why() == (
        "the run's data was lost: nothing forms until all nodes have left a round above the known one: x, y"
    )
    board.lose("x")
    board.join("y", join=2, floor=5)
    decision = board.decide()
    assert isinstance(decision, Form)
    assert decision.number == 6


def test_at_most_five_members_above_the_known_round_are_named() -> None:
    board = Board()
    board.confirm(5, *"abcdefgh")
    assert board.why().endswith("a round above the known one: a, b, c, d, e and 3 more")


# Gathering


def test_empty_run_waits_for_the_minimum() -> None:
    assert Board().why() == "0 of at least 2 nodes joined"


def test_too_few_nodes_are_named() -> None:
    board = Board(min_nodes=4)
    board.join("a", "b", "d")
    assert board.why() == "3 of at least 4 nodes joined: a, b, d"


def test_at_most_five_nodes_are_named() -> None:
    board = Board(min_nodes=10, max_nodes=10)
    board.join(*"abcde")
    assert board.why() == "5 of at least 10 nodes joined: a, b, c, d, e"
    board.join(*"fgh")
    assert board.why() == "8 of at least 10 nodes joined: a, b, c, d, e and 3 more"


def test_maximum_forms_at_once() -> None:
    board = Board()
    board.join("d", "b", "a", "c")
    decision = board.decide()
    assert formed(decision) == ["a", "b", "c", "d"]
    assert decision == Form(1, decision.ranked, "all 4 places are taken")  # type: ignore[union-attr]


def test_reason_names_lost_nodes_and_nodes_that_left() -> None:
    board = Board(min_nodes=4)
    board.join("a", "b", "c", "d")
    board.now += 40
    board.lose("c")
    board.leave("d", why="done here")
    board.lose("d")
    assert board.why() == (
        "2 of at least 4 nodes joined: a, b; lost: c (joined at 0 s, lost at 40 s: its session ended); "
        "left: d (done here)"
    )


def test_reason_names_the_round_of_a_lost_member() -> None:
    board = Board(min_nodes=2, hold_back_losses=0)
    board.activate(1, "a", "b")
    board.now += 7
    board.lose("a")
    board.join("b", join=2)
    assert board.why() == (
        "1 of at least 2 nodes joined: b; lost: a (member of round 1, 7 s into it: its session ended)"
    )


def test_node_that_came_back_is_not_named_as_lost() -> None:
    board = Board(min_nodes=4)
    board.join("a", "b")
    board.lose("b")
    board.put(KEYS.node("b2"), node("b", id="b2"))
    assert board.why() == "2 of at least 4 nodes joined: a, b"


def test_drained_and_unconfirmed_nodes_do_not_count() -> None:
    board = Board()
    board.join("a", "b", "c")
    board.drain("a")
    board.view.give_up(["b"], board.now)
    assert board.why() == "1 of at least 2 nodes joined: c; left out because it did not confirm: b"


def test_unconfirmed_node_is_excluded_until_its_key_changes() -> None:
    board = Board(min_nodes=3)
    board.join("a", "b", "c")
    board.view.give_up(["b"], board.now)
    assert board.why().startswith("2 of at least 3")
    board.join("b", join=2)
    assert board.why().startswith("last call of 30 s: 3 of")


def test_at_most_five_unconfirmed_nodes_are_named() -> None:
    board = Board(min_nodes=8, max_nodes=8)
    board.join(*"abcdefg")
    board.view.give_up(list("abcdefg"), board.now)
    assert board.why() == (
        "0 of at least 8 nodes joined; left out because it did not confirm: a, b, c, d, e and 2 more"
    )


# The last call


def test_last_call_starts_when_the_minimum_is_reached() -> None:
    board = Board(last_call_timeout=10)
    board.join("a", "b")
    decision = board.decide()
    assert decision == Wait(
        "last call of 10 s: 2 of at most 4 nodes joined: a, b; more may still come", until=board.now + 10
    )
    assert isinstance(board.decide(after_s=9.9), Wait)
    decision = board.decide(after_s=0.1)
    assert formed(decision) == ["a", "b"]
    assert decision.why == "the last call of 10 s is over"  # type: ignore[union-attr]


def test_arrivals_do_not_prolong_the_last_call() -> None:
    board = Board(last_call_timeout=10)
    board.join("a", "b")
    board.decide()
    board.now += 9
    board.join("c")
    board.decide()
    assert formed(board.decide(after_s=1)) == ["a", "b", "c"]


def test_last_call_stops_below_the_minimum_and_starts_again() -> None:
    board = Board(last_call_timeout=10)
    board.join("a", "b")
    board.decide()
    board.lose("b")
    assert board.why(after_s=9).startswith("1 of at least 2")
    board.join("c")
    assert board.why().startswith("last call")
    assert board.why(after_s=9).startswith("last call")
    assert formed(board.decide(after_s=1)) == ["a", "c"]


def test_maximum_ends_the_last_call() -> None:
    board = Board(last_call_timeout=10)
    board.join("a", "b")
    board.decide()
    board.join("c", "d")
    assert len(formed(board.decide(after_s=1))) == 4


def test_new_coordinator_starts_the_last_call_again() -> None:
    board = Board(last_call_timeout=10)
    board.join("a", "b")
    board.decide()
    board.now += 9
    fresh = Board(last_call_timeout=10)
    fresh.now = board.now
    fresh.view.load(board.scan(), board.engine.revision, board.now)
    assert fresh.why() == "last call of 10 s: 2 of at most 4 nodes joined: a, b; more may still come"
    assert isinstance(fresh.decide(after_s=9), Wait)
    assert isinstance(fresh.decide(after_s=1), Form)


def test_adaptive_last_call_is_not_needed_once_a_round_was_active() -> None:
    board = Board(hold_back_losses=0)
    board.activate(1, "a", "b", "c")
    board.lose("c")
    board.join("a", join=2)
    board.join("b", join=2)
    decision = board.decide()
    assert formed(decision) == ["a", "b"]
    assert decision.why == "every live node has joined: 2"  # type: ignore[union-attr]


def test_fixed_last_call_never_ends_early() -> None:
    board = Board(last_call_mode="fixed", hold_back_losses=0)
    board.activate(1, "a", "b", "c")
    board.join("a", join=2)
    board.join("b", join=2)
    board.lose("c")
    assert board.why().startswith("last call of 30 s: 2 of at most 4")
    assert formed(board.decide(after_s=30)) == ["a", "b"]


def test_round_of_an_earlier_incarnation_does_not_shorten_the_last_call() -> None:
    board = Board()
    board.activate(1, "a", "b")
    board.lose("a", "b")
    board.put(KEYS.config, config(incarnation="second"))
    board.join("x", "y")
    assert board.why().startswith("last call of 30 s: 2 of at most 4 nodes joined: x, y; ")
    assert formed(board.decide(after_s=30)) == ["x", "y"]


def test_last_call_goes_on_after_an_attempt_was_given_up() -> None:
    board = Board(last_call_timeout=10)
    board.join("a", "b", "c")
    last_call_over(board)
    board.plan(1, "a", "b", "c")
    board.lose("c")
    decision = board.decide(after_s=1)
    assert isinstance(decision, GiveUp)
    board.view.give_up(decision.late, board.now)
    assert formed(board.decide()) == ["a", "b"]


def test_last_call_does_not_run_while_a_forgotten_round_has_members() -> None:
    board = Board(last_call_timeout=10)
    board.join("a", "b")
    board.confirm(5, "x")
    board.decide()
    board.decide(after_s=20)
    board.lose("x")
    assert board.why().startswith("last call")


# Admission


def test_nodes_beyond_a_multiple_of_step_are_spares() -> None:
    board = Board(min_nodes=2, max_nodes=6, step=2)
    board.join("a", "b", "c", "d", "e")
    assert formed(last_call_over(board)) == ["a", "b", "c", "d"]


def test_minimum_counts_complete_steps_only() -> None:
    board = Board(min_nodes=4, max_nodes=8, step=4)
    board.join("a", "b", "c")
    assert board.why().startswith("3 of at least 4 nodes joined")


def test_places_go_to_members_first_and_then_by_order_of_joining() -> None:
    board = Board(min_nodes=3, max_nodes=3, hold_back_losses=0)
    board.activate(1, "m", "n", "o")
    board.join("early", "late")
    board.lose("o")
    board.join("m", "n", join=2)
    assert sorted(formed(board.decide())) == ["early", "m", "n"]


def test_survivors_keep_their_ranks_and_a_replacement_gets_the_free_one() -> None:
    board = Board(min_nodes=3, max_nodes=3, hold_back_losses=0)
    board.activate(1, "c", "a", "b")
    board.lose("a")
    board.join("new")
    board.join("b", "c", join=2)
    assert formed(board.decide()) == ["c", "new", "b"]


def test_new_process_on_the_same_machine_gets_its_rank_back() -> None:
    board = Board(min_nodes=3, max_nodes=3, hold_back_losses=0)
    board.activate(1, "c", "a", "b")
    board.lose("a")
    board.put(KEYS.node("a2"), node("a", id="a2"))
    board.join("b", "c", join=2)
    assert formed(board.decide()) == ["c", "a", "b"]


def test_of_two_nodes_with_one_name_the_previous_owner_keeps_the_rank() -> None:
    board = Board(min_nodes=3, max_nodes=3)
    board.activate(1, "b", "a", "c")
    board.lose("c")
    board.put(KEYS.node("another"), node("a", id="another"))
    board.join("b", "a", join=2)
    decision = board.decide()
    assert isinstance(decision, Form)
    assert [candidate.id for candidate in decision.ranked] == ["b", "a", "another"]


def test_held_back_node_is_chosen_last_when_its_hold_is_over() -> None:
    board = Board(min_nodes=2, max_nodes=3)
    board.hold("a", hold_s=30)
    board.join("a", "b", "c")
    assert board.why() == (
        "last call of 30 s: 2 of at most 3 nodes joined: b, c; more may still come; "
        "held back for 30 s: a (it was lost 3 times)"
    )
    assert board.view.excluded
    board.now += 29
    board.join("d")
    assert sorted(formed(board.decide())) == ["b", "c", "d"]
    assert sorted(formed(board.decide(after_s=1))) == ["b", "c", "d"]
    board.lose("d")
    assert sorted(formed(board.decide())) == ["a", "b", "c"]


def test_wait_ends_when_a_hold_ends() -> None:
    board = Board(min_nodes=2)
    board.hold("a", hold_s=30)
    board.join("a", "b")
    assert board.decide() == Wait(
        "1 of at least 2 nodes joined: b; held back for 30 s: a (it was lost 3 times)", until=board.now + 30
    )


# Forming


def test_forming_waits_for_confirmations() -> None:
    board = Board(confirm_timeout=10)
    board.join("a", "b", "c")
    board.plan(1, "a", "b", "c", why="because")
    started_at = board.now
    assert board.decide() == Wait("round 1 is forming with 3 nodes: because", until=started_at + 5)
    board.confirm(1, "a")
    assert board.decide(after_s=5) == Wait(
        "round 1 is forming with 3 nodes: because; not confirmed yet: b, c", until=started_at + 10
    )


def test_attempt_becomes_active_when_all_members_confirmed() -> None:
    board = Board()
    board.join("a", "b")
    plan = board.plan(1, "a", "b", why="because")
    board.confirm(1, "b")
    assert isinstance(board.decide(), Wait)
    board.confirm(1, "a")
    assert board.decide() == Activate("because")
    assert list(plan.last_confirmed) == ["b", "a"]


def test_confirmations_that_arrive_before_the_plan_count() -> None:
    board = Board()
    board.join("a")
    board.confirm(1, "b")
    board.plan(1, "a", "b")
    board.confirm(1, "a")
    assert isinstance(board.decide(), Activate)


def test_confirmation_of_another_number_or_join_does_not_count() -> None:
    board = Board()
    board.put(KEYS.round, round_record(1, RoundPhase.FORMING))
    board.confirm(1, "a", "b")
    board.plan(2, "a", "b")
    assert isinstance(board.decide(), Wait)
    board.confirm(2, "a")
    board.confirm(2, "b", join=7)
    assert isinstance(board.decide(), GiveUp)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda board: board.lose("b"), "b (rank 1) was lost before the round was active"),
        (lambda board: board.leave("b"), "b (rank 1) left before the round was active"),
        (lambda board: board.join("b", join=2), "b (rank 1) joined anew before the round was active"),
    ],
    ids=["lost", "left", "joined anew"],
)
@pytest.mark.parametrize("confirmed", [False, True])
def test_attempt_is_given_up_when_a_planned_join_is_gone(
    change: Callable[[Board], None], why: str, confirmed: bool
) -> None:
    board = Board()
    board.join("a", "b", "c")
    board.plan(1, "a", "b", "c")
    if confirmed:
        board.confirm(1, "b")
    change(board)
    assert board.decide() == GiveUp((), why)
    board.confirm(1, "a", "c")
    assert board.decide() == GiveUp((), why)


def test_attempt_is_given_up_when_a_member_does_not_confirm_in_time() -> None:
    board = Board(confirm_timeout=10)
    board.join(*"abcd")
    board.plan(1, *"abcd")
    board.confirm(1, "b", "d")
    assert board.decide(after_s=10) == GiveUp(("a", "c"), "a, c did not confirm within 10 s")
    board.view.give_up(("a", "c"), board.now)
    assert set(board.view.candidates) == {"b", "d"}


def test_every_confirmation_restarts_the_confirm_timeout() -> None:
    board = Board(confirm_timeout=10)
    board.join(*"abcd")
    board.plan(1, *"abcd")
    for name in "abc":
        assert isinstance(board.decide(after_s=9), Wait)
        board.confirm(1, name)
    assert isinstance(board.decide(after_s=9), Wait)
    assert board.decide(after_s=1) == GiveUp(("d",), "d did not confirm within 10 s")


def test_arrivals_and_departures_of_other_nodes_do_not_disturb_an_attempt() -> None:
    board = Board()
    board.join("a", "b", "x")
    board.plan(1, "a", "b")
    board.join("y", "z")
    board.lose("x")
    board.leave("y")
    board.drain("z")
    board.confirm(1, "a", "b")
    assert isinstance(board.decide(), Activate)


def test_plan_is_dropped_when_another_attempt_replaces_it() -> None:
    board = Board()
    board.join("a", "b")
    board.plan(1, "a", "b")
    board.put(KEYS.round, round_record(2, RoundPhase.FORMING))
    assert board.view.plan is None
    board.confirm(1, "a", "b")
    decision = last_call_over(board)
    assert isinstance(decision, Form)
    assert decision.number == 3


# While a round is active


def test_nothing_forms_while_the_round_has_a_member() -> None:
    board = Board(min_nodes=2, max_nodes=2, hold_back_losses=0)
    board.activate(1, "a", "b")
    board.join("c", "d", "e")
    board.lose("a")
    assert "round 1 is active with 1 of 2 members" in board.why()
    board.lose("b")
    assert len(formed(board.decide())) == 2


def test_reason_of_an_active_round_names_waiting_nodes() -> None:
    board = Board(admission_window=1)
    board.activate(1, "a", "b")
    assert board.why() == "round 1 is active with 2 of 2 members"
    board.join("c")
    decision = board.decide()
    assert decision == Wait(
        "round 1 is active with 2 of 2 members; 1 waiting to be admitted (admission window: more may come): c",
        until=board.now + 1,
    )
    assert board.decide(after_s=1) == Wait("round 1 is active with 2 of 2 members; 1 waiting to be admitted: c")


def test_reason_of_an_active_round_says_why_nodes_are_spares() -> None:
    board = Board(max_nodes=2)
    board.activate(1, "a", "b")
    board.join("c")
    assert board.why() == "round 1 is active with 2 of 2 members; spare (full): c"
    board = Board(max_nodes=4, step=2)
    board.activate(1, "a", "b")
    board.join("c")
    assert board.why() == "round 1 is active with 2 of 2 members; spare (sizes are multiples of 2): c"


def test_nodes_that_are_too_few_for_another_round_are_no_spares() -> None:
    board = Board(min_nodes=3, hold_back_losses=0)
    board.activate(1, "a", "b", "c")
    board.lose("a", "b")
    board.join("d")
    status = board.write_status(after_s=5)
    assert (status.waiting, status.spare, status.lost, status.open_places) == (0, 0, 2, 3)
    assert status.reason.startswith(
        "round 1 is active with 1 of 3 members; too few for another round (2 of at least 3 nodes): d"
    )


def test_reason_of_an_active_round_names_five_waiting_nodes() -> None:
    board = Board(max_nodes=20)
    board.activate(1, "a", "b")
    board.join(*"cdefghij")
    assert "8 waiting to be admitted (admission window: more may come): c, d, e, f, g and 3 more" in board.why()


# Status


def test_counts_are_zero_before_the_first_round() -> None:
    board = Board()
    board.join("a")
    assert board.write_status() == WaitingRecord(number=0, open_places=4, reason="1 of at least 2 nodes joined: a")


def test_all_places_are_open_when_a_round_is_over() -> None:
    board = Board(hold_back_losses=0)
    board.activate(1, "a", "b", "c", "d")
    assert board.write_status().open_places == 0
    board.lose("a", "b", "c", "d")
    board.join("e")
    status = board.write_status()
    assert (status.number, status.open_places, status.lost) == (1, 4, 0)


def test_counts_are_zero_while_forming_and_after_close() -> None:
    board = Board(admission_window=0)
    board.activate(1, "a", "b")
    board.join("c")
    assert board.write_status().waiting == 1
    board.close(by="ops", why="done")
    status = board.write_status()
    assert (status.number, status.waiting, status.spare, status.open_places) == (1, 0, 0, 2)
    board.close(closed=False)
    board.lose("a", "b", "c")
    board.join("x", "y")
    board.plan(2, "x", "y")
    status = board.write_status()
    assert (status.number, status.waiting, status.lost) == (2, 0, 0)


def test_only_nodes_that_would_be_admitted_count_as_waiting() -> None:
    board = Board(max_nodes=4, admission_window=0)
    board.activate(1, "a", "b")
    board.join("c", "d", "e")
    status = board.write_status()
    assert (status.waiting, status.spare, status.open_places) == (2, 1, 2)


def test_held_back_nodes_are_counted_separately() -> None:
    board = Board(max_nodes=4, admission_window=0)
    board.activate(1, "a", "b")
    board.hold("c")
    board.join("c", "d")
    board.drain("d")
    status = board.write_status()
    assert (status.waiting, status.spare, status.held_back) == (0, 0, 1)
    assert board.write_status(after_s=30).waiting == 1


def test_waiting_nodes_are_reported_after_the_admission_window() -> None:
    board = Board(admission_window=1)
    board.activate(1, "a", "b")
    board.now += 100
    board.join("c")
    assert board.write_status().waiting == 0
    assert board.write_status(after_s=0.9).waiting == 0
    assert board.write_status(after_s=0.1).waiting == 1


def test_each_arrival_restarts_the_admission_window() -> None:
    board = Board(max_nodes=10, admission_window=1)
    board.activate(1, "a", "b")
    board.join("c")
    board.write_status()
    board.now += 0.9
    board.join("d")
    assert board.write_status(after_s=0.9).waiting == 0
    assert board.write_status(after_s=0.1).waiting == 2


def test_admission_window_ends_although_nodes_keep_arriving() -> None:
    board = Board(max_nodes=1000, admission_window=1)
    board.activate(1, "a", "b")
    started_at = board.now
    for index in range(1000):
        board.join(f"late{index}")
        if board.write_status().waiting:
            break
        board.now += 0.5
    assert board.now - started_at == LONGEST_ADMISSION_S


def test_admission_window_of_zero_reports_at_once() -> None:
    board = Board(admission_window=0)
    board.activate(1, "a", "b")
    board.join("c")
    assert board.write_status().waiting == 1


def test_further_arrivals_are_reported_at_once_when_members_know_of_one() -> None:
    board = Board(max_nodes=10, admission_window=1)
    board.activate(1, "a", "b")
    board.join("c")
    assert board.write_status(after_s=1).waiting == 1
    board.join("d")
    assert board.write_status().waiting == 2


def test_admission_window_ends_when_its_node_is_gone() -> None:
    board = Board(admission_window=1)
    board.activate(1, "a", "b")
    board.join("c")
    board.write_status()
    board.lose("c")
    assert board.write_status(after_s=10).waiting == 0
    board.join("d")
    assert board.write_status().waiting == 0
    assert board.write_status(after_s=1).waiting == 1


def test_nodes_that_waited_when_the_round_became_active_start_a_window() -> None:
    board = Board(max_nodes=4, admission_window=1)
    board.join("c")
    board.activate(1, "a", "b")
    assert board.write_status().waiting == 0
    assert board.write_status(after_s=1).waiting == 1


def test_loss_is_reported_at_once_together_with_waiting_nodes() -> None:
    board = Board(max_nodes=4, admission_window=1, hold_back_losses=0)
    board.activate(1, "a", "b", "c")
    board.join("d")
    board.lose("a")
    status = board.write_status()
    assert (status.lost, status.waiting, status.open_places) == (1, 1, 2)


def test_member_that_joins_again_is_reported_at_once_as_waiting() -> None:
    board = Board(min_nodes=2, max_nodes=3, admission_window=1)
    board.activate(1, "a", "b", "c")
    board.join("a", join=2)
    status = board.write_status()
    assert (status.lost, status.waiting) == (0, 1)


def test_counts_of_another_round_do_not_end_the_window() -> None:
    board = Board(max_nodes=4, admission_window=1)
    board.put(KEYS.waiting, WaitingRecord(number=1, waiting=2))
    board.activate(2, "a", "b")
    board.now += 5
    board.join("c")
    assert board.write_status().waiting == 0


# Holding back


def test_node_that_is_lost_repeatedly_is_held_back() -> None:
    board = Board(hold_back_losses=2, hold_back=30, hold_back_window=600)
    for number in (1, 2):
        board.activate(number, "a", "b", join=number)
        board.now += 5
        board.lose("a")
    decision = board.decide()
    assert isinstance(decision, Hold)
    assert (decision.record.name, decision.record.losses, decision.record.hold_s) == ("a", 2, 30)
    board.put(KEYS.health("a"), decision.record)
    assert isinstance(board.decide(), Wait)
    board.join("a", join=9)
    assert set(board.view.excluded) == {"a"}


def test_node_without_further_losses_is_forgiven() -> None:
    board = Board(hold_back=30, hold_back_window=600)
    board.hold("a", hold_s=30)
    assert isinstance(board.decide(after_s=629), Wait)
    assert board.decide(after_s=1) == Forgive("a")
    board.write(Delete(KEYS.health("a")))
    assert isinstance(board.decide(), Wait)


# After any history

NAMES = tuple(f"n{index}" for index in range(7))
STEPS = st.one_of(
    *(
        st.tuples(st.just(verb), st.sampled_from(NAMES))
        for verb in ("join", "join", "join", "lose", "leave", "drain", "hold", "confirm", "confirm", "rejoin", "above")
    ),
    st.tuples(st.sampled_from(["close", "reopen", "confirm all", "leave all"]), st.just("")),
    st.tuples(st.just("pass"), st.sampled_from(["1", "12", "40"])),
)
RULES = st.sampled_from(
    [
        {"min_nodes": 2, "max_nodes": 4},
        {"min_nodes": 1, "max_nodes": 1},
        {"min_nodes": 2, "max_nodes": 6, "step": 2, "last_call_mode": "fixed"},
        {"min_nodes": 3, "max_nodes": 7, "hold_back_losses": 1, "hold_back": 5, "ranks": "natural"},
    ]
)


class CheckedBoard(Board):
    """A board that checks its decisions and carries them out like a coordinator."""

    def act(self, verb: str, name: str) -> None:
        present = self.view.nodes.get(name)
        phase = present.record.phase if present else None
        match verb:
            case "join" if present is None:
                self.join(name)
            case "rejoin" if present is not None and phase is not NodePhase.LEFT:
                record = present.record
                self.join(name, join=record.join + 1, floor=record.floor)
            case "lose":
                self.lose(name)
            case "leave" if present is not None:
                self.leave(name)
            case "drain" if present is not None:
                self.drain(name)
            case "hold":
                self.hold(name, hold_s=10)
            case "confirm" if present is not None and self.view.plan and name in self.view.plan.ranks:
                if phase is not NodePhase.LEFT and self.view.plan.ranks[name][0] == present.record.join:
                    self.confirm(self.view.plan.number, name, join=present.record.join)
            case "above" if present is None:
                self.confirm(self.view.next_number() + 1, name)
            case "close" | "reopen":
                self.close(closed=verb == "close")
            case "confirm all" | "leave all":
                for one in list(self.view.nodes):
                    self.act("confirm" if verb == "confirm all" else "lose", one)
            case "pass":
                self.now += float(name)

    def carry_out(self) -> None:
        for _ in range(50):
            decision = self.decide()
            record = summarise(self.view, decision, self.now)
            assert min(record.waiting, record.spare, record.held_back, record.lost, record.open_places) >= 0
            assert record.waiting <= record.open_places
            assert record.waiting + record.spare <= len(self.view.candidates)
            match decision:
                case Wait(until=until):
                    assert until is None or until > self.now
                    return
                case Form():
                    self.check_form(decision)
                    self.plan(decision.number, *(one.name for one in decision.ranked))
                    assert self.view.plan is not None
                    self.view.plan.ranks = {
                        one.id: (self.view.nodes[one.id].record.join, place)
                        for place, one in enumerate(decision.ranked)
                    }
                    self.view.plan.broken = None
                case Activate():
                    self.check_activate()
                case GiveUp(late):
                    self.view.give_up(late, self.now)
                case Hold(health):
                    self.put(KEYS.health(health.name), health)
                case Forgive(name):
                    self.write(Delete(KEYS.health(name)))
        raise AssertionError("it does not come to rest")

    def check_form(self, decision: Form) -> None:
        view, rules = self.view, self.view.rules
        assert rules is not None
        assert not view.is_closed
        assert not view.unreadable
        number = view.round.number if view.round else 0
        records = [seen.record for seen in view.nodes.values()]
        active = number if view.is_active else None
        assert not [one for one in records if one.phase is NodePhase.MEMBER and one.round == active]
        assert not [one for one in records if one.phase is NodePhase.MEMBER and one.round > number]
        assert decision.number > max([number, *(max(one.floor, one.round) for one in records)])
        size = len(decision.ranked)
        assert rules.min_nodes <= size <= rules.max_nodes
        assert size % rules.step == 0
        assert len({one.id for one in decision.ranked}) == size
        for one in decision.ranked:
            assert view.nodes[one.id].record.phase is not NodePhase.LEFT
            assert one.id not in view.drains
            assert not view.hold_back.is_held(one.name)

    def check_activate(self) -> None:
        view = self.view
        plan = view.plan
        assert plan is not None
        assert not view.is_closed
        members = []
        for node_id, (join, _) in sorted(plan.ranks.items(), key=lambda entry: entry[1][1]):
            record = view.nodes[node_id].record
            assert (record.phase, record.round, record.join) == (NodePhase.MEMBER, plan.number, join)
            members.append(RosterMember(node_id, join, record.name, record.addr))
        self.put(KEYS.round, round_record(plan.number, RoundPhase.ACTIVE, len(members)))
        assert set(view.members) == set(plan.ranks)
        view.set_roster(plan.number, members)


@settings(max_examples=200)
@given(RULES, st.lists(STEPS, max_size=60))
def test_no_history_leads_to_a_wrong_decision(rules: dict[str, object], history: list[tuple[str, str]]) -> None:
    board = CheckedBoard(**rules)
    for verb, name in history:
        board.act(verb, name)
        board.carry_out()


@settings(max_examples=100)
@given(RULES, st.lists(STEPS, max_size=40))
def test_enough_nodes_form_a_round_after_any_history(rules: dict[str, object], history: list[tuple[str, str]]) -> None:
    board = CheckedBoard(**rules)
    for verb, name in history:
        board.act(verb, name)
        board.carry_out()
    board.close(closed=False)
    board.act("leave all", "")
    board.act("pass", "4000")
    for index in range(7):
        board.join(f"fresh{index}")
    board.carry_out()
    if board.view.plan is None:
        board.act("pass", "40")
        board.carry_out()
    assert board.view.plan is not None
    number = board.view.plan.number
    board.act("confirm all", "")
    board.carry_out()
    assert board.view.round is not None
    assert (board.view.round.number, board.view.round.phase) == (number, RoundPhase.ACTIVE)


def test_records_in_these_tests_are_what_nodes_write() -> None:
    assert encode(node("a")).startswith(b'{"v":1,"id":"a"')
