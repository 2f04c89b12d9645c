"""The checker of a run's past can fail: each guarantee that it stands for, broken once by hand."""

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
from tests.rendezvous.kit import Past, kinds


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


def regular(board: Board) -> None:
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


def of_another_join(board: Board) -> None:
    record = forming(board, 1, "a", "b")
    board.confirm(1, "a")
    board.confirm(1, "b", join=2)
    activate(board, record)


def gone(board: Board) -> None:
    record = forming(board, 1, "a", "b")
    board.confirm(1, "a", "b")
    board.lose("b")
    activate(board, record)


def twice_in_it(board: Board) -> None:
    record = forming(board, 1, "a", "a")
    board.confirm(1, "a")
    activate(board, record)


def while_in_another(board: Board) -> None:
    regular(board)
    forming(board, 2, "b", "c")


def number_again(board: Board) -> None:
    forming(board, 1, "a", "b")
    forming(board, 1, "a", "c")


def number_back(board: Board) -> None:
    forming(board, 5, "a", "b")
    forming(board, 4, "a", "b")


def after_close(board: Board) -> None:
    record = forming(board, 1, "a", "b")
    board.confirm(1, "a", "b")
    board.close()
    activate(board, record)


def of_another_term(board: Board) -> None:
    record = forming(board, 1, "a", "b")
    board.confirm(1, "a", "b")
    activate(board, record, term=9)


def check(story: Callable[[Board], None]) -> Past:
    board = Board()
    board.join("a", "b", "c")
    story(board)
    past = Past(KEYS)
    for batch in board.engine.history.batches:
        past.take(batch)
    return past


def test_regular_past_passes() -> None:
    assert [member.name for member in check(regular).lives[-1][1]] == ["a", "b"]


@pytest.mark.parametrize(
    ("story", "broken"),
    [
        (too_few, "Barrier: 1 members"),
        (not_confirmed, "Barrier: b had not confirmed"),
        (of_another_join, "Barrier: b had not confirmed"),
        (gone, "Freshness: b of round 1 had gone"),
        (twice_in_it, "Ranks: a member twice"),
        (while_in_another, "Exclusivity: round 2 was decided while"),
        (number_again, "number 1 was used twice"),
        (number_back, "Monotonicity: numbers went back"),
        (after_close, "Finality: a round was decided after close"),
        (of_another_term, "went on with the forming of another"),
    ],
)
def test_broken_past_is_caught(story: Callable[[Board], None], broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        check(story)


def test_kinds_of_writes_are_told_apart() -> None:
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
    records.append((KEYS.node("a"), board.view.nodes["a"].record, "goodbye"))
    assert [type(record) for _, record, _ in records[:1]] == [ConfigRecord]
    assert isinstance(records[-1][1], NodeRecord)
    for key, record, kind in records:
        assert kinds([Put(key, encode(record))]) == {kind}
