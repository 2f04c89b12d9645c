"""Workers that hang: with `--stall-timeout` they are found, and the stacks of all nodes are written before a kill."""

import sys
from pathlib import Path

import pytest

from tests.e2e.kit import HERE, Fact, Stage, loopback
from tests.e2e.launching import Launcher, Run
from tests.e2e.operating import until_said

HANG_WORKER = str(HERE / "hang_worker.py")


@pytest.fixture
def endpoint(stage: Stage) -> str:
    return stage.serve(loopback()).wait_listening()


def start(run: Run, name: str, mode: str, *flags: str) -> Launcher:
    """A launcher of the worker that hangs, as rank 1."""
    argv = [sys.executable, "-m", "rallypoint", "run", *run.flags, "--name", name, "--local-addr", "127.0.0.1", *flags]
    launcher = Launcher(name, [*argv, HANG_WORKER, str(run.directory), mode, "1"])
    run.stage.processes.append(launcher)
    run.launchers.append(launcher)
    return launcher


def stacks(run: Run, number: int) -> dict[str, str]:
    """The stacks of the round's workers, by node."""
    found = (run.directory / "logs").glob(f"{run.id}/*/round_{number}/*/stacks.txt")
    return {path.parts[-4]: path.read_text() for path in found}


def private_files(worker: Fact) -> list[Path]:
    """The private files of its launcher, which the worker has been told of."""
    environ = Path(f"/proc/{worker['pid']}/environ").read_text().split("\0")
    found = dict(part.split("=", 1) for part in environ if part)
    return [Path(found["RALLYPOINT_ALIVE"]) / "pipe", Path(found["TORCHELASTIC_ERROR_FILE"])]


@pytest.mark.parametrize(("mode", "frame"), [("loop", "hang_in_a_loop"), ("recv", "hang_in_recv"), ("stop", "main")])
def test_worker_that_hangs_is_named_and_the_stacks_of_both_nodes_are_there(stage, endpoint, tmp_path, mode, frame):
    run = Run(stage, endpoint, tmp_path, "2", "--stall-timeout", "3", "--max-restarts", "3")
    a, b = (start(run, name, mode, "--log-dir", str(tmp_path / "logs")) for name in ("a", "b"))
    first = a.workers(2, count=1) + b.workers(2, count=1)
    number = first[0]["RALLYPOINT_ROUND"]
    for one in (a, b):
        one.wait_line("a worker has stalled: rank", "said nothing for", "the stacks of this node's workers are in")
        one.wait_line("stopping the workers:", "said nothing for", "last: step 5, training")
    again = a.workers(2, above=number) + b.workers(2, above=number)
    assert {fact["TORCHELASTIC_RESTART_COUNT"] for fact in again} == {1}, "one failure, counted once"
    run.finish(a, b)
    written = stacks(run, number)
    assert written.keys() == {"a", "b"}
    assert any("=== rank 1: a worker of the round has stalled" in text and frame in text for text in written.values())
    assert all("in main" in text or "main (" in text for text in written.values()), written
    lines = [line for one in (a, b) for line in one.errors]
    assert sum("stacks of all nodes: " in line for line in lines) == 1, "one launcher reports for all"
    if mode == "stop":
        assert any("rank 1 on" in line and "its process is stopped by a signal" in line for line in lines)


