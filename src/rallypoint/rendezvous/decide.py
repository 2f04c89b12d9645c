"""The decisions of the coordinator: `decide(view, now) -> Decision`, the next step with its reason. Pure.

Level-triggered: it reads the whole view and returns the next step, whatever happened before. A crash, a lost watch or a
refused write therefore needs no code of its own: read again, decide again. It keeps no state, reads no clock and writes
nothing. The reasons are the sentences that nodes, logs, errors and tools show.

In this order:

1. A run whose keys cannot be read, or that has no config, waits.
2. Records of nodes that are held back are written or deleted when they are due.
3. An attempt of this coordinator is given up when a planned (id, join) is gone or the run was closed meanwhile.
4. A closed run waits.
5. An attempt is activated when all members have confirmed, and given up when some did not confirm in time.
6. While the active round has members, nothing is formed; likewise while nodes may be members of an unknown round, or
   may still return after the server lost its data.
7. Otherwise the candidates are counted against `min_nodes`, `max_nodes`, `step` and the last call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from rallypoint._marks import mark
from rallypoint.options import LastCallMode
from rallypoint.rendezvous.ranks import Candidate, choose, rank
from rallypoint.rendezvous.records import ClosedRecord, HealthRecord, LeaveKind, RoundEnd, WaitingRecord
from rallypoint.rendezvous.round_end import admission
from rallypoint.rendezvous.rules import Rules
from rallypoint.rendezvous.view import Departure, Plan, SeenNode, View
from rallypoint.sentences import FEW, listed, of_at_least, round_ended

_LOSSES = (LeaveKind.MEMBER_LOST, LeaveKind.SESSION_LOST)

LONGEST_ADMISSION_S = 30.0
"""Limit of the admission window while further nodes keep arriving."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something changes, or until `until` on the coordinator's clock."""

    why: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """Form a new attempt with these candidates, in rank order."""

    number: int
    ranked: tuple[Candidate, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Activate:
    """Every planned member has confirmed."""

    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The attempt cannot become active; `late` did not confirm in time."""

    late: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Hold a node back, by name: write its health record."""

    record: HealthRecord


@dataclass(frozen=True, slots=True)
class Forgive:
    """Delete the health record of a node, by name: it was not lost again for long enough."""

    name: str


Decision: TypeAlias = Wait | Form | Activate | GiveUp | Hold | Forgive


def decide(view: View, now: float) -> Decision:
    """The next step. `view.tick(now)` must be called before."""
    rules = view.rules
    if view.unreadable:
        key, why = next(iter(view.unreadable.items()))
        return Wait(f"{key} cannot be read: {why}")
    if rules is None:
        return Wait("the run has no config yet: no node has joined")
    for record in view.hold_back.due.values():
        mark("decide.held_back")
        return Hold(record)
    if (name := view.hold_back.forgiven(now)) is not None:
        return Forgive(name)
    if view.plan is not None and view.plan.broken is not None:
        mark("decide.broken")
        return GiveUp((), view.plan.broken)
    if view.is_closed and view.closed is not None:
        return Wait(closed_reason(view.closed))
    if view.plan is not None:
        return _follow(view, view.plan, rules, now)
    if view.members:
        return Wait(_active_sentence(view, rules, now), until=_earliest(_window_ends_at(view, rules), view, now))
    if view.above:
        mark("decide.above")  # rule 9
        return Wait(
            f"the run's data was lost: nothing forms until all nodes have left a round above the known one: "
            f"{_names((view.nodes[node_id] for node_id in view.above), len(view.above))}"
        )
    if view.returning is not None and (until := view.returning.holds_until(now)) is not None:
        mark("decide.returning")
        return Wait(view.returning.sentence(), until=until)
    return _gather(view, rules, now)


def _follow(view: View, plan: Plan, rules: Rules, now: float) -> Decision:
    """The step for this coordinator's own attempt. `confirm_timeout` starts again with every confirmation."""
    if not plan.pending:
        return Activate(plan.why)
    timeout_s, since = rules.timing.confirm_timeout_s, max(plan.started_at, plan.confirmed_at)
    why = forming_sentence(plan.number, len(plan.ranks), plan.why)
    if now < since + timeout_s / 2:
        return Wait(why, until=_earliest(since + timeout_s / 2, view, now))
    missing = _names([view.nodes[node_id] for node_id in islice(plan.pending, FEW)], len(plan.pending))
    if now < since + timeout_s:
        return Wait(f"{why}; not confirmed yet: {missing}", until=_earliest(since + timeout_s, view, now))
    mark("decide.late")
    return GiveUp(tuple(plan.pending), f"{missing} did not confirm within {timeout_s:g} s")


def _gather(view: View, rules: Rules, now: float) -> Decision:
    """The step while no round is current: wait for more candidates, or form."""
    joined = len(view.candidates)
    size = rules.usable(joined)
    if size < rules.min_nodes:
        names = f": {_names(view.candidates.values(), joined)}" if joined else ""
        why = f"{of_at_least(joined, rules.min_nodes)} joined{names}{_ended(view)}{_absent(view, view.last_end)}"
        return Wait(why, until=_earliest(None, view, now))
    if size == rules.max_nodes:
        return _form(view, rules, size, f"all {size} places are taken" if size > 1 else "its one place is taken")
    if rules.last_call_mode is LastCallMode.ADAPTIVE and (view.ever_active or view.all_returned):
        all_nodes = "every live node that may be admitted" if view.excluded else "every live node"
        return _form(view, rules, size, f"{all_nodes} has joined: {joined}")
    assert view.minimum_since is not None, "tick() comes before decide()"
    ends_at = view.minimum_since + rules.timing.last_call_timeout_s
    if now >= ends_at:
        return _form(view, rules, size, f"the last call of {rules.timing.last_call_timeout_s:g} s is over")
    why = (
        f"last call of {rules.timing.last_call_timeout_s:g} s: {joined} of at most {rules.max_nodes} nodes joined: "
        f"{_names(view.candidates.values(), joined)}; more may still come{_ended(view)}{_absent(view, view.last_end)}"
    )
    return Wait(why, until=_earliest(ends_at, view, now))


def _form(view: View, rules: Rules, size: int, why: str) -> Form:
    pool = [_candidate(view, node) for node in view.candidates.values()]
    ranked = rank(choose(pool, size) if size < len(pool) else pool, rules.ranks, rules.rank0)
    return Form(view.next_number(), tuple(ranked), why)


def _candidate(view: View, node: SeenNode) -> Candidate:
    record = node.record
    last_rank, owner = view.last_ranks.get(record.name, (None, record.id))
    if owner != record.id and owner in view.candidates:
        last_rank = None  # two nodes of one name: the node that had the rank keeps it
    return Candidate(
        id=record.id,
        name=record.name,
        addr=record.addr,
        order=node.order,
        labels=record.labels,
        node_rank=record.node_rank,
        was_member=record.id in view.roster,
        last_rank=last_rank,
        held_back=record.name in view.hold_back.records,
    )


# --- state/waiting --------------------------------------------------------------------------------------------------


def summarise(view: View, decision: Decision, now: float) -> WaitingRecord:
    """`state/waiting` as it should be now. New waiting nodes count only after the admission window, or after a loss."""
    rules = view.rules
    number = view.round.number if view.round else 0
    reason = decision.why if isinstance(decision, Wait | GiveUp | Form | Activate) else ""
    held = sum(1 for node in view.excluded.values() if view.hold_back.is_held(node.record.name))
    names = tuple(islice(view.hold_back.held(), FEW))
    open_places = max(0, rules.max_nodes - len(view.members)) if rules else 0
    if rules is None or view.is_closed or not view.members:
        return WaitingRecord(
            number=number,
            held_back=held,
            open_places=open_places,
            reason=reason,
            held=names,
            members=len(view.members) if view.plan is None else len(view.plan.ranks),
            candidates=len(view.candidates) if view.plan is None else 0,
            end=view.last_end,
        )
    waiting = _admissible(view, rules)
    written = view.waiting.waiting if view.waiting is not None and view.waiting.number == number else 0
    ends_at = _window_ends_at(view, rules)
    is_open = view.lost > 0 or bool(view.rejoined) or written > 0 or ends_at is None or now >= ends_at
    return WaitingRecord(
        number=number,
        waiting=waiting if is_open else 0,
        spare=0 if _too_few(view, rules) else len(view.candidates) - waiting,
        held_back=held,
        lost=view.lost,
        open_places=open_places,
        reason=reason,
        held=names,
        end=_end_of_active(view, number, has_waiting=is_open and waiting > 0),
        members=len(view.members),
        candidates=len(view.candidates),
    )


def _end_of_active(view: View, number: int, has_waiting: bool) -> RoundEnd | None:
    """Why the members of the active round leave it, or should: they say it in turn."""
    root = view.root_cause()
    return admission(number, view.newcomers()) if root is None and has_waiting else root


def _admissible(view: View, rules: Rules) -> int:
    """How many of the candidates would be admitted if the members re-joined now."""
    size = rules.usable(len(view.members) + len(view.candidates))
    return 0 if _too_few(view, rules) else max(0, size - len(view.members))


def _too_few(view: View, rules: Rules) -> bool:
    """Members and candidates together are too few for a round: then no candidate is spare, all wait for more nodes."""
    return rules.usable(len(view.members) + len(view.candidates)) < rules.min_nodes


def _window_ends_at(view: View, rules: Rules) -> float | None:
    """The end of the admission window: from then on members are told of waiting nodes. None: no node is new."""
    if view.first_arrival_at is None:
        return None
    return min(view.last_arrival_at + rules.timing.admission_window_s, view.first_arrival_at + LONGEST_ADMISSION_S)


def _earliest(until: float | None, view: View, now: float) -> float | None:
    times = [at for at in (until, view.hold_back.next_at()) if at is not None and at > now]
    return min(times, default=None)


# --- sentences --------------------------------------------------------------------------------------------------------


def active_sentence(number: int, present: int, size: int) -> str:
    """The state of an active round."""
    return f"round {number} is active with {present} of {size} members"


def closed_reason(closed: ClosedRecord) -> str:
    """What a closed run waits for."""
    return f"the run is closed by {closed.by or 'an unknown node'}: {closed.why or 'no reason given'}"


def forming_sentence(number: int, size: int, why: str) -> str:
    """The state of an attempt."""
    return f"round {number} is forming with {size} node{'s' * (size != 1)}: {why}"


def _active_sentence(view: View, rules: Rules, now: float) -> str:
    assert view.round is not None
    parts = [active_sentence(view.round.number, len(view.members), view.round.size)]
    root = view.root_cause()
    if root is not None and root.kind in _LOSSES:
        root = None  # `_absent` names losses, and when they happened
    if root is not None:
        parts.append(f"its members are leaving it: {root.why}")
    waiting = _admissible(view, rules)
    if view.candidates:
        names = _names(view.candidates.values(), len(view.candidates))
        if _too_few(view, rules):
            total = len(view.members) + len(view.candidates)
            parts.append(f"too few for another round ({of_at_least(total, rules.min_nodes)}): {names}")
        elif waiting == 0:
            why = "full" if len(view.members) >= rules.max_nodes else f"sizes are multiples of {rules.step}"
            parts.append(f"spare ({why}): {names}")
        else:
            ends_at = _window_ends_at(view, rules)
            in_window = ends_at is not None and now < ends_at and not view.lost and not view.rejoined
            note = " (admission window: more may come)" if in_window else ""
            count = (
                f"{waiting}" if waiting == len(view.candidates) else f"place for {waiting} of {len(view.candidates)}"
            )
            parts.append(f"{count} waiting to be admitted{note}: {names}")
    return "; ".join(parts) + _absent(view, root)


def _absent(view: View, told: RoundEnd | None) -> str:
    """The nodes that are gone or excluded, as the end of a sentence, but for those that `told` is about."""
    parts = []
    absent = [node for node in view.departures if not view.is_present(node.name) and not _is_told(told, node)]
    for verb, left in (("lost", False), ("gone", None)):
        if group := [node for node in absent if node.left is left]:
            parts.append(f"{verb}: " + ", ".join(_departed(node) for node in group))
    if in_order := [node for node in absent if node.left]:
        parts.append("left: " + ", ".join(f"{node.name} ({node.why})" for node in in_order))
    for name in islice(view.hold_back.held(), FEW):
        record = view.hold_back.records.get(name) or view.hold_back.due[name]
        parts.append(f"held back for {record.hold_s:g} s: {name} ({record.why})")
    late = [view.nodes[node_id].record.name for node_id in view.unconfirmed if node_id in view.excluded]
    if late:
        parts.append("left out because it did not confirm: " + listed(late))
    return "".join("; " + part for part in parts)


def _ended(view: View) -> str:
    """Why the last round ended, as the end of a sentence."""
    end = view.last_end
    return f"; {round_ended(end.round, end.lasted_s, end.why)}" if end is not None else ""


def _is_told(told: RoundEnd | None, node: Departure) -> bool:
    """Whether the sentence on the end of a round says this already, in the same words or in those of another node."""
    if told is None or node.round != told.round:
        return False
    return node.name in told.nodes or (node.left is True and node.why in told.why)


def _departed(node: Departure) -> str:
    if node.round:
        when = "" if node.gone_s is None else f", {node.gone_s:.0f} s into it"
        return f"{node.name} (member of round {node.round}{when}: {node.why})"
    if node.gone_s is None:
        return f"{node.name} ({node.why})"
    return f"{node.name} (joined at {node.joined_s:.0f} s, lost at {node.gone_s:.0f} s: {node.why})"


def _names(nodes: Iterable[SeenNode], total: int) -> str:
    return listed([node.record.name for node in islice(nodes, FEW)], total)
