"""Explains the state of a run in one paragraph: `explain(report)`. Pure.

The waiting reason is the coordinator's own sentence; closing, draining and refusals are worded as in the nodes' errors:
nothing here says the same thing in other words. This module adds the missing nodes and advice for the operator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rallypoint.observe.report import PastRound, Phase, Refusal, Report, Restarts, Standing
from rallypoint.rendezvous.decide import active_sentence
from rallypoint.rendezvous.records import ClosedRecord, DrainRecord
from rallypoint.rendezvous.run_config import Differences, closed_sentence, differences_sentence, drain_sentence
from rallypoint.rendezvous.view import FEW
from rallypoint.sentences import round_ended

NO_ACTION = "No action is needed"
SAME_SETTINGS = "Give all nodes the same settings, or use another run id for those that differ"
FIX_PREFLIGHT = "Fix what the preflight check found there, or start other nodes instead"


@dataclass(frozen=True, slots=True)
class Explanation:
    """`facts` describe the state, the waiting reason first; `advice` says what to do."""

    facts: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def paragraph(self) -> str:
        return " ".join([*self.facts, *self.advice])


def explain(report: Report, given: Mapping[str, int | str] | None = None) -> Explanation:
    """The answer to "why is it stuck?". `given`: shared settings of a node, to check whether it would be admitted."""
    if not report.exists:
        return Explanation(
            (f"Run {report.run_id!r} does not exist on {report.where}: no node has joined it, or all have gone.",),
            (
                f"Start its nodes with {report.where}/{report.run_id}?min_nodes=..., or check with `rallypoint ls` "
                f"whether it has another id.",
            ),
        )
    facts = [_sentence(_state(report))]
    facts += [_sentence(fact) for fact in _further_facts(report)]
    advice = _advice(report)
    if mismatch := mismatch_sentence(report, given or {}):
        facts.append(_sentence(mismatch))
        advice = [SAME_SETTINGS, *(text for text in advice if text != SAME_SETTINGS and not text.startswith(NO_ACTION))]
    return Explanation(tuple(facts), tuple(_sentence(text) for text in advice))


def _state(report: Report) -> str:
    name = f"run {report.run_id!r}"
    if report.unreadable:
        key, why = next(iter(report.unreadable.items()))
        return f"{name} cannot continue: {why if key in why else f'{key}: {why}'}"
    if report.phase is Phase.CLOSED:
        return _closed(report)
    if report.phase is Phase.ACTIVE and report.round is not None:
        number, present, size = report.round.number, report.round.present, report.round.size
        return f"{name}: {active_sentence(number, present, size) if report.is_closed else report.reason}"
    return f"{name} is waiting: {report.reason or 'its coordinator has given no reason yet'}"


def _closed(report: Report) -> str:
    closing, config = report.closing, report.config
    assert closing is not None
    record = ClosedRecord(closed=True, by=closing.by, why=closing.why)
    return closed_sentence(report.run_id, record, config.timing["reopen_after_s"] if config is not None else 0.0)


def _further_facts(report: Report) -> list[str]:
    """The facts that the first sentence does not contain."""
    facts = []
    if report.phase is Phase.ACTIVE and report.is_closed:
        facts.append(f"{_closed(report)}; the current round goes on until its members leave")
    if report.coordinator is None:
        facts.append("the run has no coordinator at present: the last one has gone, and no node has taken over yet")
    missing = [name for name in report.missing if not _names(report.reason, name)]
    if missing and report.round is not None:
        facts.append(f"members of round {report.round.number} that have gone: {_listed(missing)}")
    facts += [
        f"held back for {held.hold_s:g} s: {held.name} ({held.why})"
        for held in report.held
        if held.is_held and not _names(report.reason, held.name)
    ]
    for node in [node for node in report.nodes if node.drain is not None][:FEW]:
        assert node.drain is not None
        facts.append(f"{node.name}: {drain_sentence(DrainRecord(by=node.drain.by, why=node.drain.why))}")
    if report.last_end is not None and report.last_end.ended not in report.reason:
        facts.append(end_sentence(report.last_end))
    if report.restarts is not None and report.restarts.used:
        facts.append(f"{restarts_sentence(report.restarts)}: {report.restarts.why}")
    facts += [refusal_sentence(refusal) for refusal in report.refused[:FEW]]
    if len(report.refused) > FEW:
        facts.append(f"{len(report.refused) - FEW} more nodes were refused")
    return facts


def mismatch_sentence(report: Report, given: Mapping[str, int | str]) -> str:
    """Why a node with these settings would be refused; empty if it would not be."""
    shared = report.config.shared if report.config is not None else {}
    different: Differences = {
        name: (value, shared[name]) for name, value in given.items() if name in shared and shared[name] != value
    }
    return f"a node with this URL would be refused: {differences_sentence(different)}" if different else ""


def end_sentence(one: PastRound) -> str:
    """That a round ended, and why."""
    return round_ended(one.number, one.lasted_s, one.ended)


def restarts_sentence(restarts: Restarts) -> str:
    """How many restarts the run has used, and how many it has left."""
    if restarts.limit == 0:
        return "the run has no restarts"
    return f"{restarts.used} of {restarts.limit} restart{'s' * (restarts.limit != 1)} used, {restarts.left} left"


def refusal_sentence(refusal: Refusal) -> str:
    """That a node was refused or is held back, and why."""
    return f"{refusal.name} {'was refused' if refusal.differences else 'is held back'}: {refusal.why}"


def _advice(report: Report) -> list[str]:
    if report.unreadable:
        return []  # the reason contains the advice
    counts, least = report.counts, report.shared("min_nodes")
    if report.phase is Phase.CLOSED:
        return ["Reopen it with `rallypoint reopen`, or use another run id"]
    if report.phase is Phase.FORMING:
        pending = [node.name for node in report.standing(Standing.CONFIRMING)]
        rest = f"; still to confirm: {_listed(pending)}" if pending else ""
        return [f"{NO_ACTION}: the round forms with the members that confirm it in time{rest}"]
    if report.phase is Phase.GATHERING:
        return _gathering(report, counts.joining + counts.confirmed + counts.confirming, least)
    if report.is_closed:
        return ["No node can join it any more: if that is not intended, reopen it with `rallypoint reopen`"]
    if counts.gone:
        return _after_a_loss(report, least)
    if counts.waiting and counts.member + counts.waiting < least:
        return [f"Start {_nodes(least - counts.member - counts.waiting)} more: the next round needs {least}"]
    if counts.waiting:
        return [
            f"{NO_ACTION} if the members re-join when they are notified (`world.changed`, `num_nodes_waiting()`): "
            f"the waiting nodes enter with the next round"
        ]
    if counts.spare:
        return [f"{NO_ACTION}: a spare takes the place of a member that goes. For a larger round, raise max_nodes"]
    if counts.held_back:
        return [f"{NO_ACTION}: a node is held back for a limited time. Find out why it was lost so often"]
    return _about_refused(report) or [f"{NO_ACTION}: the round is complete"]


def _about_refused(report: Report) -> list[str]:
    """Advice about nodes that were refused, or whose preflight check failed."""
    has_other_settings = any(one.differences for one in report.refused)
    has_failed_preflight = any(not one.differences for one in report.refused)
    return [SAME_SETTINGS] * has_other_settings + [FIX_PREFLIGHT] * has_failed_preflight


def _gathering(report: Report, joined: int, least: int) -> list[str]:
    advice = _about_refused(report)
    lacking = least - joined
    if lacking > 0 and not report.refused:
        advice.append(
            f"Start {_nodes(lacking)} more with the same URL. If they were started already, look at their logs: a node "
            f"that cannot reach {report.where} says so, and `rallypoint doctor` on its machine finds out why"
        )
    elif lacking <= 0:
        advice.append(f"{NO_ACTION}: the round forms by itself, at the latest when the last call is over")
    return advice


def _after_a_loss(report: Report, least: int) -> list[str]:
    counts = report.counts
    left = counts.member + counts.waiting + counts.spare
    is_one = counts.member == 1
    advice = [
        f"The {_nodes(counts.member)} still in the round {'has' if is_one else 'have'} to re-join: "
        f"{'it has' if is_one else 'they have'} been notified (`world.changed`, `num_nodes_waiting()`)"
    ]
    if left < least:
        advice.append(f"Start {_nodes(least - left)} more: the next round needs {least}")
    return advice


def _names(sentence: str, name: str) -> bool:
    """Whether a sentence contains the name of a node as a whole word."""
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", sentence) is not None


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:FEW])
    return shown if len(names) <= FEW else f"{shown} and {len(names) - FEW} more"


def _sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
