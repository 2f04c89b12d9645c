"""Each checker raises the error of its own guarantee on a hand-made story, and is silent on a good one."""

from __future__ import annotations

import pytest

from rallypoint.kv.types import Change, Item
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.rendezvous.records import (
    ClosedRecord,
    CoordinatorRecord,
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


class Story:
    """Commits and returns, one after the other, told to all checkers. Every commit is one revision."""

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
        """All of them join, confirm and return."""
        for name in names:
            self.node(name, join=join)
        self.form(number, *names, join=join)
        for name in names:
            self.node(name, MEMBER, number, join=join)
        self.activate(number, len(names))
        for rank, name in enumerate(names):
            self.come_back(name, number, rank, len(names))


# --- what is fine -----------------------------------------------------------------------------------------------------


def test_good_story_breaks_nothing():
    story = Story()
    story.whole_round(1, "a", "b")
    story.put("a", (KEYS.store(1) + "k/x", ClosedRecord(closed=False)))
    story.node("c")
    story.put(BOSS, (KEYS.waiting, WaitingRecord(number=1, waiting=1)))
    story.whole_round(2, "a", "b", "c", join=2)
    story.lose("c")
    story.node("b", LEFT, join=2)
    story.lose("b")
    story.node("a", join=3)
    story.close()
    story.open()
    story.elect("other")
    story.node("b", join=3)
    story.form(3, "a", "b", join=3, by="other")


def test_attempt_that_is_given_up_breaks_nothing():
    story = Story()
    for name in ("a", "b", "c"):
        story.node(name)
    story.form(1, "a", "b", "c")
    story.node("a", MEMBER, 1)
    story.lose("c")
    story.form(2, "a", "b")
    story.node("a", MEMBER, 2)
    story.node("b", MEMBER, 2)
    story.activate(2, 2)


def test_store_that_lost_everything_may_begin_again():
    story = Story()
    story.whole_round(1, "a", "b")
    story.safety.wiped()
    again = Story()
    again.safety = story.safety
    again.open()
    again.elect(BOSS)
    for name in ("c", "d"):
        again.node(name)
    again.form(1, "c", "d")


# --- safety -----------------------------------------------------------------------------------------------------------


def confirmed_by(story: Story, *names: str) -> None:
    """Attempt 1 of a and b, and who has confirmed it."""
    for name in ("a", "b"):
        story.node(name)
    story.form(1, "a", "b")
    for name in names:
        story.node(name, MEMBER, 1)


def test_round_that_is_active_without_a_confirmation_breaks_barrier():
    story = Story()
    confirmed_by(story, "a")
    with pytest.raises(BrokeBarrier, match="b stands at"):
        story.activate(1, 2)


def test_round_with_the_confirmation_of_another_join_breaks_barrier():
    story = Story()
    confirmed_by(story, "a")
    story.node("b", MEMBER, 1, join=2)
    with pytest.raises(BrokeBarrier, match="b stands at"):
        story.activate(1, 2)


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("a", "b", "c", "d", "e", "f")])
def test_round_of_a_size_that_is_not_allowed_breaks_barrier(names):
    story = Story(min_nodes=2, max_nodes=4, step=2)
    with pytest.raises(BrokeBarrier, match="allowed are 2 to 4 in steps of 2"):
        story.whole_round(1, *names)


def test_returning_from_a_round_that_was_never_active_breaks_barrier():
    story = Story()
    confirmed_by(story, "a", "b")
    with pytest.raises(BrokeBarrier, match="never active"):
        story.come_back("a", 1, 0, 2)


def test_roster_that_changes_after_the_decision_breaks_agreement():
    story = Story()
    confirmed_by(story)
    with pytest.raises(BrokeAgreement, match="was changed"):
        story.put(BOSS, story.roster(1, "b", "a"))


def test_returning_with_the_rank_of_another_breaks_agreement():
    story = Story()
    confirmed_by(story, "a", "b")
    story.activate(1, 2)
    with pytest.raises(BrokeAgreement, match="rank 1 of 2; decided was: a, b"):
        story.come_back("a", 1, 1, 2)


def test_returning_with_another_size_breaks_agreement():
    story = Story()
    confirmed_by(story, "a", "b")
    story.activate(1, 2)
    with pytest.raises(BrokeAgreement):
        story.come_back("a", 1, 0, 3)


def test_node_that_is_in_a_round_twice_breaks_ranks():
    story = Story()
    story.node("a")
    with pytest.raises(BrokeRanks, match="twice"):
        story.form(1, "a", "a")


def test_round_without_its_roster_breaks_ranks():
    story = Story()
    story.node("a")
    with pytest.raises(BrokeRanks, match="0 ranks for 2 places"):
        story.put(BOSS, story.round(1, FORMING, 2))


def two_lives() -> Story:
    """Round 1 of a and b became active; the store lost everything; round 1 of c and d became active in its new life."""
    story = Story()
    confirmed_by(story, "a", "b")
    story.activate(1, 2)
    story.safety.wiped()
    again = Story()
    again.safety = story.safety
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
    story = two_lives()
    story.come_back("c", 1, 0, 2)
    story.come_back("a", 1, 0, 2)  # late, from the life before
    story.come_back("d", 1, 1, 2)
    story.come_back("b", 1, 1, 2)


