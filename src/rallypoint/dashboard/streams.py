"""Server-sent events: the updates of a feed, to each browser as fast as it reads.

The id of an event is the version it leads to. A browser that comes back sends the last id it had, and gets the
difference. A heartbeat every few seconds lets both sides notice when the other is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from rallypoint.dashboard.feeds import Feed

HEARTBEAT_S = 5.0
SEND_S = 20.0
"""A browser that reads nothing for so long is disconnected."""
RETRY_MS = 1_000


def event(kind: str, data: bytes, event_id: str = "") -> bytes:
    """One event. JSON has no line breaks of its own."""
    head = f"event: {kind}\nid: {event_id}\n" if event_id else f"event: {kind}\n"
    return head.encode() + b"data: " + data + b"\n\n"


def resume_version(last_id: str, epoch: str) -> int:
    """The version in a `Last-Event-ID`; 0 if it is not of this epoch, or no id of ours."""
    told, _, version = last_id.partition(".")
    return int(version) if told == epoch and version.isascii() and version.isdecimal() and len(version) < 16 else 0


class EventStream:
    """The answer to one reader of a feed, as an ASGI application. Ends when `is_valid` says no, or on `stopping`."""

    def __init__(
        self,
        feed: Feed,
        last_id: str,
        is_valid: Callable[[], bool],
        *,
        heartbeat_s: float = HEARTBEAT_S,
        send_s: float = SEND_S,
        stopping: asyncio.Event,
    ) -> None:
        self._feed = feed
        self._version = resume_version(last_id, feed.epoch)
        self._is_valid = is_valid
        self._heartbeat_s = heartbeat_s
        self._send_s = send_s
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.create_task(_wait_disconnected(receive), name="end of a stream")
        stops = asyncio.create_task(self._stopping.wait(), name="end of all streams")
        try:
            with suppress(TimeoutError):  # the browser does not read
                await self._stream(send, gone, stops)
        finally:
            gone.cancel()
            stops.cancel()
            await asyncio.gather(gone, stops, return_exceptions=True)

    async def _stream(self, send: Send, gone: asyncio.Task[None], stops: asyncio.Task[bool]) -> None:
        await self._send(send, f": rallypoint\nretry: {RETRY_MS}\n\n".encode())
        feed = self._feed
        while True:
            news = feed.news
            if feed.version != self._version and feed.version > 0:
                self._version, data = feed.message(self._version)
                await self._send(send, event("update", data, f"{feed.epoch}.{self._version}"))
                continue
            if feed.is_over or stops.done():
                await self._send(send, event("end", b'"ends"'), more=False)
                return
            if not self._is_valid():
                await self._send(send, event("end", b'"signed out"'), more=False)
                return
            waiting = asyncio.create_task(news.wait(), name="news for a stream")
            try:
                done, _ = await asyncio.wait(
                    {waiting, gone, stops}, timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waiting.cancel()
            if gone in done:
                return
            if not done:
                await self._send(send, b": keep-alive\nevent: heartbeat\ndata: {}\n\n")

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Waits while the browser does not read. TimeoutError."""
        async with asyncio.timeout(self._send_s):
            await send({"type": "http.response.body", "body": body, "more_body": more})


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
