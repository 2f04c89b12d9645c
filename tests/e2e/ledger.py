"""Clients that keep books on a server that is killed again and again: `python ledger.py ENDPOINT`.

Writers add, set and append; each knows what must come out, and any other answer is a lie of the server: a write was
lost, or counts twice. Watchers see every change once and in order. Members of a round stay in it, and their
store goes on. Another run forms rounds all the time, and the checkers of the guarantees look at all it commits.

It says `ready` when all of them are at work. Then each line of stdin is answered with `books` when everybody has got
an answer to something it asked for after that line was read: what each has done so far. The first lie is a fact `lie`.
"""

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import rallypoint.aio
from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.dial import dial
from rallypoint.errors import OutcomeUnknown, StoreTimeoutError
from rallypoint.kv.types import Change, ModRevisionIs, Put
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import RoundPhase
from rallypoint.testing.checkers import Safety

WRITERS = 4
MEMBERS = 3
CHURNERS = 2
OPTIONS = "is_host=false&last_call_timeout=0.3&local_addr=127.0.0.1&join_timeout=3600&keep_alive_interval=300"
"""Sessions live long: that all processes of a busy machine stand still for a while is not what is tried here."""
CALL_S = 3600.0


def say(kind: str, **what: Any) -> None:
    print(json.dumps({"kind": kind, "at": time.monotonic(), **what}), flush=True)


def lie(what: str) -> None:
    """What should be so is not. Nothing that follows means anything."""
    say("lie", what=what)
    os._exit(1)


class Books:
    """How often each of them got an answer."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.told = 0
        """Batches that a watch was told of."""
        self.begun: dict[str, int] = {}
        self._turned = asyncio.Event()

    async def did(self, who: str, work: Awaitable[Any]) -> Any:
        """Have something done that must work, however long it takes."""
        self.begun[who] = self.begun.get(who, 0) + 1
        try:
            result = await work
        except Exception as error:
            lie(f"{who}: {type(error).__name__}: {error}")
        self.counts[who] = self.counts.get(who, 0) + 1
        self._turned.set()
        return result

    async def all_turned(self) -> None:
        """Until everybody has got an answer to something that it began after now."""
        wanted = {who: begun + 1 for who, begun in self.begun.items()}
        await self.until(lambda: all(self.counts[who] >= count for who, count in wanted.items()))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Look whenever somebody has got an answer."""
        while not condition():
            self._turned.clear()
            await self._turned.wait()


def expect(who: str, wanted: object, found: object) -> None:
    if wanted != found:
        lie(f"{who}: {found!r} came out, and it must be {wanted!r}")


async def write(endpoint: str, number: int, books: Books, shared: set[int]) -> None:
    """Adds to a number of its own and to everybody's, sets a key, appends to another; each write once."""
    backend = TcpBackend(endpoint, dial(endpoint, 1), call_timeout_s=CALL_S)
    who, revision, text, text_revision = f"writer {number}", 0, b"", 0
    for count in range(1, sys.maxsize):
        added = await books.did(who, backend.add(f"/ledger/add/{number}", 1))
        expect(f"{who}: add", count, added.value)
        everybodys = (await books.did(who, backend.add("/ledger/all", 1))).value
        if everybodys in shared:
            lie(f"{who}: {everybodys} was the answer to two adds")
        shared.add(everybodys)
        key = f"/ledger/set/{number}"
        put = await books.did(who, backend.txn([ModRevisionIs(key, revision)], [Put(key, b"%d" % count)]))
        expect(f"{who}: set on what it had set before", True, put.committed)
        revision = put.revision
        key = f"/ledger/append/{number}"
        text = text[-200:] + b"%d," % count
        put = await books.did(who, backend.txn([ModRevisionIs(key, text_revision)], [Put(key, text)]))
        expect(f"{who}: append to what it had appended", True, put.committed)
        text_revision = put.revision
        got = (await books.did(who, backend.get(key))).item
        expect(f"{who}: read its own write", text, got.value)
        await asyncio.sleep(0)


async def watch(endpoint: str, after: int, books: Books) -> None:
    """Every number goes up by one, and each is seen once."""
    backend = TcpBackend(endpoint, dial(endpoint, 1))
    seen: dict[str, int] = {}
    last = after
    async for batch in backend.watch("/ledger/", after):
        if batch.revision <= last:
            lie(f"a watch was told of revision {batch.revision} after {last}")
        last = batch.revision
        for change in batch.changes:
            if change.key.startswith("/ledger/a") and "append" not in change.key:
                assert change.item is not None
                seen[change.key] = seen.get(change.key, 0) + 1
                expect(f"the watch of {change.key}", seen[change.key], int(change.item.value))
        books.told += 1


