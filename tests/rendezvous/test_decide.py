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
from tests.rendezvous.fake_run import KEYS, FakeRun, config, node, round_record


def formed(decision: Decision) -> list[str]:
    """The names of a new attempt, in rank order."""
    assert isinstance(decision, Form), decision
    return [candidate.name for candidate in decision.ranked]


def last_call_over(run: FakeRun) -> Decision:
    run.decide()
    return run.decide(after_s=30)


# No decision possible


def test_run_without_config_waits() -> None:
    run = FakeRun()
    run.write(Delete(KEYS.config))
    assert run.why() == "the run has no config yet: no node has joined"


@pytest.mark.parametrize("key", [KEYS.config, KEYS.round, KEYS.closed, KEYS.waiting])
def test_unreadable_key_of_the_run_stops_all_decisions_and_is_named(key: str) -> None:
    run = FakeRun()
    run.join("a", "b", "c", "d")
    run.write(Put(key, b"damaged"))
    assert run.why().startswith(f"{key} cannot be read: {key} holds no ")


def test_reason_of_a_closed_run_names_the_closing_node_and_its_reason() -> None:
    run = FakeRun()
    run.join("a", "b", "c", "d")
    run.close(by="ops", why="maintenance")
    assert run.why() == "the run is closed by ops: maintenance"
    run.close()
    assert run.why() == "the run is closed by an unknown node: no reason given"
    run.close(closed=False)
    assert formed(run.decide()) == ["a", "b", "c", "d"]


def test_attempt_is_given_up_when_the_run_is_closed() -> None:
    run = FakeRun()
    run.join("a", "b")
    run.plan(1, "a", "b")
    run.confirm(1, "a", "b")
    run.close(by="ops", why="enough")
    assert run.decide() == GiveUp((), "the run was closed while it was forming")
    run.view.give_up((), run.now)
    assert run.why() == "the run is closed by ops: enough"


def test_nothing_forms_until_members_above_the_known_round_have_left() -> None:
    run = FakeRun()
    run.join("a", "b", "c", "d")
    run.confirm(5, "x", "y")
    assert run.why() == (
        "the run's data was lost: nothing forms until all nodes have left a round above the known one: x, y"
    )
    run.lose("x")
    run.join("y", join=2, floor=5)
    decision = run.decide()
    assert isinstance(decision, Form)
    assert decision.number == 6


def test_at_most_five_members_above_the_known_round_are_named() -> None:
    run = FakeRun()
    run.confirm(5, *"abcdefgh")
    assert run.why().endswith("a round above the known one: a, b, c, d, e and 3 more")


# Gathering


def test_empty_run_waits_for_the_minimum() -> None:
    assert FakeRun().why() == "0 of at least 2 nodes joined"


def test_too_few_nodes_are_named() -> None:
    run = FakeRun(min_nodes=4)
    run.join("a", "b", "d")
    assert run.why() == "3 of at least 4 nodes joined: a, b, d"


def test_at_most_five_nodes_are_named() -> None:
    run = FakeRun(min_nodes=10, max_nodes=10)
    run.join(*"abcde")
    assert run.why() == "5 of at least 10 nodes joined: a, b, c, d, e"
    run.join(*"fgh")
    assert run.why() == "8 of at least 10 nodes joined: a, b, c, d, e and 3 more"


def test_maximum_forms_at_once() -> None:
    run = FakeRun()
    run.join("d", "b", "a", "c")
    decision = run.decide()
    assert formed(decision) == ["a", "b", "c", "d"]
    assert decision == Form(1, decision.ranked, "all 4 places are taken")  # type: ignore[union-attr]


def test_reason_names_lost_nodes_and_nodes_that_left() -> None:
    run = FakeRun(min_nodes=4)
    run.join("a", "b", "c", "d")
    run.now += 40
    run.lose("c")
    run.leave("d", why="done here")
    run.lose("d")
    assert run.why() == (
        "2 of at least 4 nodes joined: a, b; lost: c (joined at 0 s, lost at 40 s: its session ended); "
        "left: d (done here)"
    )


