"""What is written of an attempt, and that it comes to the same whether its members are asked or have said so before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.backends.contract import Asked
from rallypoint.kv.types import Delete, Put, RangeEmpty, Txn, TxnResult
from rallypoint.rendezvous.attempt import (
    Attempt,
    Leases,
    active,
    active_words,
    at_once,
    attempt,
    becomes_active,
    forming_words,
    forms,
    how_first_confirms,
)
from rallypoint.rendezvous.decide import Form, decide, summarise
from rallypoint.rendezvous.fenced import Writes
from rallypoint.rendezvous.history import Reports
from rallypoint.rendezvous.records import NodePhase, RoundPhase, RoundRecord, decode, encode, join_roster
from tests.rendezvous.board import KEYS, Board, node

NAMES = ("a", "b", "c", "d")
LEASES = Leases(0, 0)
JOIN = 2


def decided(*names: str, after: bool = False) -> tuple[Board, Attempt]:
    """A board on which these nodes have joined, and what is to be done about it; `after` a round, with a loss in it."""
    board = Board(min_nodes=len(names), max_nodes=len(names))
    if after:
        board.activate(1, *names)
        board.now += 100
        board.lose(names[0])
        board.now += 8
    board.join(*names, join=JOIN)
    decision = decide(board.view, board.now)
    assert isinstance(decision, Form)
    return board, attempt(board.view, decision, term=1)


def said(board: Board, new: Attempt, name: str) -> Put:
    """How a node confirms its place."""
    record = node(name, join=JOIN, phase=NodePhase.MEMBER, round=new.record.number, addr0=name, port0=5)
    return Put(KEYS.node(name), encode(record), board.view.nodes[name].lease)


def execute(board: Board, writes: Writes) -> bool:
    """Whether it was executed."""
    result = board.engine.apply(Txn(tuple(writes.compares), tuple(writes.ops)), 0.0).result
    assert isinstance(result, TxnResult)
    if result.committed:
        batch = board.engine.history.batches[-1]
        board.view.apply(batch.changes, batch.revision, board.now)
    return result.committed


def write_active(board: Board, new: Attempt, saying: list[Put], at_once_too: bool) -> Writes:
    reports = Reports(lambda: 0.0)
    plan = new.plan(board.now)
    reports.formed(plan, board.view)
    record, words = (
        active(new.record, how_first_confirms(saying[0]), "all are there"),
        active_words(board.view, new.record),
    )
    report = reports.activated(plan, record, board.now)
    if at_once_too:
        return at_once(KEYS, new, saying, board.view, record, words, report, LEASES)
    return becomes_active(KEYS, record, words, report, LEASES)


def left_by(board: Board) -> dict[str, tuple[bytes, int]]:
    return {key: (item.value, item.lease) for key, item in board.engine.items.items()}


def seen_by(board: Board) -> object:
    """What a coordinator goes by afterwards."""
    view = board.view
    decision = decide(view, board.now)
    words = summarise(view, decision, board.now)
    return decision, words, view.departures, view.started_at, view.plan, view.minimum_since, set(view.members)


@given(st.integers(1, 4), st.sets(st.sampled_from(NAMES)), st.booleans())
def test_it_comes_to_the_same_whoever_has_said_so_before(count: int, before: set[str], after: bool) -> None:
    names = NAMES[:count]

    board, new = decided(*names, after=after)
    saying = [said(board, new, member.id) for member in new.members]
    assert execute(board, write_active(board, new, saying, at_once_too=True))
    at_one_time, then = left_by(board), seen_by(board)

    board, new = decided(*names, after=after)
    known = [put if member.id in before else None for put, member in zip(saying, new.members, strict=True)]
    assert execute(board, forms(KEYS, new, known, forming_words(new.record), board.view, LEASES))
    record = board.view.round
    assert record is not None
    assert record.phase is RoundPhase.FORMING
    for put, member in zip(saying, new.members, strict=True):
        is_written = board.engine.items[KEYS.node(member.id)].value == put.value
        assert is_written is (member.id in before)
    board.write(*saying)
    assert execute(board, write_active(board, new, saying, at_once_too=False))
    assert left_by(board) == at_one_time
    assert seen_by(board) == then


def test_an_attempt_that_is_active_at_once_is_whole() -> None:
    board, new = decided("b", "a", "c")
    saying = [said(board, new, member.id) for member in new.members]
    assert execute(board, write_active(board, new, saying, at_once_too=True))
    view, items = board.view, board.engine.items
    assert view.is_active
    assert view.members.keys() == {"a", "b", "c"}
    record = decode(RoundRecord, items[KEYS.round])
    roster = [item for key, item in items.items() if key.startswith(KEYS.roster(1))]
    assert [member.id for member in join_roster(record, roster)] == [member.id for member in new.members]
    assert (record.addr, record.port) == (new.members[0].id, 5)
    assert items[KEYS.round].version == 1


@pytest.mark.parametrize("at_once_too", [True, False])
@pytest.mark.parametrize("how", ["joined again", "gone"])
def test_what_was_said_is_not_written_over_anything_else(at_once_too: bool, how: str) -> None:
    board, new = decided("a", "b")
    saying = [said(board, new, member.id) for member in new.members]
    if at_once_too:
        writes = write_active(board, new, saying, at_once_too=True)
    else:
        writes = forms(KEYS, new, [None, saying[1]], forming_words(new.record), board.view, LEASES)
    name = new.members[1].id
    if how == "gone":
        board.write(Delete(KEYS.node(name)))
    else:
        board.join(name, join=JOIN + 1)
    before = left_by(board)
    assert not execute(board, writes)
    assert left_by(board) == before


def test_a_store_that_is_not_empty_is_not_passed_on() -> None:
    board, new = decided("a", "b")
    saying = [said(board, new, member.id) for member in new.members]
    writes = write_active(board, new, saying, at_once_too=True)
    assert RangeEmpty(KEYS.store(1)) in writes.compares
    board.write(Put(f"{KEYS.store(1)}left", b"of an earlier life"))
    assert not execute(board, writes)


def test_the_places_that_are_asked_for_are_those_of_the_view() -> None:
    board, new = decided("a", "b")
    nodes = board.view.nodes
    assert list(new.asked(board.view)) == [
        Asked(member.id, JOIN, rank, nodes[member.id].mod_revision) for rank, member in enumerate(new.members)
    ]
