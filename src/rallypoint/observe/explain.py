"""Explains the state of a run in one paragraph: `explain(report, now)`. Pure.

The paragraph begins with what to do, and goes on with the facts. The waiting reason is the coordinator's own sentence;
closing, draining and refusals are worded as in the nodes' errors: nothing here says the same thing in other words. The
name of a node is never changed: a sentence that begins with one begins with a small letter if the name does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from rallypoint.observe.phase import Phase
from rallypoint.observe.report import Held, PastRound, Refusal, Report, Restarts, Standing
from rallypoint.rendezvous.decide import active_sentence
from rallypoint.rendezvous.records import ClosedRecord, DrainRecord
from rallypoint.rendezvous.run_config import Differences, closed_sentence, differences_sentence, drain_sentence
from rallypoint.sentences import FEW, listed, round_ended

NO_ACTION = "No action is needed"
SAME_SETTINGS = "Give all nodes the same settings, or use another run id for those that differ"
FIX_PREFLIGHT = "Fix what the preflight check found there, or start other nodes instead"
PRESENT_S = 600.0
"""A refusal explains the present state for so long: a launcher that is still refused tries again within this time."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """`advice` says what to do; `facts` say how it stands, the waiting reason first; `hints` say where else to look."""

    advice: tuple[str, ...]
    facts: tuple[str, ...]
    hints: tuple[str, ...] = ()

    @property
    def paragraph(self) -> str:
        return " ".join([*self.advice, *self.facts, *self.hints])


def explain(report: Report, now: float | None, given: Mapping[str, int | str] | None = None) -> Explanation:
    """The answer to "why is it stuck?".

    `now` is the wall-clock time, for the ages of refusals. `given`: shared settings of a node, to check whether it
    would be admitted.
    """
    if report.phase is Phase.ABSENT:
        return Explanation(
            (),
            (f"{absent_sentence(report.run_id, report.where).replace('there', 'There', 1)}.",),
            (f"To start it, start its nodes with {run_url(report)}?min_nodes=...",),
        )
    present = [one for one in report.refused if is_present(one, now)]
    old = [one for one in report.refused if not is_present(one, now)]
    advice, hints = _advice(report, present)
    facts = [_state(report), *_further_facts(report), *_refusals(present, now)]
    hints += _refusals(old, now)
    if mismatch := mismatch_sentence(report, given or {}):
        facts.append(f"Compared with the run, {mismatch}")
        advice = [SAME_SETTINGS, *(text for text in advice if text != SAME_SETTINGS and not text.startswith(NO_ACTION))]
    return Explanation(_sentences(advice), _sentences(facts), _sentences(hints))


def absent_sentence(run_id: str, where: str) -> str:
    """That there is no such run, and how to find out whether it has another id."""
    where_to_look = (
        "Each file there is a run" if where.startswith("file:") else f"`rallypoint ls {where}` shows the runs"
    )
    return (
        f"there is no run {run_id!r} on {where}: no node has joined it, or all have gone for longer than reopen_after. "
        f"{where_to_look}"
    )


def run_url(report: Report) -> str:
    """The URL of the run, as the commands take it."""
    return f"{report.where}/{quote(report.run_id, safe='')}"


# --- facts ------------------------------------------------------------------------------------------------------------


def _state(report: Report) -> str:
    name = f"Run {report.run_id!r}"
    if report.phase is Phase.UNREADABLE:
        key, why = next(iter(report.unreadable.items()))
        return f"{name} cannot continue: {_named(key, why)}"
    if report.phase is Phase.CLOSED:
        return f"{name}{_closed(report)}"
    if report.has_round and report.round is not None:
        number, present, size = report.round.number, report.round.present, report.round.size
        return f"{name}: {active_sentence(number, present, size) if report.is_closed else report.reason}"
    if report.phase is Phase.EMPTY:
        return f"{name} has no node: {report.reason or 'all have gone'}"
    return f"{name} is waiting: {report.reason or 'its coordinator has given no reason yet'}"


def _closed(report: Report) -> str:
    """That the run is closed, without the beginning "run 'x'"."""
    closing, config = report.closing, report.config
    assert closing is not None
    record = ClosedRecord(closed=True, by=closing.by, why=closing.why)
    text = closed_sentence(report.run_id, record, config.timing["reopen_after_s"] if config is not None else 0.0)
    return text.removeprefix(f"run {report.run_id!r}")


def _further_facts(report: Report) -> list[str]:
    """The facts that the first sentence does not contain."""
    facts = []
    if report.phase is Phase.CLOSING:
        facts.append(f"The run{_closed(report)}; the current round goes on until its members leave")
    if report.phase is not Phase.UNREADABLE:
        facts += [f"A record cannot be read: {_named(key, why)}" for key, why in report.unreadable.items()]
    if _has_lost_its_coordinator(report):
        facts.append("The run has no coordinator at present: the last one has gone, and no node has taken over yet")
    missing = [name for name in report.missing if not _names(report.reason, name)]
    if missing and report.round is not None and report.phase is not Phase.EMPTY:
        facts.append(f"Members of round {report.round.number} that have gone: {listed(missing)}")
    facts += [
        f"Held back for {held.hold_s:g} s: {held.name} ({held.why})"
        for held in _held(report)
        if not _names(report.reason, held.name)
    ]
    for node in [node for node in report.nodes if node.drain is not None][:FEW]:
        assert node.drain is not None
        facts.append(f"{node.name}: {drain_sentence(DrainRecord(by=node.drain.by, why=node.drain.why))}")
    if report.last_end is not None and report.last_end.ended not in report.reason:
        facts.append(end_sentence(report.last_end).replace("round", "Round", 1))
    if report.restarts is not None and report.restarts.used and report.restarts.why:
        facts.append(f"{restarts_sentence(report.restarts)}: {report.restarts.why}")
    return facts


def _has_lost_its_coordinator(report: Report) -> bool:
    """Nobody decides for the nodes that are there. Without a node, nothing is to be decided."""
    return report.coordinator is None and any(node.standing is not Standing.GONE for node in report.nodes)


def _named(key: str, why: str) -> str:
    return why if key in why else f"{key}: {why}"


def _held(report: Report) -> list[Held]:
    return [held for held in report.held if held.is_held]


def is_present(refusal: Refusal, now: float | None) -> bool:
    """Whether a refusal explains the present state: it is not older than `PRESENT_S`, or its age is not known."""
    return now is None or refusal.refused_at is None or now - refusal.refused_at < PRESENT_S


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


def refusal_sentence(refusal: Refusal, now: float | None) -> str:
    """That a node was refused or does not join, how long ago, and why."""
    when = "" if now is None or refusal.refused_at is None else f" {_ago(now - refusal.refused_at)}"
    return f"{refusal.name} {'was refused' if refusal.differences else 'did not join'}{when}: {refusal.why}"


def _refusals(refusals: list[Refusal], now: float | None) -> list[str]:
    facts = [refusal_sentence(refusal, now) for refusal in refusals[:FEW]]
    if len(refusals) > FEW:
        facts.append(f"{len(refusals) - FEW} more nodes were refused")
    return facts


def _ago(age_s: float) -> str:
    """An age in words. Another machine's clock wrote the time: it may be ahead."""
    for unit_s, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if age_s >= unit_s:
            count = int(age_s // unit_s)
            return f"{count} {unit}{'s' * (count != 1)} ago"
    return "less than a minute ago"


# --- advice -----------------------------------------------------------------------------------------------------------


def _advice(report: Report, refused: list[Refusal]) -> tuple[list[str], list[str]]:
    """(what to do, hints for a further look)."""
    if _has_lost_its_coordinator(report) and not report.is_closed and report.phase is not Phase.UNREADABLE:
        return [
            "Wait for a node to take over: the run has no coordinator, and the next one decides a few seconds after "
            "its election. If none comes, look at the logs of the nodes: they cannot reach the backend, or hang"
        ], []
    match report.phase:
        case Phase.CLOSED if report.closing is not None and report.closing.outcome == 0:
            return [f"{NO_ACTION}: the job has finished. For another one, use another run id"], []
        case Phase.CLOSED:
            return [
                f"The run is closed: reopen it with `rallypoint reopen {run_url(report)}`, or use another run id"
            ], []
        case Phase.CLOSING:
            return [
                f"No node can join any more: if that is not intended, reopen the run with `rallypoint reopen "
                f"{run_url(report)}`"
            ], []
        case Phase.EMPTY:
            return _empty(report), []
        case Phase.BELOW_MINIMUM:
            return _below_minimum(report, refused)
        case Phase.GATHERING:
            return [
                f"{NO_ACTION}: the round forms by itself",
                *_about_refused(refused),
            ], []
        case Phase.FORMING:
            return [_forming(report)], []
        case Phase.INCOMPLETE:
            return [_rejoin(report)], []
        case Phase.ACTIVE:
            return _active(report, refused), []
    return [], []  # absent; unreadable: the reason contains the advice


def _empty(report: Report) -> list[str]:
    least, config = report.shared("min_nodes"), report.config
    after = f" {config.timing['reopen_after_s']:g} s after its last node has gone" if config is not None else ""
    return [
        f"If the job is over, {NO_ACTION.lower()}: the run id is free again{after}",
        f"Else start at least {_nodes(least)}",
    ]


def _forming(report: Report) -> str:
    pending = [node.name for node in report.standing(Standing.CONFIRMING)]
    if not pending or report.config is None:
        return f"{NO_ACTION}: all members have confirmed the round, and it is active in a moment"
    limit_s = report.config.timing["confirm_timeout_s"]
    has = "has" if len(pending) == 1 else "have"
    return (
        f"{NO_ACTION}: {listed(pending)} {has} not confirmed the round yet; without a confirmation for {limit_s:g} s, "
        f"the others form a new one"
    )


def _below_minimum(report: Report, refused: list[Refusal]) -> tuple[list[str], list[str]]:
    counts = report.counts
    there = counts.member + counts.confirmed + counts.confirming + counts.joining + counts.waiting + counts.spare
    lacking = max(1, report.shared("min_nodes") - there)  # 0: a node is there that did not confirm its place
    start = f"{_nodes(lacking, 'more ')} with the same URL"
    held = _held(report)
    advice = _about_refused(refused)
    if held:
        names = listed([one.name for one in held])
        free = f"`rallypoint free {run_url(report)} {held[0].name}`"
        advice.append(f"Free the held-back node{'s' * (len(held) != 1)} {names} with {free}, or start {start}")
    else:
        advice.append(f"{'Otherwise start' if refused else 'Start'} {start}")
    if counts.member:
        advice.append(_rejoin(report))
    hint = (
        f"If {'it was' if lacking == 1 else 'they were'} started already, look at the log there: a node that cannot "
        f"reach {report.where} says so, and `rallypoint doctor {run_url(report)}` on its machine finds out why"
    )
    return advice, [] if held or refused else [hint]


def _active(report: Report, refused: list[Refusal]) -> list[str]:
    counts = report.counts
    asked = [node.name for node in report.standing(Standing.MEMBER) if node.drain is not None]
    if asked:
        is_one = len(asked) == 1
        return [
            f"{NO_ACTION}: {listed(asked)} {'was' if is_one else 'were'} asked to go, and leave{'s' * is_one} when "
            f"the program re-joins (`world.changed`, `num_nodes_waiting()`)"
        ]
    if counts.waiting and counts.member + counts.waiting < report.shared("min_nodes"):
        lacking = report.shared("min_nodes") - counts.member - counts.waiting
        return [f"Start {_nodes(lacking, 'more ')}: the next round needs {report.shared('min_nodes')}"]
    if counts.waiting:
        return [
            f"{NO_ACTION} if the members re-join when they are notified (`world.changed`, `num_nodes_waiting()`): "
            f"the waiting nodes enter with the next round"
        ]
    if counts.spare:
        return [f"{NO_ACTION}: a spare takes the place of a member that goes. For a larger round, raise max_nodes"]
    if counts.held_back:
        return [f"{NO_ACTION}: a node is held back for a limited time. Find out why it was lost so often"]
    return _about_refused(refused) or [f"{NO_ACTION}: the round is complete"]


def _about_refused(refused: list[Refusal]) -> list[str]:
    """Advice about nodes that were refused, or whose preflight check failed."""
    different = [one for one in refused if one.differences]
    failed = [one.name for one in refused if not one.differences]
    advice = []
    if different:
        wanted = {name: theirs for one in different for name, (_, theirs) in one.differences.items()}
        settings = ", ".join(f"{name}={value}" for name, value in wanted.items())
        advice.append(
            f"Give {listed([one.name for one in different])} the settings of the run ({settings}), or another run id"
        )
    if failed:
        advice.append(f"Fix what the preflight check found on {listed(failed)}, or start other nodes instead")
    return advice


def _rejoin(report: Report) -> str:
    members = report.standing(Standing.MEMBER)
    is_one = len(members) == 1
    return (
        f"The next round forms when {'member' if is_one else 'members'} {listed([node.name for node in members])} "
        f"{'has' if is_one else 'have'} re-joined: {'it has' if is_one else 'they have'} been notified "
        f"(`world.changed`, `num_nodes_waiting()`)"
    )


def _names(sentence: str, name: str) -> bool:
    """Whether a sentence contains the name of a node as a whole word."""
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", sentence) is not None


def _nodes(count: int, more: str = "") -> str:
    return f"{count} {more}node{'s' * (count != 1)}"


def _sentences(texts: list[str]) -> tuple[str, ...]:
    """The texts, each with a full stop."""
    return tuple(text.strip() + ("" if text.strip().endswith((".", "!", "?")) else ".") for text in texts)