def test_reason_names_the_round_of_a_lost_member() -> None:
    run = FakeRun(min_nodes=2, hold_back_losses=0)
    run.activate(1, "a", "b")
    run.now += 7
    run.lose("a")
    run.join("b", join=2)
    assert run.why() == ("1 of at least 2 nodes joined: b; lost: a (member of round 1, 7 s into it: its session ended)")


def test_node_that_came_back_is_not_named_as_lost() -> None:
    run = FakeRun(min_nodes=4)
    run.join("a", "b")
    run.lose("b")
    run.put(KEYS.node("b2"), node("b", id="b2"))
    assert run.why() == "2 of at least 4 nodes joined: a, b"


def test_drained_and_unconfirmed_nodes_do_not_count() -> None:
    run = FakeRun()
    run.join("a", "b", "c")
    run.drain("a")
    run.view.give_up(["b"], run.now)
    assert run.why() == "1 of at least 2 nodes joined: c; left out because it did not confirm: b"


def test_unconfirmed_node_is_excluded_until_its_key_changes() -> None:
    run = FakeRun(min_nodes=3)
    run.join("a", "b", "c")
    run.view.give_up(["b"], run.now)
    assert run.why().startswith("2 of at least 3")
    run.join("b", join=2)
    assert run.why().startswith("last call of 30 s: 3 of")


def test_at_most_five_unconfirmed_nodes_are_named() -> None:
    run = FakeRun(min_nodes=8, max_nodes=8)
    run.join(*"abcdefg")
    run.view.give_up(list("abcdefg"), run.now)
    assert run.why() == ("0 of at least 8 nodes joined; left out because it did not confirm: a, b, c, d, e and 2 more")


# The last call


def test_last_call_starts_when_the_minimum_is_reached() -> None:
    run = FakeRun(last_call_timeout=10)
    run.join("a", "b")
    decision = run.decide()
    assert decision == Wait(
        "last call of 10 s: 2 of at most 4 nodes joined: a, b; more may still come", until=run.now + 10
    )
    assert isinstance(run.decide(after_s=9.9), Wait)
    decision = run.decide(after_s=0.1)
    assert formed(decision) == ["a", "b"]
    assert decision.why == "the last call of 10 s is over"  # type: ignore[union-attr]


def test_arrivals_do_not_prolong_the_last_call() -> None:
    run = FakeRun(last_call_timeout=10)
    run.join("a", "b")
    run.decide()
    run.now += 9
    run.join("c")
    run.decide()
    assert formed(run.decide(after_s=1)) == ["a", "b", "c"]


def test_last_call_stops_below_the_minimum_and_starts_again() -> None:
    run = FakeRun(last_call_timeout=10)
    run.join("a", "b")
    run.decide()
    run.lose("b")
    assert run.why(after_s=9).startswith("1 of at least 2")
    run.join("c")
    assert run.why().startswith("last call")
    assert run.why(after_s=9).startswith("last call")
    assert formed(run.decide(after_s=1)) == ["a", "c"]


def test_maximum_ends_the_last_call() -> None:
    run = FakeRun(last_call_timeout=10)
    run.join("a", "b")
    run.decide()
    run.join("c", "d")
    assert len(formed(run.decide(after_s=1))) == 4


def test_new_coordinator_starts_the_last_call_again() -> None:
    run = FakeRun(last_call_timeout=10)
    run.join("a", "b")
    run.decide()
    run.now += 9
    fresh = FakeRun(last_call_timeout=10)
    fresh.now = run.now
    fresh.view.load(run.scan(), run.engine.revision, run.now)
    assert fresh.why() == "last call of 10 s: 2 of at most 4 nodes joined: a, b; more may still come"
    assert isinstance(fresh.decide(after_s=9), Wait)
    assert isinstance(fresh.decide(after_s=1), Form)


