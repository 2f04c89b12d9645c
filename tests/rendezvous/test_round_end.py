"""The root cause of a round's end, from losses and from what members wrote, in whatever order they arrive."""

import random

import pytest

from rallypoint.rendezvous.records import LeaveKind, RoundEnd
from rallypoint.rendezvous.round_end import Leaving, Leavings, unknown
from rallypoint.sentences import round_ended

OOM = "rank 3 on b exited with 1: RuntimeError: CUDA out of memory"


def noted(*facts: Leaving | str, vanished: list[str] | None = None) -> Leavings:
    """Facts in this order: what a member wrote, or the name of a lost one, each at the revision of its place."""
    leavings = Leavings()
    for index, fact in enumerate(facts):
        if isinstance(fact, str):
            leavings.note_lost(fact, fact, index + 1)
        else:
            leavings.note(fact.name, fact)
    leavings.note_vanished({name: name for name in vanished or []})
    return leavings


def left(revision: int, name: str, kind: LeaveKind, why: str = "") -> Leaving:
    return Leaving(revision, name, kind, why or f"{name} says {kind.value}")


def told(leavings: Leavings, *waiting: str) -> tuple[str, str]:
    root = leavings.root(2, waiting)
    assert root is not None
    return root.kind.value, root.why


def test_first_failure_is_the_cause_and_later_ones_are_its_echo() -> None:
    facts = [
        left(7, "a", LeaveKind.WORKER_FAILED, "rank 0 on a exited with 1: Connection reset by peer"),
        left(5, "b", LeaveKind.WORKER_FAILED, OOM),
        left(9, "c", LeaveKind.ROUND_OVER),
    ]
    assert told(noted(*facts)) == ("worker failed", OOM)
    assert noted(*facts).root(2) == noted(*reversed(facts)).root(2)


def test_loss_outranks_failures_and_names_the_first_of_them() -> None:
    failed = left(1, "a", LeaveKind.WORKER_FAILED, "rank 0 on a exited with 1")
    leavings = noted(failed, left(2, "b", LeaveKind.MEMBER_LOST), "c")
    assert told(leavings) == ("member lost", "c was lost (its session ended); rank 0 on a exited with 1")


def test_several_losses_are_one_sentence() -> None:
    assert told(noted("c", "d")) == ("member lost", "c, d were lost (their sessions ended)")
    many = noted(*(f"n{index}" for index in range(8)))
    assert told(many)[1] == "n0, n1, n2, n3, n4 and 3 more were lost (their sessions ended)"


def test_member_that_comes_back_explains_its_loss_itself() -> None:
    facts = ["c", left(9, "c", LeaveKind.SESSION_LOST, "c lost its session: no answer for 15 s"), "d"]
    assert told(noted(*facts)) == ("session lost", "c lost its session: no answer for 15 s; also lost: d")


def test_member_that_left_in_order_is_no_loss_although_the_others_think_so() -> None:
    leavings = noted(
        left(3, "b", LeaveKind.DRAIN, "b was drained by ops"), left(5, "a", LeaveKind.MEMBER_LOST, "b lost")
    )
    assert told(leavings) == ("drain", "b was drained by ops")
    leavings = noted(left(3, "b", LeaveKind.REQUESTED, "b left: done"), left(5, "a", LeaveKind.MEMBER_LOST, "b lost"))
    assert told(leavings) == ("requested", "b left: done")


def test_admission_names_the_nodes_that_wait_now() -> None:
    leavings = noted(left(3, "a", LeaveKind.ADMISSION, "to admit waiting nodes"), left(4, "b", LeaveKind.ADMISSION))
    assert told(leavings) == ("admission", "to admit waiting nodes")
    assert told(leavings, "d", "e") == ("admission", "to admit d, e")


def test_members_that_vanished_before_this_process_looked_are_named_unless_more_is_known() -> None:
    gone = "c is gone (it went before this coordinator took over)"
    assert told(noted(vanished=["c"])) == ("member lost", gone)
    assert told(noted(left(9, "a", LeaveKind.ROUND_OVER), vanished=["c"])) == ("member lost", gone)
    assert told(noted(left(9, "a", LeaveKind.WORKER_FAILED, OOM), vanished=["c"])) == ("worker failed", OOM)


