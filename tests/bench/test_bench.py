"""Whole cases, small, through the runner and the command. No test depends on how long a sample took."""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from rallypoint.bench import usage
from rallypoint.bench.competitors import find
from rallypoint.bench.plan import (
    LAST_ARRIVAL,
    MEASURES,
    MOST_PROCESSES,
    ROUND_FRAMES_IN,
    ROUND_FRAMES_OUT,
    TRIPS_COLD,
    TRIPS_LAST,
    Bench,
    Case,
    Sample,
    Side,
)
from rallypoint.bench.processes import kill_all
from rallypoint.bench.rallypoint_side import RallypointClient, RallypointSide
from rallypoint.bench.runner import Job, run_case, run_cases
from rallypoint.bench.sides import RunConfig
from rallypoint.cli import main
from tests.patience import until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def measured(case: Case) -> list[Sample]:
    outcome = run_case(case, lambda text: None)
    assert outcome.failed == ""
    return list(outcome.samples)


@pytest.mark.parametrize("bench", [Bench.RENDEZVOUS, Bench.RECOVERY])
def test_every_measure_of_rallypoint_has_a_sample(bench):
    samples = measured(Case(bench, Side.RALLYPOINT, nodes=3, repeat=1))
    assert [sample.measure for sample in samples] == list(MEASURES[bench])
    assert [sample.why_none for sample in samples] == [""] * len(samples)
    assert all(sample.value is not None and sample.value > 0.0 for sample in samples)


@linux_only
def test_idle_round_of_rallypoint_is_measured():
    samples = measured(Case(Bench.IDLE, Side.RALLYPOINT, nodes=2, repeat=1, seconds=1.0))
    assert [sample.measure for sample in samples] == list(MEASURES[Bench.IDLE])


@linux_only
def test_cost_of_a_round_is_counted_by_the_server():
    samples = {s.measure: s.value for s in measured(Case(Bench.SCALE, Side.RALLYPOINT, nodes=6, repeat=1, seconds=1.0))}
    assert list(samples) == list(MEASURES[Bench.SCALE])
    frames_in, frames_out = samples[ROUND_FRAMES_IN], samples[ROUND_FRAMES_OUT]
    assert frames_in is not None
    assert frames_out is not None
    assert 6 <= frames_in <= 60  # a node says that it joins and that it confirms
    assert 6 <= frames_out <= 120


@pytest.mark.slow
def test_last_arrival_takes_fewer_trips_than_a_cold_start():
    samples = {s.measure: s.value for s in measured(Case(Bench.TRIPS, Side.RALLYPOINT, nodes=3, repeat=1))}
    assert list(samples) == list(MEASURES[Bench.TRIPS])
    last, cold = samples[TRIPS_LAST], samples[TRIPS_COLD]
    assert last is not None
    assert cold is not None
    assert 0.5 < last < 3.0, "join and assignment, confirmation and release"
    assert last < cold


def test_more_nodes_than_processes_share_four_processes():
    samples = measured(Case(Bench.RENDEZVOUS, Side.RALLYPOINT, nodes=MOST_PROCESSES + 2, repeat=1))
    assert [sample.why_none for sample in samples] == ["", ""]


@pytest.mark.parametrize(
    "side",
    [
        pytest.param(Side.TORCH_STOCK, marks=[needs("torch"), pytest.mark.slow]),
        pytest.param(Side.TORCH_LEAN, marks=[needs("torch"), pytest.mark.slow]),
        pytest.param(Side.TORCHFT, marks=needs("torchft")),
        pytest.param(Side.TORCHFT_TWICE, marks=needs("torchft")),
        pytest.param(Side.JAX, marks=needs("jax")),
    ],
)
def test_competitor_does_the_same_work(side):
    samples = measured(Case(Bench.RENDEZVOUS, side, nodes=2, repeat=1))
    assert [(sample.measure, sample.why_none) for sample in samples] == [
        (name, "") for name in MEASURES[Bench.RENDEZVOUS]
    ]


def test_sample_that_takes_too_long_is_none():
    outcome = run_case(Case(Bench.RENDEZVOUS, Side.RALLYPOINT, nodes=2, repeat=2, limit_s=1e-6), lambda text: None)
    assert [sample.value for sample in outcome.samples] == [None] * len(outcome.samples)
    assert all("none in 1e-06 s" in sample.why_none for sample in outcome.samples)
    assert len(outcome.samples) == 2  # one of each measure: what took too long once is not tried again


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_case_whose_side_is_not_installed_says_so():
    outcome = run_case(Case(Bench.RENDEZVOUS, Side.TORCH_STOCK, nodes=2, repeat=1), lambda text: None)
    assert outcome.samples == ()
    assert "No module named 'torch'" in outcome.failed


def test_command_writes_one_json_document():
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "bench", "rendezvous", "--nodes", "2", "--repeat", "1", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["bench"] == "rendezvous"
    assert document["machine"]["cores"] == os.cpu_count()
    assert document["settings"]["repeat"] == 1
    assert [case["nodes"] for case in document["cases"]] == [2]


