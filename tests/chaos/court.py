"""Judges a world by its logs: what the store committed and what the processes said. The checkers are the simulator's.

Pure: evidence in, findings out, or the error of the guarantee that was broken. What the checkers do not see, because
it is said by processes alone, is judged here: the order of what one node returned, what the store of a round answered,
and how long anybody waited.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rallypoint.kv.types import Batch
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.rendezvous.records import RoundPhase, RoundRecord
from rallypoint.testing.checkers import (
    Broke,
    BrokeAgreement,
    BrokeBarrier,
    BrokeMonotonicity,
    BrokeOutageTolerance,
    BrokeRelease,
    Safety,
)
from tests.chaos.server import Life, Line

Fact = dict[str, Any]
NOBODY_ABSENT = re.compile(r": (\d+) of \1 ranks came")
STORE_S = 5.0
"""What a call of the store is given by the workload, at most."""
WITHDRAW_S = 5.0
SLACK_S = 2.0


class BrokeStore(Broke):
    """The store of a round lost or doubled something, or let somebody past a barrier before all had come."""


class Crashed(Broke):
    """A process of the product ended, or wrote a traceback, though nobody had killed it."""


@dataclass(frozen=True)
class Process:
    """What one process said. `stalled` are the times it was not let run, by its own watch or because it was paused."""

    name: str
    facts: Sequence[Fact]
    errors: Sequence[str] = ()
    stalled: Sequence[tuple[float, float]] = ()
    is_crashed: bool = False


@dataclass(frozen=True)
class Evidence:
    """Everything about one world."""

    keys: RunKeys
    min_nodes: int
    max_nodes: int
    lines: Sequence[Line]
    nodes: Sequence[Process]
    servers: Sequence[Process] = ()
    compared: int = 1_000_000
    waits_s: float | None = None
    """How long a call may take, `confirm_timeout` included; None: somebody may be a spare, who may wait for ever."""


@dataclass
class Findings:
    """What was judged."""

    commits: int = 0
    lives: int = 0
    rounds: int = 0
    returns: int = 0
    adds: int = 0
    barriers: int = 0
    store_calls: int = 0
    longest_join_s: float = 0.0
    longest_call_s: float = 0.0
    """Of the calls of stores that failed."""
    clocks_apart_s: float = 0.0
    """How far the wall clocks of nodes were apart, at most."""
    errors: dict[str, int] = field(default_factory=dict)


@dataclass
class Activation:
    """A round that became active, and what its members said of it."""

    number: int
    ids: tuple[str, ...]
    names: tuple[str, ...]


def judge(evidence: Evidence) -> Findings:
    """Raises the error of the first guarantee that does not hold."""
    findings = Findings()
    activations = _replay(evidence, findings)
    _numbers_grow(evidence.nodes)
    _members_agree(evidence.nodes, activations)
    _store_is_true(evidence.nodes, activations, findings)
    _nobody_waits_for_ever(evidence, findings)
    walls = [fact["wall"] - fact["at"] for node in evidence.nodes for fact in node.facts if "wall" in fact]
    findings.clocks_apart_s = max(walls) - min(walls) if walls else 0.0
    _nobody_crashed((*evidence.nodes, *evidence.servers))
    return findings


# --- what was committed and returned ----------------------------------------------------------------------------------


def _replay(evidence: Evidence, findings: Findings) -> dict[tuple[str, int], Activation]:
    """All commits through the checkers; each return when its round becomes active. The rounds, by member and number."""
    safety = Safety(evidence.keys, evidence.min_nodes, evidence.max_nodes, compared=evidence.compared)
    returned = {
        (fact["id"], fact["round"]): (node.name, fact)
        for node in evidence.nodes
        for fact in node.facts
        if fact["kind"] == "round"
    }
    activations: dict[tuple[str, int], Activation] = {}
    generation, last = None, 0
    for line in evidence.lines:
        if isinstance(line, Life):
            if line.lost:
                raise BrokeOutageTolerance(f"{line.lost} revisions up to {last} were told of, and are gone")
            if generation is not None and line.generation != generation:
                safety.wiped()
            generation, last = line.generation, line.revision
            findings.lives += 1
            continue
        batch = line.batch
        if batch.revision <= last:
            raise BrokeMonotonicity(f"revision {batch.revision} was committed after {last}")
        last = batch.revision
        findings.commits += 1
        safety.committed(batch.revision, batch.changes, writer_of(evidence.keys, batch))
        now = safety.picture.round
        wrote = any(change.key == evidence.keys.round and change.item is not None for change in batch.changes)
        if wrote and now is not None and now.phase is RoundPhase.ACTIVE:
            findings.rounds += 1
            findings.returns += _feed(safety, now, returned, activations)
    if returned:
        who = "; ".join(f"{name}: {number}" for (_, number), (name, _) in returned.items())
        raise BrokeBarrier(f"nodes returned from rounds that were never active: {who}")
    return activations


def _feed(
    safety: Safety,
    now: RoundRecord,
    returned: dict[tuple[str, int], tuple[str, Fact]],
    activations: dict[tuple[str, int], Activation],
) -> int:
    """Whoever returned from this round, as if it had done so at once: before the run goes on to the next."""
    members = safety.picture.members(now)
    activation = Activation(now.number, tuple(m.id for m in members), tuple(m.name for m in members))
    count = 0
    for member in members:
        activations[member.id, now.number] = activation
        name, fact = returned.pop((member.id, now.number), ("", None))
        if fact is not None:
            joined = Joined(
                number=fact["round"], rank=fact["rank"], size=fact["size"], addr="", port=0, own_revision=0,
                data_lease=0,
            )  # fmt: skip
            safety.returned(f"{name} {member.id}", member.id, joined)
            count += 1
    return count


def writer_of(keys: RunKeys, batch: Batch) -> str:
    """The node that wrote a value of the workload, which begins with its id; "" for all else."""
    for change in batch.changes:
        if change.item is not None and change.key.startswith(keys.stores) and "/own/" in change.key:
            return change.item.value.split(b" ")[0].decode()
    return ""


def _numbers_grow(nodes: Iterable[Process]) -> None:
    """By the log of each process: what one node returns from goes up."""
    last: dict[str, int] = {}
    for node in nodes:
        for fact in node.facts:
            if fact["kind"] == "round":
                if fact["round"] <= last.get(fact["id"], 0):
                    raise BrokeMonotonicity(f"{node.name} returned from {fact['round']} after {last[fact['id']]}")
                last[fact["id"]] = fact["round"]


def _members_agree(nodes: Iterable[Process], activations: dict[tuple[str, int], Activation]) -> None:
    for node in nodes:
        for fact in node.facts:
            if fact["kind"] == "members":
                decided = activations[fact["id"], fact["round"]]
                if tuple(member[0] for member in fact["members"]) != decided.ids:
                    raise BrokeAgreement(
                        f"{node.name} has read {fact['members']} as the members of round {fact['round']}; decided was: "
                        f"{decided.names}"
                    )


# --- what the store answered ------------------------------------------------------------------------------------------


def _store_is_true(
    nodes: Iterable[Process], activations: dict[tuple[str, int], Activation], findings: Findings
) -> None:
    added: dict[int, list[tuple[str, int]]] = {}
    unknown: dict[int, int] = {}
    arrived: dict[tuple[int, str], dict[str, float]] = {}
    passed: dict[tuple[int, str], list[tuple[str, float]]] = {}
    rounds: dict[int, Activation] = {}
    for node in nodes:
        current: Activation | None = None
        for fact in node.facts:
            kind = fact["kind"]
            if kind == "lie":
                raise BrokeStore(f"{node.name}: {fact['what']}")
            if kind == "round":
                current = activations[fact["id"], fact["round"]]
                rounds[id(current)] = current
                unknown[id(current)] = unknown.get(id(current), 0) + 1  # it may die with one under way
            elif kind == "added":
                added.setdefault(id(current), []).append((fact["id"], fact["value"]))
            elif kind == "store":
                findings.errors[fact["error"]] = findings.errors.get(fact["error"], 0) + 1
                if NOBODY_ABSENT.search(fact["text"]):
                    raise BrokeStore(f"{node.name} waited in vain for nobody: {fact['text']}")
                if fact["did"] == "add":
                    unknown[id(current)] += 1
            elif kind == "arrives":
                arrived.setdefault((id(current), fact["barrier"]), {})[fact["id"]] = fact["at"]
            elif kind == "passed":
                passed.setdefault((id(current), fact["barrier"]), []).append((fact["id"], fact["at"]))
            findings.store_calls += kind in ("added", "set", "got", "passed", "members")
    for where, values in added.items():
        _adds_count_once(rounds[where], values, unknown[where])
    findings.adds = sum(map(len, added.values()))
    for (where, name), those in passed.items():
        _all_had_come(rounds[where], name, arrived.get((where, name), {}), those)
    findings.barriers = len(passed)


def _adds_count_once(activation: Activation, values: list[tuple[str, int]], unknown: int) -> None:
    """No answer twice, and no more than was asked for."""
    numbers = [value for _, value in values]
    if len(set(numbers)) != len(numbers):
        twice = sorted({n for n in numbers if numbers.count(n) > 1})
        raise BrokeStore(f"round {activation.number}: two adds were answered with the same numbers: {twice[:5]}")
    if max(numbers) > len(numbers) + unknown:
        raise BrokeStore(
            f"round {activation.number}: {len(numbers)} adds were answered and {unknown} may have happened, and the "
            f"count is {max(numbers)}"
        )
    last: dict[str, int] = {}
    for who, value in values:
        if value <= last.get(who, 0):
            raise BrokeStore(f"round {activation.number}: {who} was given {value} after {last[who]}")
        last[who] = value


def _all_had_come(
    activation: Activation, name: str, arrived: dict[str, float], passed: list[tuple[str, float]]
) -> None:
    first_at = min(at for _, at in passed)
    late = [member for member in activation.ids if arrived.get(member, first_at + 1.0) > first_at]
    if late:
        names = [activation.names[activation.ids.index(member)] for member in late]
        raise BrokeStore(f"round {activation.number}: somebody passed barrier {name!r} before {names} came")


# --- what the processes did -------------------------------------------------------------------------------------------


def _nobody_waits_for_ever(evidence: Evidence, findings: Findings) -> None:
    for node in evidence.nodes:
        for fact in node.facts:
            if fact["kind"] not in ("round", "raised", "exit", "store"):
                continue
            took_s, ended_at = fact["took_s"], fact["at"]
            stood_s = sum(_overlap(ended_at - took_s, ended_at, since, until) for since, until in node.stalled)
            if fact["kind"] == "store":
                limit_s: float | None = STORE_S
                findings.longest_call_s = max(findings.longest_call_s, took_s - stood_s)
            else:
                limit_s = evidence.waits_s
                findings.longest_join_s = max(findings.longest_join_s, took_s - stood_s)
            if limit_s is not None and took_s - stood_s > limit_s + WITHDRAW_S + SLACK_S:
                raise BrokeRelease(
                    f"{node.name} waited for {took_s:.1f} s ({stood_s:.1f} s of that it stood still), allowed are "
                    f"{limit_s:g} s: {fact}"
                )


def _overlap(since: float, until: float, began_at: float, ended_at: float) -> float:
    return max(0.0, min(until, ended_at) - max(since, began_at))


def _nobody_crashed(processes: Iterable[Process]) -> None:
    for process in processes:
        told = [line for line in process.errors if "Traceback" in line or "never retrieved" in line]
        if told or process.is_crashed:
            text = "\n".join(list(process.errors)[-25:])
            raise Crashed(f"{process.name} {'ended by itself' if process.is_crashed else 'wrote a traceback'}:\n{text}")