def test_two_nodes_that_return_with_one_rank_of_one_life_break_ranks():
    story = two_lives()
    ranks = next(checker for checker in story.safety.checkers if isinstance(checker, Ranks))
    story.come_back("c", 1, 0, 2)
    story.come_back("a", 1, 0, 2)
    with pytest.raises(BrokeRanks, match="two nodes returned from round 1 as rank 0"):
        # No life gave it the rank, so it counts for the one that is now.
        ranks.returned(story.safety.picture, "x", "x", Joined(1, 0, 2, "", 0, 0, 0))


def test_two_nodes_that_return_with_one_rank_of_a_round_break_ranks():
    story = Story()
    confirmed_by(story, "a", "b")
    story.activate(1, 2)
    ranks = next(checker for checker in story.safety.checkers if isinstance(checker, Ranks))
    ranks.returned(story.safety.picture, "a", "a", Joined(1, 0, 2, "", 0, 0, 0))
    ranks.returned(story.safety.picture, "a", "a", Joined(1, 0, 2, "", 0, 0, 0))  # the same node, told twice
    with pytest.raises(BrokeRanks, match="two nodes returned from round 1 as rank 0"):
        ranks.returned(story.safety.picture, "b", "b", Joined(1, 0, 2, "", 0, 0, 0))


def test_round_that_is_decided_while_a_member_is_inside_breaks_exclusivity():
    story = Story()
    story.whole_round(1, "a", "b")
    story.node("a", join=2)
    story.node("c")
    with pytest.raises(BrokeExclusivity, match="while b is in round 1"):
        story.form(2, "a", "c")


def test_round_that_is_decided_while_one_is_in_a_forgotten_round_breaks_exclusivity():
    story = Story()
    story.whole_round(5, "a", "b")
    story.delete(KEYS.config, KEYS.closed, KEYS.round)
    story.open()
    story.node("a", join=2)
    story.node("c")
    with pytest.raises(BrokeExclusivity, match="while b is in round 5"):
        story.form(6, "a", "c")


def test_member_that_never_left_though_its_key_says_joining_breaks_exclusivity():
    story = Story()
    story.whole_round(1, "a", "b")
    story.node("b", JOINING, join=1)
    story.node("a", join=2)
    with pytest.raises(BrokeExclusivity, match="while b is in round 1"):
        story.form(2, "a", "b")


def test_number_that_is_used_again_breaks_monotonicity():
    story = Story()
    confirmed_by(story)
    with pytest.raises(BrokeMonotonicity, match="second attempt"):
        story.form(1, "a", "b")


def test_number_that_goes_back_breaks_monotonicity():
    story = Story()
    for name in ("a", "b"):
        story.node(name)
    story.form(7, "a", "b")
    with pytest.raises(BrokeMonotonicity, match="went back from 7 to 6"):
        story.form(6, "a", "b")


def test_process_that_returns_from_an_earlier_round_breaks_monotonicity():
    story = Story()
    story.whole_round(1, "a", "b")
    story.whole_round(2, "a", "b", join=2)
    with pytest.raises(BrokeMonotonicity, match="after round 2"):
        story.come_back("a", 1, 0, 2)


def test_member_whose_session_had_ended_breaks_freshness():
    story = Story()
    confirmed_by(story, "a", "b")
    story.lose("b")
    with pytest.raises(BrokeFreshness, match="b, whose session had ended"):
        story.activate(1, 2)


def test_freshness_looks_at_as_many_members_as_could_be_compared():
    story = Story(compared=1)
    confirmed_by(story, "a", "b")
    story.lose("b")
    story.activate(1, 2)


def test_coordinator_that_was_deposed_and_writes_breaks_fencing():
    story = Story()
    confirmed_by(story, "a", "b")
    story.elect("other")
    with pytest.raises(BrokeFencing, match=r"boss wrote .* while the coordinator was other"):
        story.activate(1, 2)


def test_coordinator_of_an_earlier_term_breaks_fencing():
    story = Story()
    confirmed_by(story, "a", "b")
    with pytest.raises(BrokeFencing, match="term"):
        story.activate(1, 2, term=1)


def test_node_that_writes_the_key_of_another_breaks_fencing():
    story = Story()
    with pytest.raises(BrokeFencing, match="b wrote"):
        story.node("a", by="b")


@pytest.mark.parametrize("writer", ["a", "stranger"])
def test_store_that_is_written_by_one_who_is_no_member_breaks_fencing(writer):
    story = Story()
    story.whole_round(1, "a", "b")
    story.node("a", join=2)
    with pytest.raises(BrokeFencing, match="without being a member of round 1"):
        story.put(writer, (KEYS.store(1) + "k/x", ClosedRecord(closed=False)))


def test_round_that_is_active_after_the_close_breaks_finality():
    story = Story()
    confirmed_by(story, "a", "b")
    story.close()
    with pytest.raises(BrokeFinality, match="after the run was closed"):
        story.activate(1, 2)


def test_attempt_from_before_the_close_that_is_active_after_the_reopening_breaks_finality():
    story = Story()
    confirmed_by(story, "a", "b")
    story.close()
    story.open()
    with pytest.raises(BrokeFinality, match="decided before the run was closed"):
        story.activate(1, 2)


def test_errors_are_named_after_their_guarantees():
    errors = [error for error in Broke.__subclasses__() if error.__module__ == Broke.__module__]
    assert {error.__name__ for error in errors} == {
        *("BrokeBarrier", "BrokeAgreement", "BrokeRanks", "BrokeExclusivity", "BrokeMonotonicity", "BrokeFreshness"),
        *("BrokeFencing", "BrokeFinality", "BrokeCompletion", "BrokeDetection", "BrokeAdmission", "BrokeRelease"),
        "BrokeOutageTolerance",
    }
    assert all(error.__doc__ for error in errors)