def test_adaptive_last_call_is_not_needed_once_a_round_was_active() -> None:
    run = FakeRun(hold_back_losses=0)
    run.activate(1, "a", "b", "c")
    run.lose("c")
    run.join("a", join=2)
    run.join("b", join=2)
    decision = run.decide()
    assert formed(decision) == ["a", "b"]
    assert decision.why == "every live node has joined: 2"  # type: ignore[union-attr]


def test_fixed_last_call_never_ends_early() -> None:
    run = FakeRun(last_call_mode="fixed", hold_back_losses=0)
    run.activate(1, "a", "b", "c")
    run.join("a", join=2)
    run.join("b", join=2)
    run.lose("c")
    assert run.why().startswith("last call of 30 s: 2 of at most 4")
    assert formed(run.decide(after_s=30)) == ["a", "b"]


def test_round_of_an_earlier_incarnation_does_not_shorten_the_last_call() -> None:
    run = FakeRun()
    run.activate(1, "a", "b")
    run.lose("a", "b")
    run.put(KEYS.config, config(incarnation="second"))
    run.join("x", "y")
    assert run.why().startswith("last call of 30 s: 2 of at most 4 nodes joined: x, y; ")
    assert formed(run.decide(after_s=30)) == ["x", "y"]


def test_last_call_goes_on_after_an_attempt_was_given_up() -> None:
    run = FakeRun(last_call_timeout=10)
    run.join("a", "b", "c")
    last_call_over(run)
    run.plan(1, "a", "b", "c")
    run.lose("c")
    decision = run.decide(after_s=1)
    assert isinstance(decision, GiveUp)
    run.view.give_up(decision.late, run.now)
    assert formed(run.decide()) == ["a", "b"]


def test_last_call_does_not_run_while_a_forgotten_round_has_members() -> None:
    run = FakeRun(last_call_timeout=10)
    run.join("a", "b")
    run.confirm(5, "x")
    run.decide()
    run.decide(after_s=20)
    run.lose("x")
    assert run.why().startswith("last call")


# Admission


def test_nodes_beyond_a_multiple_of_step_are_spares() -> None:
    run = FakeRun(min_nodes=2, max_nodes=6, step=2)
    run.join("a", "b", "c", "d", "e")
    assert formed(last_call_over(run)) == ["a", "b", "c", "d"]


def test_minimum_counts_complete_steps_only() -> None:
    run = FakeRun(min_nodes=4, max_nodes=8, step=4)
    run.join("a", "b", "c")
    assert run.why().startswith("3 of at least 4 nodes joined")


def test_places_go_to_members_first_and_then_by_order_of_joining() -> None:
    run = FakeRun(min_nodes=3, max_nodes=3, hold_back_losses=0)
    run.activate(1, "m", "n", "o")
    run.join("early", "late")
    run.lose("o")
    run.join("m", "n", join=2)
    assert sorted(formed(run.decide())) == ["early", "m", "n"]


def test_survivors_keep_their_ranks_and_a_replacement_gets_the_free_one() -> None:
    run = FakeRun(min_nodes=3, max_nodes=3, hold_back_losses=0)
    run.activate(1, "c", "a", "b")
    run.lose("a")
    run.join("new")
    run.join("b", "c", join=2)
    assert formed(run.decide()) == ["c", "new", "b"]


def test_new_process_on_the_same_machine_gets_its_rank_back() -> None:
    run = FakeRun(min_nodes=3, max_nodes=3, hold_back_losses=0)
    run.activate(1, "c", "a", "b")
    run.lose("a")
    run.put(KEYS.node("a2"), node("a", id="a2"))
    run.join("b", "c", join=2)
    assert formed(run.decide()) == ["c", "a", "b"]


