"""`rallypoint run` on one machine: growing, shrinking, killed workers and launchers, and no process left behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.kit import PATIENCE_S, Stage, loopback
from tests.e2e.launching import Run, consistent, marked
from tests.e2e.operating import command, until_said


@pytest.fixture
def endpoint(stage: Stage) -> str:
    return stage.serve(loopback()).wait_listening()


def test_run_grows_from_two_to_four_and_shrinks_to_two(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2:4", "--nproc-per-node", "2")
    a, b = run.start("a"), run.start("b")
    first = consistent(a.workers(4, count=2), b.workers(4, count=2))
    c, d = run.start("c"), run.start("d")
    grown = consistent(*(one.workers(8, count=2) for one in (a, b, c, d)))
    assert {fact["node"]: fact["GROUP_RANK"] for fact in grown}["a"] == 0
    number = grown[0]["RALLYPOINT_ROUND"]
    assert number > first[0]["RALLYPOINT_ROUND"]
    killed_at = c.kill()
    d.kill()
    shrunk = consistent(*(one.workers(4, above=number, count=2) for one in (a, b)))
    took_s = min(fact["at"] for fact in shrunk) - killed_at
    print(f"kill -9 of two launchers to the first line of the re-started workers: {took_s:.2f} s")
    assert {fact["TORCHELASTIC_RESTART_COUNT"] for fact in shrunk} == {0}, "nodes that come and go cost no restart"
    assert marked(f"{run.id}/c") == marked(f"{run.id}/d") == []
    run.finish(a, b)


def test_kill_of_a_launcher_takes_its_workers_and_all_their_children_along(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:1", "--nproc-per-node", "2")
    a = run.start("a", words=("children",))
    a.workers(2, count=2)
    run.wait_left(7, "a guardian, two workers, and two children of each")
    a.kill()
    run.nothing_is_left()


def test_worker_that_is_killed_is_started_again_with_all_others(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2", "--nproc-per-node", "2", "--max-restarts", "1")
    a, b = run.start("a", words=("children",)), run.start("b")
    workers = consistent(a.workers(4, count=2), b.workers(4, count=2))
    number = workers[0]["RALLYPOINT_ROUND"]
    os.kill(workers[0]["pid"], signal.SIGKILL)
    again = consistent(*(one.workers(4, above=number, count=2) for one in (a, b)))
    assert {fact["TORCHELASTIC_RESTART_COUNT"] for fact in again} == {1}
    assert not {fact["pid"] for fact in workers} & {fact["pid"] for fact in again}
    assert a.wait_line("was killed by SIGKILL")
    assert b.wait_line("root cause", "on a was killed by SIGKILL", "(restart 1 of 1)"), "b gets the reason"
    os.kill(again[0]["pid"], signal.SIGKILL)
    assert (a.wait_exit(), b.wait_exit()) == (80, 80)
    run.nothing_is_left()


def test_guardian_that_is_killed_takes_its_workers_along_and_counts_as_their_failure(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:1", "--max-restarts", "1")
    a = run.start("a", words=("children",))
    (worker,) = a.workers(1)
    guardian = int(Path(f"/proc/{worker['pid']}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guardian, signal.SIGKILL)
    (again,) = a.workers(1, above=worker["RALLYPOINT_ROUND"])
    assert again["TORCHELASTIC_RESTART_COUNT"] == 1
    run.wait_left(4, "a guardian, a worker and its two children; of the killed ones nothing is left")
    run.finish(a)


def test_node_that_is_preempted_leaves_first_and_gives_its_workers_time(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:2", "--grace-period", "1.5")
    a, b = run.start("a"), run.start("b", words=("deaf",))
    number = consistent(a.workers(2), b.workers(2))[0]["RALLYPOINT_ROUND"]
    told_at = b.terminate()
    b.wait("deaf")
    alone = a.workers(1, above=number)[0]
    assert a.wait_line("stopping the workers", "b", "SIGTERM"), "a gets the node that left and the reason"
    assert b.wait_exit() == 143
    until_said("history", run.url, parts=("b was stopped by SIGTERM",))
    assert alone["at"] - told_at < PATIENCE_S
    assert marked(f"{run.id}/b") == [], "the worker that ignores SIGTERM was killed"
    run.finish(a)


def test_drained_node_ends_without_failure(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:2")
    a, b = run.start("a"), run.start("b")
    number = consistent(a.workers(2), b.workers(2))[0]["RALLYPOINT_ROUND"]
    until_said("drain", run.url, "b", "--reason", "its disk is failing", parts=("b",))
    assert b.wait_exit() == 0
    assert b.wait_line("its disk is failing")
    a.workers(1, above=number)
    until_said("history", run.url, parts=("b was drained by ", "its disk is failing"))
    run.finish(a)


def test_node_whose_preflight_fails_is_held_back_and_the_run_shows_the_reason(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2", conf="hold_back=0.5")
    check = f"test -e {tmp_path}/fit || {{ echo 'GPU 3 has fallen off the bus'; exit 9; }}"
    a, b = run.start("a"), run.start("b", "--preflight", check)
    assert b.wait_line("this node is held back", "exited with 9: GPU 3 has fallen off the bus")
    why = until_said("why", run.url, parts=(" b did not join ", "GPU 3 has fallen off the bus"))
    assert why.startswith("Fix what the preflight check found on b")
    assert "did not join: b" in until_said("status", run.url, parts=("GPU 3",))
    run.say("fit")
    consistent(a.workers(2), b.workers(2))
    assert "did not join" not in until_said("why", run.url, parts=("active",))
    run.finish(a, b)


def test_node_whose_preflight_never_succeeds_ends_with_its_own_code(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2", conf="hold_back=0.2,join_timeout=1")
    b = run.start("b", "--preflight", f"export RALLYPOINT_WORKER_OF={run.id}/b; setsid sleep 300 & exit 3")
    assert b.wait_exit() == 83
    assert b.wait_line("did not join: preflight", "exited with 3")
    run.nothing_is_left()


def test_output_of_workers_goes_to_console_and_files_as_configured(stage, endpoint, tmp_path):
    logs = tmp_path / "logs"
    run = Run(stage, endpoint, tmp_path, "1:1", "--nproc-per-node", "2", "--log-dir", str(logs), "--tee", "0:1")
    a = run.start("a", "--redirects", "1:3")
    (worker,) = a.workers(2)
    assert worker["LOCAL_RANK"] == 0, "the other one is redirected"
    run.finish(a)
    files = {str(path.relative_to(logs / run.id)): path.read_text() for path in logs.rglob("*.log")}
    assert files.keys() == {f"a/round_1/{name}" for name in ("0/stdout.log", "1/stdout.log", "1/stderr.log")}
    assert '"LOCAL_RANK": 1' in files["a/round_1/1/stdout.log"]
    assert '"LOCAL_RANK": 0' in files["a/round_1/0/stdout.log"]
    assert "[rank" not in files["a/round_1/0/stdout.log"], "prefixes are only for the console"


def test_program_that_does_not_exist_fails_with_the_code_of_a_shell(stage, tmp_path):
    done = command("run", "--standalone", "--", "./no-such-program")
    assert done.returncode == 127
    assert "cannot start './no-such-program'" in done.stderr
    begun_at = time.monotonic()
    done = command("run", "--standalone", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR; exit 0")
    assert (done.returncode, done.stdout) == (0, "[rank 0] 0 of 1 at 127.0.0.1\n"), done.stderr
    assert time.monotonic() - begun_at < PATIENCE_S


@pytest.mark.slow
def test_workers_go_on_while_no_server_runs_and_restart_once_when_it_is_back(stage, tmp_path):
    bind, data = loopback(), str(tmp_path / "data")
    server = stage.serve(bind, "--data", data)
    run = Run(stage, bind, tmp_path, "2", conf="keep_alive_interval=1,keep_alive_max_attempt=3")
    a, b = run.start("a"), run.start("b")
    number = consistent(a.workers(2), b.workers(2))[0]["RALLYPOINT_ROUND"]
    server.kill()
    for one in (a, b):
        one.wait_line("lost its session")
        one.wait_line("no server is running", "the workers go on until one is")
        assert one.all("told") == []
    run.wait_left(4, "two workers and their guardians")
    stage.serve(bind, "--data", data)
    consistent(*(one.workers(2, above=number) for one in (a, b)))
    run.finish(a, b)
    assert [len(one.all("told")) for one in (a, b)] == [1, 1], "stopped once, when it was back"


@pytest.mark.slow
def test_run_goes_on_if_the_launcher_that_hosts_its_server_is_killed(stage, tmp_path):
    run = Run(stage, loopback(), tmp_path, "2:3", conf="keep_alive_interval=1,keep_alive_max_attempt=3")
    a = run.start("a")
    a.wait_line("serves this run itself")
    b, c = run.start("b"), run.start("c")
    number = consistent(*(one.workers(3) for one in (a, b, c)))[0]["RALLYPOINT_ROUND"]
    a.kill()
    consistent(*(one.workers(2, above=number) for one in (b, c)))
    assert any("serves this run itself" in line for line in b.errors + c.errors)
    run.finish(b, c)
