"""Trying something until it is known to have worked, within a limit: for what is safe to try again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quorate.backends.backoff import Backoff
from quorate.errors import (
    OutcomeUnknown,
    Rejected,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    Unavailable,
    UnreadableState,
)
from quorate.rendezvous.reach import Reach


async def insist(
    attempt: Callable[[], Awaitable[bool]],
    *,
    limit_s: float,
    started_at: float | None,
    reach: Reach,
    backoff: Backoff,
    what: str,
    endpoint: str,
) -> bool:
    """What `attempt` says once it is answered; `what` it does, and where, is for the errors.

    Raises RendezvousTimeoutError `limit_s` after `started_at` (now), RendezvousConnectionError if it is refused.
    """
    reach.restart()
    loop = asyncio.get_running_loop()
    started_at = loop.time() if started_at is None else started_at
    try:
        async with asyncio.timeout_at(started_at + limit_s):
            while True:
                try:
                    result = await attempt()
                    reach.succeeded()
                    return result
                except (Unavailable, OutcomeUnknown) as error:
                    reach.failed(error)
                    await backoff.sleep()
    except TimeoutError:
        after_s = loop.time() - started_at
        raise RendezvousTimeoutError(
            f"{what} within {after_s:.0f} s: {reach.sentence() or 'no answer from ' + endpoint}"
        ) from None
    except UnreadableState:
        raise
    except Rejected as error:
        raise RendezvousConnectionError(f"{endpoint} refused: {error}") from error
