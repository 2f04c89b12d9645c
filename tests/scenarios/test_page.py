"""The page is made from the outcomes, and a run of some rows does not change the others."""

import msgspec
import pytest

from tests.scenarios.page import (
    FAILED,
    KEPT,
    MISSED,
    PAGE,
    Outcome,
    Sight,
    note,
    read,
    render,
    row_tests,
    verdict_of,
)
from tests.scenarios.record import Load, Recorder
from tests.scenarios.rows import ROWS


def outcome(test="test_row_03_told[tcp]", row=3, backend="tcp", **more):
    given = {"verdict": KEPT, "day": "2031-02-03", "took_s": 4.0, "load": 0.5, **more}
    return Outcome(test=test, row=row, backend=backend, **given)


def test_page_in_the_repository_is_made_from_the_outcomes():
    assert PAGE.read_text(encoding="utf-8") == render(read())


def test_every_row_has_a_test_named_by_it():
    assert {int(name[len("test_row_") :][:2]) for name in row_tests()} == set(ROWS) == {*range(1, 33)}


def test_repository_has_no_outcome_of_a_test_that_no_longer_exists():
    assert {one.test.partition("[")[0] for one in read()} <= set(row_tests())


def test_partial_run_replaces_its_own_outcomes_and_no_others(tmp_path):
    files = {
        "data": tmp_path / "d.json",
        "page": tmp_path / "p.md",
        "known_tests": ["test_row_03_told", "test_row_07_late"],
    }
    note(outcome("test_row_07_late[tcp]", 7, sights=(Sight("it was told", 15.2, 16.0),)), **files)
    note(outcome(sights=(Sight("they were told", 1.0, 1.5),)), **files)
    note(outcome(verdict=MISSED, sights=(Sight("they were told", 1.9, 1.5),)), **files)
    text = files["page"].read_text(encoding="utf-8")
    assert "it was told: 15.20 s, promised 16 s\n" in text
    assert "they were told: 1.90 s, promised 1.5 s (missed)\n" in text
    assert "1.00 s" not in text
    assert [one.row for one in read(files["data"])] == [3, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.json", "p.md"]


def test_outcome_of_a_removed_test_is_dropped(tmp_path):
    files = {"data": tmp_path / "d.json", "page": tmp_path / "p.md"}
    note(outcome("test_row_03_old[tcp]"), known_tests=["test_row_03_old"], **files)
    note(outcome("test_row_03_told[tcp]"), known_tests=["test_row_03_told"], **files)
    assert [one.test for one in read(files["data"])] == ["test_row_03_told[tcp]"]
    note(outcome("test_row_03_told"), known_tests=["test_row_03_told"], **files)
    assert [one.test for one in read(files["data"])] == ["test_row_03_told"]


def test_summary_shows_the_worst_verdict_and_the_tightest_promise():
    sights = (Sight("a", 1.0, 10.0), Sight("b", 1.4, 1.5), Sight("c", 9.0), Sight("d"))
    text = render([outcome(sights=sights), outcome("test_row_03_other[tcp]", verdict=FAILED, why="it broke")])
    assert "| [3](#row-3) | A member is killed while nobody waits | failed, 1.40 s of 1.5 s | - |" in text
    assert "- failed: it broke\n" in text
    assert text.count("Not run yet.") == len(ROWS) - 1


def test_missed_promise_makes_the_verdict_missed():
    assert verdict_of([Sight("a", 1.0, 1.5), Sight("b")]) == KEPT
    assert verdict_of([Sight("a", 1.6, 1.5)]) == MISSED


def test_broken_file_of_outcomes_is_an_error(tmp_path):
    (tmp_path / "d.json").write_text("[{]")
    with pytest.raises(msgspec.DecodeError):
        note(outcome(), known_tests=[], data=tmp_path / "d.json", page=tmp_path / "p.md")
    assert not (tmp_path / "p.md").exists()


def test_promise_is_scaled_by_the_load_up_to_a_maximum():
    load = Load()
    load.end()
    load._wanting, load._looks, load.still_s = 0, 1, 0.0
    assert load.allowed_s(1.5) == 1.5
    load.still_s = 0.25
    assert load.allowed_s(1.5) == 2.0
    load._wanting = 1_000_000
    assert load.allowed_s(1.5) == 6.5


def test_recorder_fails_far_beyond_a_promise_and_keeps_the_observation():
    recorder = Recorder()
    try:
        with pytest.raises(AssertionError) as caught:
            recorder("it was told", 1e6, 1.5)
    finally:
        recorder.load.end()
    assert "promised 1.5 s" in str(caught.value)
    assert recorder.sights == [Sight("it was told", 1e6, 1.5)]