def test_of_two_nodes_with_one_name_the_previous_owner_keeps_the_rank() -> None:
    run = FakeRun(min_nodes=3, max_nodes=3)
    run.activate(1, "b", "a", "c")
    run.lose("c")
    run.put(KEYS.node("another"), node("a", id="another"))
    run.join("b", "a", join=2)
    decision = run.decide()
    assert isinstance(decision, Form)
    assert [candidate.id for candidate in decision.ranked] == ["b", "a", "another"]


def test_held_back_node_is_chosen_last_when_its_hold_is_over() -> None:
    run = FakeRun(min_nodes=2, max_nodes=3)
    run.hold("a", hold_s=30)
    run.join("a", "b", "c")
    assert run.why() == (
        "last call of 30 s: 2 of at most 3 nodes joined: b, c; more may still come; "
        "held back for 30 s: a (it was lost 3 times)"
    )
    assert run.view.excluded
    run.now += 29
    run.join("d")
    assert sorted(formed(run.decide())) == ["b", "c", "d"]
    assert sorted(formed(run.decide(after_s=1))) == ["b", "c", "d"]
    run.lose("d")
    assert sorted(formed(run.decide())) == ["a", "b", "c"]


def test_wait_ends_when_a_hold_ends() -> None:
    run = FakeRun(min_nodes=2)
    run.hold("a", hold_s=30)
    run.join("a", "b")
    assert run.decide() == Wait(
        "1 of at least 2 nodes joined: b; held back for 30 s: a (it was lost 3 times)", until=run.now + 30
    )


# Forming


def test_forming_waits_for_confirmations() -> None:
    run = FakeRun(confirm_timeout=10)
    run.join("a", "b", "c")
    run.plan(1, "a", "b", "c", why="because")
    started_at = run.now
    assert run.decide() == Wait("round 1 is forming with 3 nodes: because", until=started_at + 5)
    run.confirm(1, "a")
    assert run.decide(after_s=5) == Wait(
        "round 1 is forming with 3 nodes: because; not confirmed yet: b, c", until=started_at + 10
    )


def test_attempt_becomes_active_when_all_members_confirmed() -> None:
    run = FakeRun()
    run.join("a", "b")
    plan = run.plan(1, "a", "b", why="because")
    run.confirm(1, "b")
    assert isinstance(run.decide(), Wait)
    run.confirm(1, "a")
    assert run.decide() == Activate("because")
    assert list(plan.last_confirmed) == ["b", "a"]


def test_confirmations_that_arrive_before_the_plan_count() -> None:
    run = FakeRun()
    run.join("a")
    run.confirm(1, "b")
    run.plan(1, "a", "b")
    run.confirm(1, "a")
    assert isinstance(run.decide(), Activate)


def test_confirmation_of_another_number_or_join_does_not_count() -> None:
    run = FakeRun()
    run.put(KEYS.round, round_record(1, RoundPhase.FORMING))
    run.confirm(1, "a", "b")
    run.plan(2, "a", "b")
    assert isinstance(run.decide(), Wait)
    run.confirm(2, "a")
    run.confirm(2, "b", join=7)
    assert isinstance(run.decide(), GiveUp)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda run: run.lose("b"), "b (rank 1) was lost before the round was active"),
        (lambda run: run.leave("b"), "b (rank 1) left before the round was active"),
        (lambda run: run.join("b", join=2), "b (rank 1) joined anew before the round was active"),
    ],
    ids=["lost", "left", "joined anew"],
)
@pytest.mark.parametrize("confirmed", [False, True])
def test_attempt_is_given_up_when_a_planned_join_is_gone(
    change: Callable[[FakeRun], None], why: str, confirmed: bool
) -> None:
    run = FakeRun()
    run.join("a", "b", "c")
    run.plan(1, "a", "b", "c")
    if confirmed:
        run.confirm(1, "b")
    change(run)
    assert run.decide() == GiveUp((), why)
    run.confirm(1, "a", "c")
    assert run.decide() == GiveUp((), why)


