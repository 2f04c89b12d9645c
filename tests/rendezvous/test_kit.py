"""The history checker detects violations: each guarantee that it checks is broken once by hand."""

from collections.abc import Callable

import msgspec
import pytest

from rallypoint.kv.types import Put
from rallypoint.rendezvous.records import (
    ConfigRecord,
    NodeRecord,
    Record,
    RosterMember,
    RoundPhase,
    RoundRecord,
    encode,
    roster_digest,
    split_roster,
)
from tests.rendezvous.fake_run import KEYS, FakeRun, config, round_record
from tests.rendezvous.kit import HistoryChecker, kinds


def forming(run: FakeRun, number: int, *names: str, **fields: object) -> RoundRecord:
    """An attempt with its roster."""
    chunks = split_roster(number, [RosterMember(name, 1, name, name) for name in names])
    for index, chunk in enumerate(chunks):
        run.write(Put(KEYS.roster_chunk(number, index), chunk))
    record = round_record(
        number,
        RoundPhase.FORMING,
        len(names),
        **{"chunks": len(chunks), "digest": roster_digest(chunks), **fields},
    )
    run.put(KEYS.round, record)
    return record


def activate(run: FakeRun, record: RoundRecord, **fields: object) -> None:
    run.put(KEYS.round, msgspec.structs.replace(record, phase=RoundPhase.ACTIVE, **fields))


def correct(run: FakeRun) -> None:
    record = forming(run, 1, "a", "b")
    run.confirm(1, "a", "b")
    activate(run, record)


def too_few(run: FakeRun) -> None:
    record = forming(run, 1, "a")
    run.confirm(1, "a")
    activate(run, record)


def not_confirmed(run: FakeRun) -> None:
    record = forming(run, 1, "a", "b")
    run.confirm(1, "a")
    activate(run, record)


def other_join(run: FakeRun) -> None:
    record = forming(run, 1, "a", "b")
    run.confirm(1, "a")
    run.confirm(1, "b", join=2)
    activate(run, record)


def lost(run: FakeRun) -> None:
    record = forming(run, 1, "a", "b")
    run.confirm(1, "a", "b")
    run.lose("b")
    activate(run, record)


def member_twice(run: FakeRun) -> None:
    record = forming(run, 1, "a", "a")
    run.confirm(1, "a")
    activate(run, record)


def members_in_another_round(run: FakeRun) -> None:
    correct(run)
    forming(run, 2, "b", "c")


def number_reused(run: FakeRun) -> None:
    forming(run, 1, "a", "b")
    forming(run, 1, "a", "c")


def number_decreased(run: FakeRun) -> None:
    forming(run, 5, "a", "b")
    forming(run, 4, "a", "b")


def active_after_close(run: FakeRun) -> None:
    record = forming(run, 1, "a", "b")
    run.confirm(1, "a", "b")
    run.close()
    activate(run, record)


def other_term(run: FakeRun) -> None:
    record = forming(run, 1, "a", "b")
    run.confirm(1, "a", "b")
    activate(run, record, term=9)


def check(history: Callable[[FakeRun], None]) -> HistoryChecker:
    run = FakeRun()
    run.join("a", "b", "c")
    history(run)
    checker = HistoryChecker(KEYS)
    for batch in run.engine.history.batches:
        checker.apply(batch)
    return checker


def test_correct_history_passes() -> None:
    assert [member.name for member in check(correct).lives[-1][1]] == ["a", "b"]


@pytest.mark.parametrize(
    ("history", "violation"),
    [
        (too_few, "Barrier: 1 members"),
        (not_confirmed, "Barrier: b had not confirmed"),
        (other_join, "Barrier: b had not confirmed"),
        (lost, "Freshness: b of round 1 was gone"),
        (member_twice, "Ranks: a member twice"),
        (members_in_another_round, "Exclusivity: round 2 was decided while"),
        (number_reused, "number 1 was used twice"),
        (number_decreased, "Monotonicity: numbers went back"),
        (active_after_close, "Finality: a round was decided after close"),
        (other_term, "continued an attempt of another term"),
    ],
)
def test_broken_guarantee_is_detected(history: Callable[[FakeRun], None], violation: str) -> None:
    with pytest.raises(AssertionError, match=violation):
        check(history)


def test_kinds_of_writes_are_distinguished() -> None:
    run = FakeRun()
    records: list[tuple[str, Record, str]] = [
        (KEYS.config, config(), "config"),
        (KEYS.round, round_record(1), "active"),
        (KEYS.round, round_record(1, RoundPhase.FORMING), "form"),
    ]
    run.join("a")
    records.append((KEYS.node("a"), run.view.nodes["a"].record, "join"))
    run.confirm(1, "a")
    records.append((KEYS.node("a"), run.view.nodes["a"].record, "confirm"))
    run.leave("a")
    records.append((KEYS.node("a"), run.view.nodes["a"].record, "left"))
    assert [type(record) for _, record, _ in records[:1]] == [ConfigRecord]
    assert isinstance(records[-1][1], NodeRecord)
    for key, record, kind in records:
        assert kinds([Put(key, encode(record))]) == {kind}
