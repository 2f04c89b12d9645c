"""Honest clients, in a process of their own: they work as before, and every answer is right, whatever others do.

    python -m tests.fuzz.honest ENDPOINT TOKEN

Says `ready`, works until its stdin ends, then says as JSON what it saw: how often, how fast, what went wrong.
"""

import asyncio
import json
import os
import sys
import threading

from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.dial import dial
from rallypoint.kv.types import Put

PAUSE_S = 0.002
TTL_S = 3_600.0
"""Of sessions, and for one request: longer than a machine may stand still."""
TICK_S = 0.05
STILL_S = 0.5
"""A process that did not run for so long stood still: that is nobody's latency."""


class Ticker:
    """Notices when this process, and most likely the whole machine, stood still."""

    def __init__(self) -> None:
        self.stood_s = 0.0
        self.times = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_at = loop.time()
            await asyncio.sleep(TICK_S)
            gap_s = loop.time() - began_at - TICK_S
            if gap_s > STILL_S:
                self.stood_s += gap_s
                self.times += 1


async def work(number: int, endpoint: str, token: str, over: asyncio.Event, ticker: Ticker, took: list[float]) -> int:
    """Add to a counter, write under a session, read both, and see all of it in a watch; how often."""
    loop = asyncio.get_running_loop()
    backend = TcpBackend(endpoint, dial(endpoint, 1), token=token, call_timeout_s=TTL_S)
    prefix = f"/honest/{os.getpid()}-{number}/"
    session = await backend.open_session(TTL_S)
    revision = (await backend.txn((), (Put(f"{prefix}mine", b"0", session.lease),))).revision
    watch = backend.watch(prefix, revision)
    times = 0
    while not over.is_set():
        began_at, stood = loop.time(), ticker.times
        times += 1
        added = await backend.add(f"{prefix}count", 1)
        assert added.value == times, f"{added} after {times} times"
        written = await backend.txn((), (Put(f"{prefix}mine", b"%d" % times, session.lease),))
        got = await backend.get(f"{prefix}mine")
        assert got.item is not None
        assert got.item.value == b"%d" % times
        async with asyncio.timeout(TTL_S):
            seen = [(await anext(watch)).revision for _ in range(2)]
        assert seen == [added.revision, written.revision]
        took_s = (loop.time() - began_at) / 3
        await asyncio.sleep(PAUSE_S if took_s < STILL_S / 3 else 2 * TICK_S)  # then the ticker has noticed too
        if ticker.times == stood:
            took.append(took_s)
    assert not session.lost.is_set()
    await backend.close()
    return times


async def main(endpoint: str, token: str) -> None:
    over, took, ticker = asyncio.Event(), [], Ticker()
    ticking = asyncio.create_task(ticker.run())
    loop = asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=wait, daemon=True).start()
    print("ready", flush=True)
    times = await asyncio.gather(*(work(number, endpoint, token, over, ticker, took) for number in range(4)))
    ticking.cancel()
    took.sort()
    figures = {"times": sum(times), "p50_ms": took[len(took) // 2] * 1e3, "p99_ms": took[len(took) * 99 // 100] * 1e3}
    print(json.dumps({**figures, "max_ms": took[-1] * 1e3, "stood_still_s": ticker.stood_s}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
