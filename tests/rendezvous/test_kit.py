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
from tests.rendezvous.board import KEYS, Board, config, round_record
from tests.rendezvous.kit import HistoryChecker, kinds


def forming(board: Board, number: int, *names: str, **fields: object) -> RoundRecord:
    """An attempt with its roster."""
    chunks = split_roster(number, [RosterMember(name, 1, name, name) for name in names])
    for index, chunk in enumerate(chunks):
        board.write(Put(KEYS.roster_chunk(number, index), chunk))
    record = round_record(
        number,
        RoundPhase.FORMING,
        len(names),
        **{"chunks": len(chunks), "digest": roster_digest(chunks), **fields},
    )
    board.put(KEYS.round, record)
    return record


def activate(board: Board, record: RoundRecord, **fields: object) -> None:
    board.put(KEYS.round, msgspec.structs.replace(record, phase=RoundPhase.ACTIVE, **fields))


def correct(board: Board) -> None:
    record = forming(board, 1, "a", "b")
    board.confirm(1, "a", "b")
    activate(board, record)


def too_few(board: Board) -> None:
    record = forming(board, 1, "a")
    board.confirm(1, "a")
    activate(board, record)


def not_confirmed(board: Board) -> None:
    record = forming(board, 1, "a", "b")
    board.confirm(1, "a")
    activate(board, record)


def other_join(board: Board) -> None:
    record = forming(board, 1, "a", "b")
    board.confirm(1, "a")
    board.confirm(1, "b", join=2)
    activate(board, record)


def lost(board: Board) -> None:
    record = forming(board, 1, "a", "b")
    board.confirm(1, "a", "b")
    board.lose("b")
    activate(board, record)


def member_twice(board: Board) -> None:
    record = forming(board, 1, "a", "a")
    board.confirm(1, "a")
    activate(board, record)


def members_in_another_round(board: Board) -> None:
    correct(board)
    forming(board, 2, "b", "c")


def number_reused(board: Board) -> None:
    forming(board, 1, "a", "b")
    forming(board, 1, "a", "c")


def number_decreased(board: Board) -> None:
    forming(board, 5, "a", "b")
    forming(board, 4, "a", "b")


def active_after_close(board: Board) -> None:
    record = forming(board, 1, "a", "b")
    board.confirm(1, "a", "b")
    board.close()
    activate(board, record)


def other_term(board: Board) -> None:
    record = forming(board, 1, "a", "b")
    board.confirm(1, "a", "b")
    activate(board, record, term=9)


def check(history: Callable[[Board], None]) -> HistoryChecker:
    board = Board()
    board.join("a", "b", "c")
    history(board)
    checker = HistoryChecker(KEYS)
    for batch in board.engine.history.batches:
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
def test_broken_guarantee_is_detected(history: Callable[[Board], None], violation: str) -> None:
    with pytest.raises(AssertionError, match=violation):
        check(history)


def test_kinds_of_writes_are_distinguished() -> None:
    board = Board()
    records: list[tuple[str, Record, str]] = [
        (KEYS.config, config(), "config"),
        (KEYS.round, round_record(1), "active"),
        (KEYS.round, round_record(1, RoundPhase.FORMING), "form"),
    ]
    board.join("a")
    records.append((KEYS.node("a"), board.view.nodes["a"].record, "join"))
    board.confirm(1, "a")
    records.append((KEYS.node("a"), board.view.nodes["a"].record, "confirm"))
    board.leave("a")
    records.append((KEYS.node("a"), board.view.nodes["a"].record, "left"))
    assert [type(record) for _, record, _ in records[:1]] == [ConfigRecord]
    assert isinstance(records[-1][1], NodeRecord)
    for key, record, kind in records:
        assert kinds([Put(key, encode(record))]) == {kind}
