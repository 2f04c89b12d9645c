"""Splitting many messages for one peer into frames.

It must never encode all waiting messages at once: the memory for that would multiply that of a slow reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Deleted, Failure, FailureCode, PutDone, TxnResult
from rallypoint.wire.frames import MOST_PACKED, packed
from rallypoint.wire.messages import Answer, Going, PushRaw, SentMessage, WatchRefused, encoder

SMALL_FRAME = 256 * 1024
"""The size of frames, unless a single message is larger."""
MAX_UNSPLIT_MESSAGES = 16
"""Up to so many messages are encoded as one frame, and split only if that is too large."""


def split_frames(
    messages: Sequence[SentMessage], most: int, stop_watch: Callable[[int], None], engine: Engine
) -> Iterator[tuple[bytes, int]]:
    """The payloads of frames of at most `most` bytes, each with the number of its messages.

    A message that is too large for any frame is replaced by a failure; if it is a push, its watch is stopped.
    """
    max_frame, most = most, most - len(packed([]))
    part: list[bytes] = []
    size = 0
    for message in messages:
        piece = encoder.encode(message)
        if part and (size + len(piece) > min(SMALL_FRAME, most) or len(part) == MOST_PACKED):
            yield packed(part), len(part)
            part, size = [], 0
        if len(piece) > most:
            if type(message) is PushRaw:
                stop_watch(message.watch)
            piece = encoder.encode(_replacement(message, len(piece), max_frame, engine.revision))
        part.append(piece)
        size += len(piece)
    if part:
        yield packed(part), len(part)


def _replacement(message: SentMessage, size: int, max_frame: int, revision: int) -> SentMessage:
    match message:
        case Answer(seq, result):
            results = result.results if isinstance(result, TxnResult) else ()
            has_written = any(isinstance(one, (PutDone, Deleted)) for one in results)
            code = FailureCode.TOO_OLD if has_written else FailureCode.INVALID
            limit = f"{size} bytes, and {max_frame} at most can be sent: ask for less at once"
            return Answer(seq, Failure(code, f"the answer is too large: {limit}"))
        case PushRaw(number):
            return WatchRefused(number, revision)
        case _:
            return Going("a message was too large")


def pushed_bytes(messages: Sequence[SentMessage]) -> int:
    """The size of all pushed batches among the messages."""
    return sum(len(message.batch) for message in messages if type(message) is PushRaw)
