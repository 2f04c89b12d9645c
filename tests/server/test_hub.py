"""The engine on the clock of a real loop, whichever it is."""

import asyncio

import pytest

from rallypoint.kv.types import Grant, LeaseResult, Shorten
from rallypoint.server.hub import Hub
from tests.server.kit import PATIENCE_S, eventually


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_lease_that_ends_at_once_does_not_disturb_what_comes_in_the_same_turn(kind):
    """uvloop calls what is due at once without a timer, so that there is nothing to ask when it is due."""
    factory = None if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    async def main():
        hub = Hub()
        for lease in (1, 2):
            hub.execute(Grant(60.0, lease))
            assert hub.execute(Shorten(lease, 0.0)) == LeaseResult(lease, 60.0, True)
        hub.execute(Grant(60.0, 3))
        async with asyncio.timeout(PATIENCE_S):
            await eventually(lambda: len(hub.engine.leases) == 1, "both have ended")
        hub.stop()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
