import pytest

from rallypoint.bench.plan import (
    COLD_START,
    CPU,
    LAST_ARRIVAL,
    MAX_PHASE_S,
    MEASURES,
    MOST_PROCESSES,
    Bench,
    Case,
    Competitor,
    Sample,
    Side,
    columns,
    comparable,
    comparisons,
    phase_s,
    schedule,
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


def test_table_has_a_row_for_each_measure_number_of_nodes_and_side():
    table = Table(
        Bench.RENDEZVOUS,
        SIDES,
        [outcome(side, nodes, 0.1 if side is Side.RALLYPOINT else 1.0) for nodes in (8, 2) for side in SIDES],
    )
    assert table.heads() == ["", "N", "", "median (least to most)", "ratio", "samples"]
    assert table.rows() == [
        [LAST_ARRIVAL, "2", "rallypoint", "100 ms", "", "1"],
        [LAST_ARRIVAL, "2", "torch", "1.00 s", "10.0×", "1"],
        [LAST_ARRIVAL, "8", "rallypoint", "100 ms", "", "1"],
        [LAST_ARRIVAL, "8", "torch", "1.00 s", "10.0×", "1"],
        [COLD_START, "2", "rallypoint", "-", "", "0"],
        [COLD_START, "2", "torch", "-", "", "0"],
        [COLD_START, "8", "rallypoint", "-", "", "0"],
        [COLD_START, "8", "torch", "-", "", "0"],
    ]


def test_table_without_competitors_has_no_columns_to_compare():
    table = Table(Bench.RENDEZVOUS, SIDES[:1], [outcome(Side.RALLYPOINT, 10_000, 0.1)])
    assert table.heads() == ["", "N", "median (least to most)", "samples"]
    assert table.rows()[0] == [LAST_ARRIVAL, "10,000", "100 ms", "1"]


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
    planned = comparisons(Bench.RENDEZVOUS, SIDES, (2, MOST_PROCESSES + 1), repeat=1, seconds=0.0)
    assert [[(case.side, case.nodes) for case in group] for group in planned] == [
        [(Side.RALLYPOINT, 2), (Side.TORCH_STOCK, 2)],
        [(Side.RALLYPOINT, MOST_PROCESSES + 1)],
    ]


def test_sides_take_turns_sample_by_sample_and_none_is_always_first():
    cases = [Case(Bench.RENDEZVOUS, side, 2, repeat=repeat) for side, repeat in zip(SIDES, (3, 2), strict=True)]
    assert [(index, turn.measure, turn.repetition) for index, turn in schedule(cases)] == [
        *[(0, LAST_ARRIVAL, 0), (1, LAST_ARRIVAL, 0), (1, LAST_ARRIVAL, 1), (0, LAST_ARRIVAL, 1), (0, LAST_ARRIVAL, 2)],
        *[(0, COLD_START, 0), (1, COLD_START, 0), (1, COLD_START, 1), (0, COLD_START, 1), (0, COLD_START, 2)],
    ]


def test_measurements_of_everything_at_once_take_turns_by_repetition():
    cases = [Case(Bench.IDLE, side, 2, repeat=2) for side in SIDES]
    assert [(index, turn.repetition) for index, turn in schedule(cases)] == [(0, 0), (1, 0), (1, 1), (0, 1)]


def test_every_measurement_begins_with_rallypoint_itself():
    for bench in MEASURES:
        assert columns(bench, []) == (Side.RALLYPOINT,)
        if comparable(bench, Competitor.TORCH):
            assert columns(bench, [Competitor.TORCH])[0] is Side.RALLYPOINT
    assert columns(Bench.RENDEZVOUS, [Competitor.TORCHFT, Competitor.JAX]) == (
        *(Side.RALLYPOINT, Side.TORCHFT, Side.TORCHFT_TWICE, Side.JAX),
    )
    assert columns(Bench.RENDEZVOUS, [Competitor.TORCH_ETCD])[0] is Side.RALLYPOINT_ETCD
    assert comparable(Bench.RENDEZVOUS, Competitor.TORCHFT)
    assert not comparable(Bench.IDLE, Competitor.TORCHFT)


def test_random_part_of_the_settle_time_differs_between_repetitions_and_not_between_sides():
    times = [phase_s(8, repetition) for repetition in range(5)]
    assert len(set(times)) == 5
    assert times == [phase_s(8, repetition) for repetition in range(5)]
    assert all(0.0 <= time <= MAX_PHASE_S for time in times)
