"""`rallypoint serve --metrics --events`: a real server, looked at from outside."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

import rallypoint
from rallypoint.cli import main
from rallypoint.cli.serve_observing import metrics_address
from rallypoint.errors import SettingsError
from tests.observe.metrics_kit import Scraped
from tests.patience import until

PATIENCE_S = 60
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(rallypoint.__file__).parents[1])}


class Serving:
    """`rallypoint serve` on a free port, and what it says."""

    def __init__(self, *options):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rallypoint", "serve", "--bind", "127.0.0.1:0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.said = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process.stderr.close()

    def find(self, pattern):
        """What matches in the next lines it says."""
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.start()
        try:
            for line in self.process.stderr:
                self.said.append(line)
                if found := re.search(pattern, line):
                    return found[1]
        finally:
            timer.cancel()
        raise AssertionError(f"it ended without {pattern!r}: {self.said}")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.said += self.process.stderr.readlines()
        return self.process.wait(PATIENCE_S)


def scraped(metrics):
    with urllib.request.urlopen(metrics, timeout=PATIENCE_S) as answer:
        return Scraped(answer.read().decode())


def test_metrics_and_events_of_a_real_server(tmp_path):
    path = tmp_path / "events.jsonl"
    with Serving("--metrics", "0", "--events", str(path), "--data", str(tmp_path / "data")) as server:
        metrics = server.find(r"shows metrics at (http://127\.0\.0\.1:\d+/metrics)")
        endpoint = server.find(r"listening on (\S+)")
        handler = rallypoint.create_handler(f"tcp://{endpoint}/my-run?min_nodes=1&name=a")
        handler.next_rendezvous()
        until(lambda: scraped(metrics)("rallypoint_rounds_total", outcome="active") == 1, "the round is counted")
        found = scraped(metrics)
        assert found("rallypoint_run_members", run="my-run") == 1
        assert found("rallypoint_server_log_bytes") > 0
        handler.shutdown()
        assert server.stop() == 0
    told = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = [line["event"] for line in told]
    assert kinds[:2] == ["MetricsListen", "ServerListens"]
    assert kinds[-1] == "ServerStopped"
    assert {"CoordinatorElected", "RoundForming", "RoundActive"} <= set(kinds), "those too that stderr is not told"
    assert not any("RoundForming" in line or "forms with" in line for line in server.said)


def test_taken_address_of_metrics_ends_the_command_with_a_sentence():
    with Serving("--metrics", "127.0.0.1:0") as one:
        port = one.find(r"shows metrics at http://127\.0\.0\.1:(\d+)/")
        with Serving("--metrics", port) as other:
            assert other.process.wait(PATIENCE_S) == 1
            said = other.process.stderr.read()
        assert f"Error: metrics cannot be served on 127.0.0.1:{port}: Address already in use" in said
        assert "Traceback" not in said


def test_without_the_library_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("prometheus_client", "rallypoint.observe.metrics"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = CliRunner().invoke(main, ["serve", "--metrics", "0"])
    assert result.exit_code == 1
    assert "pip install 'rallypoint[dashboard]'" in result.output


def test_nothing_imports_the_library_unless_metrics_are_asked_for():
    modules = "rallypoint.cli, rallypoint.observe.follower, rallypoint.observe.sinks, rallypoint.server.process"
    program = f"import {modules}, sys; print('prometheus_client' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, env=ENVIRONMENT
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:1234", ("0.0.0.0", 1234)),
        ("[::1]:0", ("::1", 0)),
        ("somewhere", ("somewhere", 9400)),
    ],
)
def test_port_alone_is_one_of_loopback(given, meant):
    assert metrics_address(given) == meant


@pytest.mark.parametrize("given", ["0.0.0.0:x", ":", "99999"])
def test_address_that_is_none_is_refused(given):
    with pytest.raises(SettingsError):
        metrics_address(given)


def test_metrics_are_not_for_etcd_which_has_its_own():
    result = CliRunner().invoke(main, ["serve", "--engine", "etcd", "--metrics", "0"])
    assert result.exit_code == 2
    assert "etcd has metrics of its own" in result.output


def test_file_of_events_that_cannot_be_made_ends_the_command(tmp_path):
    result = CliRunner().invoke(main, ["serve", "--events", str(tmp_path / "no" / "file")])
    assert result.exit_code == 1
    assert "events cannot be written to" in result.output
