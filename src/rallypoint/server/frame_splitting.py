"""Many messages for one peer, put into frames a few at a time: never all of what waits for it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Deleted, Failure, FailureCode, PutDone, TxnResult
from rallypoint.wire.frames import MOST_PACKED, packed
from rallypoint.wire.messages import Answer, Going, PushRaw, SentMessage, WatchRefused, encoder

SMALL_FRAME = 256 * 1024
MAX_UNSPLIT_MESSAGES = 16
"""More messages than these are not put together at once."""


def split_frames(
    messages: Sequence[SentMessage], most: int, stop_watch: Callable[[int], None], engine: Engine
) -> Iterator[tuple[bytes, int]]:
    """The payloads of frames, and how many messages each has. They are small, unless a single message is not.

    Something else is said in the place of one that is too large for any frame; a watch of which that is so is stopped.
    """
    most_sent, most = most, most - len(packed([]))
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
            piece = encoder.encode(_instead_of(message, len(piece), most_sent, engine.revision))
        part.append(piece)
        size += len(piece)
    if part:
        yield packed(part), len(part)


def _instead_of(message: SentMessage, size: int, most: int, revision: int) -> SentMessage:
    match message:
        case Answer(seq, result):
            results = result.results if isinstance(result, TxnResult) else ()
            has_written = any(isinstance(one, (PutDone, Deleted)) for one in results)
            code = FailureCode.TOO_OLD if has_written else FailureCode.INVALID
            limit = f"{size} bytes, and {most} at most can be sent: ask for less at once"
            return Answer(seq, Failure(code, f"the answer is too large: {limit}"))
        case PushRaw(number):
            return WatchRefused(number, revision)
        case _:
            return Going("a message was too large")


def pushed_bytes(messages: Sequence[SentMessage]) -> int:
    """How much of it was pushed."""
    return sum(len(message.batch) for message in messages if type(message) is PushRaw)
