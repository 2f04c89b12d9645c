"""Writes the pages and drawings that are made from the results."""

from __future__ import annotations

from pathlib import Path

from bench.suite.page import benchmarks_page, drawings, reflow
from bench.suite.results import Results, collect, read
from bench.suite.scale_page import scale_page


def files(results: Results) -> dict[str, str]:
    """The pages and drawings, by their paths under docs/."""
    drawn = {f"benchmarks/{name}": text for name, text in drawings(results).items()}
    return {"benchmarks.md": reflow(benchmarks_page(results)), "scale.md": reflow(scale_page(results)), **drawn}


def write_pages(results: Path, docs: Path) -> list[Path]:
    """Write all of them, and remove drawings that are no longer made; the paths written."""
    made = files(collect(read(results)))
    for old in (docs / "benchmarks").glob("*.svg"):
        if f"benchmarks/{old.name}" not in made:
            old.unlink()
    written = []
    for name, text in made.items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
