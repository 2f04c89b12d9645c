"""The paragraph says what is so, in the algorithm's own words, and what to do."""

import pytest

from rallypoint.kv.types import Change, Item
from rallypoint.observe.explain import explain
from rallypoint.observe.report import Report
from rallypoint.observe.scene import Scene
from rallypoint.rendezvous.records import (
    ClosedRecord,
    CoordinatorRecord,
    NodePhase,
    Record,
    RefusedRecord,
    RosterMember,
    WaitingRecord,
    encode,
    roster_digest,
    split_roster,
)
from tests.rendezvous.board import KEYS, config, node, round_record

LED = (KEYS.coordinator, CoordinatorRecord(id="c", name="server"))


def drawn(*records: tuple[str, Record], roster: tuple[str, ...] = (), **options: object) -> Report:
    """A run with these keys, one of them its config."""
    scene = Scene(KEYS, "tcp://head:29400", 0.0)
    everything = [(KEYS.config, config(**options)), *records]
    items = [Item(key, encode(record), at, at, 1) for at, (key, record) in enumerate(everything, start=1)]
    scene.load(items, len(items), 0.0)
    if scene.wanted_roster is not None:
        chunks = split_roster(scene.wanted_roster, [RosterMember(name, 1, name, name) for name in roster])
        found = [Item(KEYS.roster_chunk(1, at), chunk, 1, 1, 1) for at, chunk in enumerate(chunks)]
        scene.set_roster(scene.wanted_roster, found, 0.0)
    return scene.report()


def joining(*names: str) -> list[tuple[str, Record]]:
    return [(KEYS.node(name), node(name)) for name in names]


def active(*present: str, of: tuple[str, ...]) -> list[tuple[str, Record]]:
    digest = roster_digest(split_roster(1, [RosterMember(name, 1, name, name) for name in of]))
    members = [(KEYS.node(name), node(name, phase=NodePhase.MEMBER, round=1)) for name in present]
    return [(KEYS.round, round_record(1, size=len(of), chunks=1, digest=digest)), *members]


def test_reason_is_the_coordinators_and_the_advice_counts():
    told = (KEYS.waiting, WaitingRecord(number=0, reason="1 of at least 2 nodes joined: a"))
    found = explain(drawn(LED, told, *joining("a")))
    assert found.facts == ("Run 'run' waits: 1 of at least 2 nodes joined: a.",)
    assert found.advice[0].startswith("Start 1 node more with the same URL")


def test_reason_of_another_round_is_not_told():
    told = (KEYS.waiting, WaitingRecord(number=7, reason="of long ago"))
    assert "of long ago" not in explain(drawn(LED, told, *joining("a"))).paragraph


def test_run_without_a_coordinator_says_so():
    assert "nobody decides at present" in explain(drawn(*joining("a"))).paragraph.lower()


def test_who_is_missing_is_named_if_the_reason_does_not():
    members = active("a", of=("a", "b"))
    report = drawn(LED, *members, roster=("a", "b"))
    assert report.missing == ("b",)
    assert "Not there any more, of round 1: b." in explain(report).paragraph
    told = (KEYS.waiting, WaitingRecord(number=1, lost=1, reason="round 1 is active with 1 of 2 members; lost: b"))
    assert "Not there any more" not in explain(drawn(LED, told, *members, roster=("a", "b"))).paragraph


def test_closed_run_whose_round_goes_on_is_both():
    closed = (KEYS.closed, ClosedRecord(closed=True, by="me@here:1", why="enough"))
    text = explain(drawn(LED, closed, *active("a", "b", of=("a", "b")), roster=("a", "b"))).paragraph
    assert "was closed by me@here:1: enough" in text
    assert "goes on until its members leave" in text
    assert "round 1 is active with 2 of 2 members" in text
    assert "rallypoint reopen" in text


def test_node_that_was_refused_and_came_in_later_is_not_told_as_refused():
    note = (KEYS.refusal("b"), RefusedRecord(name="b", differences={"min_nodes": (3, 2)}, why="other settings"))
    assert "B was refused: other settings." in explain(drawn(LED, note, *joining("a"))).paragraph
    assert "refused" not in explain(drawn(LED, note, *joining("a", "b"))).paragraph


def test_node_whose_own_check_failed_is_told_as_held_back_with_what_to_do():
    note = (KEYS.refusal("b"), RefusedRecord(name="b", differences={}, why="preflight 'check' exited with 9"))
    text = explain(drawn(LED, note, *joining("a"))).paragraph
    assert "B is held back: preflight 'check' exited with 9." in text
    assert "Mend what the preflight found there" in text
    assert "same settings" not in text
    both = (KEYS.refusal("c"), RefusedRecord(name="c", differences={"min_nodes": (3, 2)}, why="other settings"))
    assert "Give all nodes the same settings" in explain(drawn(LED, note, both, *joining("a"))).paragraph


@pytest.mark.parametrize(("given", "is_refused"), [({"min_nodes": 3}, True), ({"min_nodes": 2}, False), ({}, False)])
def test_settings_that_would_be_refused_are_named(given, is_refused):
    text = explain(drawn(LED, *joining("a", "b")), given).paragraph
    assert ("a node with this url would be refused: min_nodes is 3 here and 2 there" in text.lower()) is is_refused


def test_attempt_that_lost_a_member_is_no_longer_forming():
    digest = roster_digest(split_roster(1, [RosterMember(name, 1, name, name) for name in ("a", "b")]))
    scene = Scene(KEYS, "tcp://head:29400", 0.0)
    from rallypoint.rendezvous.records import RoundPhase

    forming = round_record(1, RoundPhase.FORMING, chunks=1, digest=digest)
    records = [(KEYS.config, config()), (KEYS.round, forming), *joining("a", "b")]
    scene.load([Item(key, encode(record), at, at, 1) for at, (key, record) in enumerate(records, start=1)], 4, 0.0)
    chunk = split_roster(1, [RosterMember(name, 1, name, name) for name in ("a", "b")])[0]
    scene.set_roster(1, [Item(KEYS.roster_chunk(1, 0), chunk, 1, 1, 1)], 0.0)
    assert scene.report().phase.value == "forming"
    assert "still to confirm: a, b" in explain(scene.report()).paragraph
    scene.apply([Change(KEYS.node("b"), None)], 5, 1.0)
    assert scene.report().phase.value == "gathering"
