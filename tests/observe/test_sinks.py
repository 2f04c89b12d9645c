"""The event file: one line an event, bounded in size and number; the job goes on if it cannot be written."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

import rallypoint
from rallypoint.errors import SettingsError
from rallypoint.events import Emitter, EventsGoOn, EventsTrouble, NodeLost, WaitingFor
from rallypoint.observe import sinks
from rallypoint.observe.sinks import JsonLines
from tests.patience import unique


def waiting(reason):
    return WaitingFor(run_id="r", by="a", reason=str(reason))


def lines(*paths):
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def made(tmp_path):
    """Makes sinks that are closed when the test ends."""
    open_ones = []

    def make(**options):
        told = []
        sink = JsonLines(tmp_path / "events.jsonl", tell=told.append, **options)
        open_ones.append(sink)
        return sink, told, tmp_path / "events.jsonl"

    yield make
    for sink in open_ones:
        sink.close()


def test_every_event_is_a_line_with_its_time_level_and_sentence(made):
    sink, told, path = made(wall=lambda: 12.5)
    emit = Emitter(sink)
    emit(NodeLost(run_id="r", by="server", node="b", round=3, reason="its session ended"))
    emit(waiting("ünïcode\nand a line end"))
    assert sink.wait_written()
    first, second = lines(path)
    assert first == {
        "at": 12.5,
        "event": "NodeLost",
        "run_id": "r",
        "by": "server",
        "node": "b",
        "round": 3,
        "reason": "its session ended",
        "level": "warning",
        "text": "b (member of round 3) is lost: its session ended",
    }
    assert second["reason"] == "ünïcode\nand a line end"
    assert told == []


def test_file_rotates_by_size_and_a_bounded_number_is_kept(made, tmp_path):
    sink, _, path = made(max_bytes=1000, kept=2)
    for number in range(100):
        sink(waiting(number))
        assert sink.wait_written()
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1", "events.jsonl.2"]
    files = [path.with_name("events.jsonl.2"), path.with_name("events.jsonl.1"), path]
    assert all(file.stat().st_size <= 1000 for file in files)
    reasons = [int(line["reason"]) for line in lines(*files)]
    assert reasons == list(range(reasons[0], 100))


def test_number_of_old_files_may_be_zero(made, tmp_path):
    sink, _, path = made(max_bytes=300, kept=0)
    for number in range(20):
        sink(waiting(number))
    assert sink.wait_written()
    assert os.listdir(tmp_path) == ["events.jsonl"]
    assert lines(path)[-1]["reason"] == "19"


def test_file_of_an_earlier_process_is_continued(made):
    sink, _, path = made()
    sink(waiting("before"))
    sink.close()
    again, _, _ = made()
    again(waiting("after"))
    assert again.wait_written()
    assert [line["reason"] for line in lines(path)] == ["before", "after"]
    sink(waiting("too late"))
    assert len(lines(path)) == 2


def test_file_that_another_program_moved_is_started_anew(made):
    sink, _, path = made()
    sink(waiting("before"))
    assert sink.wait_written()
    path.rename(path.with_name("moved"))
    sink(waiting("after"))
    assert sink.wait_written()
    assert [line["reason"] for line in lines(path)] == ["after"]


def test_event_that_cannot_be_encoded_is_the_only_one_lost(made):
    sink, _, path = made()
    sink(waiting("a path \udcff"))
    sink(waiting("after it"))
    assert sink.wait_written(5)
    sink(waiting("later"))
    assert sink.wait_written(5)
    assert [line.get("reason", line.get("lost")) for line in lines(path)] == ["after it", 1, "later"]


def test_full_disk_is_reported_once_and_the_number_of_lost_events_afterwards(made, monkeypatch):
    clock = Clock()
    sink, told, path = made(clock=clock)
    full = threading.Event()
    write = os.write

    def fails(fd, data):
        if full.is_set() and fd == sink._file._fd:
            if len(data) > 20:
                return write(fd, data[:20])  # a part of it fits: the line is cut short
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(sinks.os, "write", fails)
    sink(waiting("first"))
    assert sink.wait_written()
    full.set()
    for number in range(10):
        sink(waiting(number))
        assert sink.wait_written()
        clock.now += 0.5
    assert [type(event) for event in told] == [EventsTrouble]
    assert "No space left on device" in str(told[0])
    assert str(path) in str(told[0])
    full.clear()
    clock.now += 10
    sink(waiting("again"))
    assert sink.wait_written()
    assert [type(event) for event in told] == [EventsTrouble, EventsGoOn]
    assert told[1].lost == 10
    whole = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [line.get("reason") for line in whole] == ["first", None, "again"]
    assert (whole[1]["event"], whole[1]["lost"]) == ("EventsGoOn", 10)


def test_slow_disk_blocks_no_caller_and_lost_events_are_counted(made, monkeypatch):
    monkeypatch.setattr(sinks, "MAX_QUEUED", 5)
    sink, _, path = made()
    go = threading.Event()
    write = os.write

    def slow(fd, data):
        if fd == sink._file._fd:
            assert go.wait(60)
        return write(fd, data)

    monkeypatch.setattr(sinks.os, "write", slow)
    for number in range(100):
        sink(waiting(number))  # returns although nothing is written
    go.set()
    assert sink.wait_written(60)
    sink(waiting("last"))
    assert sink.wait_written(60)
    found = lines(path)
    lost = sum(line.get("lost", 0) for line in found)
    assert lost + len([line for line in found if line["event"] == "WaitingFor"]) == 101
    assert lost >= 90


def test_file_that_cannot_be_opened_is_an_error_at_once(tmp_path):
    with pytest.raises(SettingsError) as error:
        JsonLines(tmp_path / "missing" / "events.jsonl")
    assert "No such file or directory" in str(error.value)
    with pytest.raises(SettingsError):
        JsonLines(tmp_path / "events.jsonl", max_bytes=0)


def test_events_are_written_at_exit_without_a_call_of_close(tmp_path):
    path = tmp_path / "events.jsonl"
    program = f"""
import rallypoint
from rallypoint.observe.sinks import JsonLines
handler = rallypoint.create_handler("memory:///run?min_nodes=1&name=a", sinks=[JsonLines({str(path)!r})])
handler.next_rendezvous()
handler.shutdown()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    kinds = [line["event"] for line in lines(path)]
    assert {"JoinStarted", "RoundActive", "RoundEntered", "RunClosed", "NodeLeft"} <= set(kinds)
    (active,) = [line for line in lines(path) if line["event"] == "RoundActive"]
    assert active["confirm_s"] >= 0


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small disk needs root")
def test_job_on_a_disk_that_is_really_full_goes_on(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no mounts here: {mounted.stderr.decode().strip()}")
    try:
        told = []
        sink = JsonLines(tmp_path / "events.jsonl", tell=told.append)
        (tmp_path / "fills").write_bytes(bytes(40 * 1024))
        handler = rallypoint.create_handler(f"memory://{unique()}/run?min_nodes=1", sinks=[sink])
        for _ in range(40):
            handler.next_rendezvous()
        assert sink.wait_written()
        assert [type(event) for event in told] == [EventsTrouble]
        (tmp_path / "fills").unlink()
        sink._retry_at = 0.0
        handler.shutdown()
        sink.close()
        assert [type(event) for event in told] == [EventsTrouble, EventsGoOn]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
