"""What the supervisor says, and what it must not miss."""

import asyncio
import signal

from rallypoint import events
from rallypoint.launcher import supervisor as module
from rallypoint.launcher.supervisor import Job, Supervisor
from rallypoint.settings import Settings
from tests.patience import PATIENCE_S


class Said:
    """In the place of a console."""

    def __init__(self) -> None:
        self.waits: list[str | None] = []
        self.lines: list[str] = []

    def wait_for(self, what: str | None) -> None:
        self.waits.append(what)

    def say(self, text: str) -> None:
        self.lines.append(text)


def made(said: Said, **job: str) -> Supervisor:
    settings = Settings.build(scheme="memory", endpoints="here", run_id="r", min_nodes=1, max_nodes=1)
    return Supervisor(settings, Job(("true",), 1, 0, **job), said)


def test_outage_is_shown_as_long_as_it_lasts():
    said = Said()

    async def main() -> None:
        one = made(said)
        unreachable = events.BackendUnreachable(run_id="r", by="n", reason="it is away")
        reachable = events.BackendReachable(run_id="r", by="n", after_s=1.0)
        one._hear(unreachable)
        one._hear(reachable)
        assert said.waits == [unreachable.text(), None]
        one._hear(events.WaitingFor(run_id="r", by="n", reason="1 more node"))
        one._hear(unreachable)
        one._hear(reachable)
        assert said.waits[2:] == ["1 more node", unreachable.text(), "1 more node"]

    asyncio.run(main())


def test_signal_that_comes_as_the_preflight_passes_is_not_missed(monkeypatch):
    async def main() -> None:
        one = made(Said(), preflight="true")

        async def passes(*_: object) -> None:
            one._tell(signal.SIGTERM)

        monkeypatch.setattr(module, "wait_until_fit", passes)
        assert await one._unfit() == 143 or not one._events.empty()

    asyncio.run(main())


def test_launcher_that_is_told_again_while_it_lets_go_of_the_run_ends_at_once(monkeypatch):
    async def main() -> None:
        one = made(Said())
        monkeypatch.setattr(one.handler, "aclose", lambda: asyncio.sleep(PATIENCE_S))
        one._tell(signal.SIGINT)
        ending = asyncio.create_task(one._let_go())
        await asyncio.wait_for(ending, PATIENCE_S / 3)

    asyncio.run(main())


def test_nodes_whose_names_cannot_be_read_are_named_by_their_rank():
    assert module._named(["a", "b"], 1) == "b (node 1)"
    assert module._named([], 1) == "node 1"