def test_attempt_is_given_up_when_a_member_does_not_confirm_in_time() -> None:
    run = FakeRun(confirm_timeout=10)
    run.join(*"abcd")
    run.plan(1, *"abcd")
    run.confirm(1, "b", "d")
    assert run.decide(after_s=10) == GiveUp(("a", "c"), "a, c did not confirm within 10 s")
    run.view.give_up(("a", "c"), run.now)
    assert set(run.view.candidates) == {"b", "d"}


def test_every_confirmation_restarts_the_confirm_timeout() -> None:
    run = FakeRun(confirm_timeout=10)
    run.join(*"abcd")
    run.plan(1, *"abcd")
    for name in "abc":
        assert isinstance(run.decide(after_s=9), Wait)
        run.confirm(1, name)
    assert isinstance(run.decide(after_s=9), Wait)
    assert run.decide(after_s=1) == GiveUp(("d",), "d did not confirm within 10 s")


def test_arrivals_and_departures_of_other_nodes_do_not_disturb_an_attempt() -> None:
    run = FakeRun()
    run.join("a", "b", "x")
    run.plan(1, "a", "b")
    run.join("y", "z")
    run.lose("x")
    run.leave("y")
    run.drain("z")
    run.confirm(1, "a", "b")
    assert isinstance(run.decide(), Activate)


def test_plan_is_dropped_when_another_attempt_replaces_it() -> None:
    run = FakeRun()
    run.join("a", "b")
    run.plan(1, "a", "b")
    run.put(KEYS.round, round_record(2, RoundPhase.FORMING))
    assert run.view.plan is None
    run.confirm(1, "a", "b")
    decision = last_call_over(run)
    assert isinstance(decision, Form)
    assert decision.number == 3


# While a round is active


def test_nothing_forms_while_the_round_has_a_member() -> None:
    run = FakeRun(min_nodes=2, max_nodes=2, hold_back_losses=0)
    run.activate(1, "a", "b")
    run.join("c", "d", "e")
    run.lose("a")
    assert "round 1 is active with 1 of 2 members" in run.why()
    run.lose("b")
    assert len(formed(run.decide())) == 2


def test_reason_of_an_active_round_names_waiting_nodes() -> None:
    run = FakeRun(admission_window=1)
    run.activate(1, "a", "b")
    assert run.why() == "round 1 is active with 2 of 2 members"
    run.join("c")
    decision = run.decide()
    assert decision == Wait(
        "round 1 is active with 2 of 2 members; 1 waiting to be admitted (admission window: more may come): c",
        until=run.now + 1,
    )
    assert run.decide(after_s=1) == Wait("round 1 is active with 2 of 2 members; 1 waiting to be admitted: c")


def test_reason_of_an_active_round_says_why_nodes_are_spares() -> None:
    run = FakeRun(max_nodes=2)
    run.activate(1, "a", "b")
    run.join("c")
    assert run.why() == "round 1 is active with 2 of 2 members; spare (full): c"
    run = FakeRun(max_nodes=4, step=2)
    run.activate(1, "a", "b")
    run.join("c")
    assert run.why() == "round 1 is active with 2 of 2 members; spare (sizes are multiples of 2): c"


def test_nodes_that_are_too_few_for_another_round_are_no_spares() -> None:
    run = FakeRun(min_nodes=3, hold_back_losses=0)
    run.activate(1, "a", "b", "c")
    run.lose("a", "b")
    run.join("d")
    status = run.write_status(after_s=5)
    assert (status.waiting, status.spare, status.lost, status.open_places) == (0, 0, 2, 3)
    assert status.reason.startswith(
        "round 1 is active with 1 of 3 members; too few for another round (2 of at least 3 nodes): d"
    )


