"""What the supervisor shows on its console, and signals at awkward moments."""

import asyncio
import signal

import pytest

from rallypoint import events
from rallypoint.launcher import agreement, policy
from rallypoint.launcher import supervisor as module
from rallypoint.launcher.supervisor import Job, Supervisor
from rallypoint.settings import Settings
from tests.patience import PATIENCE_S


class RecordedConsole:
    """Records what would be shown on a console."""

    def __init__(self) -> None:
        self.waits: list[str | None] = []
        self.lines: list[str] = []

    def wait_for(self, what: str | None, limit: object = None) -> None:
        self.waits.append(what)

    def say(self, text: str) -> None:
        self.lines.append(text)


def supervisor(console: RecordedConsole, **job: str) -> Supervisor:
    settings = Settings.build(scheme="memory", endpoints="here", run_id="r", min_nodes=1, max_nodes=1)
    return Supervisor(settings, Job(("true",), 1, 0, **job), console)


def test_outage_is_shown_as_long_as_it_lasts():
    console = RecordedConsole()

    async def main() -> None:
        launcher = supervisor(console)
        unreachable = events.BackendUnreachable(run_id="r", by="n", reason="it is away")
        reachable = events.BackendReachable(run_id="r", by="n", after_s=1.0)
        launcher._on_event(unreachable)
        launcher._on_event(reachable)
        assert console.waits == [unreachable.text(), None]
        launcher._on_event(events.WaitingFor(run_id="r", by="n", reason="1 more node"))
        launcher._on_event(unreachable)
        launcher._on_event(reachable)
        assert console.waits[2:] == ["1 more node", unreachable.text(), "1 more node"]

    asyncio.run(main())


def test_signal_that_comes_as_the_preflight_passes_is_not_missed(monkeypatch):
    async def main() -> None:
        launcher = supervisor(RecordedConsole(), preflight="true")

        async def passes(*_: object) -> None:
            launcher._on_signal(signal.SIGTERM)

        monkeypatch.setattr(module, "wait_until_passed", passes)
        assert await launcher._preflight() == 143 or not launcher._events.empty()

    asyncio.run(main())


def test_second_signal_while_the_launcher_leaves_the_run_ends_it_at_once(monkeypatch):
    async def main() -> None:
        launcher = supervisor(RecordedConsole())
        monkeypatch.setattr(launcher.handler, "aclose", lambda: asyncio.sleep(PATIENCE_S))
        launcher._on_signal(signal.SIGINT)
        ending = asyncio.create_task(launcher._shut_down())
        await asyncio.wait_for(ending, PATIENCE_S / 3)

    asyncio.run(main())


def test_nodes_whose_names_are_not_known_are_named_by_their_rank():
    assert agreement._named(["a", "b"], 1) == "b (node 1)"
    assert agreement._named([], 1) == "node 1"


@pytest.mark.parametrize(
    ("url", "is_hinted"),
    [
        ("tcp://localhost:29400/r?min_nodes=2", True),
        ("tcp://127.0.0.1/r?min_nodes=1&max_nodes=4", True),
        ("static://localhost/r?min_nodes=2&node_rank=0", True),
        ("tcp://localhost:29400/r?min_nodes=1", False),
        ("tcp://head:29400/r?min_nodes=2", False),
        ("etcd://localhost/r?min_nodes=2", False),
    ],
)
def test_node_that_waits_at_an_endpoint_of_loopback_gets_a_hint(url, is_hinted):
    console = RecordedConsole()

    async def main() -> None:
        launcher = Supervisor(Settings.from_url(url), Job(("true",), 1, 0), console)
        launcher._on_event(events.WaitingFor(run_id="r", by="n", reason="1 more node"))
        launcher._policy.handle(policy.Entered(1, 1))
        launcher._on_event(events.WaitingFor(run_id="r", by="n", reason="1 more node"))

    asyncio.run(main())
    assert [wait != "1 more node" for wait in console.waits] == [is_hinted, False]
    if is_hinted:
        assert "is this machine: nodes on other machines need its name or address" in str(console.waits[0])
