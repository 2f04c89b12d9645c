"""Runs the text traces beside this file and compares their outputs with the expected ones."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.testing.traces import TraceError, run_trace

HERE = Path(__file__).parent
TRACES = sorted(HERE.glob("*.txt"))
HAPPY = "run min_nodes=2\n\njoin a b\n----\n"


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace_gives_the_expected_output(path, request):
    expected = path.read_text(encoding="utf-8")
    actual = run_trace(expected)
    if request.config.getoption("--rewrite"):
        path.write_text(actual, encoding="utf-8")
    elif actual != expected:
        pytest.fail(_difference(path.name, expected, actual), pytrace=False)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace_begins_with_a_comment_that_says_what_it_shows(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")


def test_traces_are_the_same_in_every_process():
    program = (
        "import hashlib, pathlib, sys; from rallypoint.testing.traces import run_trace\n"
        "texts = [pathlib.Path(name).read_text(encoding='utf-8') for name in sys.argv[1:]]\n"
        "print(hashlib.sha256(''.join(map(run_trace, texts)).encode()).hexdigest())"
    )
    digests = {_output(program, seed) for seed in ("0", "1", "4242")}
    assert len(digests) == 1


def _output(program, hash_seed):
    command = [sys.executable, "-c", program, *map(str, TRACES)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout


def _difference(name, expected, actual):
    lines = difflib.unified_diff(
        expected.splitlines(), actual.splitlines(), f"{name} (expected)", f"{name} (actual)", lineterm=""
    )
    return "\n".join([*lines, "if the actual output is right: pytest tests/traces --rewrite"])


# --- the runner of traces ---------------------------------------------------------------------------------------------


def test_trace_is_a_fixed_point_of_running_it():
    once = run_trace(HAPPY)
    assert once != HAPPY
    assert run_trace(once) == once


def test_wrong_expectation_is_replaced_by_the_actual_output():
    right = run_trace(HAPPY)
    wrong = right.replace("rank 0 of 2", "rank 1 of 2")
    assert wrong != right
    assert run_trace(wrong) == right


def test_wrong_expectation_fails_the_test_of_its_trace(pytester_dir):
    wrong = run_trace(HAPPY).replace("rank 0 of 2", "rank 1 of 2")
    (pytester_dir / "wrong.txt").write_text("# It shows something.\n" + wrong, encoding="utf-8")
    (pytester_dir / "test_traces.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (pytester_dir / "conftest.py").write_text(
        (HERE.parent / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    chosen = "test_traces.py::test_trace_gives_the_expected_output"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", chosen]
    failed = subprocess.run(command, cwd=pytester_dir, check=False, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1, failed.stdout
    assert "-    0.000 a: -> round 1, rank 1 of 2, a:20001" in failed.stdout
    assert "+    0.000 a: -> round 1, rank 0 of 2, a:20001" in failed.stdout
    subprocess.run([*command, "--rewrite"], cwd=pytester_dir, check=True, capture_output=True, timeout=60)
    assert (pytester_dir / "wrong.txt").read_text(encoding="utf-8").endswith(run_trace(HAPPY))


@pytest.fixture
def pytester_dir(tmp_path):
    """A directory outside of this project's tests."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return tmp_path


def test_comments_and_empty_lines_are_kept():
    text = "# One.\n\n# Two.\nrun min_nodes=1\n# Three.\njoin a\n----\n\n# The end.\n"
    lines = run_trace(text).splitlines()
    assert lines[:7] == text.splitlines()[:7]
    assert lines[-2:] == ["", "# The end."]


def test_frozen_node_does_nothing_until_it_is_thawed():
    text = "run min_nodes=1\nstart a\nfreeze a\njoin a\nadvance 3\n----\n\nthaw a\n----\n"
    before, after = run_trace(text).split("\n\n")
    assert before.endswith("----")
    assert "    3.000 a: -> round 1, rank 0 of 1, a:20001" in after


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run min_nodes=1\nfly a\n----\n", "line 2: unknown command 'fly': the commands are run, show, "),
        ("join a\n----\n", "line 1: run must be the first command, and only there"),
        ("run min_nodes=1\nrun min_nodes=2\n----\n", "line 2: run must be the first command, and only there"),
        ("run a\n----\n", "line 1: run takes OPTION=VALUE only, not 'a'"),
        ("----\n", "line 1: ---- without a command before it"),
        ("run min_nodes=1\n----\n\njoin a\n", "line 4: ---- is missing after this command"),
        ("run min_nodes=1\nadvance soon\n----\n", "line 2: 'soon' is not a number of seconds"),
        ("run min_nodes=1\nadvance -1\n----\n", "line 2: -1 s cannot pass"),
        ("run min_nodes=1\njoin\n----\n", "line 2: join takes one name or more"),
        ("run min_nodes=1\ncrash a\n----\n", "line 2: 'a' is not a running process"),
        ("run min_nodes=1\nstart a a\n----\n", "line 2: a already runs"),
        ("run min_nodes=1\nstart a\njoin a rank=1\n----\n", "line 3: a already runs: its options cannot change"),
        ("run min_nodes=1\nstart a\nleave a\n----\n", "line 3: leave takes a name and a reason"),
        ("run min_nodes=1\ndrain a x\n----\n", "line 2: no node can be drained: no process runs"),
        ("run min_nodes=1\nput config\n----\n", "line 2: put takes a key and a value"),
        ("run min_nodes=1\nshow all\n----\n", "line 2: show takes one of debug, info, warning, not 'all'"),
        ("run min_nodes=1\nstart a\nrepeat 2\n----\n", "line 3: repeat must be at the start of a block"),
    ],
)
def test_text_that_is_no_trace_is_refused_with_its_line(text, message):
    with pytest.raises(TraceError) as refused:
        run_trace(text)
    assert str(refused.value).startswith(message)
