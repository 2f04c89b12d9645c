import pytest

from rallypoint.bench.plan import (
    CPU,
    LAST_ARRIVAL,
    MEASURES,
    MOST_PHASE_S,
    MOST_PROCESSES,
    TOGETHER,
    Against,
    Bench,
    Case,
    Sample,
    Side,
    cases,
    columns,
    comparable,
    phase_s,
)
from rallypoint.bench.report import Table, figure, quantity, ratio
from rallypoint.bench.runner import Outcome

SIDES = (Side.RALLYPOINT, Side.TORCH_STOCK)


def outcome(side: Side, nodes: int, *values: float | None, failed: str = "") -> Outcome:
    samples = tuple(Sample(LAST_ARRIVAL, value, "" if value is not None else "none in 60 s") for value in values)
    return Outcome(Case(Bench.RENDEZVOUS, side, nodes), samples, failed)


def test_figure_is_the_median_of_its_samples():
    found = figure(LAST_ARRIVAL, outcome(Side.RALLYPOINT, 2, 0.3, 0.1, 0.2).samples)
    assert found.median == 0.2
    assert found.in_words() == "200 ms (100 ms to 300 ms)"


def test_figure_without_any_value_says_why():
    found = figure(LAST_ARRIVAL, outcome(Side.RALLYPOINT, 2, None).samples)
    assert found.median is None
    assert found.in_words() == "none in 60 s"


def test_figure_with_some_values_says_what_is_missing():
    found = figure(LAST_ARRIVAL, outcome(Side.RALLYPOINT, 2, 1.5, None).samples)
    assert found.in_words() == "1.50 s; once none in 60 s"


def test_ratio_is_the_competitor_by_rallypoint():
    ours = figure(LAST_ARRIVAL, outcome(Side.RALLYPOINT, 2, 0.01).samples)
    theirs = figure(LAST_ARRIVAL, outcome(Side.TORCH_STOCK, 2, 1.0).samples)
    assert ratio(theirs, ours) == pytest.approx(100.0)


def test_there_is_no_ratio_to_nothing():
    ours = figure(CPU, [Sample(CPU, 0.0)])
    theirs = figure(CPU, [Sample(CPU, 2.0)])
    nothing = figure(CPU, [])
    assert ratio(theirs, ours) is None
    assert ratio(nothing, theirs) is None


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.00123, "s", "1.23 ms"),
        (0.0123, "s", "12.3 ms"),
        (12.34, "s", "12.3 s"),
        (1539_000.0, "B/s", "1,539 kB/s"),
        (75.0, "B/s", "75.0 B/s"),
        (4.2, "KiB", "4.20 KiB"),
    ],
)
def test_quantity_is_written_with_a_unit_that_fits(value, unit, text):
    assert quantity(value, unit) == text


def test_table_has_a_row_for_each_measure_and_number_of_nodes():
    table = Table(
        Bench.RENDEZVOUS,
        SIDES,
        [outcome(side, nodes, 0.1 if side is Side.RALLYPOINT else 1.0) for nodes in (8, 2) for side in SIDES],
    )
    assert table.heads() == ["", "N", "rallypoint", "torch", "ratio", "runs"]
    assert table.rows() == [
        [LAST_ARRIVAL, "2", "100 ms", "1.00 s", "10.0×", "1 / 1"],
        [LAST_ARRIVAL, "8", "100 ms", "1.00 s", "10.0×", "1 / 1"],
        [TOGETHER, "2", "-", "-", "-", "0 / 0"],
        [TOGETHER, "8", "-", "-", "-", "0 / 0"],
    ]


def test_remarks_say_what_failed_and_what_was_left_out():
    outcomes = [outcome(Side.RALLYPOINT, 256, 0.1), outcome(Side.TORCH_STOCK, 2, failed="its process ended early")]
    assert Table(Bench.RENDEZVOUS, SIDES, outcomes).remarks() == [
        "torch, 2 nodes: its process ended early",
        "competitors run as one process a node, and so with at most 128 nodes",
    ]


def test_json_has_all_samples_and_the_ratios():
    outcomes = [outcome(Side.RALLYPOINT, 2, 0.1, 0.3), outcome(Side.TORCH_STOCK, 2, 2.0, None)]
    document = Table(Bench.RENDEZVOUS, SIDES, outcomes).as_json()
    ours, theirs = document["cases"]
    assert (ours["side"], ours["nodes"], ours["failed"]) == ("rallypoint", 2, None)
    assert ours["measures"][0] == {
        "measure": LAST_ARRIVAL,
        "unit": "s",
        "median": 0.2,
        "samples": [0.1, 0.3],
        "none": [],
    }
    assert theirs["measures"][0]["none"] == ["none in 60 s"]
    assert document["ratios"] == [
        {"measure": LAST_ARRIVAL, "nodes": 2, "side": "torch-stock", "ratio": pytest.approx(10.0)}
    ]


def test_competitors_are_not_run_with_more_nodes_than_processes():
    planned = cases(Bench.RENDEZVOUS, Against.TORCH, (2, MOST_PROCESSES + 1), repeat=1, seconds=0.0)
    assert [(case.side, case.nodes) for case in planned] == [
        (Side.RALLYPOINT, 2),
        (Side.TORCH_STOCK, 2),
        (Side.TORCH_LEAN, 2),
        (Side.RALLYPOINT, MOST_PROCESSES + 1),
    ]


def test_every_measurement_begins_with_rallypoint_itself():
    for bench in MEASURES:
        assert columns(bench, None) == (Side.RALLYPOINT,)
        if comparable(bench, Against.TORCH):
            assert columns(bench, Against.TORCH)[0] is Side.RALLYPOINT
    assert comparable(Bench.RENDEZVOUS, Against.TORCHFT)
    assert not comparable(Bench.IDLE, Against.TORCHFT)


def test_random_part_of_the_settle_time_differs_between_repetitions_and_not_between_sides():
    times = [phase_s(8, repetition) for repetition in range(5)]
    assert len(set(times)) == 5
    assert times == [phase_s(8, repetition) for repetition in range(5)]
    assert all(0.0 <= time <= MOST_PHASE_S for time in times)
