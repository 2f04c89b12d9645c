"""What becomes of a round, agreed on by its launchers in the round's store: one key, which all of them follow.

Whose workers have finished says `finish`; who sees that other nodes wait, or whose worker failed, says `again`; who
learns that the run is over says `failed`. The first word counts, so that no node finishes while others begin again; but
a failure overrules `finish`, and the end of the run overrules both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec

from rallypoint.errors import OutcomeUnknown
from rallypoint.launcher.plan import PREFIX
from rallypoint.launcher.policy import Fate
from rallypoint.store import AsyncStore

KEY = f"{PREFIX}fate"
_WEIGHT = {Fate.FINISH: 0, Fate.AGAIN: 1, Fate.FAILED: 2}


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """One launcher's word."""

    fate: Fate
    why: str
    code: int = 0


async def propose(store: AsyncStore, word: Word) -> Word:
    """Say it, if nobody has said anything; what counts now."""
    return await _say(store, b"", word)


async def overrule(store: AsyncStore, word: Word) -> Word:
    """Say it, unless something as grave was said; what counts now."""
    expected = b""
    while True:
        held = await _say(store, expected, word)
        if _WEIGHT[held.fate] >= _WEIGHT[word.fate]:
            return held
        expected = msgspec.json.encode(held)


async def _say(store: AsyncStore, expected: bytes, word: Word) -> Word:
    while True:
        try:
            held = await store.compare_set(KEY, expected, msgspec.json.encode(word))
        except OutcomeUnknown:  # if it was written, the next answer says so
            await asyncio.sleep(0.1)
        else:
            return msgspec.json.decode(held, type=Word)


async def words(store: AsyncStore) -> AsyncIterator[Word]:
    """What counts now, if anything, and every change of it. Has no end."""
    async with aclosing(store.watch(KEY)) as values:
        async for value in values:
            if value is not None:
                yield msgspec.json.decode(value, type=Word)
