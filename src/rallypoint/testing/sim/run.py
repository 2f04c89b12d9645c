"""Runs one world, given by its seed or plan, and returns its verdict."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from dataclasses import dataclass

from rallypoint import _marks
from rallypoint.testing.loop import Stuck, VirtualTimeLoop
from rallypoint.testing.sim.director import Director
from rallypoint.testing.sim.plan import Plan, draw, draw_register
from rallypoint.testing.sim.wired import small_bounds
from rallypoint.testing.sim.world import SimWorld, in_words

LIMIT_S = 3_600.0
MAX_TURNS = 200_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a world. `broke` is the name of the broken guarantee, or of another failure."""

    seed: int
    nodes: int
    faults: int
    events: int
    digest: str
    took_s: float
    virtual_s: float
    broke: str = ""
    why: str = ""
    notes: tuple[tuple[float, str, str, str], ...] = ()
    marks: frozenset[str] = frozenset()


def run_seed(seed: int, register: bool = False) -> Verdict:
    """Run the world of a seed, on a server or on a register."""
    return run_plan(draw_register(seed) if register else draw(seed))


def run_plan(plan: Plan) -> Verdict:
    """Run the world of a plan. Deterministic: the same plan gives the same digest."""
    started_at = time.perf_counter()
    loop = VirtualTimeLoop(seed=f"loop {plan.seed}", limit_s=LIMIT_S, max_iterations=MAX_TURNS)
    errors: list[str] = []
    loop.set_exception_handler(lambda _, context: errors.append(str(context.get("exception") or context["message"])))
    asyncio.set_event_loop(loop)
    marks = _marks.collect()
    log = logging.getLogger("rallypoint")
    was_disabled, log.disabled = log.disabled, True  # events are recorded in the event log
    broke = why = ""
    world: SimWorld | None = None
    director: Director | None = None
    gc.disable()
    try:

        async def main() -> None:
            nonlocal world, director
            world = SimWorld(plan, loop)
            director = Director(world)
            await director.run()

        with small_bounds():
            loop.run_until_complete(main())
        if errors:
            broke, why = "Error", errors[0]
    except AssertionError as error:
        broke, why = type(error).__name__.removeprefix("Broke"), str(error)
    except Stuck as error:
        broke, why = type(error).__name__, str(error)
    except Exception as error:
        broke, why = "Error", f"{type(error).__name__}: {error}"
        logging.getLogger("rallypoint.sim").debug("seed %s failed", plan.seed, exc_info=True)
    assert world is not None
    assert director is not None
    verdict = Verdict(
        seed=plan.seed,
        nodes=plan.nodes,
        faults=director.faults,
        events=world.events,
        digest=world.digest,
        took_s=time.perf_counter() - started_at,
        virtual_s=loop.time(),
        broke=broke,
        why=why,
        notes=tuple((at, kind, actor, in_words(content)) for at, kind, actor, content in world.notes) if broke else (),
        marks=frozenset(marks),
    )
    world.end()
    loop.cancel_pending()
    loop.close()
    asyncio.set_event_loop(None)
    log.disabled = was_disabled
    gc.enable()
    return verdict
