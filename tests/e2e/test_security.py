"""Token and TLS on real processes: who comes in, who does not and is told why, and what happens when files change."""

import os
import signal
import socket
import ssl
from pathlib import Path

import pytest

from tests.certificates import Pair
from tests.e2e.kit import PATIENCE_S, Node, Server, Stage, loopback, members_agree
from tests.e2e.test_servers import ended_in_time, goes_on, works_at_once
from tests.server.tls_kit import Certificates

QUICK = "last_call_timeout=0.3&local_addr=127.0.0.1&join_timeout=60"
TOKEN = "open sesame"


class Fort:
    """Where things are: an endpoint, a token, an authority, and certificates for the endpoint and for nodes."""

    def __init__(self, folder: Path) -> None:
        self.bind = loopback()
        self.host = self.bind.rpartition(":")[0]
        self.certificates = Certificates(folder)
        self.server = self.certificates.authority.issue("fort", self.host)
        self.token = folder / "token"
        self.token.write_text(f"{TOKEN}\n")
        self.token.chmod(0o600)
        self.ca = self.certificates.authority.path

    def serve(self, stage: Stage, pair: Pair | None = None, *options: str) -> Server:
        """With a token and mutual TLS."""
        pair = pair or self.server
        files = ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-ca", str(self.ca)]
        return stage.serve(self.bind, "--token-file", str(self.token), *files, *options)

    def url(self, run: str, pair: Pair | None = None, more: str = "min_nodes=2") -> str:
        pair = pair or self.certificates.client
        return (
            f"tcp://{self.bind}/{run}?{more}&{QUICK}&token_file={self.token}"
            f"&tls_ca={self.ca}&tls_cert={pair.cert}&tls_key={pair.key}"
        )


@pytest.fixture
def fort(tmp_path: Path) -> Fort:
    return Fort(tmp_path)


def failed(node: Node) -> str:
    """What a node that does not come in says, at once and not at its deadline of a minute."""
    asked, error = node.event("JoinStarted"), node.wait("error")
    assert error["error"] == "RendezvousConnectionError"
    assert error["at"] - asked["at"] < 15
    return str(error["text"])


def test_scenario_15_with_token_and_mutual_tls_only_those_who_have_both_come_in(stage: Stage, fort: Fort):
    """Row 15: and everybody else is told what is missing, while a run goes on."""
    server = fort.serve(stage)
    a, b = stage.nodes(fort.url("inside"), "a", "b")
    members_agree(a.round(), b.round())
    token, ca, client = f"token_file={fort.token}", f"tls_ca={fort.ca}", fort.certificates.client
    shows = f"tls_cert={client.cert}&tls_key={client.key}"
    foreign = fort.certificates.foreign.issue("spy")
    late = fort.certificates.authority.expired("late")
    wrong = fort.token.with_name("wrong")
    wrong.write_text("open barley")
    cases = {
        "plain": (token, "this server speaks TLS only: give tls_ca"),
        "bare": (f"{token}&{ca}", "asks for a certificate (mutual TLS) and none was given: give tls_cert"),
        "spy": (f"{token}&{ca}&tls_cert={foreign.cert}&tls_key={foreign.key}", "that the server does not trust"),
        "late": (f"{token}&{ca}&tls_cert={late.cert}&tls_key={late.key}", "(tls_cert) has expired"),
        "mute": (f"{ca}&{shows}", "asks for a token and none was given"),
        "guess": (f"token_file={wrong}&{ca}&{shows}", "the token is wrong"),
        "fooled": (
            f"{token}&tls_ca={fort.certificates.foreign.path}&{shows}",
            "signed by an authority that is not in tls_ca",
        ),
    }
    for name, (options, words) in cases.items():
        node = stage.node(f"tcp://{fort.bind}/inside?min_nodes=2&{QUICK}&{options}", name)
        assert words in failed(node), name
        node.terminate()
        a.call("store.add", "during", 1)
    with socket.create_connection((fort.host, 29400), timeout=PATIENCE_S) as one:
        one.sendall(b"\x16\x03\x01" + os.urandom(4_000))
        while one.recv(1 << 16):
            pass
    assert b.call("store.add", "during", 0) == len(cases)
    assert [node.all("changed") for node in (a, b)] == [[], []]
    said = "\n".join(server.errors)
    assert "Traceback" not in said
    assert TOKEN not in said
    busy = "no TLS handshake within"  # of a client that had no time to make one: this machine may be busy
    lines = [line for line in server.errors if "closed the connection of" in line and busy not in line]
    assert len(lines) == 3, lines  # token, certificate and TLS, once each: they have one source
    members_agree(*(node.round() for node in stage.nodes(fort.url("later"), "c", "d")))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda fort: fort.certificates.authority.expired("old", fort.host), "its certificate has expired"),
        (lambda fort: fort.certificates.authority.issue("alone", fort.host, self_signed=True), "is self-signed"),
        (
            lambda fort: fort.certificates.foreign.issue("elsewhere", fort.host),
            "signed by an authority that is not in tls_ca",
        ),
        (lambda fort: fort.certificates.authority.issue("other", "head.example"), "its certificate is not for"),
    ],
)
def test_scenario_15_server_that_is_not_the_right_one_is_not_joined(stage: Stage, fort: Fort, make, words: str):
    """Row 15 from the other side: nobody gives a token to an impostor, and nobody waits for it."""
    server = fort.serve(stage, make(fort))
    assert words in failed(stage.node(fort.url("trap"), "careful"))
    server.wait_line("does not accept this server's certificate")


