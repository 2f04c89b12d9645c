"""Why a round ended: composed from the losses that were seen and from what its members wrote when they left. Pure.

When one member leaves a round, all others leave it too. Each says why, so one cause is named many times, mostly as its
echo. The root cause, gravest first:

1. a member that was lost: workers whose peer is gone fail within milliseconds, before the loss is known. Failures that
   were reported as well are named behind it
2. a worker that failed or stalled: the first one
3. a member that was drained, stopped or had finished; then members that were gone before this process looked
4. waiting nodes, or a program that asked for the next round
5. members that only say that others had left or were lost

Within a class the lowest revision decides: what was committed first, in whatever order it arrives here. A coordinator
that was elected in the meantime composes it from the keys that still exist and from what its predecessor had told, if
that knew it. A member that comes back and says why it left is no longer one that was gone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import msgspec

from rallypoint._marks import mark
from rallypoint.rendezvous.records import LeaveKind, RoundEnd
from rallypoint.sentences import FEW, listed

_FAILURE, _MEMBER, _WISH, _ECHO, _NOTHING = 2, 3, 4, 5, 6
_CLASSES = {
    LeaveKind.WORKER_FAILED: _FAILURE,
    LeaveKind.STALLED: _FAILURE,
    LeaveKind.DRAIN: _MEMBER,
    LeaveKind.OPERATOR: _MEMBER,
    LeaveKind.STOPPED: _MEMBER,
    LeaveKind.FINISHED: _MEMBER,
    LeaveKind.ADMISSION: _WISH,
    LeaveKind.REQUESTED: _WISH,
    LeaveKind.ROUND_OVER: _ECHO,
    LeaveKind.MEMBER_LOST: _ECHO,
}
"""The classes of the module docstring. A loss itself is class 1; a member that only speaks of one says an echo."""


class Leaving(msgspec.Struct, frozen=True, gc=False):
    """One member's leaving, committed at `revision`."""

    revision: int
    name: str
    kind: LeaveKind
    why: str


class Leavings:
    """How the members of one round left it, as far as it decides about the root cause."""

    def __init__(self) -> None:
        self._losses: dict[str, Leaving] = {}
        """By node id."""
        self._order: list[tuple[int, str, str]] = []
        """(revision, name, node id) of the losses, sorted: thousands may come one by one."""
        self._first: dict[int, Leaving] = {}
        """By class: the first of the others."""
        self._vanished: dict[str, str] = {}
        """Members of which this process only knows that they are gone: id -> name."""

    def clear(self) -> None:
        """Another round is active."""
        self._losses.clear()
        self._order.clear()
        self._first.clear()
        self._vanished.clear()

    def note(self, node_id: str, leaving: Leaving) -> None:
        """A member wrote why it left. If it was seen as lost before, that its session was lost is its explanation."""
        if leaving.kind is LeaveKind.SESSION_LOST:
            seen = self._losses.get(node_id)
            if seen is not None:
                mark("round_end.explained")
            revision = min(leaving.revision, seen.revision if seen is not None else leaving.revision)
            self._set_loss(node_id, msgspec.structs.replace(leaving, revision=revision))
            return
        self._vanished.pop(node_id, None)
        number = _CLASSES[leaving.kind]
        first = self._first.get(number)
        if first is None or (leaving.revision, leaving.name) < (first.revision, first.name):
            self._first[number] = leaving

    def note_lost(self, node_id: str, name: str, revision: int) -> None:
        """The session of a member ended, and the member had not left."""
        explained = self._losses.get(node_id)
        if explained is None:
            self._set_loss(node_id, Leaving(revision, name, LeaveKind.MEMBER_LOST, ""))
        else:
            revision = min(revision, explained.revision)
            self._set_loss(node_id, msgspec.structs.replace(explained, revision=revision))

    def _set_loss(self, node_id: str, loss: Leaving) -> None:
        if (known := self._losses.get(node_id)) is not None:
            del self._order[bisect_left(self._order, (known.revision, known.name, node_id))]
        insort(self._order, (loss.revision, loss.name, node_id))
        self._losses[node_id] = loss

    def note_vanished(self, names: Mapping[str, str]) -> None:
        """These members (id -> name) were gone before this process looked: it does not know how they went."""
        self._vanished = dict(names)

    def inherit(self, end: RoundEnd) -> None:
        """What an earlier coordinator had composed: it has seen members go of which no trace is left."""
        if end.unseen:
            mark("round_end.unseen")
            return  # it knew no more than this process does
        mark("round_end.inherited")
        leaving = Leaving(0, end.nodes[0] if end.nodes else "", end.kind, end.why)
        if end.kind in (LeaveKind.MEMBER_LOST, LeaveKind.SESSION_LOST):
            self._set_loss("", leaving)
        else:
            self.note("", leaving)

    def root(self, number: int, waiting: Sequence[str] = ()) -> RoundEnd | None:
        """The root cause of the end of round `number`; None if nothing is known of any leaving.

        `waiting`: nodes that wait to be admitted.
        """
        failure = self._first.get(_FAILURE)
        if self._losses:
            first_few = [self._losses[node_id] for _, _, node_id in self._order[: FEW + 1]]
            loss = _loss(number, first_few, len(self._losses))
            if failure is None or failure.why in loss.why:
                return loss
            mark("round_end.loss_and_failure")
            return msgspec.structs.replace(loss, why=f"{loss.why}; {failure.why}", nodes=(*loss.nodes, failure.name))
        first = min(self._first, default=_NOTHING)
        if self._vanished and first > _MEMBER:
            mark("round_end.vanished")
            return _vanished(number, list(self._vanished.values()))
        if first == _NOTHING:
            return None
        root = self._first[first]
        match root.kind:
            case LeaveKind.ADMISSION:
                return admission(number, waiting, root.why)
            case LeaveKind.MEMBER_LOST | LeaveKind.ROUND_OVER:  # it is about others than the member that wrote it
                nodes: tuple[str, ...] = ()
            case _:
                nodes = (root.name,)
        return RoundEnd(round=number, kind=root.kind, why=root.why, nodes=nodes)


def admission(number: int, waiting: Sequence[str], why: str = "to admit waiting nodes") -> RoundEnd:
    """Members leave the round because nodes wait to be admitted. `why` is used if these are not known."""
    return RoundEnd(round=number, kind=LeaveKind.ADMISSION, why=f"to admit {listed(waiting)}" if waiting else why)


def unknown(number: int) -> RoundEnd:
    """The end of a round of which nothing is known."""
    return RoundEnd(round=number, kind=LeaveKind.ROUND_OVER, why="its members have gone")


def _loss(number: int, losses: Sequence[Leaving], total: int) -> RoundEnd:
    """`losses`: the first few of `total` lost members, in order. One that came back has explained its loss itself."""
    first, names = losses[0], [one.name for one in losses if one.name]
    if first.why:
        others = names[1:] if first.name else names
        why = first.why + (f"; also lost: {listed(others, total - 1)}" if others else "")
    elif total > 1:
        why = f"{listed(names, total)} were lost (their sessions ended)"
    else:
        why = f"{first.name} was lost (its session ended)"
    return RoundEnd(round=number, kind=first.kind, why=why, nodes=tuple(names[:FEW]))


def _vanished(number: int, names: Sequence[str]) -> RoundEnd:
    verb, went = ("are", "they went") if len(names) > 1 else ("is", "it went")
    why = f"{listed(names)} {verb} gone ({went} before this coordinator took over)"
    return RoundEnd(round=number, kind=LeaveKind.MEMBER_LOST, why=why, nodes=tuple(names[:FEW]), unseen=True)
