"""The command behind `make bench`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from bench.suite import cells
from bench.suite.pages import write_pages
from bench.suite.run import run_cells
from rallypoint.cli.bench import python_options, pythons_of

RESULTS = "bench/results.jsonl"
QUICK_MIN = 8.0
FULL_MIN = 28.0


@click.command()
@click.option("--quick", is_flag=True, help="Fewer cells and samples: eight minutes instead of 28.")
@click.option("--only", multiple=True, metavar="PATTERN", help="Cells like rendezvous/*/8 or */jax/*; may be repeated.")
@click.option("--most-nodes", type=click.IntRange(min=1), help="Leave out cells with more nodes.")
@click.option("--budget", type=click.FloatRange(min=0.0), help="Minutes; cells that would not fit are left out.")
@click.option("--again", is_flag=True, help="Also measure cells that have results.")
@click.option("--list", "only_list", is_flag=True, help="List the cells and measure nothing.")
@click.option("--pages", "only_pages", is_flag=True, help="Make the pages from the results and measure nothing.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, show_default=True, help="The results.")
@click.option("--docs", type=click.Path(path_type=Path), default="docs", show_default=True, help="Where the pages are.")
@python_options
def main(
    quick: bool,
    only: tuple[str, ...],
    most_nodes: int | None,
    budget: float | None,
    again: bool,
    only_list: bool,
    only_pages: bool,
    results: Path,
    docs: Path,
    **pythons: str | None,
) -> None:
    """Measure Rallypoint beside torch, torchft and JAX, and make docs/benchmarks.md and docs/scale.md.

    Sides that are compared take turns, sample by sample. The results of a comparison are appended when it is done; a
    run that was interrupted continues there. Competitors that are not installed are skipped, and named. A Python of a
    competitor's own needs Rallypoint's dependencies, too.
    """
    planned = cells.chosen(cells.quick() if quick else cells.full(), only, most_nodes)
    if not planned:
        raise click.UsageError("no cell matches: `--list` names them")
    if only_list:
        for cell in planned:
            click.echo(f"{cell.key:40} about {cell.about_s:g} s")
        click.echo(f"{len(planned)} cells, about {sum(cell.about_s for cell in planned) / 60:.0f} minutes")
        return
    no_failure = True
    if not only_pages:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: leave no processes
        no_failure = run_cells(
            planned,
            results,
            pythons_of(**pythons),
            is_quick=quick,
            again=again,
            budget_s=60.0 * (budget if budget is not None else QUICK_MIN if quick else FULL_MIN),
            say=lambda text: click.echo(text, err=True),
        )
    for path in write_pages(results, docs):
        click.echo(f"wrote {path}", err=True)
    if not no_failure:
        raise SystemExit(1)
