"""The outcome of a round, on which its launchers agree: one key in the round's store, which all of them watch.

A launcher whose workers have finished proposes `FINISH`; one that sees waiting nodes proposes `RESTART`. The first
proposal wins, so that no node finishes while others restart. Three exceptions: the report of a failed worker,
`FAILURE`, replaces `FINISH`; the `RESTART` of a launcher that leaves, or that has counted a restart, replaces both;
`FAILED` replaces everything.

While a failure is in force, every launcher of the round answers that it lives: one key each. A write to the store
compares the writer's session, so a launcher that is dead, frozen or cut off cannot answer. Only the launcher whose
report is in force reads the answers. Once all have answered, no loss can explain the failure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec

from rallypoint.errors import StoreTimeoutError
from rallypoint.launcher.failure import Failure
from rallypoint.launcher.policy import RoundOutcome
from rallypoint.launcher.worker_ranks import PREFIX, compare_set, write
from rallypoint.rendezvous.records import LeaveCause
from rallypoint.store import AsyncStore

KEY = "outcome"
_PRECEDENCE = {RoundOutcome.FINISH: 0, RoundOutcome.FAILURE: 1, RoundOutcome.RESTART: 2, RoundOutcome.FAILED: 3}


class Proposal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome that one launcher proposes, and why. `by`: its node's rank. `code`: the exit code of a failure."""

    outcome: RoundOutcome
    cause: LeaveCause
    by: int
    code: int = 0
    failure: Failure | None = None


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
    held = await compare_set(store, KEY, expected, msgspec.json.encode(proposal))
    return msgspec.json.decode(held, type=Proposal)


async def read(store: AsyncStore) -> Proposal | None:
    """The proposal in force now, if there is one."""
    if not await store.check([PREFIX + KEY]):
        return None
    return msgspec.json.decode(await store.get(PREFIX + KEY), type=Proposal)


async def follow(store: AsyncStore) -> AsyncIterator[Proposal]:
    """The proposal in force, if there is one, and every change of it. Does not end."""
    async with aclosing(store.watch(PREFIX + KEY)) as values:
        async for value in values:
            if value is not None:
                yield msgspec.json.decode(value, type=Proposal)


# --- answers to a failure ---------------------------------------------------------------------------------------------


async def answer(store: AsyncStore) -> None:
    """Answer that this launcher lives. StoreFencedError if its session was lost."""
    await write(store, _answer_key(store.rank), b"")


async def wait_answers(store: AsyncStore, ranks: list[int], limit_s: float) -> list[int]:
    """Wait for the answers of these nodes. Returns those that have not answered within the limit."""
    keys = {_answer_key(rank): rank for rank in ranks}
    try:
        await store.wait([PREFIX + key for key in keys], limit_s)
    except StoreTimeoutError as error:
        return [keys[key.removeprefix(PREFIX)] for key in error.missing if isinstance(key, str)]
    return []


def _answer_key(rank: int) -> str:
    return f"alive/{rank}"
