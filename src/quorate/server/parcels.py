"""Many messages for one peer, put into frames a few at a time: never all of what waits for it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from quorate.wire.frames import MOST_PACKED, packed
from quorate.wire.messages import PushRaw, SentMessage, encoder

SMALL_FRAME = 256 * 1024


def parcels(
    messages: Sequence[SentMessage], most: int, instead_of: Callable[[SentMessage, int], SentMessage]
) -> Iterator[tuple[bytes, int]]:
    """The payloads of frames, and how many messages each has. They are small, unless a single message is not.

    `instead_of` says what is sent in the place of one that is too large for any frame, given its size.
    """
    most -= len(packed([]))
    part: list[bytes] = []
    size = 0
    for message in messages:
        piece = encoder.encode(message)
        if part and (size + len(piece) > min(SMALL_FRAME, most) or len(part) == MOST_PACKED):
            yield packed(part), len(part)
            part, size = [], 0
        if len(piece) > most:
            piece = encoder.encode(instead_of(message, len(piece)))
        part.append(piece)
        size += len(piece)
    if part:
        yield packed(part), len(part)


def pushed_bytes(messages: Sequence[SentMessage]) -> int:
    """How much of it was pushed."""
    return sum(len(message.batch) for message in messages if type(message) is PushRaw)
