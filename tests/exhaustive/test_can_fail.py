"""Mutation tests of the exploration: each rule that is removed from the real code is noticed, with a trace."""

import __future__

import inspect
import sys
import textwrap
from typing import Any, NamedTuple

import pytest

from rallypoint.rendezvous import coordinator
from rallypoint.rendezvous import decide as deciding
from rallypoint.rendezvous.coordinator import Coordinator
from rallypoint.rendezvous.fenced_writer import FencedWriter
from rallypoint.rendezvous.node import Node
from rallypoint.rendezvous.node_session import NodeSession
from rallypoint.rendezvous.view import View
from rallypoint.testing.checkers import (
    Broke,
    BrokeAgreement,
    BrokeBarrier,
    BrokeCompletion,
    BrokeExclusivity,
    BrokeFencing,
    BrokeFinality,
    BrokeFreshness,
)
from rallypoint.testing.exhaustive import Budget, Setup, explore


class Patch(NamedTuple):
    """A replacement in the source of a function."""

    owner: Any
    name: str
    old: str
    new: str


def apply(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(patch.owner, patch.name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(patch.old) == 1, f"{patch.name} no longer contains what this test changes: {patch.old!r}"
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(patch.old, patch.new), f"<{patch.name}, changed>", "exec", flags)
    made: dict[str, Any] = {}
    exec(code, sys.modules[function.__module__].__dict__, made)
    monkeypatch.setattr(patch.owner, patch.name, made[patch.name])


MUTANTS: dict[str, tuple[list[Patch], Setup, type[Broke]]] = {
    "numbers are used again": (
        [Patch(View, "next_number", "return 1 + max(", "return (self.round is None) + max(")],
        Setup("", begin="forming", budget=Budget(expire=1)),
        BrokeAgreement,
    ),
    "an assignment may answer any join": (
        [
            Patch(Node, "_advance", "assign.join != own.join", "False"),
            Patch(View, "_check_plan", "seen.record.join != join", "False"),
        ],
        Setup("", begin="forming", budget=Budget(expire=1)),
        BrokeBarrier,
    ),
    "a node does not compare its own key": (
        [Patch(NodeSession, "write", "(own_key, *compares)", "compares")],
        Setup("", budget=Budget(ghost=1, leave=1), joins=2),
        Broke,
    ),
    "a coordinator does not compare its term": (
        [Patch(FencedWriter, "write", "(*fence, *compares)", "(fence[1], *compares)")],
        Setup("", budget=Budget(take_over=1)),
        BrokeFencing,
    ),
    "a coordinator does not compare state/round": (
        [Patch(FencedWriter, "write", "(*fence, *compares)", "(fence[0], *compares)")],
        Setup("", budget=Budget(ghost=1, leave=1)),
        Broke,
    ),
    "a round may become active after a close": (
        [Patch(FencedWriter, "write_round", "(closed, *writes.compares)", "writes.compares")],
        Setup("", joins=1, begin="forming", budget=Budget(close=1)),
        BrokeFinality,
    ),
    "a round may become active without its members": (
        [Patch(Coordinator, "_activate", "still_confirmed[:room]", "()")],
        Setup("", begin="forming", budget=Budget(expire=1)),
        BrokeFreshness,
    ),
    "one confirmation is enough": (
        [Patch(deciding, "_follow", "if not plan.pending:", "if len(plan.pending) < 2:")],
        Setup(""),
        BrokeBarrier,
    ),
    "a round may be decided while another is active": (
        [Patch(coordinator, "decide", "if view.members:", "if False:")],
        Setup("", nodes=3, begin="active", budget=Budget(leave=1)),
        BrokeExclusivity,
    ),
    "a coordinator does not see the nodes that were there before its election": (
        [
            Patch(
                Coordinator,
                "_scan",
                "scanned.items,",
                "[i for i in scanned.items if self._status or not i.key.startswith(self._keys.nodes)],",
            )
        ],
        Setup("", nodes=3, begin="active", budget=Budget(take_over=1, leave=1)),
        BrokeExclusivity,
    ),
    "a node forgets what came while it confirmed": (
        [Patch(Node, "_await_round", "if self._wake.is_set():", "if self._wake.clear():")],
        Setup("", begin="forming", budget=Budget(late=1)),
        BrokeCompletion,
    ),
    "members are told nothing new of their round": (
        [
            Patch(
                Coordinator,
                "_update_status",
                "record == self._status:",
                "self._status and record.number == self._status.number:",
            )
        ],
        Setup("", begin="active", budget=Budget(expire=1)),
        BrokeCompletion,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_removed_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, setup, expected = MUTANTS[name]
    for patch in patches:
        apply(patch, monkeypatch)
    report = explore(setup, max_states=200_000, seconds=60)
    print(report)
    assert isinstance(report.broke, expected), str(report)
    assert report.trace
