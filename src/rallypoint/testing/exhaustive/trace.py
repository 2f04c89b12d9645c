"""Describes a choice and its effect in one line, for traces of broken guarantees."""

from __future__ import annotations

from typing import Any

from rallypoint.kv.types import (
    Batch,
    Change,
    Delete,
    DeleteRange,
    Failure,
    Get,
    GotItem,
    Op,
    Put,
    Range,
    Revoke,
    Txn,
    TxnResult,
)
from rallypoint.testing.exhaustive.state import Choice, State
from rallypoint.testing.exhaustive.world import World
from rallypoint.testing.summary import key_summary, value_summary

_QUIET = ("waiting", "history", "roster")
"""Keys whose values add no information to the trace."""


def describe(world: World, state: State, choice: Choice, after: State | None, answer: Any) -> str:
    """One line. `after` is None if the choice broke a guarantee."""
    line = _happening(world, state, choice, answer)
    return line if after is None else line + _outcome(world, state, after)


def _happening(world: World, state: State, choice: Choice, answer: Any) -> str:
    kind = choice[0]
    name = world.names[choice[1]]
    match choice:
        case ("do", index, place):
            return _request(world, name, world.requests(state, index)[place], answer)
        case ("answer", index, place):
            return f"{name} gets the answer to: {_request(world, name, world.requests(state, index)[place], None)}"
        case ("deliver", index, place, count):
            return f"{name} sees {_batches(world, state.procs[index].queues[place][:count])}"
        case ("lost", _):
            return f"{name} learns that its session is lost"
        case ("join", index) | ("leave", index):
            why = "" if kind == "join" else ", without being told of a change"
            return f"{name} calls next_rendezvous ({state.procs[index].joins + 1}){why}"
        case ("tick", index) | ("slow", index):
            local = world.local(state, index)
            passed = local.timer_s if local is not None else 0
            return f"{passed:g} s pass for {name}" + (" while messages are pending" if kind == "slow" else "")
        case ("end", _, lease):
            return f"the store ends session {lease} of {name}, which is no longer renewed"
        case ("arrive", _, place):
            return f"a late request arrives: {_request(world, name, state.ghosts[place][1], answer)}"
        case ("crash", index, _, place):
            return f"{name} dies; still pending: {_request(world, name, world.requests(state, index)[place], None)}"
        case ("crash", _, _):
            return f"{name} dies"
        case ("expire", _, _, lease):
            return f"the store ends session {lease} of {name}, which does not know it yet"
        case ("cut", _):
            return f"{name} counts its session as lost before the store does"
        case ("depart", _):
            return f"{name} is asked to leave"
        case ("close", _) | ("reopen", _):
            return f"{name} is asked to {kind} the run"
        case ("late", index, place):
            return f"{_request(world, name, world.requests(state, index)[place], answer)}; the answer is pending"
        case ("unknown", index, place, was_done):
            asked = _request(world, name, world.requests(state, index)[place], answer if was_done else None)
            return f"{asked}; " + ("the answer is lost" if was_done else "the request is lost")
        case ("ghost", index, place):
            asked = _request(world, name, world.requests(state, index)[place], None)
            return f"still pending, and given up by its sender: {asked}"
        case _:
            return repr(choice)


def _request(world: World, name: str, op: Op, answer: Any) -> str:
    match op:
        case Txn(compares, then, _):
            line = f"{name} {_steps(world, then)}"
            if isinstance(answer, Failure):
                return f"{line}: {answer.message}"
            if isinstance(answer, TxnResult) and not answer.committed:
                return f"{line}: refused ({_refusal(world, compares, answer)})"
            return line
        case Revoke(lease):
            return f"{name} ends its session {lease}"
        case _:
            return f"{name} asks {op!r}"


def _steps(world: World, steps: tuple[Any, ...]) -> str:
    parts = []
    for step in steps:
        match step:
            case Put(key, value, _):
                parts.append(f"writes {_item(world, key, value)}")
            case Delete(key) | Get(key):
                parts.append(f"{'deletes' if isinstance(step, Delete) else 'reads'} {_key(world, key)}")
            case DeleteRange(prefix) | Range(prefix):
                verb = "deletes" if isinstance(step, DeleteRange) else "scans"
                parts.append(f"{verb} {_key(world, prefix) or 'the run'}")
    return ", ".join(parts)


def _refusal(world: World, compares: tuple[Any, ...], answer: TxnResult) -> str:
    changed = []
    for compare, result in zip(compares, answer.results, strict=False):
        if isinstance(result, GotItem):
            at = result.item
            is_same = (at.mod_revision if at else 0) == getattr(compare, "revision", None)
            is_own = (at.create_revision if at else 0) == getattr(compare, "revision", None)
            if not is_same and not is_own:
                changed.append(f"{_key(world, compare.key)} is {'gone' if at is None else 'another'}")
    return ", ".join(changed) or "a compare failed"


def _batches(world: World, batches: tuple[Batch, ...]) -> str:
    return "; then ".join(", ".join(_change(world, change) for change in batch.changes) for batch in batches)


def _change(world: World, change: Change) -> str:
    if change.item is None:
        return f"{_key(world, change.key)} gone"
    return _item(world, change.key, change.item.value)


def _item(world: World, key: str, value: bytes) -> str:
    shown = _key(world, key)
    return shown if any(word in shown for word in _QUIET) else f"{shown} ({value_summary(value)})"


def _key(world: World, key: str) -> str:
    for prefix in (world.keys.control, world.keys.data):
        if key.startswith(prefix):
            return key_summary(key[len(prefix) :])
    return key


def _outcome(world: World, before: State, after: State) -> str:
    lines = []
    for index in range(world.setup.nodes):
        was, now = world.local(before, index), world.local(after, index)
        name = world.names[index]
        if was is not None and now is None:
            lines.append(f" -> {name} is out")
        if was is None or now is None:
            continue
        if now.status.joined and now.status.joined != was.status.joined:
            number, rank, size = now.status.joined
            lines.append(f" -> {name} is in round {number} as rank {rank} of {size}")
        if now.status.failed and not was.status.failed:
            lines.append(f" -> {name} gets {now.status.failed}")
        if now.status.told and not was.status.told:
            lines.append(f" -> {name} is told that its world has changed")
    return "".join(lines)
