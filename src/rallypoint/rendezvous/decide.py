"""What should be true next: `decide(view, now) -> Decision`, with its reason. The algorithm, in one pure function.

Level-triggered: it looks at the whole view and says the next step, whatever happened before. A crash, a lost watch or a
refused write therefore needs no code of its own: look again, decide again. The reasons are the sentences that nodes,
logs, errors and tools show.

In order: an attempt of this coordinator is given up when a planned (id, join) is gone or the run was closed meanwhile;
a closed run waits; an attempt is activated when all have confirmed, and given up when some did not confirm in time;
while members are in the active round there is nothing to form; otherwise the candidates are counted against
`min_nodes`, `max_nodes`, `step` and the last call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from rallypoint._marks import mark
from rallypoint.options import LastCallMode
from rallypoint.rendezvous.ranks import Candidate, choose, rank
from rallypoint.rendezvous.records import HealthRecord, WaitingRecord
from rallypoint.rendezvous.rules import Rules
from rallypoint.rendezvous.view import FEW, Departure, Plan, SeenNode, View

LONGEST_ADMISSION_S = 30.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something changes, or until `until` on the coordinator's clock."""

    why: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """Decide a new attempt: these candidates, in rank order."""

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
    """A node (by name) is not to be admitted for a while."""

    record: HealthRecord


@dataclass(frozen=True, slots=True)
class Forgive:
    """A node (by name) behaved for long enough."""

    name: str


Decision: TypeAlias = Wait | Form | Activate | GiveUp | Hold | Forgive


def decide(view: View, now: float) -> Decision:
    """The next step. Call `view.tick(now)` before."""
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
        return Wait(f"the run is closed by {view.closed.by or 'somebody'}: {view.closed.why or 'no reason given'}")
    if view.plan is not None:
        return _follow(view, view.plan, rules, now)
    if view.members:
        return Wait(_active_sentence(view, rules, now), until=_earliest(_window_ends_at(view, rules), view, now))
    if view.above:
        mark("decide.above")
        return Wait(
            f"{_names((view.nodes[node_id] for node_id in view.above), len(view.above))} of a round above the known "
            f"one: memory was lost, nothing forms until they have left it"
        )
    if view.returning is not None and (until := view.returning.holds_until(now)) is not None:
        mark("decide.returning")
        return Wait(view.returning.sentence(), until=until)
    return _gather(view, rules, now)


def _follow(view: View, plan: Plan, rules: Rules, now: float) -> Decision:
    """An attempt of ours is under way. While confirmations come it is alive, however many there are to come."""
    if not plan.pending:
        return Activate(plan.why)
    timeout_s, since = rules.timing.confirm_timeout_s, max(plan.started_at, plan.heard_at)
    why = forming_sentence(plan.number, len(plan.ranks), plan.why)
    if now < since + timeout_s / 2:
        return Wait(why, until=_earliest(since + timeout_s / 2, view, now))
    missing = _names([view.nodes[node_id] for node_id in islice(plan.pending, FEW)], len(plan.pending))
    if now < since + timeout_s:
        return Wait(f"{why}; not confirmed yet: {missing}", until=_earliest(since + timeout_s, view, now))
    mark("decide.late")
    return GiveUp(tuple(plan.pending), f"{missing} did not confirm within {timeout_s:g} s")


