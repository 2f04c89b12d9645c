"""Situations that an operator looks at, each staged with real nodes under virtual time.

`stage` plays one and returns what every tool shows of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rich.console import Console

from rallypoint.backends.memory import MemoryBackend
from rallypoint.cli.render import counts_sentence, heading, runs_table
from rallypoint.dashboard.run_view import RunView
from rallypoint.errors import RendezvousError
from rallypoint.observe.explain import Explanation, explain
from rallypoint.observe.follower import read_report
from rallypoint.observe.listing import RunSummary, list_runs
from rallypoint.observe.operator_actions import Operator
from rallypoint.observe.report import Report
from rallypoint.observe.target import read_target
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.settings import Settings
from rallypoint.testing.world import EPOCH_S
from tests.rendezvous.kit import CheckedWorld, run_scenario

WHERE = "tcp://head:29400"
FLAKY = {"hold_back_losses": 2, "hold_back": 600, "max_nodes": 2}
Scene = Callable[[CheckedWorld], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Shown:
    """What the tools show of a run."""

    report: Report
    why: Explanation
    state: str
    """The line of `status` and `watch`."""
    counts: str
    listed: RunSummary
    row: str
    """The line of `ls`."""
    page: str
    """The phase on the page of the run."""


def operator(world: CheckedWorld) -> Operator:
    target = read_target(f"{WHERE}/run")
    return Operator(MemoryBackend(world.server), target, "ann@desk:7", lambda: EPOCH_S + now())


def now() -> float:
    return asyncio.get_running_loop().time()


async def look(world: CheckedWorld) -> Shown:
    backend = MemoryBackend(world.server)
    report = await read_report(backend, world.keys, WHERE)
    (listed,) = await list_runs(backend, "rallypoint")
    out = Console(width=300, highlight=False)
    with out.capture() as captured:
        out.print(runs_table([listed], out))
    view = RunView("run", WHERE)
    view.update(report, [], "", EPOCH_S + now())
    state = view.since(0, 0.0).state
    assert state is not None
    return Shown(
        report=report,
        why=explain(report, EPOCH_S + now()),
        state=heading(report)[1].plain,
        counts=counts_sentence(report),
        listed=listed,
        row=" ".join(captured.get().splitlines()[1].split()),
        page=state["phase"],
    )


def stage(name: str) -> Shown:
    """Play a scene, and look."""
    scene, options = SCENES[name]

    async def play(world: CheckedWorld) -> Shown:
        await scene(world)
        return await look(world)

    return run_scenario(play, **{"min_nodes": 2, "max_nodes": 3, "last_call_timeout": 5, **options})


# --- scenes -----------------------------------------------------------------------------------------------------------


async def below_minimum_at_the_start(world: CheckedWorld) -> None:
    world.enter("a")
    await asyncio.sleep(5.0)


async def below_minimum_after_a_loss(world: CheckedWorld) -> None:
    await world.join_all("a", "b")
    await asyncio.sleep(60.0)
    world.crash("b")
    await asyncio.sleep(20.0)
    world.join("a")
    await asyncio.sleep(2.0)


async def member_lost_and_the_survivor_has_not_rejoined(world: CheckedWorld) -> None:
    await world.join_all("a", "b")
    await asyncio.sleep(60.0)
    world.crash("b")
    await asyncio.sleep(20.0)


async def member_lost_of_a_round_that_stays_large_enough(world: CheckedWorld) -> None:
    await world.join_all("a", "b", "c")
    await asyncio.sleep(60.0)
    world.crash("c")
    await asyncio.sleep(20.0)


async def forming_waits_for_a_node_that_does_not_confirm(world: CheckedWorld) -> None:
    world.enter("a", "b")
    await asyncio.sleep(2.0)
    world.freeze("b")
    await asyncio.sleep(4.5)


async def last_call(world: CheckedWorld) -> None:
    world.enter("a", "b")
    await asyncio.sleep(2.0)


async def held_back_below_the_minimum(world: CheckedWorld) -> None:
    await world.join_all("a", "b")
    for _ in range(2):
        await asyncio.sleep(1.0)
        world.crash("b")
        await asyncio.sleep(20.0)
        world.join("a")
        world.enter("b")
        await asyncio.sleep(5.0)


async def refused_for_its_settings(world: CheckedWorld) -> None:
    world.enter("a")
    await asyncio.sleep(1.0)
    (call,) = world.enter("b", min_nodes=3)
    try:
        await call
    except RendezvousError:
        world.crash("b")
    await asyncio.sleep(90.0)


async def refused_an_hour_ago(world: CheckedWorld) -> None:
    await refused_for_its_settings(world)
    await asyncio.sleep(3540.0)


async def closed(world: CheckedWorld) -> None:
    calls = world.enter("a")
    await asyncio.sleep(1.0)
    await operator(world).close("wrong dataset")
    await asyncio.wait(calls)
    world.crash("a")
    await asyncio.sleep(1.0)


async def closed_while_a_round_goes_on(world: CheckedWorld) -> None:
    await world.join_all("a", "b")
    await operator(world).close("wrong dataset")
    await asyncio.sleep(5.0)


async def reopened_without_a_coordinator(world: CheckedWorld) -> None:
    await closed(world)
    await asyncio.sleep(16.0)
    await operator(world).reopen("dataset fixed")
    await asyncio.sleep(1.0)


async def drained_below_the_minimum(world: CheckedWorld) -> None:
    await world.join_all("a", "b")
    await operator(world).drain("b", "disk is failing")
    await asyncio.sleep(1.0)
    await world.processes["b"].node.leave("asked to go by ann@desk:7: disk is failing")
    await asyncio.sleep(2.0)


async def member_asked_to_go(world: CheckedWorld) -> None:
    await world.join_all("a", "b", "c")
    await operator(world).drain("b", "")
    await asyncio.sleep(1.0)


async def full_with_a_spare(world: CheckedWorld) -> None:
    await world.join_all("a", "b", "c")
    world.enter("d")
    await asyncio.sleep(5.0)


async def waits_to_be_admitted(world: CheckedWorld) -> None:
    await world.join_all("a", "b")
    world.enter("d")
    await asyncio.sleep(5.0)


async def active_and_well(world: CheckedWorld) -> None:
    await world.join_all("a", "b", "c")
    await asyncio.sleep(5.0)


async def all_nodes_gone(world: CheckedWorld) -> None:
    await world.join_all("a", "b")
    for name in ("a", "b"):
        await world.processes[name].node.leave("the job is done")
    await asyncio.sleep(1.0)


async def coordinator_away(world: CheckedWorld) -> None:
    await world.join_all("a", "b", "c")
    boss = world.coordinator()
    assert boss is not None
    world.crash(boss)
    await asyncio.sleep(14.0)
    for name in world.processes:
        world.freeze(name)
    await asyncio.sleep(2.0)


async def closed_before_any_node_came(world: CheckedWorld) -> None:
    settings = Settings.build(scheme="memory", run_id="run", min_nodes=2)
    config = RunConfig(MemoryBackend(world.server), world.keys, settings, "ann@desk:7", lambda: "id", lambda: EPOCH_S)
    await config.close("")


async def left_out_because_it_did_not_confirm(world: CheckedWorld) -> None:
    await forming_waits_for_a_node_that_does_not_confirm(world)
    await asyncio.sleep(5.5)


async def freed(world: CheckedWorld) -> None:
    await held_back_below_the_minimum(world)
    await operator(world).free("b")
    await asyncio.sleep(5.0)


async def two_refused_nodes_whose_names_begin_sentences(world: CheckedWorld) -> None:
    """Sentences begin with names: none is capitalised."""
    world.enter("gpu-a")
    await asyncio.sleep(1.0)
    for name in ("node7.rack2", "gpu-b"):
        (call,) = world.enter(name, min_nodes=3)
        try:
            await call
        except RendezvousError:
            world.crash(name)
    await asyncio.sleep(1.0)


SCENES: dict[str, tuple[Scene, dict[str, object]]] = {
    scene.__name__: (scene, options)
    for scene, options in (
        (below_minimum_at_the_start, {}),
        (below_minimum_after_a_loss, {}),
        (member_lost_and_the_survivor_has_not_rejoined, {}),
        (member_lost_of_a_round_that_stays_large_enough, {}),
        (last_call, {}),
        (forming_waits_for_a_node_that_does_not_confirm, {}),
        (left_out_because_it_did_not_confirm, {"confirm_timeout": 5}),
        (held_back_below_the_minimum, FLAKY),
        (freed, FLAKY),
        (refused_for_its_settings, {}),
        (refused_an_hour_ago, {"join_timeout": 9000}),
        (closed, {}),
        (closed_while_a_round_goes_on, {}),
        (closed_before_any_node_came, {}),
        (reopened_without_a_coordinator, {}),
        (drained_below_the_minimum, {}),
        (member_asked_to_go, {}),
        (full_with_a_spare, {}),
        (waits_to_be_admitted, {}),
        (active_and_well, {}),
        (all_nodes_gone, {}),
        (coordinator_away, {}),
        (two_refused_nodes_whose_names_begin_sentences, {}),
    )
}
