"""Server-sent events: differences as they come, to each browser as fast as it reads and no faster.

The id of an event is the version it leads to; a browser that comes back says the last it had and gets the difference.
Every few seconds there is a word even if nothing happens, so that both sides notice when the other is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from rallypoint.dashboard.watching import Readable

BEAT_S = 5.0
SEND_S = 20.0
"""A browser that takes nothing for so long is gone."""
RETRY_MS = 1_000


def event(kind: str, data: bytes, event_id: str = "") -> bytes:
    """One event. JSON has no line breaks of its own."""
    head = f"event: {kind}\nid: {event_id}\n" if event_id else f"event: {kind}\n"
    return head.encode() + b"data: " + data + b"\n\n"


def resume_version(last: str, epoch: str) -> int:
    """The version of a `Last-Event-ID` of this channel; 0: it is of another, or of none."""
    told, _, version = last.partition(".")
    return int(version) if told == epoch and version.isascii() and version.isdecimal() and len(version) < 16 else 0


class EventStream:
    """The answer to one reader of a channel, as an ASGI application."""

    def __init__(
        self,
        channel: Readable,
        last: str,
        is_valid: Callable[[], bool],
        *,
        beat_s: float = BEAT_S,
        send_s: float = SEND_S,
        stopping: asyncio.Event,
    ) -> None:
        self._channel = channel
        self._version = resume_version(last, channel.epoch)
        self._is_valid = is_valid
        self._beat_s = beat_s
        self._send_s = send_s
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.create_task(_wait_gone(receive), name="end of a stream")
        stops = asyncio.create_task(self._stopping.wait(), name="end of all streams")
        try:
            with suppress(TimeoutError):  # it takes nothing: it is gone
                await self._tell(send, gone, stops)
        finally:
            gone.cancel()
            stops.cancel()
            await asyncio.gather(gone, stops, return_exceptions=True)

    async def _tell(self, send: Send, gone: asyncio.Task[None], stops: asyncio.Task[bool]) -> None:
        await self._send(send, f": rallypoint\nretry: {RETRY_MS}\n\n".encode())
        channel = self._channel
        while True:
            news = channel.news
            if channel.version != self._version and channel.version > 0:
                told = await channel.tell(self._version)
                if told is not None:
                    self._version, data = told
                    await self._send(send, event("picture", data, f"{channel.epoch}.{self._version}"))
                    continue
            if channel.is_over or stops.done():
                await self._send(send, event("bye", b'"ends"'), more=False)
                return
            if not self._is_valid():
                await self._send(send, event("bye", b'"signed out"'), more=False)
                return
            waiting = asyncio.create_task(news.wait(), name="news for a stream")
            try:
                done, _ = await asyncio.wait(
                    {waiting, gone, stops}, timeout=self._beat_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waiting.cancel()
            if gone in done:
                return
            if not done:
                await self._send(send, b": keep-alive\nevent: beat\ndata: {}\n\n")

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Waits while the browser does not read. TimeoutError."""
        async with asyncio.timeout(self._send_s):
            await send({"type": "http.response.body", "body": body, "more_body": more})


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
