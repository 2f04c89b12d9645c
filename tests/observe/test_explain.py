"""The explanation of a run states facts in the algorithm's own words, and gives advice."""

import pytest

from rallypoint.kv.types import Change, Item
from rallypoint.observe.explain import Explanation
from rallypoint.observe.explain import explain as explain_at
from rallypoint.observe.report import Report
from rallypoint.observe.report_builder import ReportBuilder
from rallypoint.rendezvous.records import (
    BudgetRecord,
    ClosedRecord,
    CoordinatorRecord,
    HistoryRecord,
    LeaveKind,
    NodePhase,
    Record,
    RefusedRecord,
    RosterMember,
    RoundPhase,
    WaitingRecord,
    encode,
    roster_digest,
    split_roster,
)
from tests.rendezvous.fake_run import KEYS, config, node, round_record

NOW = 1_000_000.0
LED = (KEYS.coordinator, CoordinatorRecord(id="c", name="server"))


def explain(report: Report, given: dict[str, int | str] | None = None) -> Explanation:
    return explain_at(report, NOW, given)


def report_of(*records: tuple[str, Record], roster: tuple[str, ...] = (), **options: object) -> Report:
    """The report of a run with these records and a config."""
    builder = ReportBuilder(KEYS, "tcp://head:29400", 0.0)
    everything = [(KEYS.config, config(**options)), *records]
    items = [Item(key, encode(record), at, at, 1) for at, (key, record) in enumerate(everything, start=1)]
    builder.load(items, len(items), 0.0)
    if builder.wanted_roster is not None:
        chunks = split_roster(builder.wanted_roster, [RosterMember(name, 1, name, name) for name in roster])
        found = [Item(KEYS.roster_chunk(1, at), chunk, 1, 1, 1) for at, chunk in enumerate(chunks)]
        builder.set_roster(builder.wanted_roster, found, 0.0)
    return builder.report()


def joining(*names: str) -> list[tuple[str, Record]]:
    return [(KEYS.node(name), node(name)) for name in names]


def active(*present: str, of: tuple[str, ...]) -> list[tuple[str, Record]]:
    digest = roster_digest(split_roster(1, [RosterMember(name, 1, name, name) for name in of]))
    members = [(KEYS.node(name), node(name, phase=NodePhase.MEMBER, round=1)) for name in present]
    return [(KEYS.round, round_record(1, size=len(of), chunks=1, digest=digest)), *members]


def test_reason_is_the_coordinators_and_the_advice_counts_the_missing_nodes():
    told = (KEYS.waiting, WaitingRecord(number=0, reason="1 of at least 2 nodes joined: a"))
    found = explain(report_of(LED, told, *joining("a")))
    assert found.facts == ("Run 'run' is waiting: 1 of at least 2 nodes joined: a.",)
    assert found.advice[0].startswith("Start 1 more node with the same URL")


def test_reason_of_another_round_is_not_used():
    told = (KEYS.waiting, WaitingRecord(number=7, reason="of long ago"))
    assert "of long ago" not in explain(report_of(LED, told, *joining("a"))).paragraph


def test_run_without_a_coordinator_says_so():
    assert "the run has no coordinator at present" in explain(report_of(*joining("a"))).paragraph.lower()


def test_missing_members_are_named_unless_the_reason_names_them():
    members = active("a", of=("a", "b"))
    report = report_of(LED, *members, roster=("a", "b"))
    assert report.missing == ("b",)
    assert "Members of round 1 that have gone: b." in explain(report).paragraph
    told = (KEYS.waiting, WaitingRecord(number=1, lost=1, reason="round 1 is active with 1 of 2 members; lost: b"))
    assert "that have gone" not in explain(report_of(LED, told, *members, roster=("a", "b"))).paragraph


def test_closed_run_whose_round_goes_on_is_explained_as_both():
    closed = (KEYS.closed, ClosedRecord(closed=True, by="me@here:1", why="enough"))
    text = explain(report_of(LED, closed, *active("a", "b", of=("a", "b")), roster=("a", "b"))).paragraph
    assert "was closed by me@here:1: enough" in text
    assert "goes on until its members leave" in text
    assert "round 1 is active with 2 of 2 members" in text
    assert "rallypoint reopen" in text


def test_node_that_was_refused_and_joined_later_is_not_listed_as_refused():
    note = (KEYS.refusal("b"), RefusedRecord(name="b", differences={"min_nodes": (3, 2)}, why="other settings"))
    assert "b was refused: other settings." in explain(report_of(LED, note, *joining("a"))).paragraph
    assert "refused" not in explain(report_of(LED, note, *joining("a", "b"))).paragraph