def test_scenario_15_plain_server_is_not_joined_by_a_node_that_is_to_speak_tls(stage: Stage, fort: Fort):
    stage.serve(fort.bind)
    assert "speaks plain text, not TLS" in failed(stage.node(fort.url("plain"), "careful"))


def test_scenario_26_every_call_ends_in_its_own_time_while_a_tls_server_hangs(stage: Stage, fort: Fort):
    """Row 26: paused, not dead; over TLS, and with connections that are begun while it hangs."""
    server = fort.serve(stage)
    more = "min_nodes=2&close_timeout=2&is_host=false"
    hand = fort.url("hang", more=more).replace("join_timeout=60", "join_timeout=3")
    a, b = stage.nodes(hand, "a", "b", mode="hand")
    (fresh,) = stage.nodes(hand.replace("/hang", "/third"), "fresh", mode="hand")
    for number, node in [(node.ask("next"), node) for node in (a, b)]:
        assert node.outcome(number)["kind"] == "done"
    fresh.wait("ready")
    a.call("store.set_timeout", 1.0)
    a.call("store.set", "there", "before")
    server.stop()
    calls = {
        a.ask("store.set", "k", "v"): 1,
        a.ask("store.get", "there", 2.0): 2,
        a.ask("store.add", "n", 1): 1,
        a.ask("store.barrier", "all", 2.0): 2,
    }
    joining = fresh.ask("next")
    works_at_once(a)
    for number, limit_s in calls.items():
        ended_in_time(a.outcome(number), limit_s, "StoreTimeoutError")
    ended_in_time(fresh.outcome(joining), 3, "RendezvousConnectionError")
    server.go_on()
    goes_on(server, a, b)


def test_node_that_hosts_itself_serves_tls_and_asks_for_certificates(stage: Stage, fort: Fort):
    url = fort.url("self", fort.server)
    a, b = stage.nodes(url, "a", "b")
    members_agree(a.round(), b.round())
    (hosting,) = [*a.events("Hosting"), *b.events("Hosting")]
    assert "anybody who reaches the port" not in hosting["text"]
    plain = stage.node(f"tcp://{fort.bind}/self?min_nodes=2&{QUICK}", "plain")
    assert "speaks TLS only" in failed(plain)


def test_node_with_nobody_to_host_and_no_certificate_says_that_it_cannot(stage: Stage, fort: Fort):
    url = f"tcp://{fort.bind}/lonely?min_nodes=1&{QUICK}&tls_ca={fort.ca}"
    node = stage.node(url, "lonely")
    said = node.event("NobodyServes")
    assert "has tls_ca and no tls_cert of its own" in said["text"]


def test_node_that_hosts_itself_without_a_token_binds_its_endpoint_only_and_warns(stage: Stage):
    bind = loopback()
    node = stage.node(f"tcp://{bind}/open?min_nodes=1&{QUICK}", "open")
    hosting = node.event("Hosting")
    assert hosting["address"] == bind
    assert hosting["level"] == 30
    assert "anybody who reaches the port can join: give a token_file to all nodes" in hosting["text"]


