"""The reports of rounds: arrivals, durations, the reason of the end, and how many are kept."""

from rallypoint.kv.types import Item
from rallypoint.rendezvous.history import KEPT, Reports
from rallypoint.rendezvous.records import HistoryRecord, LeaveKind, RoundEnd, encode
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


def test_end_of_a_round_is_in_its_report_once_the_report_is_kept() -> None:
    run = FakeRun(hold_back_losses=0)
    reports = Reports(lambda: 0.0)
    run.join("a", "b", "c")
    reported(run, reports, 1, "a", "b", "c")
    run.now += 60
    lasted_s = reports.lasted_s(1, run.now)
    assert lasted_s == 60.0
    end = RoundEnd(round=1, kind=LeaveKind.MEMBER_LOST, why="a was lost (its session ended)", lasted_s=lasted_s)
    ended = reports.ended(end)
    assert ended is not None
    assert (ended.number, ended.ended, ended.ended_kind, ended.lasted_s) == (1, end.why, end.kind, 60.0)
    assert reports.end_of(1) is None, "it is not kept yet"
    reports.keep(ended)
    assert reports.end_of(1) == end


def test_round_without_a_report_has_no_final_report() -> None:
    reports = Reports(lambda: 0.0)
    assert reports.ended(RoundEnd(round=7, kind=LeaveKind.REQUESTED, why="a asked for the next round")) is None
    assert reports.end_of(7) is None


def test_report_of_an_earlier_version_has_an_end_without_a_kind() -> None:
    reports = Reports(lambda: 0.0)
    old = HistoryRecord(
        number=2,
        size=2,
        formed_at=1.0,
        why="",
        gather_s=0.0,
        last_call_s=0.0,
        confirm_s=0.0,
        ended="2 joined again",
    )
    reports.load(items(old))
    assert reports.end_of(2) == RoundEnd(round=2, kind=LeaveKind.ROUND_OVER, why="2 joined again")


def test_new_coordinator_continues_existing_reports() -> None:
    reports = Reports(lambda: 0.0)
    reports.load([*items(report(3)), Item(KEYS.history(4), b"damaged", 1, 1, 1)])
    assert reports.of(3) is not None
    assert reports.of(4) is None
    assert reports.lasted_s(3, 10.0) is None, "this coordinator did not see the beginning"


def test_reports_beyond_the_last_twenty_are_dropped_once() -> None:
    reports = Reports(lambda: 0.0)
    reports.load(items(*(report(number) for number in range(1, KEPT + 4))))
    assert reports.drop_surplus() == [1, 2, 3]
    assert reports.drop_surplus() == []