def test_node_whose_preflight_check_failed_is_listed_with_advice():
    note = (KEYS.refusal("b"), RefusedRecord(name="b", differences={}, why="preflight 'check' exited with 9"))
    text = explain(report_of(LED, note, *joining("a"))).paragraph
    assert "b did not join: preflight 'check' exited with 9." in text
    assert "Fix what the preflight check found on b, or start other nodes instead." in text
    assert "same settings" not in text
    both = (KEYS.refusal("c"), RefusedRecord(name="c", differences={"min_nodes": (3, 2)}, why="other settings"))
    assert (
        "Give c the settings of the run (min_nodes=2), or another run id."
        in explain(report_of(LED, note, both, *joining("a"))).paragraph
    )


@pytest.mark.parametrize(("given", "is_refused"), [({"min_nodes": 3}, True), ({"min_nodes": 2}, False), ({}, False)])
def test_settings_that_would_be_refused_are_named(given, is_refused):
    text = explain(report_of(LED, *joining("a", "b")), given).paragraph
    assert ("a node with this url would be refused: min_nodes is 3 here and 2 there" in text.lower()) is is_refused


def test_attempt_that_lost_a_member_is_no_longer_forming():
    digest = roster_digest(split_roster(1, [RosterMember(name, 1, name, name) for name in ("a", "b")]))
    builder = ReportBuilder(KEYS, "tcp://head:29400", 0.0)
    from rallypoint.rendezvous.records import RoundPhase

    forming = round_record(1, RoundPhase.FORMING, chunks=1, digest=digest)
    records = [(KEYS.config, config()), LED, (KEYS.round, forming), *joining("a", "b")]
    builder.load([Item(key, encode(record), at, at, 1) for at, (key, record) in enumerate(records, start=1)], 4, 0.0)
    chunk = split_roster(1, [RosterMember(name, 1, name, name) for name in ("a", "b")])[0]
    builder.set_roster(1, [Item(KEYS.roster_chunk(1, 0), chunk, 1, 1, 1)], 0.0)
    assert builder.report().phase.value == "forming"
    assert "a, b have not confirmed the round yet" in explain(builder.report()).paragraph
    builder.apply([Change(KEYS.node("b"), None)], 5, 1.0)
    assert builder.report().phase.value == "below minimum"


def over(number: int = 1, **fields: object) -> tuple[str, Record]:
    """The report of a round that has ended."""
    times = {"gather_s": 0.0, "last_call_s": 0.0, "confirm_s": 0.0, "formed_at": 1.0}
    record = HistoryRecord(number=number, size=2, why="", **times, **fields)  # type: ignore[arg-type]
    return KEYS.history(number), record


OOM = "rank 1 on b exited with 1: RuntimeError: CUDA out of memory"


def test_end_of_the_last_round_is_told_while_the_next_one_forms():
    ended = over(ended=OOM, ended_kind=LeaveKind.WORKER_FAILED, lasted_s=41.2)
    forming = (KEYS.round, round_record(2, RoundPhase.FORMING, last_active=1))
    report = report_of(LED, ended, forming, *joining("a", "b"))
    assert f"Round 1 ended after 41 s: {OOM}." in explain(report).facts
    assert report.last_end is not None
    assert report.last_end.ended_kind == "worker failed"
    told = (KEYS.waiting, WaitingRecord(number=0, reason=f"1 of at least 2 nodes joined: a; round 1 ended: {OOM}"))
    assert explain(report_of(LED, ended, told, *joining("a"))).paragraph.count(OOM) == 1


def test_run_whose_job_has_finished_needs_no_action():
    closed = (KEYS.closed, ClosedRecord(closed=True, by="a", why="all workers have finished", outcome=0))
    said = explain(report_of(LED, closed)).paragraph
    assert said.startswith("No action is needed: the job has finished. For another one, use another run id. Run")
    assert "reopen" not in said.partition("Run 'run'")[0]


def test_end_of_an_earlier_round_is_not_told_while_a_round_is_active():
    report = report_of(LED, over(ended=OOM), *active("a", "b", of=("a", "b")), roster=("a", "b"))
    assert report.last_end is None
    assert OOM not in explain(report).paragraph


def test_restarts_are_told_with_the_reason_of_the_last_one():
    def budget(**fields: object) -> tuple[str, Record]:
        return KEYS.budget, BudgetRecord(**{"incarnation": "first", "used": 1, "limit": 3, **fields})  # type: ignore[arg-type]

    assert f"1 of 3 restarts used, 2 left: {OOM}." in explain(report_of(LED, budget(why=OOM))).facts
    assert "restart" not in explain(report_of(LED, budget(used=0))).paragraph
    assert "restart" not in explain(report_of(LED, budget(outcome=0, why="all workers have finished"))).paragraph
    assert report_of(LED, budget(incarnation="an earlier one")).restarts is None
    damaged = Item(KEYS.budget, b"damaged", 1, 1, 1)
    builder = ReportBuilder(KEYS, "tcp://head:29400", 0.0)
    builder.load([Item(KEYS.config, encode(config()), 1, 1, 1), damaged], 2, 0.0)
    assert builder.report().restarts is None
    assert builder.view.unreadable == {}, "nothing is decided on it"
