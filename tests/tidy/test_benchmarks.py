"""The pages of benchmarks are made from the results that are kept beside them. `--rewrite` makes them anew."""

from pathlib import Path

from bench.suite.pages import files, write_pages
from bench.suite.results import collect, read
from tests.tidy.sources import ROOT

RESULTS = ROOT / "bench" / "results.jsonl"
DOCS = ROOT / "docs"


def differing(made: dict[str, str], docs: Path) -> list[str]:
    """The pages and drawings that are not as they would be made, and drawings that would not be made."""
    wrong = [name for name, text in made.items() if not (docs / name).exists() or (docs / name).read_text() != text]
    drawn = {f"benchmarks/{path.name}" for path in (docs / "benchmarks").glob("*")}
    return sorted([*wrong, *(drawn - made.keys())])


def test_pages_of_benchmarks_are_made_from_the_results(request):
    if request.config.getoption("--rewrite"):
        write_pages(RESULTS, DOCS)
    assert not differing(files(collect(read(RESULTS))), DOCS), "run: make check ARGS=--rewrite"


def test_page_that_was_changed_by_hand_is_caught(tmp_path):
    write_pages(RESULTS, tmp_path)
    made = files(collect(read(RESULTS)))
    assert not differing(made, tmp_path)
    page = tmp_path / "benchmarks.md"
    page.write_text(page.read_text().replace("ms", "us", 1))
    (tmp_path / "benchmarks" / "invented.svg").write_text("<svg/>")
    (tmp_path / "scale.md").unlink()
    assert differing(made, tmp_path) == ["benchmarks.md", "benchmarks/invented.svg", "scale.md"]