def test_node_that_has_finished_takes_part_in_the_report_of_a_stall(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2", "--stall-timeout", "3", "--max-restarts", "1")
    a, b = (start(run, name, "recv", "--log-dir", str(tmp_path / "logs")) for name in ("a", "b"))
    hung, other = (a, b) if a.workers(2)[0]["rank"] == 1 else (b, a)
    hung.wait("hangs")
    run.say("finish")
    assert (hung.wait_exit(), other.wait_exit()) == (0, 0), "all began again, and finished"
    assert not any("stopping the workers" in line for line in other.errors), "they had finished"
    assert hung.wait_line("stacks of all nodes: ")
    assert not any("no report from" in line for line in hung.errors)
    run.nothing_is_left()


def test_stall_without_a_restart_left_ends_all_nodes_with_one_code(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2", "--stall-timeout", "2")
    a, b = (start(run, name, "recv", "--log-dir", str(tmp_path / "logs")) for name in ("a", "b"))
    assert (a.wait_exit(), b.wait_exit()) == (80, 80)
    run.nothing_is_left()
    assert stacks(run, 1).keys() == {"a", "b"}


def test_worker_that_never_says_that_it_is_alive_is_not_judged(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2", "--stall-timeout", "0.2")
    a, b = start(run, "a", "mute"), start(run, "b", "mute")
    hung = a if a.workers(2)[0]["rank"] == 1 else b
    hung.wait("hangs")
    for launcher in (a, b):
        launcher.terminate()
        assert launcher.wait_exit() == 143
        assert not any("stalled" in line for line in launcher.errors)


def test_worker_that_ignores_sigterm_leaves_its_stacks_before_it_is_killed(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:1", "--grace-period", "0.5", "--log-dir", str(tmp_path / "logs"))
    a = start(run, "a", "deaf")
    pipe, _ = private_files(a.workers(1)[0])
    a.terminate()
    assert a.wait_exit() == 143
    assert a.wait_line("still there 0.5 s after SIGTERM", "stacks are in")
    assert "main" in stacks(run, 1)["a"]
    assert not pipe.parent.exists()


def test_killed_launcher_leaves_no_temporary_directory(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:1")
    a = start(run, "a", "none")
    (worker,) = a.workers(1)
    pipe, errors = private_files(worker)
    errors.write_text("{}")
    assert pipe.exists()
    a.kill()
    run.nothing_is_left()
    assert not pipe.parent.exists()
    assert not errors.parents[1].exists()


def test_node_that_has_finished_waits_only_for_a_stated_time_for_a_lost_one(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2", "--finished-timeout", "3")
    a, b = run.start("a"), run.start("b")
    a.workers(2)
    b.workers(2)
    run.say("finish-a")
    a.wait_line("this node has finished; not finished yet: b", "gives up in", "(--exit-timeout)")
    b.kill()
    a.wait_line("waiting for", "1 of at least 2 nodes joined", "gives up in", "(--finished-timeout)")
    assert a.wait_exit() == 82
    a.wait_line("exiting with code 82: this node's workers finished in round 1", "no new round within 3 s")
    run.nothing_is_left()


def test_node_that_has_finished_takes_part_again_if_the_lost_one_comes_back_in_time(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2", "--finished-timeout", "50")
    a, b = run.start("a"), run.start("b")
    a.workers(2)
    b.workers(2)
    run.say("finish-a")
    a.wait_line("this node has finished; not finished yet: b")
    b.kill()
    a.wait_line("waiting for", "1 of at least 2 nodes joined", "gives up in", "(--finished-timeout)")
    c = run.start("b")
    c.workers(2)
    run.finish(a, c)


def test_script_that_does_not_exist_ends_each_node_at_once_and_the_run_says_so(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2", "--max-restarts", "3")
    a = run.start("a")
    argv = [sys.executable, "-m", "rallypoint", "run", *run.flags, "--name", "b", str(tmp_path / "no-such.py")]
    b = Launcher("b", argv)
    stage.processes.append(b)
    assert b.wait_exit() == 2
    b.wait_line("this node did not join: the script", "no-such.py' does not exist")
    until_said("why", run.url, parts=("no-such.py' does not exist",))
    b = run.start("b")
    assert {fact["TORCHELASTIC_RESTART_COUNT"] for fact in a.workers(2) + b.workers(2)} == {0}
    run.finish(a, b)


def test_workers_that_crash_at_their_start_are_started_again_later_each_time(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:1", "--max-restarts", "3")
    a = Launcher("a", [sys.executable, "-m", "rallypoint", "run", *run.flags, "--", "sh", "-c", "exit 9"])
    stage.processes.append(a)
    assert a.wait_exit() == 80
    a.wait_line("the workers failed 3 times within 2 s of their start: the next start is in")
    assert sum("the next start is in" in line for line in a.errors) == 1
