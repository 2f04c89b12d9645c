"""Each checker raises the error of its own guarantee for a hand-made scenario, and none for a correct one."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.kv.types import Change, Item
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.rendezvous.records import (
    ClosedRecord,
    CoordinatorRecord,
    HistoryRecord,
    LeaveCause,
    LeaveKind,
    NodePhase,
    NodeRecord,
    Record,
    RosterMember,
    RosterRecord,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    encode,
)
from rallypoint.testing.checkers import (
    Broke,
    BrokeAgreement,
    BrokeBarrier,
    BrokeCause,
    BrokeExclusivity,
    BrokeFencing,
    BrokeFinality,
    BrokeFreshness,
    BrokeMonotonicity,
    BrokeRanks,
    Ranks,
    Safety,
)

KEYS = RunKeys("rallypoint", "run")
FORMING, ACTIVE = RoundPhase.FORMING, RoundPhase.ACTIVE
JOINING, MEMBER, LEFT = NodePhase.JOINING, NodePhase.MEMBER, NodePhase.LEFT
BOSS = "boss"


class Scenario:
    """A sequence of commits and returns, given to all checkers. Every commit is one revision."""

    def __init__(self, min_nodes: int = 2, max_nodes: int = 3, step: int = 1, compared: int = 100) -> None:
        self.safety = Safety(KEYS, min_nodes, max_nodes, step, compared)
        self._revision = 1
        self._created: dict[str, int] = {}
        self.open()
        self.elect(BOSS)

    def put(self, writer: str, *puts: tuple[str, Record]) -> None:
        self._revision += 1
        changes = []
        for key, record in puts:
            created = self._created.setdefault(key, self._revision)
            changes.append(Change(key, Item(key, encode(record), created, self._revision, 1, 1)))
        self.safety.committed(self._revision, changes, writer)

    def delete(self, *keys: str) -> None:
        self._revision += 1
        for key in keys:
            self._created.pop(key, None)
        self.safety.committed(self._revision, [Change(key, None) for key in keys])

    def open(self) -> None:
        self.put("", (KEYS.closed, ClosedRecord(closed=False)))

    def close(self) -> None:
        self.put("", (KEYS.closed, ClosedRecord(closed=True)))

    def elect(self, name: str) -> None:
        self.delete(KEYS.coordinator)
        self.put(name, (KEYS.coordinator, CoordinatorRecord(id=name, name=name)))

    def node(self, name: str, phase: NodePhase = JOINING, number: int = 0, join: int = 1, by: str = "") -> None:
        record = NodeRecord(id=name, name=name, addr=name, session=1, join=join, phase=phase, round=number)
        self.put(by or name, (KEYS.node(name), record))

    def lose(self, name: str) -> None:
        self.delete(KEYS.node(name))

    def round(
        self, number: int, phase: RoundPhase, size: int, by: str = BOSS, term: int | None = None, chunks: int = 1
    ) -> tuple[str, RoundRecord]:
        term = self._created.get(KEYS.coordinator, 0) if term is None else term
        return KEYS.round, RoundRecord(
            number=number, phase=phase, incarnation="first", size=size, term=term, chunks=chunks
        )

    def roster(self, number: int, *names: str, join: int = 1) -> tuple[str, RosterRecord]:
        members = tuple(RosterMember(name, join, name, name) for name in names)
        return KEYS.roster_chunk(number, 0), RosterRecord(number=number, members=members)

    def form(self, number: int, *names: str, join: int = 1, by: str = BOSS) -> None:
        self.put(by, self.roster(number, *names, join=join), self.round(number, FORMING, len(names)))

    def activate(self, number: int, size: int, by: str = BOSS, term: int | None = None) -> None:
        self.put(by, self.round(number, ACTIVE, size, term=term))

    def come_back(self, name: str, number: int, rank: int, size: int) -> None:
        self.safety.returned(name, name, Joined(number, rank, size, "", 0, 0, 0))

    def whole_round(self, number: int, *names: str, join: int = 1) -> None:
        """All members join, confirm and return."""
        for name in names:
            self.node(name, join=join)
        self.form(number, *names, join=join)
        for name in names:
            self.node(name, MEMBER, number, join=join)
        self.activate(number, len(names))
        for rank, name in enumerate(names):
            self.come_back(name, number, rank, len(names))


# --- correct scenarios ------------------------------------------------------------------------------------------------


def test_correct_scenario_breaks_nothing():
    scenario = Scenario()
    scenario.whole_round(1, "a", "b")
    scenario.put("a", (KEYS.store(1) + "k/x", ClosedRecord(closed=False)))
    scenario.node("c")
    scenario.put(BOSS, (KEYS.waiting, WaitingRecord(number=1, waiting=1)))
    scenario.whole_round(2, "a", "b", "c", join=2)
    scenario.lose("c")
    scenario.node("b", LEFT, join=2)
    scenario.lose("b")
    scenario.node("a", join=3)
    scenario.close()
    scenario.open()
    scenario.elect("other")
    scenario.node("b", join=3)
    scenario.form(3, "a", "b", join=3, by="other")


def test_attempt_that_is_given_up_breaks_nothing():
    scenario = Scenario()
    for name in ("a", "b", "c"):
        scenario.node(name)
    scenario.form(1, "a", "b", "c")
    scenario.node("a", MEMBER, 1)
    scenario.lose("c")
    scenario.form(2, "a", "b")
    scenario.node("a", MEMBER, 2)
    scenario.node("b", MEMBER, 2)
    scenario.activate(2, 2)


def test_store_that_lost_everything_may_start_again():
    scenario = Scenario()
    scenario.whole_round(1, "a", "b")
    scenario.safety.wiped()
    again = Scenario()
    again.safety = scenario.safety
    again.open()
    again.elect(BOSS)
    for name in ("c", "d"):
        again.node(name)
    again.form(1, "c", "d")


# --- safety -----------------------------------------------------------------------------------------------------------


def confirmed_by(scenario: Scenario, *names: str) -> None:
    """Attempt 1 of a and b with the given confirmations."""
    for name in ("a", "b"):
        scenario.node(name)
    scenario.form(1, "a", "b")
    for name in names:
        scenario.node(name, MEMBER, 1)


def test_round_that_is_active_without_a_confirmation_breaks_barrier():
    scenario = Scenario()
    confirmed_by(scenario, "a")
    with pytest.raises(BrokeBarrier, match="the record of b is"):
        scenario.activate(1, 2)


def test_round_with_the_confirmation_of_another_join_breaks_barrier():
    scenario = Scenario()
    confirmed_by(scenario, "a")
    scenario.node("b", MEMBER, 1, join=2)
    with pytest.raises(BrokeBarrier, match="the record of b is"):
        scenario.activate(1, 2)


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("a", "b", "c", "d", "e", "f")])
def test_round_with_an_invalid_size_breaks_barrier(names):
    scenario = Scenario(min_nodes=2, max_nodes=4, step=2)
    with pytest.raises(BrokeBarrier, match="allowed are 2 to 4 in steps of 2"):
        scenario.whole_round(1, *names)


def test_returning_from_a_round_that_was_never_active_breaks_barrier():
    scenario = Scenario()
    confirmed_by(scenario, "a", "b")
    with pytest.raises(BrokeBarrier, match="never active"):
        scenario.come_back("a", 1, 0, 2)


def test_roster_that_changes_after_the_decision_breaks_agreement():
    scenario = Scenario()
    confirmed_by(scenario)
    with pytest.raises(BrokeAgreement, match="was changed"):
        scenario.put(BOSS, scenario.roster(1, "b", "a"))


def test_returning_with_the_rank_of_another_breaks_agreement():
    scenario = Scenario()
    confirmed_by(scenario, "a", "b")
    scenario.activate(1, 2)
    with pytest.raises(BrokeAgreement, match="rank 1 of 2; decided: a, b"):
        scenario.come_back("a", 1, 1, 2)


def test_returning_with_another_size_breaks_agreement():
    scenario = Scenario()
    confirmed_by(scenario, "a", "b")
    scenario.activate(1, 2)
    with pytest.raises(BrokeAgreement):
        scenario.come_back("a", 1, 0, 3)


def test_node_that_is_in_a_round_twice_breaks_ranks():
    scenario = Scenario()
    scenario.node("a")
    with pytest.raises(BrokeRanks, match="twice"):
        scenario.form(1, "a", "a")


def test_round_without_its_roster_breaks_ranks():
    scenario = Scenario()
    scenario.node("a")
    with pytest.raises(BrokeRanks, match="0 ranks for 2 places"):
        scenario.put(BOSS, scenario.round(1, FORMING, 2))


def two_lives() -> Scenario:
    """Round 1 of a and b became active; the store lost everything; round 1 of c and d became active in its new life."""
    scenario = Scenario()
    confirmed_by(scenario, "a", "b")
    scenario.activate(1, 2)
    scenario.safety.wiped()
    again = Scenario()
    again.safety = scenario.safety
    again.open()
    again.elect(BOSS)
    for name in ("c", "d"):
        again.node(name)
    again.form(1, "c", "d")
    for name in ("c", "d"):
        again.node(name, MEMBER, 1)
    again.activate(1, 2)
    return again


def test_return_from_an_earlier_life_of_the_store_takes_no_rank_of_this_one():
    scenario = two_lives()
    scenario.come_back("c", 1, 0, 2)
    scenario.come_back("a", 1, 0, 2)  # late, from the earlier life
    scenario.come_back("d", 1, 1, 2)
    scenario.come_back("b", 1, 1, 2)


def test_two_nodes_that_return_with_one_rank_of_one_life_break_ranks():
    scenario = two_lives()
    ranks = next(checker for checker in scenario.safety.checkers if isinstance(checker, Ranks))
    scenario.come_back("c", 1, 0, 2)
    scenario.come_back("a", 1, 0, 2)
    with pytest.raises(BrokeRanks, match="two nodes returned from round 1 as rank 0"):
        # No life gave it the rank, so it counts for the current one.
        ranks.returned(scenario.safety.picture, "x", "x", Joined(1, 0, 2, "", 0, 0, 0))


def test_two_nodes_that_return_with_one_rank_of_a_round_break_ranks():
    scenario = Scenario()
    confirmed_by(scenario, "a", "b")
    scenario.activate(1, 2)
    ranks = next(checker for checker in scenario.safety.checkers if isinstance(checker, Ranks))
    ranks.returned(scenario.safety.picture, "a", "a", Joined(1, 0, 2, "", 0, 0, 0))
    ranks.returned(scenario.safety.picture, "a", "a", Joined(1, 0, 2, "", 0, 0, 0))  # the same node, reported twice
    with pytest.raises(BrokeRanks, match="two nodes returned from round 1 as rank 0"):
        ranks.returned(scenario.safety.picture, "b", "b", Joined(1, 0, 2, "", 0, 0, 0))


def test_round_decided_while_a_member_is_in_the_current_one_breaks_exclusivity():
    scenario = Scenario()
    scenario.whole_round(1, "a", "b")
    scenario.node("a", join=2)
    scenario.node("c")
    with pytest.raises(BrokeExclusivity, match="while b is in round 1"):
        scenario.form(2, "a", "c")


def test_round_decided_while_a_node_is_in_a_forgotten_round_breaks_exclusivity():
    scenario = Scenario()
    scenario.whole_round(5, "a", "b")
    scenario.delete(KEYS.config, KEYS.closed, KEYS.round)
    scenario.open()
    scenario.node("a", join=2)
    scenario.node("c")
    with pytest.raises(BrokeExclusivity, match="while b is in round 5"):
        scenario.form(6, "a", "c")


def test_member_that_never_left_though_its_key_says_joining_breaks_exclusivity():
    scenario = Scenario()
    scenario.whole_round(1, "a", "b")
    scenario.node("b", JOINING, join=1)
    scenario.node("a", join=2)
    with pytest.raises(BrokeExclusivity, match="while b is in round 1"):
        scenario.form(2, "a", "b")


def test_number_that_is_used_again_breaks_monotonicity():
    scenario = Scenario()
    confirmed_by(scenario)
    with pytest.raises(BrokeMonotonicity, match="second attempt"):
        scenario.form(1, "a", "b")


def test_number_that_decreases_breaks_monotonicity():
    scenario = Scenario()
    for name in ("a", "b"):
        scenario.node(name)
    scenario.form(7, "a", "b")
    with pytest.raises(BrokeMonotonicity, match="went back from 7 to 6"):
        scenario.form(6, "a", "b")


def test_process_that_returns_from_an_earlier_round_breaks_monotonicity():
    scenario = Scenario()
    scenario.whole_round(1, "a", "b")
    scenario.whole_round(2, "a", "b", join=2)
    with pytest.raises(BrokeMonotonicity, match="after round 2"):
        scenario.come_back("a", 1, 0, 2)


def test_member_whose_session_had_ended_breaks_freshness():
    scenario = Scenario()
    confirmed_by(scenario, "a", "b")
    scenario.lose("b")
    with pytest.raises(BrokeFreshness, match="b, whose session had ended"):
        scenario.activate(1, 2)


def test_freshness_checks_only_members_that_could_be_compared():
    scenario = Scenario(compared=1)
    confirmed_by(scenario, "a", "b")
    scenario.lose("b")
    scenario.activate(1, 2)


def test_write_of_a_deposed_coordinator_breaks_fencing():
    scenario = Scenario()
    confirmed_by(scenario, "a", "b")
    scenario.elect("other")
    with pytest.raises(BrokeFencing, match=r"boss wrote .* while the coordinator was other"):
        scenario.activate(1, 2)


def test_coordinator_of_an_earlier_term_breaks_fencing():
    scenario = Scenario()
    confirmed_by(scenario, "a", "b")
    with pytest.raises(BrokeFencing, match="term"):
        scenario.activate(1, 2, term=1)


def test_node_that_writes_the_key_of_another_breaks_fencing():
    scenario = Scenario()
    with pytest.raises(BrokeFencing, match="b wrote"):
        scenario.node("a", by="b")


@pytest.mark.parametrize("writer", ["a", "stranger"])
def test_write_to_a_store_by_a_node_that_is_not_a_member_breaks_fencing(writer):
    scenario = Scenario()
    scenario.whole_round(1, "a", "b")
    scenario.node("a", join=2)
    with pytest.raises(BrokeFencing, match="without being a member of round 1"):
        scenario.put(writer, (KEYS.store(1) + "k/x", ClosedRecord(closed=False)))


def test_round_that_is_active_after_the_close_breaks_finality():
    scenario = Scenario()
    confirmed_by(scenario, "a", "b")
    scenario.close()
    with pytest.raises(BrokeFinality, match="after the run was closed"):
        scenario.activate(1, 2)


def test_attempt_from_before_the_close_that_is_active_after_the_reopening_breaks_finality():
    scenario = Scenario()
    confirmed_by(scenario, "a", "b")
    scenario.close()
    scenario.open()
    with pytest.raises(BrokeFinality, match="decided before the run was closed"):
        scenario.activate(1, 2)


# --- the cause of a round's end: no guarantee, but checked ------------------------------------------------------------


class Ended(Scenario):
    """Round 1 of a, b and c, of which all members have left or are lost."""

    def __init__(self, *failed: str, lost: str = "", silent: str = "") -> None:
        """`silent` leaves in order before it is told that the round is active, so it says no cause."""
        super().__init__()
        self.whole_round(1, "a", "b", "c")
        if lost:
            self.lose(lost)
        for name in sorted({"a", "b", "c"} - {lost}, key=lambda name: (name not in failed, name)):
            kind = LeaveKind.WORKER_FAILED if name in failed else LeaveKind.ROUND_OVER
            left = LeaveCause(kind=kind, why=f"{name} says why", round=1) if name != silent else None
            self.put(name, (KEYS.node(name), NodeRecord(id=name, **PLAIN, name=name, join=2, phase=JOINING, left=left)))

    def end_session(self, name: str) -> Ended:
        self.lose(name)
        return self


PLAIN: dict[str, Any] = {"addr": "", "session": 1}


def report(scenario: Scenario, kind: LeaveKind | None, why: str) -> None:
    """The coordinator reports the end of round 1."""
    times = {"gather_s": 0.0, "last_call_s": 0.0, "confirm_s": 0.0, "formed_at": 0.0}
    record = HistoryRecord(number=1, size=3, why="", ended=why, ended_kind=kind, **times)
    scenario.put(BOSS, (KEYS.history(1), record))


@pytest.mark.parametrize(
    ("scenario", "kind", "why"),
    [
        (lambda: Ended("b", "c"), LeaveKind.WORKER_FAILED, "b says why"),
        (lambda: Ended("b", lost="c"), LeaveKind.MEMBER_LOST, "c was lost"),
        (Ended, LeaveKind.ROUND_OVER, "a says why"),
        (lambda: Ended(silent="c").end_session("c"), LeaveKind.MEMBER_LOST, "c is gone"),
        (lambda: Ended().end_session("c"), LeaveKind.MEMBER_LOST, "c is gone"),
    ],
    ids=["failure", "loss", "neither", "no cause, and no record any more", "no record any more"],
)
def test_true_cause_of_an_end_breaks_nothing(scenario, kind, why):
    report(scenario(), kind, why)


@pytest.mark.parametrize(
    ("scenario", "kind", "why", "words"),
    [
        (lambda: Ended("b"), None, "somehow", "has no kind"),
        (lambda: Ended("b", "c"), LeaveKind.WORKER_FAILED, "c says why", "the first failure in round 1 was b says why"),
        (lambda: Ended("b"), LeaveKind.STALLED, "d says why", "that no member wrote"),
        (lambda: Ended("b"), LeaveKind.ADMISSION, "to admit d", "a worker of round 1 failed"),
        (Ended, LeaveKind.MEMBER_LOST, "c was lost", "lost no such member"),
        (lambda: Ended(silent="c"), LeaveKind.MEMBER_LOST, "c was lost", "lost no such member"),
        (lambda: Ended().end_session("c"), LeaveKind.MEMBER_LOST, "b was lost", "lost no such member"),
    ],
    ids=[
        *("no kind", "a later failure", "an invented failure", "an echo", "an invented loss"),
        *("an invented loss of one that said no cause", "an invented loss beside one without a record"),
    ],
)
def test_untrue_cause_of_an_end_is_detected(scenario, kind, why, words):
    with pytest.raises(BrokeCause, match=words):
        report(scenario(), kind, why)


def test_member_that_was_gone_before_its_round_was_active_may_be_reported_as_lost():
    scenario = Scenario(compared=2)
    for name in ("a", "b", "c"):
        scenario.node(name)
    scenario.form(1, "a", "b", "c")
    for name in ("a", "b", "c"):
        scenario.node(name, MEMBER, 1)
    scenario.lose("c")
    scenario.activate(1, 3)
    left = LeaveCause(kind=LeaveKind.MEMBER_LOST, why="c was lost", round=1)
    for name in ("a", "b"):
        record = NodeRecord(id=name, **PLAIN, name=name, join=2, phase=JOINING, left=left)
        scenario.put(name, (KEYS.node(name), record))
    report(scenario, LeaveKind.MEMBER_LOST, "c was lost")


def told_and_lost(scenario: Scenario) -> None:
    """Node a was told that the run is closed; then the server lost its data, and others made the run anew."""
    scenario.close()
    scenario.safety.told_closed("a", "first")
    scenario.safety.wiped(is_told=True)
    scenario.open()
    scenario.elect(BOSS)


def test_node_that_was_told_of_a_close_and_is_in_a_round_of_the_next_server_breaks_finality():
    scenario = Scenario()
    told_and_lost(scenario)
    confirmed_by(scenario, "a", "b")
    with pytest.raises(BrokeFinality, match="a is a member of round 1, although it was told"):
        scenario.activate(1, 2)


def test_node_that_was_told_of_a_close_may_join_after_a_reopening():
    scenario = Scenario()
    told_and_lost(scenario)
    scenario.close()
    scenario.open()
    confirmed_by(scenario, "a", "b")
    scenario.activate(1, 2)


def test_node_that_was_told_of_a_close_may_join_a_run_in_which_others_have_had_a_round():
    scenario = Scenario()
    told_and_lost(scenario)
    scenario.whole_round(1, "b", "c")
    scenario.whole_round(2, "a", "b", "c", join=2)


def test_errors_are_named_after_their_guarantees():
    errors = [error for error in Broke.__subclasses__() if error.__module__ == Broke.__module__]
    assert {error.__name__ for error in errors} == {
        *("BrokeBarrier", "BrokeAgreement", "BrokeRanks", "BrokeExclusivity", "BrokeMonotonicity", "BrokeFreshness"),
        *("BrokeFencing", "BrokeFinality", "BrokeCompletion", "BrokeDetection", "BrokeAdmission", "BrokeRelease"),
        "BrokeOutageTolerance",
        *("BrokeCause", "BrokeMemory"),  # no guarantees, but checked
    }
    assert all(error.__doc__ for error in errors)
