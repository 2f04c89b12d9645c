"""The outcome of a round, on which its launchers agree: one key in the round's store, which all of them watch.

A launcher whose workers have finished proposes `FINISH`. One that sees waiting nodes, or whose worker failed, proposes
`RESTART`. One that learns that the run is over proposes `FAILED`. The first proposal wins, so that no node finishes
while others restart. Two exceptions: a failed worker's `RESTART` overrules `FINISH`, and `FAILED` overrules both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec

from rallypoint.errors import OutcomeUnknown
from rallypoint.launcher.policy import RoundOutcome
from rallypoint.launcher.worker_ranks import PREFIX
from rallypoint.store import AsyncStore

KEY = f"{PREFIX}outcome"
RETRY_S = 0.1
_PRECEDENCE = {RoundOutcome.FINISH: 0, RoundOutcome.RESTART: 1, RoundOutcome.FAILED: 2}


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome that one launcher proposes; `code` is the exit code of a run that failed."""

    outcome: RoundOutcome
    why: str
    code: int = 0


async def propose(store: AsyncStore, proposal: Proposal) -> Proposal:
    """Write the proposal unless there is one already. Returns the one in force."""
    return await _compare_set(store, b"", proposal)


async def overrule(store: AsyncStore, proposal: Proposal) -> Proposal:
    """Write the proposal unless one of the same or higher precedence is in force. Returns the one in force."""
    expected = b""
    while True:
        held = await _compare_set(store, expected, proposal)
        if _PRECEDENCE[held.outcome] >= _PRECEDENCE[proposal.outcome]:
            return held
        expected = msgspec.json.encode(held)


async def _compare_set(store: AsyncStore, expected: bytes, proposal: Proposal) -> Proposal:
    while True:
        try:
            held = await store.compare_set(KEY, expected, msgspec.json.encode(proposal))
        except OutcomeUnknown:  # if it was written, the next attempt returns it
            await asyncio.sleep(RETRY_S)
        else:
            return msgspec.json.decode(held, type=Proposal)


async def follow(store: AsyncStore) -> AsyncIterator[Proposal]:
    """The proposal in force, if there is one, and every change of it. Does not end."""
    async with aclosing(store.watch(KEY)) as values:
        async for value in values:
            if value is not None:
                yield msgspec.json.decode(value, type=Proposal)
