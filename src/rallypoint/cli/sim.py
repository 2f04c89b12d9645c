"""`rallypoint sim`: simulates worlds from their seeds, or replays one."""

from __future__ import annotations

import time
from collections.abc import Iterable

import click

EXAMPLES = """\b
Examples:
  rallypoint sim --seeds 0:1000            simulate a thousand worlds on all cores
  rallypoint sim --seed 4711               replay one world, and show its last events
  rallypoint sim --seed 4711 --shrink      reduce a failing world to the faults that it needs
"""


class SeedRange(click.ParamType):  # type: ignore[type-arg]
    """`A:B`: the seeds from A to B, without B."""

    name = "A:B"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> range:
        first, colon, last = str(value).partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
            self.fail(f"{value!r} is not a range of seeds: give A:B with A < B, for example 0:1000", param, ctx)
        return range(int(first), int(last))


class FaultNumbers(click.ParamType):  # type: ignore[type-arg]
    """The numbers of faults, separated by commas, or `none`."""

    name = "N,N,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> frozenset[int]:
        if value == "none":
            return frozenset()
        parts = str(value).split(",")
        if not all(part.isdecimal() for part in parts):
            self.fail(f"{value!r} is not a list of faults: give their numbers, for example 0,3,7", param, ctx)
        return frozenset(map(int, parts))


@click.command(epilog=EXAMPLES)
@click.option("--seeds", type=SeedRange(), help="Simulate all seeds of a range.")
@click.option("--seed", type=click.IntRange(min=0), help="Simulate one seed, and show its last events.")
@click.option("--keep", type=FaultNumbers(), help="With --seed: only these faults, as --shrink prints them.")
@click.option("--shrink", is_flag=True, help="Reduce a failing world to the faults that it needs.")
@click.option("--workers", type=click.IntRange(min=1), help="The number of processes (default: one for each core).")
@click.option("--register", is_flag=True, help="Simulate nodes that share only a compare-and-set cell.")
@click.option("--all-marks", is_flag=True, help="Fail if the mark of a rare branch was never reached.")
def sim(
    seeds: range | None,
    seed: int | None,
    keep: frozenset[int] | None,
    shrink: bool,
    workers: int | None,
    register: bool,
    all_marks: bool,
) -> None:
    """Simulate nodes and faults in virtual time, and check every guarantee.

    Everything in a simulated world is drawn from its seed. The exit code is 1 if a guarantee was broken.
    """
    if (seeds is None) == (seed is None):
        raise click.UsageError("give either --seeds A:B or --seed N")
    if seed is not None:
        raise SystemExit(_one(seed, keep, shrink, register))
    assert seeds is not None
    raise SystemExit(_many(seeds, workers, shrink, register, all_marks))


def _one(seed: int, keep: frozenset[int] | None, reduce: bool, register: bool) -> int:
    from rallypoint.testing.sim.campaign import replay_command, shrink
    from rallypoint.testing.sim.plan import draw, draw_register
    from rallypoint.testing.sim.run import run_plan

    plan = draw_register(seed) if register else draw(seed)
    if reduce:
        plan, kept, verdict = shrink(seed, register)
        click.echo(f"reduced to {len(kept)} faults: {replay_command(seed, kept, register)}")
    else:
        verdict = run_plan(plan if keep is None else plan.keeping(keep))
    for number, action in enumerate(plan.actions):
        if keep is None or reduce or number in keep:
            click.echo(f"fault {number:2} at {action.at_s:7.3f} s for {action.length_s:6.3f} s: {action.fault.value}")
    _show_events(verdict.notes)
    click.echo(
        f"seed {seed}: {verdict.nodes} nodes, {verdict.faults} faults, {verdict.events} events, "
        f"{verdict.virtual_s:.0f} s of virtual time, digest {verdict.digest}"
    )
    if verdict.broke:
        click.echo(f"broke {verdict.broke}: {verdict.why}")
        return 1
    click.echo("every guarantee held")
    return 0


def _show_events(notes: Iterable[tuple[float, str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = list(notes)
    if not rows:
        return
    table = Table("seconds", "what", "who", "", title="the last events", box=None)
    for at, kind, who, text in rows:
        table.add_row(f"{at:.4f}", kind, who, text)
    Console(soft_wrap=True).print(table, markup=False)


def _many(seeds: range, workers: int | None, reduce: bool, register: bool, all_marks: bool) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rallypoint._marks import REGISTER_MARKS
    from rallypoint.testing.sim.campaign import Sum, replay_command, run_many, shrink

    total = Sum(marks=dict.fromkeys(REGISTER_MARKS, 0)) if register else Sum()
    started_at = time.monotonic()
    columns = (
        TextColumn("worlds"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[broken]} broken"),
        TimeRemainingColumn(),
    )
    console = Console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("worlds", total=len(seeds), broken=0)
        for verdict in run_many(seeds, workers, register):
            total.add(verdict)
            progress.update(bar, advance=1, broken=len(total.broken))
            if verdict.broke:
                click.echo(f"seed {verdict.seed} broke {verdict.broke}: {verdict.why}")
                click.echo(f"  replay it: {replay_command(verdict.seed, register=register)}")
    for verdict in sorted(total.broken, key=lambda verdict: verdict.seed)[:1]:
        if reduce:
            _, kept, verdict = shrink(verdict.seed, register)
            click.echo(f"reduced to {len(kept)} faults: {replay_command(verdict.seed, kept, register)}")
        _show_events(verdict.notes)
    click.echo(f"{total.in_words()}; {time.monotonic() - started_at:.0f} s")
    if total.missed:
        click.echo(f"marks that no world reached: {', '.join(total.missed)}")
    return 1 if total.broken or (all_marks and total.missed) else 0
