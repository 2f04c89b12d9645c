"""Checks a world by its logs: the commits of the store and the reports of the processes, with the simulator's checkers.

Pure: a history in, findings out, or the error of the broken guarantee. Checked here is also what the checkers do not
see, because only the processes know it: the order of one node's rounds, the answers of a round's store, and the
durations of calls.
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
from tests.chaos.server import AuditLine, ServerStart

Fact = dict[str, Any]
NOBODY_ABSENT = re.compile(r": (\d+) of \1 ranks came")
STORE_S = 5.0
"""The longest time-out of the workload's store calls."""
WITHDRAW_S = 5.0
SLACK_S = 2.0


class BrokeStore(Broke):
    """The store of a round lost or repeated a write, or released a barrier before all ranks had arrived."""


class Crashed(Broke):
    """A process ended unexpectedly, or wrote a traceback."""


@dataclass(frozen=True)
class ProcessLog:
    """The reports of one process. `stalled` are the periods in which it was paused or got no processor."""

    name: str
    facts: Sequence[Fact]
    errors: Sequence[str] = ()
    stalled: Sequence[tuple[float, float]] = ()
    is_crashed: bool = False


@dataclass(frozen=True)
class History:
    """The logs of one world."""

    keys: RunKeys
    min_nodes: int
    max_nodes: int
    lines: Sequence[AuditLine]
    nodes: Sequence[ProcessLog]
    servers: Sequence[ProcessLog] = ()
    compared: int = 1_000_000
    waits_s: float | None = None
    """How long a call may take, including `confirm_timeout`; None: a node may be a spare, which may wait for ever."""


@dataclass
class Findings:
    """What was checked."""

    commits: int = 0
    lives: int = 0
    rounds: int = 0
    returns: int = 0
    adds: int = 0
    barriers: int = 0
    store_calls: int = 0
    longest_join_s: float = 0.0
    longest_call_s: float = 0.0
    """Of the failed store calls."""
    clocks_apart_s: float = 0.0
    """The largest difference between wall clocks of nodes."""
    errors: dict[str, int] = field(default_factory=dict)


@dataclass
class Activation:
    """A round that became active."""

    number: int
    ids: tuple[str, ...]
    names: tuple[str, ...]


def check_history(history: History) -> Findings:
    """Raises the error of the first broken guarantee."""
    findings = Findings()
    activations = _replay(history, findings)
    _check_numbers(history.nodes)
    _check_members(history.nodes, activations)
    _check_store(history.nodes, activations, findings)
    _check_waits(history, findings)
    walls = [fact["wall"] - fact["at"] for node in history.nodes for fact in node.facts if "wall" in fact]
    findings.clocks_apart_s = max(walls) - min(walls) if walls else 0.0
    _check_crashes((*history.nodes, *history.servers))
    return findings


# --- commits and returns ----------------------------------------------------------------------------------------------


def _replay(history: History, findings: Findings) -> dict[tuple[str, int], Activation]:
    """Give all commits to the checkers, and each return at the activation of its round. Rounds by member and number."""
    safety = Safety(history.keys, history.min_nodes, history.max_nodes, compared=history.compared)
    returned = {
        (fact["id"], fact["round"]): (node.name, fact)
        for node in history.nodes
        for fact in node.facts
        if fact["kind"] == "round"
    }
    activations: dict[tuple[str, int], Activation] = {}
    generation, last = None, 0
    for line in history.lines:
        if isinstance(line, ServerStart):
            if line.lost:
                raise BrokeOutageTolerance(f"{line.lost} revisions up to {last} were acknowledged and are lost")
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
        safety.committed(batch.revision, batch.changes, writer_of(history.keys, batch))
        now = safety.picture.round
        wrote = any(change.key == history.keys.round and change.item is not None for change in batch.changes)
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
    """Report the returns from this round, as if they had happened at its activation."""
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
    """The node that wrote a value of the workload, which begins with its id; "" for other batches."""
    for change in batch.changes:
        if change.item is not None and change.key.startswith(keys.stores) and "/own/" in change.key:
            return change.item.value.split(b" ")[0].decode()
    return ""


def _check_numbers(nodes: Iterable[ProcessLog]) -> None:
    """The round numbers of each node increase."""
    last: dict[str, int] = {}
    for node in nodes:
        for fact in node.facts:
            if fact["kind"] == "round":
                if fact["round"] <= last.get(fact["id"], 0):
                    raise BrokeMonotonicity(f"{node.name} returned from {fact['round']} after {last[fact['id']]}")
                last[fact["id"]] = fact["round"]


