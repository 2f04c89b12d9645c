"""The command behind `make bench`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from bench.suite import cells
from bench.suite.pages import write_pages

RESULTS = "bench/results.jsonl"
QUICK_MIN = 8.0
FULL_MIN = 28.0


@click.command()
@click.option("--quick", is_flag=True, help="Fewer cells and samples: eight minutes instead of 28.")
@click.option("--only", multiple=True, metavar="PATTERN", help="Cells like rendezvous/*/8 or */jax/*; may be repeated.")
@click.option("--most-nodes", type=click.IntRange(min=1), help="Leave out cells with more nodes.")
@click.option("--budget", type=click.FloatRange(min=0.0), help="Minutes; no cell is begun that would not fit.")
@click.option("--again", is_flag=True, help="Measure cells again that are in the results already.")
@click.option("--list", "only_list", is_flag=True, help="Say which cells there are, and measure nothing.")
@click.option("--pages", "only_pages", is_flag=True, help="Make the pages from the results, and measure nothing.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, show_default=True, help="Where they are.")
@click.option("--docs", type=click.Path(path_type=Path), default="docs", show_default=True, help="Where the pages are.")
@click.option("--torch-python", envvar="TORCH_PYTHON", help="A Python with torch (and python-etcd).")
@click.option("--torchft-python", envvar="TORCHFT_PYTHON", help="A Python with torchft.")
@click.option("--jax-python", envvar="JAX_PYTHON", help="A Python with jax.")
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
    torch_python: str | None,
    torchft_python: str | None,
    jax_python: str | None,
) -> None:
    """Measure Rallypoint beside torch, torchft and JAX, and make docs/benchmarks.md and docs/scale.md of it.

    What is measured is added to the results at once; a run that was ended goes on where it was. Competitors that are
    not installed are skipped by name. One that lives in a Python of its own needs Rallypoint's dependencies there.
    """
    planned = cells.chosen(cells.quick() if quick else cells.full(), only, most_nodes)
    if not planned:
        raise click.UsageError("no cell is like that: `--list` says which there are")
    if only_list:
        for cell in planned:
            click.echo(f"{cell.key:40} about {cell.about_s:g} s")
        click.echo(f"{len(planned)} cells, about {sum(cell.about_s for cell in planned) / 60:.0f} minutes")
        return
    is_whole = True
    if not only_pages:
        from bench.suite.run import run_cells

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: leave no processes
        own = {"torch": torch_python, "torchft": torchft_python, "jax": jax_python}
        minutes = budget if budget is not None else QUICK_MIN if quick else FULL_MIN
        is_whole = run_cells(
            planned,
            results,
            {name: python for name, python in own.items() if python},
            is_quick=quick,
            again=again,
            budget_s=60.0 * minutes,
            say=lambda text: click.echo(text, err=True),
        )
    for path in write_pages(results, docs):
        click.echo(f"wrote {path}", err=True)
    if not is_whole:
        raise SystemExit(1)
