"""Repeats a write until its outcome is known, within a deadline. Only for writes that are safe to repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rallypoint.backends.backoff import Backoff
from rallypoint.errors import (
    OutcomeUnknown,
    Rejected,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    Unavailable,
    UnreadableState,
)
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.settings import Settings


class Retry:
    """Retries for one node, with its back-off and its reports of reachability."""

    def __init__(self, settings: Settings, reachability: Reachability, backoff: Backoff) -> None:
        self._settings = settings
        self._reachability = reachability
        self._backoff = backoff

    async def __call__(self, attempt: Callable[[], Awaitable[bool]], verb: str, started_at: float | None) -> bool:
        """The result of `attempt`, which is called until it is answered. `verb` ("closed") is for the errors.

        `attempt` must compare the revisions that it read, so that repeating it is safe. Raises RendezvousTimeoutError
        `close_timeout` after `started_at` (now), RendezvousConnectionError if the backend rejects the request.
        """
        reachability, settings = self._reachability, self._settings
        reachability.restart()
        loop = asyncio.get_running_loop()
        started_at = loop.time() if started_at is None else started_at
        try:
            async with asyncio.timeout_at(started_at + settings.close_timeout_s):
                while True:
                    try:
                        result = await attempt()
                        reachability.succeeded()
                        return result
                    except (Unavailable, OutcomeUnknown) as error:
                        reachability.failed(error)
                        await self._backoff.sleep()
        except TimeoutError:
            after_s, outage = loop.time() - started_at, reachability.sentence() or f"no answer from {settings.where}"
            raise RendezvousTimeoutError(
                f"run {settings.run_id!r} could not be {verb} within {after_s:.0f} s: {outage}"
            ) from None
        except UnreadableState:
            raise
        except Rejected as error:
            raise RendezvousConnectionError(f"{settings.where} refused: {error}") from error
