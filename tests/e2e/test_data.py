"""Servers that keep their data, as real processes: killed, stopped, wiped, full; and what their nodes notice of it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.crash import campaign
from tests.e2e.kit import PATIENCE_S, Node, Stage, loopback, members_agree
from tests.e2e.operating import ask
from tests.patience import until

QUICK = "last_call_timeout=0.3&local_addr=127.0.0.1&join_timeout=60"
TTL_S = 6.0
SHORT_LIVED = "keep_alive_interval=1&keep_alive_max_attempt=6"
PATIENT = QUICK.replace("last_call_timeout=0.3", "last_call_timeout=3")
"""All who start together are in the first round, on a busy machine, too."""


def undisturbed(*nodes: Node) -> None:
    for node in nodes:
        assert node.all("changed") == []
        assert node.events("SessionLost") == []
        assert len(node.all("round")) == 1


@pytest.mark.parametrize("sync", ["always", "os"])
def test_scenario_08_members_of_a_server_that_is_killed_and_restarted_with_its_data_stay_members(
    stage: Stage, tmp_path, sync
):
    """Row 8: nobody is told of anything, the store is there, and the run goes on."""
    bind, data = loopback(), ("--data", str(tmp_path / "data"), "--sync", sync)
    server = stage.serve(bind, *data)
    nodes = stage.nodes(f"tcp://{bind}/kept?min_nodes=3&max_nodes=4&{QUICK}", "a", "b", "c")
    first = [node.round(size=3) for node in nodes]
    members_agree(*first)
    nodes[0].call("store.set", "key", "before")
    nodes[0].call("store.add", "n", 5)
    for _ in range(3):
        server.kill()
        for node in nodes:
            node.event("BackendUnreachable")
        server = stage.serve(bind, *data)
        server.wait_line("continues with the data in")
        for number, node in enumerate(nodes):
            assert node.call("store.get", "key") == "before"
            node.call("store.set", f"from {number}", node.name)
        undisturbed(*nodes)
    assert nodes[1].call("store.add", "n", 1) == 6

    late = stage.node(f"tcp://{bind}/kept?min_nodes=3&max_nodes=4&{QUICK}", "late")
    second = [node.round(above=first[0]["round"], size=4) for node in (*nodes, late)]
    members_agree(*second)  # the coordinator of the last life goes on, too
    assert "Traceback" not in "\n".join(server.errors)


def test_what_happened_survives_the_server(stage: Stage, tmp_path):
    """A loss from before the restart is told afterwards, once; and the numbers of what happens later go on."""
    bind, data = loopback(), ("--data", str(tmp_path / "data"))
    server = stage.serve(bind, *data)
    url = f"tcp://{bind}/told"
    a, b, c = stage.nodes(f"{url}?min_nodes=2&max_nodes=3&{PATIENT}", "a", "b", "c")
    first = [node.round(size=3) for node in (a, b, c)]
    c.kill()
    members_agree(*(node.round(above=first[0]["round"], size=2) for node in (a, b)))
    lost = "c (member of round 1) is lost: its session ended"
    until(lambda: lost in ask("events", url), "the loss is told")
    before = ask("events", url).splitlines()
    server.kill()
    a.event("BackendUnreachable")
    server = stage.serve(bind, *data)
    server.wait_line("continues with the data in")
    b.kill()
    until(lambda: "b (member of round 2) is lost" in ask("events", url), "the later loss is told, too")
    after = ask("events", url)
    assert after.splitlines()[: len(before)] == before
    assert after.count(lost) == 1
    assert ask("events", url, "--since", "0").strip() == ""


def test_member_that_dies_with_the_server_is_lost_one_time_to_live_after_the_restart(stage: Stage, tmp_path):
    """Sessions begin anew, and end by time as always: the dead do not stay members."""
    bind, data = loopback(), ("--data", str(tmp_path / "data"))
    server = stage.serve(bind, *data)
    a, b, c = stage.nodes(f"tcp://{bind}/dead?min_nodes=2&max_nodes=3&{SHORT_LIVED}&{PATIENT}", "a", "b", "c")
    first = [node.round(size=3) for node in (a, b, c)]
    server.kill()
    c.kill()
    restarted_at = time.monotonic()
    stage.serve(bind, *data)
    told = [node.wait("changed", lambda fact: fact["round"] == first[0]["round"]) for node in (a, b)]
    assert all("c" in fact["reason"] for fact in told), told
    assert min(fact["at"] for fact in told) - restarted_at > TTL_S - 0.2
    members_agree(*(node.round(above=first[0]["round"], size=2) for node in (a, b)))


def test_terminated_server_with_data_goes_on_where_it_was(stage: Stage, tmp_path):
    """SIGTERM: no member is disturbed, either."""
    bind, data = loopback(), ("--data", str(tmp_path / "data"))
    server = stage.serve(bind, *data)
    nodes = stage.nodes(f"tcp://{bind}/term?min_nodes=2&{QUICK}", "a", "b")
    for node in nodes:
        node.round()
    server.terminate()
    assert server.wait_exit() == 0
    server = stage.serve(bind, *data)
    assert [line for line in server.errors if "cut off" in line] == []
    nodes[0].call("store.set", "after", "x")
    assert nodes[1].call("store.get", "after") == "x"
    undisturbed(*nodes)


def test_restart_from_a_wiped_directory_is_one_without_data(stage: Stage, tmp_path):
    """A new generation: the members are told and form one new round."""
    bind, place = loopback(), tmp_path / "data"
    server = stage.serve(bind, "--data", str(place))
    nodes = stage.nodes(f"tcp://{bind}/wiped?min_nodes=2&keep_alive_interval=2&{QUICK}", "a", "b")
    first = [node.round() for node in nodes]
    server.kill()
    shutil.rmtree(place)
    stage.serve(bind, "--data", str(place))
    for node in nodes:
        assert "restarted without its data" in node.wait("changed")["reason"]
    members_agree(*(node.round(above=first[0]["round"]) for node in nodes))


def test_scenario_26_server_that_hangs_with_its_data_loses_nothing(stage: Stage, tmp_path):
    """Row 26, paused in the middle of writing: calls end in their own time, and afterwards each write counts once."""
    server = stage.serve(loopback(), "--data", str(tmp_path / "data"))
    url = f"tcp://{server.wait_listening()}/hang?min_nodes=1&{QUICK}&is_host=false"
    (a,) = stage.nodes(url, "a", mode="hand")
    a.call("next")
    a.call("store.set_timeout", 1.0)
    server.stop()
    adding = [a.ask("store.add", "n", 1) for _ in range(5)]
    assert {a.outcome(number)["kind"] for number in adding} == {"failed"}
    server.go_on()
    a.call("store.set_timeout", 30.0)
    assert 1 <= a.call("store.add", "n", 1) <= 6  # those that timed out may have happened, once


def test_scenario_15_strangers_cost_a_server_with_data_nothing(stage: Stage, tmp_path):
    """Row 15: what strangers send never reaches the log."""
    place = tmp_path / "data"
    server = stage.serve(loopback(), "--data", str(place))
    bind = server.wait_listening()
    (a,) = stage.nodes(f"tcp://{bind}/calm?min_nodes=1&{QUICK}&is_host=false", "a", mode="hand")
    a.call("next")
    a.call("store.set", "k", "v")
    host, _, port = bind.rpartition(":")
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04.", os.urandom(5000), b""):
        with socket.create_connection((host, int(port)), PATIENCE_S) as one:
            one.sendall(junk)
    assert a.call("store.get", "k") == "v"
    server.kill()
    server = stage.serve(bind, "--data", str(place))
    assert a.call("store.get", "k") == "v"
    assert "Traceback" not in "\n".join(server.errors)


# --- disks ------------------------------------------------------------------------------------------------------------


def small_disk(path: Path, size: str) -> None:
    """A file system of its own, of that size."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")


