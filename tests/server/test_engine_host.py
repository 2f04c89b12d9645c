"""The engine host on real event loops: asyncio and uvloop."""

import asyncio

import pytest

from rallypoint.kv.types import Grant, LeaseResult, Shorten
from rallypoint.server.engine_host import EngineHost
from tests.server.kit import PATIENCE_S, eventually


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_leases_that_end_at_once_do_not_break_the_timer(kind):
    """uvloop calls what is due at once without a timer, so that there is nothing to ask when it is due."""
    factory = None if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    async def main():
        engine_host = EngineHost()
        for lease in (1, 2):
            engine_host.execute(Grant(60.0, lease))
            assert engine_host.execute(Shorten(lease, 0.0)) == LeaseResult(lease, 60.0, True)
        engine_host.execute(Grant(60.0, 3))
        async with asyncio.timeout(PATIENCE_S):
            await eventually(lambda: len(engine_host.engine.leases) == 1, "both have ended")
        engine_host.stop()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