def test_member_that_vanished_and_comes_back_says_itself_why_it_left() -> None:
    leavings = noted(vanished=["c", "d"])
    leavings.note("c", left(9, "c", LeaveKind.ADMISSION, "to admit e"))
    assert told(leavings) == ("member lost", "d is gone (it went before this coordinator took over)")
    leavings.note("d", left(10, "d", LeaveKind.REQUESTED, "d asked for the next round"))
    assert told(leavings) == ("admission", "to admit e")
    lost = noted(vanished=["c"])
    lost.note("c", left(9, "c", LeaveKind.SESSION_LOST, "c lost its session: no answer for 15 s"))
    assert told(lost) == ("session lost", "c lost its session: no answer for 15 s")


def test_members_that_a_predecessor_had_not_seen_go_are_no_losses() -> None:
    end = noted(vanished=["c"]).root(2)
    assert end is not None
    leavings = noted(left(9, "a", LeaveKind.WORKER_FAILED, OOM), vanished=["c"])
    leavings.inherit(end)
    assert told(leavings) == ("worker failed", OOM)
    leavings = noted(left(9, "c", LeaveKind.ADMISSION, "to admit e"), left(11, "a", LeaveKind.ROUND_OVER))
    leavings.inherit(end)
    assert told(leavings) == ("admission", "to admit e")


def test_successor_knows_what_its_predecessor_had_composed() -> None:
    leavings = noted(left(9, "a", LeaveKind.ROUND_OVER), vanished=["b"])
    leavings.inherit(RoundEnd(round=2, kind=LeaveKind.WORKER_FAILED, why=OOM))
    assert told(leavings) == ("worker failed", OOM)
    leavings.inherit(RoundEnd(round=2, kind=LeaveKind.MEMBER_LOST, why=f"c was lost (its session ended); {OOM}"))
    assert told(leavings)[1].count(OOM) == 1


def test_nothing_is_known_of_a_round_that_nobody_left() -> None:
    assert noted().root(2) is None
    end = unknown(4)
    assert (end.round, end.why) == (4, "its members have gone")
    leavings = noted("c", left(2, "a", LeaveKind.WORKER_FAILED), vanished=["d"])
    leavings.clear()
    assert leavings.root(2) is None


def test_end_is_one_sentence() -> None:
    assert round_ended(2, 41.4, OOM) == f"round 2 ended after 41 s: {OOM}"
    assert round_ended(2, None, "to admit d") == "round 2 ended: to admit d"
    assert round_ended(2, 7325.0, "") == "round 2 ended after 2 h 2 min: no reason given"


@pytest.mark.parametrize("seed", range(300))
def test_cause_does_not_depend_on_the_order_of_arrival_and_is_never_empty(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"n{index}" for index in range(rng.randint(1, 8))]
    facts: list[tuple[int, str, LeaveKind | None]] = []
    for revision, name in enumerate(rng.sample(names, len(names)), start=1):
        is_lost = rng.random() < 0.2
        if is_lost:
            facts.append((revision, name, None))
        if not is_lost or rng.random() < 0.5:  # a lost one may come back
            kind = LeaveKind.SESSION_LOST if is_lost else rng.choice(list(LeaveKind))
            facts.append((revision + 100 * is_lost, name, kind))
    roots: set[RoundEnd | None] = set()
    for _ in range(10):
        leavings = Leavings()
        for revision, name, kind in rng.sample(facts, len(facts)):
            if kind is None:
                leavings.note_lost(name, name, revision)
            else:
                leavings.note(name, left(revision, name, kind))
        roots.add(leavings.root(2, ["d"]))
    (root,) = roots
    assert root is not None
    assert root.why
    echoes = (LeaveKind.ROUND_OVER, LeaveKind.MEMBER_LOST)
    assert root.kind is not LeaveKind.ROUND_OVER or all(kind in echoes for _, _, kind in facts)
    if any(kind is None for _, _, kind in facts):
        assert root.kind in (LeaveKind.MEMBER_LOST, LeaveKind.SESSION_LOST)