def fill(path: Path) -> None:
    """Until it is full."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_full_disk_stops_acknowledging_disturbs_nobody_and_goes_on_when_there_is_room(stage: Stage, tmp_path):
    """A real file system that is really full. Longer than a time to live: renewals go on."""
    place = tmp_path / "small"
    small_disk(place, "2m")
    try:
        server = stage.serve(loopback(), "--data", str(place / "data"))
        url = f"tcp://{server.wait_listening()}/full?min_nodes=2&{SHORT_LIVED}&{QUICK}&is_host=false"
        a, b = stage.nodes(url, "a", "b")
        for node in (a, b):
            node.round()
        assert a.call("store.add", "n", 1) == 1
        ballast = place / "ballast"
        with pytest.raises(OSError, match="No space"):
            fill(ballast)
        a.call("store.set_timeout", 2.0)
        failed = 0
        while failed < 3:  # what fits into the last block is still kept
            fact = a.outcome(a.ask("store.set", "k", "v" * 3000))
            failed += fact["kind"] == "failed"
        server.wait_line("cannot write", "No space left on device", "Nothing is acknowledged")
        time.sleep(TTL_S + 1)  # longer than a session lives without renewals
        undisturbed(a, b)
        ballast.unlink()
        server.wait_line("can write", "again")
        a.call("store.set_timeout", 30.0)
        assert a.call("store.add", "n", 1) == 2
        undisturbed(a, b)
    finally:
        for process in stage.processes:
            process.end()
        subprocess.run(["umount", str(place)], check=False, timeout=PATIENCE_S)


def refused(*options: str) -> str:
    """What `rallypoint serve` says when it does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "serve", "--bind", loopback(), *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")},
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


