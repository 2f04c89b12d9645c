"""`rallypoint run` with workers that communicate: a lost node is not taken for a failure of its peers' workers."""

import time

import pytest

from tests.backends.etcd.kit import needs, running
from tests.e2e.kit import HERE, Fact, Stage, loopback
from tests.e2e.launching import Launcher, Run
from tests.e2e.operating import ask

RING = str(HERE / "ring_worker.py")
DDP = str(HERE / "ddp_worker.py")


@pytest.fixture
def endpoint(stage: Stage) -> str:
    return stage.serve(loopback()).wait_listening()


def three(run: Run, *words: str, program: str = RING) -> tuple[list[Launcher], int]:
    """Three launchers whose workers communicate, by the rank of their workers; the number of their round."""
    launchers = [run.start(name, words=words, program=program) for name in "abc"]
    workers = [one.workers(3)[0] for one in launchers]
    by_rank = sorted(zip(workers, launchers, strict=True), key=lambda pair: int(pair[0]["rank"]))
    return [launcher for _, launcher in by_rank], workers[0]["RALLYPOINT_ROUND"]


def goes_on(run: Run, launchers: list[Launcher], number: int, restarts: int = 0) -> list[Fact]:
    """The workers of the next round; then the run finishes, and every launcher exits with 0."""
    again = [one.workers(len(launchers), above=number)[0] for one in launchers]
    assert {fact["TORCHELASTIC_RESTART_COUNT"] for fact in again} == {restarts}
    run.finish(*launchers)
    return again


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_kill_of_a_launcher_ends_no_job_and_costs_no_restart(stage, endpoint, tmp_path, victim, restarts):
    run = Run(stage, endpoint, tmp_path, "1:3", "--max-restarts", str(restarts))
    launchers, number = three(run)
    killed_at = launchers.pop(victim).kill()
    again = goes_on(run, launchers, number)
    print(f"kill -9 to the first line of the new round's workers: {min(w['at'] for w in again) - killed_at:.2f} s")
    for one in launchers:
        assert one.wait_line("lost: ", "is taken for its echo, and no restart is counted")