# --- `rallypoint serve` ---------------------------------------------------------------------------------------------


def cannot_start(stage: Stage, bind: str, *options: str) -> str:
    server = stage.serve(bind, *options, listens=False)
    assert server.wait_exit() != 0
    assert "Traceback" not in server.story
    return "\n".join(server.errors)


def test_serve_without_authentication_stays_on_loopback_unless_it_is_told_otherwise(stage: Stage, fort: Fort):
    said = cannot_start(stage, "0.0.0.0:0")
    for part in ("anybody who reaches 0.0.0.0 could join", "--token-file", "--tls-ca", "--insecure"):
        assert part in said
    only_cert = ["--tls-cert", str(fort.server.cert), "--tls-key", str(fort.server.key)]
    assert "--insecure" in cannot_start(stage, "0.0.0.0:0", *only_cert)
    stage.serve("0.0.0.0:0", "--insecure").wait_line("anybody who reaches 0.0.0.0 can join and change every run here")
    with_token = stage.serve("0.0.0.0:0", "--token-file", str(fort.token))
    with_token.wait_line("the token crosses the network unencrypted")
    mutual = stage.serve("0.0.0.0:0", *only_cert, "--tls-ca", str(fort.ca))
    mutual.terminate()
    assert mutual.wait_exit() == 0
    assert not any("network" in line or "whoever" in line for line in mutual.errors)


def test_serve_says_which_file_is_wrong_and_does_not_start(stage: Stage, fort: Fort, tmp_path: Path):
    junk = tmp_path / "junk"
    junk.write_text("\n")
    pair, other = fort.server, fort.certificates.client
    cert = ["--tls-cert", str(pair.cert)]
    assert f"token_file {str(junk)!r} is empty" in cannot_start(stage, fort.bind, "--token-file", str(junk))
    assert "--token-file" in cannot_start(stage, fort.bind, "--token-file", str(tmp_path / "none"))
    assert "is not the key of tls_cert" in cannot_start(stage, fort.bind, *cert, "--tls-key", str(other.key))
    assert f"tls_cert {str(pair.cert)!r} holds no private key" in cannot_start(stage, fort.bind, *cert)
    assert "--tls-cert" in cannot_start(stage, fort.bind, "--tls-ca", str(fort.ca))
    ca = ["--tls-key", str(pair.key), "--tls-ca", str(junk)]
    assert f"tls_ca {str(junk)!r} holds no certificate" in cannot_start(stage, fort.bind, *cert, *ca)


def test_serve_warns_of_a_token_that_everybody_can_read(stage: Stage, fort: Fort):
    fort.token.chmod(0o644)
    server = stage.serve(fort.bind, "--token-file", str(fort.token))
    server.wait_line("token_file", "can be read by everybody on this machine: chmod 600 it")


def shown_certificate(fort: Fort) -> bytes:
    """What the server shows to whoever connects now."""
    return ssl.get_server_certificate((fort.host, 29400), timeout=PATIENCE_S).encode()


def test_serve_takes_up_new_files_when_it_is_told_to_and_running_nodes_notice_nothing(stage: Stage, fort: Fort):
    files = ["--tls-cert", str(fort.server.cert), "--tls-key", str(fort.server.key)]
    server = stage.serve(fort.bind, "--token-file", str(fort.token), *files)
    a, b = stage.nodes(fort.url("long"), "a", "b")
    members_agree(a.round(), b.round())
    before = shown_certificate(fort)
    fort.certificates.authority.issue("fort", fort.host)  # into the same files
    fort.token.write_text(f"{TOKEN}\nsecond\n")
    server.popen.send_signal(signal.SIGHUP)
    server.wait_line("loaded changed files")
    assert shown_certificate(fort) != before
    second = fort.token.with_name("second")
    second.write_text("second")
    url = fort.url("other", more="min_nodes=1").replace(f"token_file={fort.token}", f"token_file={second}")
    stage.node(url, "c").round()
    assert a.call("store.add", "n", 1) == 1
    assert [node.all("changed") for node in (a, b)] == [[], []]
