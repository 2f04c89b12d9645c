"""`rallypoint why` and `rallypoint doctor` in staged situations: is their finding right, and their advice?"""

import shutil
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.backends.etcd.kit import needs, running
from tests.e2e.kit import PATIENCE_S, Process, Stage, loopback
from tests.e2e.operating import ask, ask_json, checks, until_said, write


class Place:
    """A server or an etcd that all tests share. Each test has a run of its own."""

    def __init__(self, stage: Stage, scheme: str, endpoint: str) -> None:
        self.stage = stage
        self.root = f"{scheme}://{endpoint}"
        self.soon = "&keep_alive_interval=1" if scheme == "etcd" else ""
        """Options for tests that wait for a loss: on etcd it is noticed only after the time to live."""

    def run(self, run_id: str) -> str:
        return f"{self.root}/{run_id}"


@pytest.fixture(scope="module", params=["tcp", "etcd"])
def place(request, tmp_path_factory) -> Iterator[Place]:
    with ExitStack() as stack:
        if request.param == "tcp":
            stage, endpoint = stack.enter_context(Stage()), loopback()
            stage.serve(endpoint)
        else:
            cluster = stack.enter_context(running(needs("system"), tmp_path_factory.mktemp("etcd")))
            stage, endpoint = stack.enter_context(Stage()), cluster.endpoints
        yield Place(stage, request.param, endpoint)


also_on_a_slow_etcd = pytest.mark.parametrize(
    "place", ["tcp", pytest.param("etcd", marks=pytest.mark.slow)], indirect=True, scope="module"
)
"""For tests that hardly depend on the backend."""


# --- why a run waits --------------------------------------------------------------------------------------------------


def test_too_few_nodes_are_counted_and_named(place):
    url = place.run("too-few")
    place.stage.node(f"{url}?min_nodes=3", "a")
    said = until_said("why", url, parts=("1 of at least 3 nodes joined: a",))
    assert said.startswith("Start 2 more nodes with the same URL. "), "what to do comes first"
    document = ask_json("why", url)
    assert document["phase"] == "below minimum"
    assert document["reason"] == "1 of at least 3 nodes joined: a"
    found = checks(ask_json("doctor", url))
    assert found["run"]["verdict"] == "ok"
    assert "1 of at least 3 nodes joined: a" in found["run"]["found"]


def test_last_call_says_that_more_may_come(place):
    url = place.run("last-call")
    place.stage.nodes(f"{url}?min_nodes=2&max_nodes=4&last_call_timeout=600", "a", "b")
    said = until_said("why", url, parts=("last call of 600 s: 2 of at most 4 nodes joined",))
    assert "No action is needed: the round forms by itself" in said


def test_admission_window_says_that_more_may_come(place):
    url = place.run("window")
    options = "min_nodes=1&max_nodes=4&last_call_timeout=0.1&admission_window=600"
    place.stage.node(f"{url}?{options}&labels=zone=x", "a", "hand").ask("next")
    until_said("why", url, parts=("round 1 is active with 1 of 1 members",))
    place.stage.node(f"{url}?{options}", "b")
    said = until_said("why", url, parts=("1 waiting to be admitted", "admission window: more may come", "b"))
    assert "the waiting nodes enter with the next round" in said
    report = ask_json("status", url)
    standing = {node["name"]: (node["standing"], node["rank"]) for node in report["nodes"]}
    assert standing == {"a": ("member", 0), "b": ("waiting", None)}
    assert {node["name"]: node["labels"] for node in report["nodes"]}["a"] == {"zone": "x"}
    assert report["open_places"] == 3


def test_full_round_has_spares(place):
    url = place.run("full")
    place.stage.node(f"{url}?min_nodes=1", "a")
    until_said("why", url, parts=("round 1 is active with 1 of 1 members", "the round is complete"))
    place.stage.node(f"{url}?min_nodes=1", "b")
    said = until_said("why", url, parts=("spare (full): b",))
    assert "a spare takes the place of a member that goes" in said
    assert ask_json("status", url)["counts"]["spare"] == 1