def test_reason_of_an_active_round_names_five_waiting_nodes() -> None:
    run = FakeRun(max_nodes=20)
    run.activate(1, "a", "b")
    run.join(*"cdefghij")
    assert "8 waiting to be admitted (admission window: more may come): c, d, e, f, g and 3 more" in run.why()


# Status


def test_counts_are_zero_before_the_first_round() -> None:
    run = FakeRun()
    run.join("a")
    assert run.write_status() == WaitingRecord(
        number=0, open_places=4, reason="1 of at least 2 nodes joined: a", candidates=1
    )


def test_all_places_are_open_when_a_round_is_over() -> None:
    run = FakeRun(hold_back_losses=0)
    run.activate(1, "a", "b", "c", "d")
    assert run.write_status().open_places == 0
    run.lose("a", "b", "c", "d")
    run.join("e")
    status = run.write_status()
    assert (status.number, status.open_places, status.lost) == (1, 4, 0)


def test_counts_are_zero_while_forming_and_after_close() -> None:
    run = FakeRun(admission_window=0)
    run.activate(1, "a", "b")
    run.join("c")
    assert run.write_status().waiting == 1
    run.close(by="ops", why="done")
    status = run.write_status()
    assert (status.number, status.waiting, status.spare, status.open_places) == (1, 0, 0, 2)
    run.close(closed=False)
    run.lose("a", "b", "c")
    run.join("x", "y")
    run.plan(2, "x", "y")
    status = run.write_status()
    assert (status.number, status.waiting, status.lost) == (2, 0, 0)


def test_only_nodes_that_would_be_admitted_count_as_waiting() -> None:
    run = FakeRun(max_nodes=4, admission_window=0)
    run.activate(1, "a", "b")
    run.join("c", "d", "e")
    status = run.write_status()
    assert (status.waiting, status.spare, status.open_places) == (2, 1, 2)


def test_held_back_nodes_are_counted_separately() -> None:
    run = FakeRun(max_nodes=4, admission_window=0)
    run.activate(1, "a", "b")
    run.hold("c")
    run.join("c", "d")
    run.drain("d")
    status = run.write_status()
    assert (status.waiting, status.spare, status.held_back) == (0, 0, 1)
    assert run.write_status(after_s=30).waiting == 1


def test_waiting_nodes_are_reported_after_the_admission_window() -> None:
    run = FakeRun(admission_window=1)
    run.activate(1, "a", "b")
    run.now += 100
    run.join("c")
    assert run.write_status().waiting == 0
    assert run.write_status(after_s=0.9).waiting == 0
    assert run.write_status(after_s=0.1).waiting == 1


def test_each_arrival_restarts_the_admission_window() -> None:
    run = FakeRun(max_nodes=10, admission_window=1)
    run.activate(1, "a", "b")
    run.join("c")
    run.write_status()
    run.now += 0.9
    run.join("d")
    assert run.write_status(after_s=0.9).waiting == 0
    assert run.write_status(after_s=0.1).waiting == 2


def test_admission_window_ends_although_nodes_keep_arriving() -> None:
    run = FakeRun(max_nodes=1000, admission_window=1)
    run.activate(1, "a", "b")
    started_at = run.now
    for index in range(1000):
        run.join(f"late{index}")
        if run.write_status().waiting:
            break
        run.now += 0.5
    assert run.now - started_at == LONGEST_ADMISSION_S


def test_admission_window_of_zero_reports_at_once() -> None:
    run = FakeRun(admission_window=0)
    run.activate(1, "a", "b")
    run.join("c")
    assert run.write_status().waiting == 1


def test_further_arrivals_are_reported_at_once_when_members_know_of_one() -> None:
    run = FakeRun(max_nodes=10, admission_window=1)
    run.activate(1, "a", "b")
    run.join("c")
    assert run.write_status(after_s=1).waiting == 1
    run.join("d")
    assert run.write_status().waiting == 2


