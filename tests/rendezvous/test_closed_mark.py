"""What a node remembers of a close, and what ends it."""

import pytest

from rallypoint.rendezvous.closed_mark import next_mark
from rallypoint.rendezvous.records import ClosedMark, ClosedRecord, ConfigRecord
from rallypoint.settings import Settings

OPEN, CLOSED = ClosedRecord(closed=False), ClosedRecord(closed=True, by="a", why="done", outcome=3)


def config(incarnation: str = "one") -> ConfigRecord:
    settings = Settings.build(scheme="tcp", endpoints="host:1", run_id="run", min_nodes=1)
    return ConfigRecord(
        incarnation=incarnation, shared=settings.shared(), timing=settings.timing(), run_lease=1, data_lease=2
    )


MARK = ClosedMark(config=config(), state=CLOSED, revision=10)


def test_node_that_sees_the_close_keeps_who_closed_which_incarnation_and_why():
    assert next_mark(None, config(), CLOSED, 10, 10) == MARK


def test_node_that_was_never_told_of_a_close_has_no_mark():
    assert next_mark(None, config(), OPEN, 10, 10) is None
    assert next_mark(None, None, None, 0, 10) is None


@pytest.mark.parametrize(
    ("name", "given", "stays"),
    [
        ("it is still closed", (config(), CLOSED, 10, 12), True),
        ("an older state of the same incarnation knows less", (config(), OPEN, 9, 12), True),
        ("the same incarnation was reopened later", (config(), OPEN, 11, 12), False),
        ("others have made the run anew", (config("two"), OPEN, 11, 12), False),
        ("the run is gone from a store that had it", (None, None, 0, 12), False),
        ("a store that has not come so far knows less", (None, None, 0, 9), True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mark_ends_only_by_a_store_that_knows_more(name, given, stays):
    assert (next_mark(MARK, *given) is not None) is stays


def test_mark_follows_a_later_close():
    later = ClosedRecord(closed=True, by="b", why="again")
    assert next_mark(MARK, config("two"), later, 20, 20) == ClosedMark(config=config("two"), state=later, revision=20)