def test_kill_of_a_launcher_ends_no_training_with_ddp(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:3")
    launchers, number = three(run, program=DDP)
    launchers.pop(1).kill()
    goes_on(run, launchers, number)


def test_machine_that_freezes_is_waited_for_until_its_session_ends(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:3", conf="keep_alive_interval=1,keep_alive_max_attempt=4")
    launchers, number = three(run, "1")
    frozen = launchers.pop()
    frozen.freeze_all()
    for one in launchers:
        assert one.wait_line("stopping the workers", "exited with 1")
    lines = [line for one in launchers for line in one.errors]
    assert not any("root cause" in line for line in lines), "it is not known yet whether a node was lost"
    again = [one.workers(2, above=number)[0] for one in launchers]
    assert {fact["TORCHELASTIC_RESTART_COUNT"] for fact in again} == {0}
    said = [line for one in launchers for line in one.errors if "waiting for" in line]
    assert any("Is a lost node the reason?" in line and "within 4 s" in line for line in said), said
    frozen.thaw_all()
    frozen.wait_line("lost its session")
    launchers.append(frozen)
    goes_on(run, launchers, again[0]["RALLYPOINT_ROUND"])


def test_launcher_that_alone_is_stopped_beyond_its_time_to_live_ends_no_job(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:3", conf="keep_alive_interval=1,keep_alive_max_attempt=3")
    launchers, number = three(run)
    stopped = launchers.pop(1)
    stopped.stop()
    again = [one.workers(2, above=number)[0] for one in launchers]
    assert {fact["TORCHELASTIC_RESTART_COUNT"] for fact in again} == {0}
    stopped.go_on()
    stopped.wait_line("stopping the workers")
    launchers.append(stopped)
    goes_on(run, launchers, again[0]["RALLYPOINT_ROUND"])


@pytest.mark.parametrize(
    ("what", "code", "how"),
    [
        ("exit 1", 1, "exited with 1: cannot go on"),
        ("exit 3", 3, "exited with 3: cannot go on"),
        ("signal SIGSEGV", 139, "was killed by SIGSEGV"),
        ("signal SIGKILL", 137, "was killed by SIGKILL, perhaps for want of memory"),
        ("raise CUDA out of memory", 1, "exited with 1: RuntimeError: CUDA out of memory"),
        ("record CUDA out of memory", 1, "exited with 1: RuntimeError: CUDA out of memory"),
    ],
)
def test_workers_own_failure_is_counted_once_and_named_by_all_in_the_same_words(
    stage, endpoint, tmp_path, what, code, how
):
    run = Run(stage, endpoint, tmp_path, "3", "--max-restarts", "1")
    launchers, number = three(run)
    run.say("do-1", what)
    again = [one.workers(3, above=number)[0] for one in launchers]
    assert {fact["TORCHELASTIC_RESTART_COUNT"] for fact in again} == {1}
    cause = f"rank 1 on {launchers[1].name} {how}"
    for one in launchers:
        assert one.wait_line(f"root cause of the end of round {number}: {cause} (restart 1 of 1)")
        if "memory" in what:
            assert one.wait_line("  | Traceback (most recent call last):")
            assert one.wait_line("  | RuntimeError: CUDA out of memory")
    by_rank = sorted(zip(again, launchers, strict=True), key=lambda pair: int(pair[0]["rank"]))
    cause = f"rank 1 on {by_rank[1][1].name} {how}"
    run.say("do-1", what)
    assert [one.wait_exit() for one in launchers] == [80, 80, 80]
    for one in launchers:
        assert f"exiting with code 80: {cause}, and the run has used its 1 restart" in one.errors[-1], one.story
        assert len([line for line in one.errors if "root cause" in line]) == 2
    assert cause in ask("status", run.url), "the run was closed for that reason"


def test_worker_that_is_told_to_go_with_its_launcher_has_not_failed(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1:3")
    launchers, number = three(run)
    preempted = launchers.pop(1)
    (worker,) = preempted.workers(3)
    run.say("do-1", "signal SIGTERM")
    preempted.wait_line("stopping the workers", "was killed by SIGTERM")
    preempted.terminate()
    assert preempted.wait_exit() == 143
    goes_on(run, launchers, number)
    assert worker["rank"] == 1


def test_node_that_has_finished_answers_and_takes_part_again(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "2", "--max-restarts", "1")
    a, b = run.start("a"), run.start("b")
    workers = [one.workers(2)[0] for one in (a, b)]
    run.say("finish-a")
    a.wait("done")
    (tmp_path / "finish-a").unlink()
    run.say(f"fail-{workers[1]['rank']}", "3")
    again = [one.workers(2, above=workers[0]["RALLYPOINT_ROUND"])[0] for one in (a, b)]
    assert {fact["TORCHELASTIC_RESTART_COUNT"] for fact in again} == {1}
    run.finish(a, b)


def test_failure_of_a_run_of_one_node_is_not_waited_for(stage, endpoint, tmp_path):
    run = Run(stage, endpoint, tmp_path, "1", "--max-restarts", "1")
    a = run.start("a", program=RING)
    number = a.workers(1)[0]["RALLYPOINT_ROUND"]
    failed_at = time.monotonic()
    run.say("do-0", "raise Connection refused")
    again = a.workers(1, above=number)[0]
    print(f"failure to the first line of the restarted worker: {again['at'] - failed_at:.2f} s")
    assert not [line for line in a.errors if "waiting for" in line and "lost node" in line]
    run.finish(a)


def test_failure_while_no_server_runs_ends_nothing_and_is_explained_by_lost_sessions(stage, tmp_path):
    bind, data = loopback(), str(tmp_path / "data")
    server = stage.serve(bind, "--data", data)
    run = Run(stage, bind, tmp_path, "3", conf="keep_alive_interval=1,keep_alive_max_attempt=3")
    launchers, number = three(run)
    server.kill()
    run.say("do-1", "exit 3")
    for one in launchers:
        one.wait_line("lost its session")
    stage.serve(bind, "--data", data)
    goes_on(run, launchers, number)


def test_node_whose_worker_has_failed_waits_for_a_server_only_until_the_join_timeout(stage, tmp_path):
    bind = loopback()
    server = stage.serve(bind)
    run = Run(
        stage, bind, tmp_path, "2", conf="keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=3,is_host=no"
    )
    a, b = (run.start(name, program=RING) for name in "ab")
    assert a.workers(2)
    assert b.workers(2)
    server.kill()
    run.say("do-1", "exit 3")
    assert (a.wait_exit(), b.wait_exit()) == (4, 4)
    run.nothing_is_left()


@pytest.mark.slow
def test_kill_of_a_launcher_on_etcd_ends_no_job_and_costs_no_restart(stage, tmp_path):
    directory = tmp_path / "etcd"
    directory.mkdir()
    with running(needs("system"), directory) as cluster:
        conf = "keep_alive_interval=1,keep_alive_max_attempt=3"
        run = Run(stage, cluster.members[0].endpoint, tmp_path, "1:3", "--rdzv-backend", "etcd", conf=conf)
        launchers, number = three(run)
        killed_at = launchers.pop(1).kill()
        again = goes_on(run, launchers, number)
        print(f"kill -9 to the first line of the new round's workers: {min(w['at'] for w in again) - killed_at:.2f} s")