def test_node_with_other_settings_is_named_with_both_values(place):
    url = place.run("mismatch")
    place.stage.node(f"{url}?min_nodes=2", "a")
    until_said("why", url, parts=("1 of at least 2 nodes joined: a",))
    refused = place.stage.node(f"{url}?min_nodes=3", "b", "hand")
    error = refused.outcome(refused.ask("next"))["text"]
    assert "min_nodes is 3 here and 2 there" in error
    said = ask("why", url)
    assert f" b was refused less than a minute ago: {error}" in said, "in the words of the node's own error"
    assert said.startswith("Give b the settings of the run (max_nodes=2, min_nodes=2), or another run id. Otherwise ")
    found = checks(ask_json("doctor", url, code=1))["settings"]
    assert found["verdict"] == "failed"
    assert "min_nodes is 3 here and 2 there" in found["found"]
    compared = checks(ask_json("doctor", f"{url}?min_nodes=2&max_nodes=9", code=1))["settings"]
    assert compared["found"] == "a node with this URL would be refused: max_nodes is 9 here and 2 there"
    assert "max_nodes is 9 here and 2 there" in ask("why", f"{url}?min_nodes=2&max_nodes=9")


def test_lost_member_is_named_with_the_reason(place):
    url = place.run("lost")
    nodes = []
    for name in ("a", "b"):
        node = place.stage.node(f"{url}?min_nodes=2{place.soon}", name, "hand")
        nodes.append(node)
        node.ask("next")
        until_said("status", url, parts=("coordinator: ",))  # on etcd, this makes a the coordinator
    for node in nodes:
        node.round()
    nodes[1].kill()
    said = until_said("why", url, parts=("lost: b (member of round 1",))
    assert "round 1 is active with 1 of 2 members" in said
    assert "its session ended" in said
    assert "Start 1 more node with the same URL. The next round forms when member a has re-joined" in said
    report = ask_json("status", url)
    gone = [node for node in report["nodes"] if node["standing"] == "gone"]
    assert [node["name"] for node in gone] == ["b"]
    assert report["missing"] == ["b"]
    assert "gone" in ask("status", url)


def test_held_back_node_is_named_with_why(place):
    url = place.run("held-back")
    options = f"min_nodes=1&max_nodes=2&last_call_timeout=2&hold_back_losses=1&hold_back=600{place.soon}"
    steady = place.stage.node(f"{url}?{options}", "a")
    until_said("status", url, parts=("coordinator: ",))  # on etcd, this makes a the coordinator
    flaky = place.stage.node(f"{url}?{options}", "b")
    steady.round(size=2)
    flaky.kill()
    until_said("why", url, parts=("held back for 600 s: b (it was lost 1 times",))
    place.stage.node(f"{url}?{options}", "b")
    said = until_said("status", url, parts=("1 held back",))
    assert "held back for 600 s: b" in said
    assert "a node is held back for a limited time" in ask("why", url)
    assert "freed b: it may join again" in ask("free", url, "b")
    said = until_said("status", url, parts=("nodes: 2 members",))
    assert "held back" not in said
    assert "holds no node 'b' back; held back: none" in ask("free", url, "b", code=3)


@also_on_a_slow_etcd
def test_drained_member_is_told_who_asked_and_why(place):
    url = place.run("drained")
    node = place.stage.node(f"{url}?min_nodes=1", "a", "hand")
    node.ask("next")
    node.round()
    refused = ask("drain", url, "a", "--reason", "its disk is failing", code=1)
    assert "without a, run 'drained' has 0 of at least 1 node: when a leaves, the round ends, and the job" in refused
    assert "Nothing was changed: start another node first, or give --force" in refused
    assert "--force" in ask("drain", url, "a", "--yes", code=1)
    assert not node.all("changed")
    assert "asked a to go" in ask("drain", url, "a", "--reason", "its disk is failing", "--force")
    node.wait("changed", lambda fact: fact["cause"] == "drain" and "its disk is failing" in fact["reason"])
    said = ask("why", url)
    assert "its disk is failing" in said
    assert "@" in said.split("drained by ")[1], "who asked: user@host:pid"
    assert "has no node with the name or id 'zz'" in ask("drain", url, "zz", code=3)


def test_closed_run_says_by_whom_and_why(place):
    url = place.run("closed")
    node = place.stage.node(f"{url}?min_nodes=2", "a", "hand")
    asked = node.ask("next")
    until_said("why", url, parts=("1 of at least 2 nodes joined",))
    document = ask_json("close", url, "--reason", "wrong dataset")
    assert document["changed"]
    assert document["closing"]["why"] == "wrong dataset"
    error = node.outcome(asked)["text"]
    assert "wrong dataset" in error
    said = ask("why", url)
    assert error[1:] in said, "in the words of the node's own error"
    assert "rallypoint reopen" in said
    assert "was closed already" in ask("close", url)