def _check_members(nodes: Iterable[ProcessLog], activations: dict[tuple[str, int], Activation]) -> None:
    for node in nodes:
        for fact in node.facts:
            if fact["kind"] == "members":
                decided = activations[fact["id"], fact["round"]]
                if tuple(member[0] for member in fact["members"]) != decided.ids:
                    raise BrokeAgreement(
                        f"{node.name} has read {fact['members']} as the members of round {fact['round']}; decided: "
                        f"{decided.names}"
                    )


# --- answers of the store ---------------------------------------------------------------------------------------------


def _check_store(
    nodes: Iterable[ProcessLog], activations: dict[tuple[str, int], Activation], findings: Findings
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
            if kind == "mismatch":
                raise BrokeStore(f"{node.name}: {fact['what']}")
            if kind == "round":
                current = activations[fact["id"], fact["round"]]
                rounds[id(current)] = current
                unknown[id(current)] = unknown.get(id(current), 0) + 1  # it may die during an add
            elif kind == "added":
                added.setdefault(id(current), []).append((fact["id"], fact["value"]))
            elif kind == "store":
                findings.errors[fact["error"]] = findings.errors.get(fact["error"], 0) + 1
                if NOBODY_ABSENT.search(fact["text"]):
                    raise BrokeStore(f"a barrier of {node.name} timed out although no rank was absent: {fact['text']}")
                if fact["did"] == "add":
                    unknown[id(current)] += 1
            elif kind == "arrives":
                arrived.setdefault((id(current), fact["barrier"]), {})[fact["id"]] = fact["at"]
            elif kind == "passed":
                passed.setdefault((id(current), fact["barrier"]), []).append((fact["id"], fact["at"]))
            findings.store_calls += kind in ("added", "set", "got", "passed", "members")
    for where, values in added.items():
        _check_adds(rounds[where], values, unknown[where])
    findings.adds = sum(map(len, added.values()))
    for (where, name), those in passed.items():
        _check_barrier(rounds[where], name, arrived.get((where, name), {}), those)
    findings.barriers = len(passed)


def _check_adds(activation: Activation, values: list[tuple[str, int]], unknown: int) -> None:
    """No two adds have the same answer, and the sum is at most the number of adds."""
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


def _check_barrier(
    activation: Activation, name: str, arrived: dict[str, float], passed: list[tuple[str, float]]
) -> None:
    first_at = min(at for _, at in passed)
    late = [member for member in activation.ids if arrived.get(member, first_at + 1.0) > first_at]
    if late:
        names = [activation.names[activation.ids.index(member)] for member in late]
        raise BrokeStore(f"round {activation.number}: a rank passed barrier {name!r} before {names} arrived")


# --- waits and crashes ------------------------------------------------------------------------------------------------


def _check_waits(history: History, findings: Findings) -> None:
    for node in history.nodes:
        for fact in node.facts:
            if fact["kind"] not in ("round", "raised", "exit", "store"):
                continue
            took_s, ended_at = fact["took_s"], fact["at"]
            stood_s = sum(_overlap(ended_at - took_s, ended_at, since, until) for since, until in node.stalled)
            if fact["kind"] == "store":
                limit_s: float | None = STORE_S
                findings.longest_call_s = max(findings.longest_call_s, took_s - stood_s)
            else:
                limit_s = history.waits_s
                findings.longest_join_s = max(findings.longest_join_s, took_s - stood_s)
            if limit_s is not None and took_s - stood_s > limit_s + WITHDRAW_S + SLACK_S:
                raise BrokeRelease(
                    f"{node.name} waited for {took_s:.1f} s ({stood_s:.1f} s of that it was paused), allowed are "
                    f"{limit_s:g} s: {fact}"
                )


def _overlap(since: float, until: float, began_at: float, ended_at: float) -> float:
    return max(0.0, min(until, ended_at) - max(since, began_at))


def _check_crashes(processes: Iterable[ProcessLog]) -> None:
    for process in processes:
        told = [line for line in process.errors if "Traceback" in line or "never retrieved" in line]
        if told or process.is_crashed:
            text = "\n".join(list(process.errors)[-25:])
            raise Crashed(
                f"{process.name} {'ended unexpectedly' if process.is_crashed else 'wrote a traceback'}:\n{text}"
            )