def test_admission_window_ends_when_its_node_is_gone() -> None:
    run = FakeRun(admission_window=1)
    run.activate(1, "a", "b")
    run.join("c")
    run.write_status()
    run.lose("c")
    assert run.write_status(after_s=10).waiting == 0
    run.join("d")
    assert run.write_status().waiting == 0
    assert run.write_status(after_s=1).waiting == 1


def test_nodes_that_waited_when_the_round_became_active_start_a_window() -> None:
    run = FakeRun(max_nodes=4, admission_window=1)
    run.join("c")
    run.activate(1, "a", "b")
    assert run.write_status().waiting == 0
    assert run.write_status(after_s=1).waiting == 1


def test_loss_is_reported_at_once_together_with_waiting_nodes() -> None:
    run = FakeRun(max_nodes=4, admission_window=1, hold_back_losses=0)
    run.activate(1, "a", "b", "c")
    run.join("d")
    run.lose("a")
    status = run.write_status()
    assert (status.lost, status.waiting, status.open_places) == (1, 1, 2)


def test_member_that_joins_again_is_reported_at_once_as_waiting() -> None:
    run = FakeRun(min_nodes=2, max_nodes=3, admission_window=1)
    run.activate(1, "a", "b", "c")
    run.join("a", join=2)
    status = run.write_status()
    assert (status.lost, status.waiting) == (0, 1)


def test_counts_of_another_round_do_not_end_the_window() -> None:
    run = FakeRun(max_nodes=4, admission_window=1)
    run.put(KEYS.waiting, WaitingRecord(number=1, waiting=2))
    run.activate(2, "a", "b")
    run.now += 5
    run.join("c")
    assert run.write_status().waiting == 0


# Holding back


def test_node_that_is_lost_repeatedly_is_held_back() -> None:
    run = FakeRun(hold_back_losses=2, hold_back=30, hold_back_window=600)
    for number in (1, 2):
        run.activate(number, "a", "b", join=number)
        run.now += 5
        run.lose("a")
    decision = run.decide()
    assert isinstance(decision, Hold)
    assert (decision.record.name, decision.record.losses, decision.record.hold_s) == ("a", 2, 30)
    run.put(KEYS.health("a"), decision.record)
    assert isinstance(run.decide(), Wait)
    run.join("a", join=9)
    assert set(run.view.excluded) == {"a"}


def test_node_without_further_losses_is_forgiven() -> None:
    run = FakeRun(hold_back=30, hold_back_window=600)
    run.hold("a", hold_s=30)
    assert isinstance(run.decide(after_s=629), Wait)
    assert run.decide(after_s=1) == Forgive("a")
    run.write(Delete(KEYS.health("a")))
    assert isinstance(run.decide(), Wait)


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


class CheckedRun(FakeRun):
    """A fake run that checks its decisions and carries them out like a coordinator."""

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
    run = CheckedRun(**rules)
    for verb, name in history:
        run.act(verb, name)
        run.carry_out()


@settings(max_examples=100)
@given(RULES, st.lists(STEPS, max_size=40))
def test_enough_nodes_form_a_round_after_any_history(rules: dict[str, object], history: list[tuple[str, str]]) -> None:
    run = CheckedRun(**rules)
    for verb, name in history:
        run.act(verb, name)
        run.carry_out()
    run.close(closed=False)
    run.act("leave all", "")
    run.act("pass", "4000")
    for index in range(7):
        run.join(f"fresh{index}")
    run.carry_out()
    if run.view.plan is None:
        run.act("pass", "40")
        run.carry_out()
    assert run.view.plan is not None
    number = run.view.plan.number
    run.act("confirm all", "")
    run.carry_out()
    assert run.view.round is not None
    assert (run.view.round.number, run.view.round.phase) == (number, RoundPhase.ACTIVE)


def test_records_in_these_tests_are_what_nodes_write() -> None:
    assert encode(node("a")).startswith(b'{"v":1,"id":"a"')