@also_on_a_slow_etcd
def test_control_characters_in_names_and_reasons_do_not_reach_the_terminal(place):
    url = place.run("rude")
    place.stage.node(f"{url}?min_nodes=1", "a")
    until_said("why", url, parts=("round 1 is active",))
    ask("store", "set", url, "k\bk", "v")
    for words in (["close", url, "--reason", "wiped\b\nall is well"], ["why", url], ["status", url], ["events", url]):
        assert "wiped\N{REPLACEMENT CHARACTER} all is well" in ask(*words), words
    for words in (["history", url], ["ls", place.root], ["store", "ls", url]):
        assert "\b" not in ask(*words), words


@also_on_a_slow_etcd
def test_observing_a_run_that_does_not_exist_does_not_create_it(place):
    said = ask("why", place.run("never"), code=3)
    assert "There is no run 'never' on" in said
    assert f"`rallypoint ls {place.root}` shows the runs" in said
    assert "there is no run 'never'" in ask("status", place.run("never"), code=3)
    assert "there is no run 'never'" in ask("close", place.run("never"), code=3)
    assert "never" not in ask("ls", place.root), "observing creates no run"


# --- what keeps a client from its server ------------------------------------------------------------------------------


def test_server_that_is_not_running_is_diagnosed():
    endpoint = loopback()
    url = f"tcp://{endpoint}/run"
    said = ask("why", url, code=4)
    assert said == (
        f"Error: {endpoint} cannot be reached: connection refused. Is it running there, and can this machine reach "
        f"it? `rallypoint doctor {url}` finds out\n"
    )
    found = checks(ask_json("doctor", f"{url}?min_nodes=1", code=1))["connect"]
    assert "no process listens there" in found["found"]
    assert f"rallypoint serve --bind {endpoint}" in found["fix"]
    with socket.socket() as probe:
        assert probe.connect_ex((endpoint.partition(":")[0], 29400)) != 0, "an observer hosts no server"


def test_wrong_and_missing_tokens_are_told_apart(stage, tmp_path):
    endpoint = loopback()
    right, wrong = write(tmp_path / "right", "open sesame"), write(tmp_path / "wrong", "open barley")
    stage.serve(endpoint, "--token-file", right)
    url = f"tcp://{endpoint}/run"
    assert "the token is wrong" in ask("why", f"{url}?token_file={wrong}", code=5)
    assert "asks for a token and none was given" in ask("why", url, code=5)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RALLYPOINT_TOKEN_FILE", right)
        environment.setenv("RALLYPOINT_URL", f"tcp://{endpoint}")
        assert "there are no runs" in ask("ls"), "URL and token of the environment"
        assert "the token is wrong" in ask("ls", f"tcp://{endpoint}", "--token-file", wrong, code=5)
    assert "the token is wrong" in checks(ask_json("doctor", f"{url}?token_file={wrong}", code=1))["token"]["found"]
    missing = checks(ask_json("doctor", url, code=1))["token"]
    assert missing["found"] == "the server asks for a token, but the URL has none"
    assert "token_file" in missing["fix"]
    assert checks(ask_json("doctor", f"{url}?token_file={right}"))["token"]["found"] == "accepted"
    assert "there are no runs" in ask("ls", f"tcp://{endpoint}", "--token-file", right)


def test_wrong_port_says_what_listens_there(stage):
    address = loopback().partition(":")[0]
    web = Process("web", [sys.executable, "-u", "-m", "http.server", "--bind", address, "8080"])
    stage.processes.append(web)
    web.until(lambda: any("Serving HTTP" in str(fact) for fact in web.facts), "it serves")
    url = f"tcp://{address}:8080/run"
    said = ask("why", url, "--timeout", "1", code=4)  # the HTTP server waits for a line that never comes
    assert "it is a different kind of server" in said
    found = checks(ask_json("doctor", url, "--timeout", "1", code=1))["protocol"]
    assert "it is an HTTP server (SimpleHTTP" in found["found"]
    assert found["fix"] == "correct the port in the URL"


def test_port_of_torchs_store_is_recognised(stage):
    pytest.importorskip("torch")
    code = (
        "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
        "print(s.port, flush=True); sys.stdin.read()"
    )
    other = Process("torch", [sys.executable, "-W", "ignore", "-c", code])
    stage.processes.append(other)
    port = other.until(lambda: next(iter(other.facts), None), "its port")["kind"]
    found = checks(ask_json("doctor", f"tcp://127.0.0.1:{port}/run", "--timeout", "2", code=1))["protocol"]
    assert "is not a Rallypoint server: it is torch's TCPStore" in found["found"]


