"""The guardian as the launcher runs it: real processes, none of which is left afterwards."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rallypoint.launcher import worker_guardian
from tests.patience import PATIENCE_S, until

FORKS = "sleep 300 & setsid sleep 300 & (setsid sh -c 'sleep 300 & sleep 300' &) ; echo up; exec sleep 300"


class GuardianProcess:
    """A guardian with one worker, or several equal ones."""

    def __init__(self, *argv: str, mark: str, workers: int = 1, at_once: bytes = b"") -> None:
        self.mark = f"TEST_GUARD={mark}"
        reader, writer = os.pipe()
        writers = [writer, *(os.dup(writer) for _ in range(workers - 1))]
        self.output = os.fdopen(reader, "rb", buffering=0)
        self.popen = subprocess.Popen(
            [sys.executable, "-I", "-S", worker_guardian.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=writers,
            start_new_session=True,
            bufsize=0,
        )
        env = {"PATH": os.environ["PATH"], "TEST_GUARD": mark}
        specs = [
            {"argv": argv, "env": env, "local_rank": rank, "stdout": fd, "stderr": fd}
            for rank, fd in enumerate(writers)
        ]
        text = json.dumps(specs).encode()
        self.tell(f"{len(text)}\n".encode() + text + at_once)
        for fd in writers:
            os.close(fd)

    def tell(self, words: bytes) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(words)

    def line(self) -> list[str]:
        """The next line that the guardian reports."""
        assert self.popen.stdout is not None
        found = b""
        deadline = time.monotonic() + PATIENCE_S
        while not found.endswith(b"\n"):
            ready, _, _ = select.select([self.popen.stdout], [], [], deadline - time.monotonic())
            assert ready, "it reports nothing"
            part = self.popen.stdout.read(1)
            assert part, "it has ended"
            found += part
        return found.decode().split()

    def wait_up(self) -> None:
        assert self.output.read(3) == b"up\n"

    def left(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def end(self) -> None:
        for stream in (self.popen.stdin, self.popen.stdout, self.output):
            assert stream is not None
            stream.close()
        self.popen.wait(PATIENCE_S)
        until(lambda: not self.left(), "nothing is left")


@pytest.fixture
def held(request, tmp_path):
    made: list[GuardianProcess] = []

    def make(*argv: str) -> GuardianProcess:
        made.append(GuardianProcess(*argv, mark=str(tmp_path)))
        assert made[-1].line()[0] == "started"
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_end_of_a_worker_is_reported_with_its_code(held):
    one = held("sh", "-c", "exit 7")
    assert [one.line(), one.line()] == [["exited", "0", "7"], ["empty"]]
    assert one.popen.wait(PATIENCE_S) == 0


def test_signal_that_ended_a_worker_is_reported_as_by_a_shell(held):
    one = held("sh", "-c", "kill -9 $$")
    assert one.line() == ["exited", "0", "137"]


def test_missing_program_is_reported_by_its_code_and_a_message(held):
    one = held("/no/such/program")
    assert one.line() == ["exited", "0", "127"]
    assert b"cannot start '/no/such/program': No such file or directory" in one.output.read(200)


def test_worker_that_ends_by_itself_leaves_no_children(held):
    one = held("sh", "-c", "sleep 300 & setsid sleep 300 & exit 0")
    assert [one.line(), one.line()] == [["exited", "0", "0"], ["empty"]]
    assert one.left() == []


def test_command_to_terminate_reaches_the_worker_and_command_to_kill_all_of_its_children(held):
    loop = FORKS.replace("exec sleep 300", "while :; do sleep 0.05; done")
    one = held("sh", "-c", "trap 'echo terminated' TERM; " + loop)
    one.wait_up()
    until(lambda: len(one.left()) >= 5, "all of them are there")
    one.tell(b"t\n")
    output = b""
    while b"terminated\n" not in output:  # its shell may print more
        output += one.output.read(100)
    assert one.popen.poll() is None, "it was only asked"
    one.tell(b"k\n")
    assert [one.line(), one.line()] == [["exited", "0", "137"], ["empty"]]
    assert one.left() == []


def test_command_to_terminate_reaches_workers_whose_programs_have_not_started(tmp_path):
    one = GuardianProcess("sleep", "300", mark=str(tmp_path), at_once=b"t\n")
    try:
        assert one.line()[0] == "started"
        assert one.line() == ["exited", "0", str(128 + signal.SIGTERM)]
    finally:
        one.end()


def test_worker_has_its_own_output_and_none_of_the_others(tmp_path):
    one = GuardianProcess("sh", "-c", "ls -m /proc/$$/fd; true", mark=str(tmp_path), workers=3)
    try:
        output = b"".join(iter(lambda: one.output.read(100), b""))
        assert output.split(b"\n")[:3] == [b"0, 1, 2"] * 3
    finally:
        one.end()


def test_process_that_may_not_be_killed_is_no_error(monkeypatch):
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    with subprocess.Popen(["sleep", "300"]) as other:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", refuse)
            assert other.pid in worker_guardian.kill_below(os.getpid())
        other.kill()


def test_end_of_the_launcher_kills_all_processes(held):
    one = held("sh", "-c", FORKS)
    one.wait_up()
    assert one.popen.stdin is not None
    one.popen.stdin.close()
    assert one.popen.wait(PATIENCE_S) == 0
    assert one.left() == []


def test_worker_dies_with_a_guardian_that_is_killed(held):
    one = held("sh", "-c", "echo up; exec sleep 300")
    one.wait_up()
    one.popen.kill()
    until(lambda: not one.left(), "the worker is gone")


def test_signals_that_the_guardian_ignores_are_not_ignored_by_workers(held):
    one = held("sh", "-c", "echo up; exec sleep 300")
    one.wait_up()
    ignored = int(
        next(
            line.split()[1]
            for line in Path(f"/proc/{one.left()[0]}/status").read_text().splitlines()
            if line.startswith("SigIgn")
        ),
        16,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        assert not ignored >> (number - 1) & 1
