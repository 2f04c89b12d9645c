"""What `make bench` measures and keeps, and the pages it makes."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import msgspec
import pytest
from click.testing import CliRunner

from bench.suite import cells
from bench.suite.command import FULL_MIN, QUICK_MIN, main
from bench.suite.fit import Fit, fit
from bench.suite.page import benchmarks_page, drawings, reflow
from bench.suite.plot import Series, log_plot, tick
from bench.suite.results import Begun, Measured, append, collect, decode, is_done, read
from bench.suite.run import run_cells
from bench.suite.scale_page import MEASURED, limits, scale_page
from rallypoint.bench.plan import (
    COLD_START,
    IDLE_CPU,
    LAST_ARRIVAL,
    LOSS_REJOIN,
    MEMORY,
    ROUND_CPU,
    TRIPS_OF,
    Bench,
    Case,
    Sample,
    Side,
)
from rallypoint.bench.runner import Job, Outcome

SVG = "{http://www.w3.org/2000/svg}"


def begun(name: str = "2026-01-02 03:04:05", is_quick: bool = False, **changes: object) -> Begun:
    first = Begun(name, is_quick, "abc1234", "a machine", 2, 24.0, {"rallypoint": "0.1.0", "torch": "2.13.0"}, {})
    return msgspec.structs.replace(first, **changes)


def measured(
    bench: Bench, side: Side, nodes: int, samples: dict[str, list[float | None]], *, only: str = "", load: float = 0.1
) -> Measured:
    taken = tuple(
        Sample(measure, value, "" if value is not None else "none in 20 s")
        for measure, values in samples.items()
        for value in values
    )
    return Measured("2026-01-02 03:04:05", Case(bench, side, nodes, only=only), taken, "", 12.0, load)


def rendezvous(side: Side, nodes: int, last: list[float | None], together: list[float | None]) -> Measured:
    return measured(Bench.RENDEZVOUS, side, nodes, {LAST_ARRIVAL: last, COLD_START: together})


def scaled(nodes: int, each: float = 1e-4) -> Measured:
    values: dict[str, list[float | None]] = {measure: [each * nodes] for measure in MEASURED}
    return measured(Bench.SCALE, Side.RALLYPOINT, nodes, values)


def test_plans_fit_into_their_time_and_name_every_cell_once():
    for planned, minutes in ((cells.full(), FULL_MIN), (cells.quick(), QUICK_MIN)):
        assert len({cell.key for cell in planned}) == len(planned)
        assert sum(cell.about_s for cell in planned) <= 60 * minutes
        assert {
            Side.RALLYPOINT,
            Side.TORCH_STOCK,
            Side.TORCHFT,
            Side.JAX,
            Side.RALLYPOINT_ETCD,
            Side.TORCH_ETCD_V2,
        } <= {cell.case.side for cell in planned}
    assert {2, 10_000} <= {cell.case.nodes for cell in cells.full() if cell.case.bench is Bench.RENDEZVOUS}


def test_cells_are_chosen_by_pattern_and_by_size():
    chosen = cells.chosen(cells.full(), ["rendezvous/*/8", "trips/*"])
    assert {cell.case.nodes for cell in chosen} == {8, 4}
    assert all(cell.case.nodes <= 8 for cell in cells.chosen(cells.full(), [], most_nodes=8))


def test_cell_of_one_measure_has_a_key_of_its_own():
    one = Case(Bench.RECOVERY, Side.TORCH_UNSHARED, 8, only=LOSS_REJOIN)
    assert cells.key_of(one) == "recovery/torch-unshared/8/loss"
    assert one.measures == (LOSS_REJOIN,)


def test_results_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    entries = [begun(), rendezvous(Side.RALLYPOINT, 2, [0.001], [None])]
    for entry in entries:
        append(path, entry)
    assert read(path) == entries
    assert read(tmp_path / "none.jsonl") == []


def test_line_that_is_no_result_is_named():
    with pytest.raises(ValueError, match="line 2"):
        decode(msgspec.json.encode(begun()).decode() + "\n{}\n")


def test_last_entry_of_a_cell_counts_and_a_full_run_more_than_quick_ones():
    quick, full = begun("first", is_quick=True), begun("second")
    old = msgspec.structs.replace(rendezvous(Side.RALLYPOINT, 2, [9.0], []), run="first")
    new = [msgspec.structs.replace(rendezvous(Side.RALLYPOINT, 2, [value], []), run="second") for value in (2.0, 3.0)]
    only_quick = collect([quick, old])
    assert only_quick.is_quick
    both = collect([quick, old, full, *new, quick, old])
    assert not both.is_quick
    found = both.figure(Bench.RENDEZVOUS, Side.RALLYPOINT, 2, LAST_ARRIVAL)
    assert found is not None
    assert found.values == (3.0,)
    assert [one.run for one in both.runs] == ["second"]


def test_side_that_an_earlier_run_had_is_not_missing():
    earlier = begun("2026-01-02 03:04:05", versions={"jax": "0.10.2"})
    later = begun("later", skipped={"jax": "jax is not there", "torchft": "torchft is not there"})
    more = msgspec.structs.replace(rendezvous(Side.RALLYPOINT, 8, [1.0], []), run="later")
    both = collect([earlier, rendezvous(Side.JAX, 2, [1.0], []), later, more])
    assert both.skipped == {"torchft": "torchft is not there"}
    assert {"jax", "torch"} <= both.versions.keys()


def test_no_results_are_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match="make bench"):
        collect([begun()])


def test_cell_is_done_only_by_a_run_of_the_same_kind_with_the_same_settings():
    one = rendezvous(Side.RALLYPOINT, 2, [1.0], [1.0])
    entries = [begun(), one]
    assert is_done(entries, one.case, is_quick=False)
    assert not is_done(entries, one.case, is_quick=True)
    assert not is_done(entries, msgspec.structs.replace(one.case, repeat=9), is_quick=False)


@pytest.fixture
def some_results():
    return collect(
        [
            begun(is_quick=True, skipped={"jax": "jax is not there for python: pip install jax"}),
            rendezvous(Side.RALLYPOINT, 2, [0.002, 0.004, 0.003], [0.05]),
            rendezvous(Side.TORCH_STOCK, 2, [0.4], [1.1]),
            rendezvous(Side.TORCHFT, 2, [0.001], [0.002]),
            rendezvous(Side.RALLYPOINT, 10_000, [1.5], [3.0]),
            rendezvous(Side.TORCH_STOCK, 128, [None], [None]),
        ]
    )


def test_page_has_figures_their_spread_and_why_there_are_none(some_results):
    page = benchmarks_page(some_results)
    assert "| 2 | 3.00 ms (2.00 ms to 4.00 ms) | 400 ms | 1.00 ms |" in page
    assert "| 128 |  | none in 20 s |  |" in page
    assert "a machine" in page
    assert "torch 2.13.0" in page
    assert "jax is not there" in page


def test_page_of_a_quick_run_says_so_and_a_busy_machine_too(some_results):
    assert "From a quick run" in benchmarks_page(some_results)
    assert "The machine was busy" not in benchmarks_page(some_results)
    full = collect([begun(), msgspec.structs.replace(rendezvous(Side.RALLYPOINT, 2, [1.0], [1.0]), load=7.5)])
    assert "From a quick run" not in benchmarks_page(full)
    assert "up to 7.5 on 2 cores" in benchmarks_page(full)


def test_page_says_what_was_planned_and_not_run(some_results):
    missing = benchmarks_page(some_results).partition("## Not measured")[2]
    assert "`rendezvous/rallypoint/8`" in missing
    assert "`rendezvous/rallypoint/2`" not in missing
    assert "`rendezvous/jax/2`" not in missing  # said to be absent instead


def test_page_says_where_others_are_better_and_by_how_much(some_results):
    lost = benchmarks_page(some_results).partition("## Where others are better")[2]
    assert "- Last arrival until all are released: torchft lighthouse 0.33 (N = 2)\n" in lost
    assert ": torch 0" not in lost


def test_paragraphs_and_points_are_reflowed_and_tables_are_not():
    row = "| a | " + "b " * 100 + "|"
    page = reflow(f"# T\n\none\ntwo\n\n- N - 1\n  of it\n- last\n\n> q\n> r\n\n{row}\n\n\n" + "word " * 50)
    assert page.startswith(f"# T\n\none two\n\n- N - 1 of it\n- last\n\n> q r\n\n{row}\n\nword word")
    assert max(len(line) for line in page.splitlines() if line != row) <= 118
    assert reflow(page) == page


def test_drawings_are_xml_with_a_title_a_description_and_both_colour_schemes(some_results):
    drawn = drawings(some_results)
    assert set(drawn) == {"last-arrival.svg", "cold-start.svg"}
    root = ElementTree.fromstring(drawn["last-arrival.svg"])
    title, description, style = (root.find(f"{SVG}{name}") for name in ("title", "desc", "style"))
    assert title is not None
    assert title.text == "Last arrival until all are released"
    assert description is not None
    assert "rallypoint: 0.003 at 2, 1.5 at 10000" in (description.text or "")
    assert style is not None
    assert "prefers-color-scheme: dark" in (style.text or "")
    names = [text.text for text in root.findall(f"{SVG}text")]
    assert {"rallypoint", "torch", "torchft lighthouse", "nodes", "10,000", "0.001"} <= set(names)


def test_points_lie_where_the_logarithm_of_their_values_does():
    drawn = log_plot("t", "d", "x", "y", [Series("a", ((1.0, 1.0), (10.0, 10.0), (100.0, 100.0)))])
    root = ElementTree.fromstring(drawn)
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.findall(f"{SVG}circle")][:3]
    (x1, y1), (x2, y2), (x3, y3) = circles
    assert x2 - x1 == pytest.approx(x3 - x2)
    assert y1 - y2 == pytest.approx(y2 - y3)
    assert y1 > y3


@pytest.mark.parametrize(("power", "text"), [(-3, "0.001"), (0, "1"), (4, "10,000")])
def test_powers_of_ten_are_written_with_separators(power, text):
    assert tick(power) == text


def test_nothing_to_draw_and_too_much_to_draw_are_errors():
    with pytest.raises(ValueError, match="nothing to draw"):
        log_plot("t", "d", "x", "y", [Series("a", ())])
    with pytest.raises(ValueError, match="9 lines"):
        log_plot("t", "d", "x", "y", [Series(str(number), ((1.0, 1.0),)) for number in range(10)])


def test_names_in_drawings_are_escaped():
    assert "<b>" not in log_plot("<b>", "<b>", "<b>", "<b>", [Series("<b>", ((1.0, 1.0),))])


def test_line_through_points_of_a_line_is_that_line():
    found = fit([(nodes, 3.0 * nodes + 5.0) for nodes in (10, 100, 1_000)])
    assert (found.each, found.fixed) == pytest.approx((3.0, 5.0))
    assert found.worst == pytest.approx(0.0, abs=1e-9)
    assert found.at(2_000) == pytest.approx(6_005.0)
    assert found.nodes_for(305.0) == pytest.approx(100.0)


def test_nothing_costs_less_than_nothing():
    found = fit([(100, 90.0), (1_000, 1_000.0)])
    assert found.fixed == 0.0
    assert found.each == pytest.approx(0.95)


def test_residual_is_the_share_by_which_the_farthest_point_is_off():
    assert fit([(100, 100.0), (1_000, 1_000.0), (10_000, 20_000.0)]).worst > 0.1


def test_one_number_of_nodes_is_no_line():
    with pytest.raises(ValueError, match="two numbers"):
        fit([(10, 1.0), (10, 2.0)])


def test_page_of_scale_is_computed_from_the_constants():
    trips = measured(Bench.TRIPS, Side.RALLYPOINT, 4, {measure: [2.0] for measure in TRIPS_OF})
    page = scale_page(collect([begun(), scaled(250), scaled(1_000), trips]))
    assert "| server CPU of a round | 25.0 ms | 100 ms | 100 µs |" in page
    assert "| 100,000 * |" in page
    assert "(10 s) | 50,000 nodes |" in page  # half of ten seconds at 100 microseconds a node
    assert "| 100 ms | 1.20 s | 1.30 s | 1.20 s |" in page  # two trips, one more for TCP, and a second of the server


def test_page_of_scale_without_enough_measurements_says_so():
    page = scale_page(collect([begun(), scaled(250)]))
    assert "Not measured" in page


def test_what_ends_first_is_named_first():
    plenty = dict.fromkeys(MEASURED, Fit(0.0, 0.0, 0.0))
    fits = {**plenty, ROUND_CPU: Fit(1e-4, 0.0, 0.0), IDLE_CPU: Fit(0.01, 0.0, 0.0), MEMORY: Fit(0.01, 0.0, 0.0)}
    assert [nodes for _, nodes in limits(fits)] == pytest.approx([5_000.0, 50_000.0, 409_600.0])


def test_results_with_the_older_name_of_a_measure_count():
    line = msgspec.json.encode(rendezvous(Side.RALLYPOINT, 2, [1.0], [2.0])).decode()
    (entry,) = decode(line.replace(f'"{COLD_START}"', '"all together, connections included"'))
    assert isinstance(entry, Measured)
    assert [sample.measure for sample in entry.samples] == [LAST_ARRIVAL, COLD_START]


def test_cells_of_a_comparison_take_turns():
    chosen = cells.chosen(cells.full(), ["rendezvous/*/8", "idle/*/8", "rendezvous/rallypoint/1000"])
    groups = cells.grouped(chosen)
    assert sorted(len({(cell.case.bench, cell.case.nodes) for cell in group}) for group in groups) == [1, 1, 1]
    eight = next(group for group in groups if group[0].key == "rendezvous/rallypoint/8")
    assert {Side.RALLYPOINT, Side.TORCH_STOCK, Side.TORCHFT, Side.TORCHFT_TWICE, Side.JAX} <= {
        cell.case.side for cell in eight
    }


def test_full_plan_compares_all_sides_at_the_same_numbers_of_nodes():
    keys = {cell.key for cell in cells.full()}
    for side in (Side.RALLYPOINT, Side.TORCHFT, Side.TORCHFT_TWICE, Side.JAX, Side.TORCH_STOCK):
        assert {f"rendezvous/{side.value}/{nodes}" for nodes in (2, 8, 32, 128)} <= keys
    assert {"rendezvous/rallypoint/1000", "rendezvous/rallypoint/10000", "idle/rallypoint/10000"} <= keys


def test_cells_run_once_and_again_only_when_asked_and_never_beyond_the_budget(tmp_path):
    ran: list[str] = []
    said: list[str] = []
    path = tmp_path / "results.jsonl"

    def measure(jobs: Sequence[Job]) -> list[Outcome]:
        ran.extend(job.python for job in jobs)
        return [Outcome(job.case, (Sample(LAST_ARRIVAL, 0.1), Sample(COLD_START, 0.2))) for job in jobs]

    def run(again: bool = False, budget_s: float = 60.0) -> bool:
        chosen = cells.chosen(cells.quick(), ["rendezvous/rallypoint/2"])
        return run_cells(
            chosen, path, {}, is_quick=True, again=again, budget_s=budget_s, say=said.append, measure=measure
        )

    assert [run(), run(), run(again=True), run(again=True, budget_s=0.0)] == [True] * 4
    assert ran == [sys.executable] * 2
    assert "left out" in said[-1]
    result = CliRunner().invoke(main, ["--pages", "--results", str(path), "--docs", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "100 ms" in (tmp_path / "benchmarks.md").read_text()


def test_failure_of_a_cell_of_rallypoint_is_reported(tmp_path):
    chosen = cells.chosen(cells.quick(), ["rendezvous/rallypoint/2"])
    said: list[str] = []
    no_failure = run_cells(
        chosen,
        tmp_path / "results.jsonl",
        {},
        is_quick=True,
        again=False,
        budget_s=60.0,
        say=said.append,
        measure=lambda jobs: [Outcome(job.case, (), "it broke") for job in jobs],
    )
    assert not no_failure
    assert "it broke" in said[-1]


def test_pattern_that_matches_nothing_is_an_error():
    result = CliRunner().invoke(main, ["--only", "nothing/*"])
    assert result.exit_code == 2
    assert "--list" in result.output