def test_options_that_do_not_fit_are_refused(tmp_path):
    assert "give the directory with --data, too" in refused("--sync", "os")
    assert "'always', 'os'" in refused("--data", str(tmp_path), "--sync", "never")
    (tmp_path / "file").write_text("x")
    assert "is not a directory" in refused("--data", str(tmp_path / "file"))


def test_directory_that_cannot_be_written_is_refused():
    assert "/proc/nowhere cannot be" in refused("--data", "/proc/nowhere")


def test_directory_of_another_server_is_refused_while_that_one_lives(stage: Stage, tmp_path):
    server = stage.serve(loopback(), "--data", str(tmp_path))
    said = refused("--data", str(tmp_path))
    assert f"is used by a server that runs (process {server.popen.pid})" in said
    server.kill()
    stage.serve(loopback(), "--data", str(tmp_path))


def test_damaged_log_is_refused_with_what_to_do_and_that_works(stage: Stage, tmp_path):
    """The advice of the refusal, followed to the letter."""
    bind = loopback()
    server = stage.serve(bind, "--data", str(tmp_path))
    (a,) = stage.nodes(f"tcp://{bind}/damaged?min_nodes=1&{QUICK}&is_host=false", "a", mode="hand")
    a.call("next")
    for number in range(20):
        a.call("store.set", f"k{number}", "v")
    server.kill()
    a.end()
    (log,) = tmp_path.glob("log-*")
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(bytes(data))
    said = refused("--data", str(tmp_path))
    assert f"{log} is damaged" in said
    advice = said[said.index("truncate -s") : said.index("`, and")].split()
    subprocess.run(advice, check=True, timeout=PATIENCE_S)
    stage.serve(bind, "--data", str(tmp_path))


def test_torn_log_is_cut_with_a_warning(stage: Stage, tmp_path):
    bind = loopback()
    server = stage.serve(bind, "--data", str(tmp_path))
    (a,) = stage.nodes(f"tcp://{bind}/torn?min_nodes=1&{QUICK}&is_host=false", "a", mode="hand")
    a.call("next")
    server.kill()
    (log,) = tmp_path.glob("log-*")
    os.truncate(log, log.stat().st_size - 5)
    server = stage.serve(bind, "--data", str(tmp_path))
    server.wait_line("cut off the last", "bytes of", "were being written when the server died")


# --- many kills -------------------------------------------------------------------------------------------------------


def test_ten_kills_under_load_lose_and_double_nothing():
    """The short form of `make crash`."""
    figures = campaign(10, seed=int(os.environ.get("CRASH_SEED", "7")))
    assert figures.kills >= 10
    assert figures.snapshots > 0
    assert figures.rounds > 0


def test_campaign_notices_a_server_that_forgets():
    with pytest.raises(AssertionError, match="lie"):
        campaign(3, seed=1, entries=1_000_000, character="forgetful")


def test_server_that_is_killed_while_it_starts_can_start_again(stage: Stage, tmp_path):
    """At every step of opening a directory, as far as they can be met."""
    data = ("--data", str(tmp_path / "data"))
    for pause_s in (0.1, 0.3, 0.5, 0.7):
        server = stage.serve(loopback(), *data, listens=False)
        time.sleep(pause_s)  # the moment of the kill
        server.popen.send_signal(signal.SIGKILL)
        server.popen.wait(PATIENCE_S)
    server = stage.serve(loopback(), *data)
    until(lambda: not list((tmp_path / "data").glob("*.tmp")), "what was left over is removed")