def test_name_that_does_not_resolve_is_diagnosed():
    url = "tcp://no-such-host.invalid:29400/run"
    assert "no-such-host.invalid:29400 cannot be reached" in ask("why", url, code=4)
    found = checks(ask_json("doctor", url, code=1))
    assert "'no-such-host.invalid' does not resolve" in found["name"]["found"]
    assert "/etc/hosts" in found["name"]["fix"]
    assert found["run"]["verdict"] == "skipped"


def test_paused_server_is_told_apart_from_one_that_is_not_running(stage):
    endpoint = loopback()
    server = stage.serve(endpoint)
    server.stop()
    try:
        said = ask("why", f"tcp://{endpoint}/run", "--timeout", "1", code=4)
        assert f"no answer from tcp://{endpoint} within 1 s: it is paused or overloaded" in said
        found = checks(ask_json("doctor", f"tcp://{endpoint}/run", "--timeout", "1", code=1))
        assert found["connect"]["verdict"] == "ok"
        assert "accepts connections but does not answer" in found["protocol"]["found"]
        assert "kill -CONT" in found["protocol"]["fix"]
    finally:
        server.go_on()
    assert checks(ask_json("doctor", f"tcp://{endpoint}/run"))["protocol"]["verdict"] == "ok"


# --- etcd -------------------------------------------------------------------------------------------------------------

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="`etcd` is not on PATH")


def etcd_members(stage: Stage, count: int, folder) -> list[tuple[str, Process]]:
    """Start a cluster of real members. The client endpoint and the process of each."""
    hosts = [loopback().partition(":")[0] for _ in range(count)]
    cluster = ",".join(f"m{number}=http://{host}:2380" for number, host in enumerate(hosts))
    members = []
    for number, host in enumerate(hosts):
        client, peer = f"http://{host}:2379", f"http://{host}:2380"
        argv = ["etcd", "--name", f"m{number}", "--data-dir", str(folder / f"m{number}"), "--logger", "zap"]
        argv += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        argv += ["--initial-advertise-peer-urls", peer, "--initial-cluster", cluster, "--log-level", "error"]
        process = Process(f"etcd {host}", argv)
        stage.processes.append(process)
        members.append((f"{host}:2379", process))
    return members


def etcd_health(endpoint: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/health", timeout=5) as answer:
            return answer.read().decode()
    except OSError as error:
        return getattr(error, "read", lambda: b"")().decode()


@needs_etcd
def test_etcd_without_a_majority_is_diagnosed(stage, tmp_path):
    members = etcd_members(stage, 3, tmp_path)
    endpoints = [endpoint for endpoint, _ in members]
    url = f"etcd://{','.join(endpoints)}/run"
    last = members[0][1]
    wait_for(lambda: all('"true"' in etcd_health(endpoint) for endpoint in endpoints))
    found = checks(ask_json("doctor", url, code=doctor_code()))
    assert found["cluster"]["found"] == "3 of 3 endpoints healthy"
    for _, process in members[1:]:
        process.kill()
    wait_for(lambda: '"false"' in etcd_health(endpoints[0]))
    found = checks(ask_json("doctor", url, code=1))
    assert found["cluster"]["verdict"] == "failed", last.story
    assert "0 of 3 endpoints healthy" in found["cluster"]["found"]
    assert "it has no leader" in found[f"member {endpoints[0]}"]["found"]
    assert "connection refused" in found[f"connect {endpoints[1]}"]["found"]
    assert "a majority of etcd's members must be up" in found["cluster"]["fix"]
    wrong = checks(ask_json("doctor", f"tcp://{endpoints[0]}/run", "--timeout", "2", code=1))["protocol"]
    assert f"{endpoints[0]} is an etcd 3." in wrong["found"]
    assert "use an etcd:// URL" in wrong["fix"]
    if has_etcd():
        said = ask("why", url, "--timeout", "3", code=4)
        assert "rallypoint doctor" in said


def has_etcd() -> bool:
    """Whether etcd:// URLs can be opened here."""
    from rallypoint.backends.schemes import backend_opener
    from rallypoint.errors import SettingsError

    try:
        backend_opener("etcd")
    except SettingsError:
        return False
    return True


def doctor_code() -> int:
    return 0 if has_etcd() else 1


def wait_for(fact) -> None:
    import time

    deadline = time.monotonic() + PATIENCE_S
    while not fact():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
