"""The launcher's console: whole lines of workers with a prefix, and one line about the current wait."""

import os
import pty
import subprocess
import sys
import threading

import pytest

from rallypoint.launcher.console import Console, Limit, Stream
from tests.patience import PATIENCE_S, until


class Ends:
    """Pipes instead of a launcher's stdout and stderr."""

    def __init__(self) -> None:
        self.said = {1: b"", 2: b""}
        self.fds = {}
        for to in (1, 2):
            reader, self.fds[to] = os.pipe()
            threading.Thread(target=self._read, args=(reader, to), daemon=True).start()

    def _read(self, reader: int, to: int) -> None:
        while data := os.read(reader, 4096):
            self.said[to] += data


def follow(console: Console, to: int, prefix: bytes = b"[rank 0] ", file: int | None = None) -> tuple[int, list[str]]:
    """The writing end of a worker's pipe, and a list that gets an item when the console has seen its end."""
    reader, writer = os.pipe()
    ended: list[str] = []
    console.follow(Stream(reader, prefix, to, file, lambda: ended.append("ended")))
    return writer, ended


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_lines_have_prefixes_and_are_never_torn(ends):
    console = Console(ends.fds[1], ends.fds[2])
    one, one_ended = follow(console, 1)
    two, two_ended = follow(console, 1, b"[rank 1] ")
    os.write(one, b"hel")
    os.write(two, b"from the other\n")
    until(lambda: b"other" in ends.said[1], "whole lines are shown at once")
    os.write(one, b"lo\nprogress 1%\rprogress 2%\r\nlast words without an end")
    os.close(one)
    os.close(two)
    until(lambda: one_ended and two_ended, "both have ended")
    console.close()
    until(lambda: b"last words" in ends.said[1], "everything is shown")
    assert ends.said[1].splitlines() == [
        b"[rank 1] from the other",
        b"[rank 0] hello",
        b"[rank 0] progress 1%",
        b"[rank 0] progress 2%",
        b"[rank 0] last words without an end",
    ]


def test_name_of_a_node_cannot_forge_a_line_of_the_launcher(ends):
    console = Console(ends.fds[1], ends.fds[2])
    console.say("lost: a\033[31m\nrallypoint run: exiting with code 0")
    console.close()
    until(lambda: ends.said[2].endswith(b"\n"), "it is said")
    assert (
        ends.said[2].decode()
        == "rallypoint run: lost: a\N{REPLACEMENT CHARACTER}[31m rallypoint run: exiting with code 0\n"
    )


def test_log_files_hold_the_output_without_prefixes(ends, tmp_path):
    console = Console(ends.fds[1], ends.fds[2])
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    writer, ended = follow(console, 2, file=file)
    os.write(writer, b"one\ntwo")
    os.close(writer)
    until(lambda: ended, "it has ended")
    console.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo"
    until(lambda: ends.said[2] == b"[rank 0] one\n[rank 0] two\n", "and it is shown")


def test_full_disk_is_reported_once_and_stops_no_worker(ends):
    console = Console(ends.fds[1], ends.fds[2])
    writer, ended = follow(console, 1, file=os.open("/dev/full", os.O_WRONLY))
    os.write(writer, b"one\n")
    until(lambda: b"one" in ends.said[1], "it is shown all the same")
    os.write(writer, b"two\n")
    os.close(writer)
    until(lambda: ended, "it has ended")
    console.close()
    until(lambda: b"two" in ends.said[1], "and goes on")
    assert ends.said[2].count(b"a log file can no longer be written") == 1


def test_broken_pipe_does_not_stop_the_workers(ends):
    reader, broken = os.pipe()
    os.close(reader)
    console = Console(broken, ends.fds[2])
    writer, ended = follow(console, 1)
    for _ in range(100):
        os.write(writer, b"x" * 4000 + b"\n")
    os.close(writer)
    until(lambda: ended, "all was taken")
    console.say("still here")
    console.close()
    until(lambda: b"rallypoint run: still here\n" in ends.said[2], "the rest is said")


def test_without_a_terminal_the_waiting_reason_is_printed_when_it_changes_and_every_minute(ends):
    now = [0.0]
    console = Console(ends.fds[1], ends.fds[2], clock=lambda: now[0])
    console.wait_for("1 of 2")
    now[0] = 0.6
    until(lambda: b"waiting for 1 s: 1 of 2\n" in ends.said[2], "it is printed after half a second")
    console.wait_for("1 of 2")
    now[0] = 50.0
    console.wait_for("still 1 of 2")
    until(lambda: b"waiting for 50 s: still 1 of 2\n" in ends.said[2], "a change is printed")
    now[0] = 111.0
    until(lambda: b"waiting for 111 s: still 1 of 2\n" in ends.said[2], "and the same again after a minute")
    console.wait_for(None)
    console.close()
    assert ends.said[2].count(b"\n") == 3
    assert b"\x1b" not in ends.said[2]


def test_on_a_terminal_the_waiting_reason_is_one_line_below_all_others(ends, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    master, terminal = pty.openpty()
    said = [b""]

    def read() -> None:
        while True:
            try:
                said[0] += os.read(master, 4096)
            except OSError:
                return

    threading.Thread(target=read, daemon=True).start()
    now = [0.0]
    console = Console(ends.fds[1], terminal, clock=lambda: now[0])
    assert console.colour("[rank 1]", 1, stream=2) == "\x1b[33m[rank 1]\x1b[0m"
    assert console.colour("[rank 1]", 1, stream=1) == "[rank 1]", "no colour without a terminal"
    console.wait_for("1 of 2")
    now[0] = 1.0
    until(lambda: b"\r\x1b[Krallypoint run: waiting for 1 s: 1 of 2" in said[0], "it is drawn")
    console.say("something else")
    until(lambda: b"\r\x1b[Krallypoint run: something else" in said[0], "another line replaces it")
    now[0] = 7.0
    until(lambda: b"\r\x1b[Krallypoint run: waiting for 7 s: 1 of 2" in said[0], "and it is drawn again")
    console.wait_for(None)
    console.close()
    until(lambda: said[0].endswith(b"\r\x1b[K"), "nothing is left of it")
    os.close(terminal)
    os.close(master)


def test_launcher_with_closed_standard_streams_runs_its_workers(tmp_path):
    talk = f"head -c 1000000 /dev/zero >&2; head -c 1000000 /dev/zero; touch {tmp_path}/done"
    launch = f"exec {sys.executable} -m rallypoint run --standalone -- sh -c '{talk}' <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", launch], timeout=PATIENCE_S, check=False).returncode == 0
    assert (tmp_path / "done").exists()


def test_deadline_of_a_wait_is_named_with_the_time_that_is_left(ends):
    now = [100.0]
    console = Console(ends.fds[1], ends.fds[2], clock=lambda: now[0])
    console.wait_for("the others", Limit("--exit-timeout", 60.0))
    now[0] += 1.0
    until(lambda: b"waiting for 1 s: the others; gives up in 59 s (--exit-timeout)\n" in ends.said[2], "with its limit")
    console.wait_for("the workers to end", Limit("--grace-period", 15.0, "they are killed"))
    now[0] += 5.0
    until(lambda: b"the workers to end; they are killed in 10 s (--grace-period)\n" in ends.said[2], "and what follows")
    now[0] += 70.0
    until(lambda: b"waiting for 76 s: the workers to end\n" in ends.said[2], "no longer, once it has passed")
    console.close()