def _gather(view: View, rules: Rules, now: float) -> Decision:
    """No round is current: are there enough for the next?"""
    joined = len(view.candidates)
    size = rules.usable(joined)
    if size < rules.min_nodes:
        listed = f": {_names(view.candidates.values(), joined)}" if joined else ""
        why = f"{joined} of at least {rules.min_nodes} nodes joined{listed}{_absent(view)}"
        return Wait(why, until=_earliest(None, view, now))
    if size == rules.max_nodes:
        return _form(view, rules, size, f"all {size} places are taken" if size > 1 else "its one place is taken")
    if rules.last_call_mode is LastCallMode.ADAPTIVE and (view.ever_active or view.all_returned):
        everybody = "everybody who may be admitted" if view.aside else "every live node"
        return _form(view, rules, size, f"{everybody} has joined: {joined}")
    assert view.minimum_since is not None, "tick() comes before decide()"
    ends_at = view.minimum_since + rules.timing.last_call_timeout_s
    if now >= ends_at:
        return _form(view, rules, size, f"the last call of {rules.timing.last_call_timeout_s:g} s is over")
    why = (
        f"last call of {rules.timing.last_call_timeout_s:g} s: {joined} of at most {rules.max_nodes} nodes joined: "
        f"{_names(view.candidates.values(), joined)}; more may still come{_absent(view)}"
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
        last_rank = None  # two nodes of one name: the one that had the rank keeps it
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


# --- what the nodes are told ----------------------------------------------------------------------------------------


def summarise(view: View, decision: Decision, now: float) -> WaitingRecord:
    """`state/waiting` as it should be now. Counts are of the current round; growth is told after the window."""
    rules = view.rules
    number = view.round.number if view.round else 0
    reason = decision.why if isinstance(decision, Wait | GiveUp | Form | Activate) else ""
    held = sum(1 for node in view.aside.values() if view.hold_back.is_held(node.record.name))
    names = tuple(islice(view.hold_back.held(), FEW))
    open_places = max(0, rules.max_nodes - len(view.members)) if rules else 0
    if rules is None or view.is_closed or not view.members:
        return WaitingRecord(number=number, held_back=held, open_places=open_places, reason=reason, held=names)
    waiting = _admissible(view, rules)
    told_before = view.told.waiting if view.told is not None and view.told.number == number else 0
    ends_at = _window_ends_at(view, rules)
    tell = view.lost > 0 or bool(view.rejoined) or told_before > 0 or ends_at is None or now >= ends_at
    return WaitingRecord(
        number=number,
        waiting=waiting if tell else 0,
        spare=0 if _too_few(view, rules) else len(view.candidates) - waiting,
        held_back=held,
        lost=view.lost,
        open_places=open_places,
        reason=reason,
        held=names,
    )


def _admissible(view: View, rules: Rules) -> int:
    """How many of the candidates would get in if the members re-joined now."""
    size = rules.usable(len(view.members) + len(view.candidates))
    return 0 if _too_few(view, rules) else max(0, size - len(view.members))


def _too_few(view: View, rules: Rules) -> bool:
    """Members and candidates together could not form a round: then nobody is spare, all wait for more to come."""
    return rules.usable(len(view.members) + len(view.candidates)) < rules.min_nodes


def _window_ends_at(view: View, rules: Rules) -> float | None:
    """When the members are told of those who wait; None: nobody new waits."""
    if view.first_arrival_at is None:
        return None
    return min(view.last_arrival_at + rules.timing.admission_window_s, view.first_arrival_at + LONGEST_ADMISSION_S)


def _earliest(until: float | None, view: View, now: float) -> float | None:
    times = [at for at in (until, view.hold_back.next_at()) if at is not None and at > now]
    return min(times, default=None)


# --- sentences --------------------------------------------------------------------------------------------------------


def active_sentence(number: int, present: int, size: int) -> str:
    """How an active round stands."""
    return f"round {number} is active with {present} of {size} members"


def forming_sentence(number: int, size: int, why: str) -> str:
    """How an attempt stands."""
    return f"round {number} is forming with {size} node{'s' * (size != 1)}: {why}"


def _active_sentence(view: View, rules: Rules, now: float) -> str:
    assert view.round is not None
    parts = [active_sentence(view.round.number, len(view.members), view.round.size)]
    waiting = _admissible(view, rules)
    if view.candidates:
        names = _names(view.candidates.values(), len(view.candidates))
        if _too_few(view, rules):
            there = len(view.members) + len(view.candidates)
            parts.append(f"too few for another round ({there} of at least {rules.min_nodes} nodes): {names}")
        elif waiting == 0:
            why = "full" if len(view.members) >= rules.max_nodes else f"sizes are multiples of {rules.step}"
            parts.append(f"spare ({why}): {names}")
        else:
            ends_at = _window_ends_at(view, rules)
            in_window = ends_at is not None and now < ends_at and not view.lost and not view.rejoined
            note = " (admission window: more may come)" if in_window else ""
            some = f"{waiting}" if waiting == len(view.candidates) else f"place for {waiting} of {len(view.candidates)}"
            parts.append(f"{some} waiting to be admitted{note}: {names}")
    return "; ".join(parts) + _absent(view)


def _absent(view: View) -> str:
    """Who went away and who is not admitted, as the end of a sentence."""
    parts = []
    gone_for_good = [gone for gone in view.departures if not view.is_present(gone.name)]
    left = [gone for gone in gone_for_good if gone.left]
    for word, known in (("lost", False), ("gone", None)):
        if those := [gone for gone in gone_for_good if gone.left is known]:
            parts.append(f"{word}: " + ", ".join(_departed(gone) for gone in those))
    if left:
        parts.append("left: " + ", ".join(f"{gone.name} ({gone.why})" for gone in left))
    for name in islice(view.hold_back.held(), FEW):
        record = view.hold_back.records.get(name) or view.hold_back.due[name]
        parts.append(f"held back for {record.hold_s:g} s: {name} ({record.why})")
    late = [view.nodes[node_id].record.name for node_id in view.left_out if node_id in view.aside]
    if late:
        parts.append("left out because it did not confirm: " + _listed(late, len(late)))
    return "".join("; " + part for part in parts)


def _departed(gone: Departure) -> str:
    if gone.round:
        when = "" if gone.gone_s is None else f", {gone.gone_s:.0f} s into it"
        return f"{gone.name} (member of round {gone.round}{when}: {gone.why})"
    if gone.gone_s is None:
        return f"{gone.name} ({gone.why})"
    return f"{gone.name} (joined at {gone.joined_s:.0f} s, lost at {gone.gone_s:.0f} s: {gone.why})"


def _names(nodes: Iterable[SeenNode], total: int) -> str:
    return _listed([node.record.name for node in islice(nodes, FEW)], total)


def _listed(names: list[str], total: int) -> str:
    shown = ", ".join(names[:FEW])
    return shown if total <= FEW else f"{shown} and {total - FEW} more"