async def stay(endpoint: str, number: int, books: Books) -> None:
    """A member of one round, for ever."""
    handler = rallypoint.aio.create_handler(f"tcp://{endpoint}/steady?min_nodes={MEMBERS}&{OPTIONS}", name=f"m{number}")
    world = await handler.next_rendezvous()
    world.changed.add_listener(lambda cause, why: lie(f"member {number}: its round is over ({cause}): {why}"))
    say("member", number=number, round=world.round, rank=world.rank)
    known = unknown = 0
    while True:
        found = await books.did(f"member {number}", _or_unknown(world.store.add(f"mine {number}", 1)))
        if found is None:
            unknown += 1
        elif not known < found <= known + unknown + 1:
            lie(f"member {number}: its {known + 1}th add gave {found}, and {unknown} may have happened besides")
        else:
            known, unknown = found, 0
        await asyncio.sleep(0.05)


async def _or_unknown(work: Awaitable[int]) -> int | None:
    """None: it may have happened. Nobody who is stopped for minutes, as happens here, can know more."""
    try:
        return await work
    except (OutcomeUnknown, StoreTimeoutError):
        return None


class Court:
    """The guarantees, over the run that forms and forms."""

    def __init__(self) -> None:
        self.safety = Safety(RunKeys("rallypoint", "churn"), CHURNERS, CHURNERS)
        self.rounds = 0
        self._returned: list[tuple[str, Any, Any]] = []
        self._active = 0
        self._told: deque[str] = deque(maxlen=40)

    def committed(self, revision: int, changes: tuple[Change, ...]) -> None:
        self._told.append(f"r{revision} " + ", ".join(f"{c.key} {c.item and c.item.value}" for c in changes))
        self._check(lambda: self.safety.committed(revision, changes))
        current = self.safety.picture.round
        if current is not None and current.phase is RoundPhase.ACTIVE:
            self._active = max(self._active, current.number)
            self._judge()

    def returned(self, who: str, node_id: str, joined: Any) -> None:
        """To be judged when the watch has seen that the round is active, and before it sees what comes after."""
        self._returned.append((who, node_id, joined))
        self._judge()

    def _judge(self) -> None:
        for one in [one for one in self._returned if one[2].number <= self._active]:
            self._returned.remove(one)
            self.rounds += 1
            self._check(lambda one=one: self.safety.returned(*one))

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            lie(f"{type(error).__name__}: {error}; it was told of: {' | '.join(self._told)}")


async def judge(endpoint: str, after: int, court: Court) -> None:
    backend = TcpBackend(endpoint, dial(endpoint, 1))
    async for batch in backend.watch("/rallypoint/churn", after):
        court.committed(batch.revision, batch.changes)


async def churn(endpoint: str, number: int, books: Books, court: Court) -> None:
    """Joins again and again: rounds form while the server dies."""
    handler = rallypoint.aio.create_handler(f"tcp://{endpoint}/churn?min_nodes={CHURNERS}&{OPTIONS}", name=f"c{number}")
    last = 0
    while True:
        world = await books.did(f"churner {number}", handler.next_rendezvous())
        if world.round <= last:
            lie(f"churner {number}: round {world.round} after {last}")
        last = world.round
        court.returned(f"churner {number}", world._node.identity.id, world.store.joined)
        await asyncio.sleep(0.1)


async def main(endpoint: str) -> None:
    first = TcpBackend(endpoint, dial(endpoint, 1))
    after = (await first.status()).revision
    await first.close()
    books, court, shared = Books(), Court(), set()
    tasks = [asyncio.create_task(write(endpoint, number, books, shared)) for number in range(WRITERS)]
    tasks += [asyncio.create_task(stay(endpoint, number, books)) for number in range(MEMBERS)]
    tasks += [asyncio.create_task(churn(endpoint, number, books, court)) for number in range(CHURNERS)]
    tasks += [asyncio.create_task(watch(endpoint, after, books)), asyncio.create_task(judge(endpoint, after, court))]
    for task in tasks:
        task.add_done_callback(lambda task: lie(f"it ended: {task!r}"))
    await books.until(lambda: len(books.counts) == WRITERS + MEMBERS + CHURNERS)
    say("ready")
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        await books.all_turned()
        say("books", counts=books.counts, told=books.told, rounds=court.rounds)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
