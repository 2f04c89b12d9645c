"""The reports of rounds: arrivals, durations, the reason of the end, and how many are kept."""

from rallypoint.kv.types import Item
from rallypoint.rendezvous.history import KEPT, Reports
from rallypoint.rendezvous.records import HistoryRecord, encode
from tests.rendezvous.fake_run import KEYS, FakeRun, round_record


def report(number: int) -> HistoryRecord:
    return HistoryRecord(number=number, size=2, formed_at=1.0, why="test", gather_s=0.0, last_call_s=0.0, confirm_s=0.0)


def items(*records: HistoryRecord) -> list[Item]:
    return [Item(KEYS.history(record.number), encode(record), 1, 1, 1) for record in records]


def reported(run: FakeRun, reports: Reports, number: int, *names: str) -> HistoryRecord:
    """Form and activate a round like a coordinator; the members confirm at intervals of one second."""
    plan = run.plan(number, *names)
    reports.formed(plan, run.view)
    for name in names:
        run.now += 1
        run.confirm(number, name)
    record = round_record(number, size=len(names), why="the last call is over")
    result = reports.activated(plan, record, run.now)
    run.activate(number, *names)
    return result


def test_report_has_arrivals_and_the_duration_of_each_phase() -> None:
    run = FakeRun(last_call_timeout=10)
    reports = Reports(lambda: 1234.5)
    run.join("a")
    run.now += 5
    run.join("b")
    run.decide()
    run.now += 2
    run.join("c")
    run.decide(after_s=8)
    assert reported(run, reports, 1, "c", "a", "b") == HistoryRecord(
        number=1,
        size=3,
        formed_at=1234.5,
        why="the last call is over",
        gather_s=7.0,
        last_call_s=10.0,
        confirm_s=3.0,
        first_arrival="a",
        last_arrivals=(("a", 0.0), ("b", 5.0), ("c", 7.0)),
        last_confirmed=("c", "a", "b"),
    )


def test_report_names_only_the_last_arrivals() -> None:
    run = FakeRun(max_nodes=20)
    names = [f"n{index:02d}" for index in range(12)]
    for name in names:
        run.join(name)
        run.now += 1
    result = reported(run, Reports(lambda: 0.0), 1, *names)
    assert result.first_arrival == "n00"
    assert [name for name, _ in result.last_arrivals] == names[-5:]
    assert list(result.last_confirmed) == names[-5:]


def test_end_of_a_round_is_reported_once_with_its_causes() -> None:
    run = FakeRun(hold_back_losses=0)
    reports = Reports(lambda: 0.0)
    run.join("a", "b", "c")
    reported(run, reports, 1, "a", "b", "c")
    run.now += 60
    run.lose("a")
    run.leave("b", why="done")
    run.join("c", join=2)
    ended, why = reports.ended(1, run.view, run.now)
    assert why == "a was lost (its session ended); b left (done); 1 joined again"
    assert ended is not None
    assert (ended.ended, ended.lasted_s, ended.number) == (why, 60.0, 1)
    assert reports.ended(1, run.view, run.now)[0] == ended, "it is not kept yet"
    reports.keep(ended)
    assert reports.ended(1, run.view, run.now)[0] is None


def test_end_of_a_round_without_report_has_a_reason_only() -> None:
    ended, why = Reports(lambda: 0.0).ended(7, FakeRun().view, 0.0)
    assert ended is None
    assert why == "its members have gone"


def test_new_coordinator_continues_existing_reports() -> None:
    reports = Reports(lambda: 0.0)
    reports.load([*items(report(3)), Item(KEYS.history(4), b"damaged", 1, 1, 1)])
    ended, _ = reports.ended(3, FakeRun().view, 10.0)
    assert ended is not None
    assert (ended.number, ended.lasted_s) == (3, None), "this coordinator did not see the beginning"


def test_reports_beyond_the_last_twenty_are_dropped_once() -> None:
    reports = Reports(lambda: 0.0)
    reports.load(items(*(report(number) for number in range(1, KEPT + 4))))
    assert reports.drop_surplus() == [1, 2, 3]
    assert reports.drop_surplus() == []
