"""The phase of a run follows from a few counts, in one function."""

import pytest

from rallypoint.cli.render import TONES
from rallypoint.observe.phase import Phase, Tone, phase_of, reason_of
from rallypoint.rendezvous.records import ClosedRecord, RoundPhase, RoundRecord, WaitingRecord

ROUND = {"round_phase": RoundPhase.ACTIVE, "size": 3}
FORMING = {"round_phase": RoundPhase.FORMING, "size": 3}


@pytest.mark.parametrize(
    ("facts", "phase"),
    [
        ({"nodes": 0}, Phase.EMPTY),
        ({"nodes": 0, **ROUND}, Phase.EMPTY),
        ({"nodes": 0, "is_closed": True}, Phase.CLOSED),
        ({"nodes": 1, "candidates": 1}, Phase.BELOW_MINIMUM),
        ({"nodes": 2, "candidates": 1}, Phase.BELOW_MINIMUM),
        ({"nodes": 2, "candidates": 2}, Phase.GATHERING),
        ({"nodes": 2, "candidates": 2, "is_closed": True}, Phase.CLOSED),
        ({"nodes": 3, "members": 3, **FORMING}, Phase.FORMING),
        ({"nodes": 3, "members": 3, "is_closed": True, **FORMING}, Phase.CLOSED),
        ({"nodes": 2, "members": 2, **FORMING}, Phase.GATHERING),
        ({"nodes": 3, "candidates": 3, **FORMING}, Phase.GATHERING),
        ({"nodes": 1, "candidates": 1, **FORMING}, Phase.BELOW_MINIMUM),
        ({"nodes": 3, "members": 3, **ROUND}, Phase.ACTIVE),
        ({"nodes": 4, "members": 3, "candidates": 1, **ROUND}, Phase.ACTIVE),
        ({"nodes": 2, "members": 2, **ROUND}, Phase.INCOMPLETE),
        ({"nodes": 3, "members": 1, "candidates": 2, **ROUND}, Phase.INCOMPLETE),
        ({"nodes": 1, "members": 1, **ROUND}, Phase.BELOW_MINIMUM),
        ({"nodes": 1, "candidates": 1, **ROUND}, Phase.BELOW_MINIMUM),
        ({"nodes": 3, "candidates": 3, **ROUND}, Phase.GATHERING),
        ({"nodes": 3, "members": 3, "is_closed": True, **ROUND}, Phase.CLOSING),
        ({"nodes": 1, "members": 1, "is_closed": True, **ROUND}, Phase.CLOSING),
        ({"nodes": 1, "candidates": 1, "is_closed": True, **ROUND}, Phase.CLOSED),
    ],
)
def test_phase_of_a_run_with_a_minimum_of_two_nodes(facts, phase):
    rest = {"is_closed": False, "round_phase": None, "size": 0, "members": 0, "candidates": 0, "min_nodes": 2}
    assert phase_of(**{**rest, **facts}) is phase


def test_every_phase_has_a_colour_and_only_a_complete_round_is_green():
    assert {phase for phase in Phase if phase.tone is Tone.GOOD} == {Phase.ACTIVE}
    assert TONES.keys() == set(Tone)
    assert all(phase.tone in TONES for phase in Phase)


def test_sentence_from_before_the_last_closing_or_reopening_is_not_used():
    told = WaitingRecord(number=1, reason="the run is closed by ann: enough")
    record = RoundRecord(number=1, phase=RoundPhase.ACTIVE, incarnation="i", size=2, term=1, chunks=1, digest="")
    opened = ClosedRecord(closed=False, by="ann", why="go on")
    assert reason_of(2, record, told, 8, opened, 9) == "the run was reopened by ann: go on"
    assert reason_of(2, record, told, 10, opened, 9) == "the run is closed by ann: enough"
    assert reason_of(2, None, told, 10, opened, 9) == "the run was reopened by ann: go on", "of another round"
    closed = ClosedRecord(closed=True, by="ann", why="enough")
    assert reason_of(2, record, WaitingRecord(number=1, reason="2 of 2"), 8, closed, 9) == told.reason
    assert reason_of(2, None, None, 0, None, 0) == ""


def test_sentence_about_nodes_that_have_all_gone_is_not_used():
    told = WaitingRecord(number=0, reason="2 of at least 3 nodes joined: a, b", candidates=2)
    assert reason_of(2, None, told, 2, None, 0) == told.reason
    assert reason_of(0, None, told, 2, None, 0) == "all nodes have gone"