def test_command_writes_a_table_for_people():
    result = CliRunner().invoke(main, ["bench", "rendezvous", "--nodes", "2", "--repeat", "1"])
    assert result.exit_code == 0, result.output
    assert "last arrival until all released" in result.output
    assert "settle time 0.52 s" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rendezvous", "--nodes", "2,x"], "is no list of numbers of nodes: give it like 2,8,32"),
        (["rendezvous", "--nodes", "1"], "is out of range: 2 to 16000 nodes"),
        (["rendezvous", "--seconds", "3"], "No such option"),
        (["rendezvous", "--against", "horovod"], "'torch', 'torchft'"),
        (["recovery", "--against", "torchft"], "use it with `bench rendezvous`"),
        (["idle", "--against", "torchft"], "use it with `bench rendezvous`"),
        (["recover"], "No such command 'recover'"),
    ],
)
def test_option_that_does_not_fit_is_an_error_that_says_so(arguments, said):
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_absent_competitor_is_an_error_that_says_how_to_install_it(tmp_path):
    arguments = ["bench", "rendezvous", "--against", "torch", "--torch-python", str(tmp_path / "no-python")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "pip install" in result.output
    assert "torch==2.13.0" in result.output


def test_absent_competitors_are_named_when_all_are_asked_for(tmp_path):
    none = [f"--{name}-python={tmp_path / 'no-python'}" for name in ("torch", "torchft", "jax")]
    arguments = ["bench", "rendezvous", "--against", "all", "--nodes", "2", "--repeat", "1", "--json", *none]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert {"torch-stock", "torchft", "torchft-twice", "jax"} <= document["missing"].keys()
    assert [case["side"] for case in document["cases"]] == ["rallypoint"]


def test_competitor_that_is_absent_is_found_missing_and_rallypoint_is_there(tmp_path):
    found = find([Side.RALLYPOINT, Side.JAX], {"jax": str(tmp_path / "no-python")})
    assert "jax==0.10.2" in found.missing[Side.JAX]
    assert found.pythons == {Side.RALLYPOINT: sys.executable}
    assert "rallypoint" in found.versions


def test_sides_take_turns():
    seen: list[tuple[int, str]] = []
    cases = [Case(Bench.RENDEZVOUS, Side.RALLYPOINT, nodes, repeat=2, only=LAST_ARRIVAL) for nodes in (2, 3)]
    outcomes = run_cases([Job(case) for case in cases], lambda case, text: seen.append((case.nodes, text)))
    assert [outcome.case for outcome in outcomes] == cases
    assert [len(outcome.samples) for outcome in outcomes] == [2, 2]
    assert seen == [
        *[(2, "loading"), (3, "loading")],
        *[(2, f"{LAST_ARRIVAL}, 1 of 2"), (3, f"{LAST_ARRIVAL}, 1 of 2")],
        *[(3, f"{LAST_ARRIVAL}, 2 of 2"), (2, f"{LAST_ARRIVAL}, 2 of 2")],
    ]


def test_case_that_fails_or_hangs_does_not_end_the_others():
    good = Case(Bench.RENDEZVOUS, Side.RALLYPOINT, 2, repeat=1, only=LAST_ARRIVAL)
    jobs = [Job(good, timeout_s=0.0), Job(good, python="/bin/false"), Job(good)]
    hanging, failing, whole = run_cases(jobs, lambda case, text: None)
    assert hanging.failed == "it was ended after 0 s"
    assert failing.failed.startswith("its process ended early")
    assert (whole.failed, len(whole.samples)) == ("", 1)


@linux_only
def test_node_that_has_warmed_up_has_no_connection_left():
    """A cold start begins with new connections."""
    server, port = RallypointSide().start_server(1)
    try:
        if usage.payload(port) is None:
            pytest.skip("there is no ss")
        RallypointClient(port, RunConfig("r", 1, 1, 30)).warm_up()
        until(lambda: usage.payload(port) == {}, "all connections have been closed")
    finally:
        kill_all([server])


def descendants(pid: int) -> set[int]:
    """All processes below that one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_the_command_is_ended(number):
    command = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "bench", "idle", "--nodes", "3", "--seconds", "300"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's is ignored
    )
    try:
        # The case, the server, and then three nodes.
        until(lambda: len(descendants(command.pid)) >= 5, "the nodes have started")
        below = descendants(command.pid)
        command.send_signal(number)
        command.wait(30)
    finally:
        command.kill()
        command.wait(30)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "all processes have ended")


def test_restart_from_data_and_writes_of_every_kind_are_measured():
    samples = measured(Case(Bench.RESTART, Side.RALLYPOINT, nodes=10, repeat=1, seconds=0.2, keys=100))
    assert {sample.measure for sample in samples} == set(MEASURES[Bench.RESTART])
    assert all(sample.value is not None and sample.value > 0.0 for sample in samples)


def test_command_of_the_restart_writes_one_json_document():
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "bench", "restart", "--json", "--repeat=1", "--seconds=0.2", "--keys=100"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["bench"] == "restart"
    assert [len(measure["samples"]) for measure in document["cases"][0]["measures"]] == [1] * 8


@pytest.mark.parametrize(
    "side",
    [
        pytest.param(Side.RALLYPOINT_ETCD, marks=needs("grpc")),
        pytest.param(Side.TORCH_ETCD, marks=[needs("torch"), pytest.mark.slow]),
        pytest.param(Side.TORCH_ETCD_V2, marks=[needs("torch"), pytest.mark.slow]),
    ],
)
def test_every_side_on_etcd_has_a_sample(side):
    if shutil.which("etcd", path="/usr/bin:/usr/local/bin:/opt/bin") is None:
        pytest.skip("needs an etcd: Debian's etcd-server")
    if side is not Side.RALLYPOINT_ETCD and find_spec("etcd") is None:
        pytest.skip("needs python-etcd")
    samples = measured(Case(Bench.RENDEZVOUS, side, nodes=2, repeat=1))
    assert [sample.why_none for sample in samples] == [""] * len(samples)


def test_etcd_is_not_measured_beside_what_does_not_run_on_it():
    for arguments in (["--backend", "etcd", "--against", "torch"], ["--against", "torch", "--against", "torch-etcd"]):
        result = CliRunner().invoke(main, ["bench", "rendezvous", *arguments])
        assert result.exit_code == 2
        assert "--against torch-etcd" in result.output
