"""Whoever may not come in, at the port of a real server, while a real run works and afterwards."""

import pickle
import random
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from rallypoint.wire.frames import GREETING, HELLO_LIMIT, frame
from rallypoint.wire.messages import Going, Hello, Refused, encoder, server_decoder, welcome_decoder
from tests.e2e.kit import PATIENCE_S, Node, Server, Stage, loopback, members_agree

QUICK = "last_call_timeout=0.3&local_addr=127.0.0.1&join_timeout=60"
TOKEN = "open sesame"


def hello(**said: object) -> bytes:
    fields = {"oldest": 1, "newest": 1, "client": "raw", "token": TOKEN}
    return GREETING + frame(encoder.encode(Hello(**{**fields, **said})))


def answer_to(endpoint: str, sent: bytes) -> bytes:
    """All that the server says to somebody who sends this, until it closes, however it does that."""
    host, _, port = endpoint.rpartition(":")
    found = b""
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as one:
        try:
            one.sendall(sent)
            while data := one.recv(1 << 16):
                found += data
        except ConnectionError:  # it closed while there was more to read
            pass
    return found


def refusal_in(answer: bytes) -> str:
    """The message of the one refusal that the answer is."""
    assert answer.startswith(GREETING)
    word = welcome_decoder.decode(answer[len(GREETING) + 4 :])
    assert isinstance(word, Refused)
    return word.message


def new_line(server: Server, before: int) -> str:
    """The one line that the server has said since."""
    server.until(lambda: len(server.errors) > before, "a line about the stranger")
    (line,) = server.errors[before:]
    assert "closed the connection of 127.0.0.1:" in line
    return line


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="utf-8")
    return path


def test_scenario_15_strangers_are_refused_in_one_line_each_while_a_run_goes_on(stage: Stage, token_file: Path):
    """Row 15: nobody who does not know how to come in costs those who do anything."""
    server = stage.serve(loopback(), "--token-file", str(token_file))
    endpoint = server.wait_listening()
    a, b = stage.nodes(f"tcp://{endpoint}/inside?min_nodes=2&token_file={token_file}&{QUICK}", "a", "b")
    members_agree(a.round(), b.round())

    speech = {
        "bytes that begin": b"\x00" + random.Random(15).randbytes(5_000),
        "HTTP": b"GET /metrics HTTP/1.1\r\nHost: rallypoint\r\n\r\n",
        "a pickle": pickle.dumps({"rank": 0}),
        "TLS": bytes.fromhex("16030100f1010000ed0303") + bytes(100),
        "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    }
    server.until(lambda: any("is active" in line for line in server.errors), "it has said all there was to say")
    before = len(server.errors)
    for what, sent in speech.items():
        line = answer_to(endpoint, sent).decode().rpartition("\r\n\r\n")[2]
        assert line.startswith(f"this is a Rallypoint server, and it was sent {what}")
        assert line.endswith("\n")
        assert line.count("\n") == 1
        a.call("store.add", "during", 1)
    new_line(server, before)  # one for all of them: they have one source

    hellos = {
        "a token and none was given": hello(token=""),
        "the token is wrong": hello(token="open barley"),
        "upgrade the client": hello(oldest=0, newest=0),
        "upgrade the server": hello(oldest=98, newest=99),
        "the hello is too long": GREETING + (HELLO_LIMIT + 1).to_bytes(4, "big") + bytes(100),
        "not a hello": GREETING + frame(pickle.dumps([1, 2, 3])),
    }
    kinds = set()
    for what, sent in hellos.items():
        before = len(server.errors)
        assert what in refusal_in(answer_to(endpoint, sent))
        kind = next(kind for kind in ("token", "upgrade", "hello") if kind in what)
        a.call("store.add", "during", 1)
        if kind not in kinds:  # once for each kind and source
            assert what in new_line(server, before)
        assert len(server.errors) == before + (kind not in kinds)
        kinds.add(kind)

    before = len(server.errors)
    answer = answer_to(endpoint, hello() + (1 << 31).to_bytes(4, "big") + bytes(1000))
    welcome_length = int.from_bytes(answer[len(GREETING) :][:4], "big")
    (last,) = server_decoder.decode(answer[len(GREETING) + 4 + welcome_length + 4 :])
    assert isinstance(last, Going)
    assert "is longer than the limit" in last.why
    new_line(server, before)

    assert b.call("store.add", "during", 0) == len(speech) + len(hellos)
    assert [node.all("changed") for node in (a, b)] == [[], []]
    assert "Traceback" not in "\n".join(server.errors)
    later = stage.nodes(f"tcp://{endpoint}/later?min_nodes=2&token_file={token_file}&{QUICK}", "c", "d")
    members_agree(*(node.round() for node in later))


def test_scenario_15_browser_is_told_that_this_is_no_web_server(stage: Stage):
    """Row 15: with curl, where there is one."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("`curl` is not installed")
    server = stage.serve(loopback())
    url = f"http://{server.wait_listening()}/"
    done = subprocess.run(
        [curl, "--silent", "--noproxy", "*", "--write-out", "%{http_code}", url],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    line, status = done.stdout.splitlines()
    assert line.startswith("this is a Rallypoint server, and it was sent HTTP")
    assert status == "400"


@pytest.mark.parametrize(("token", "said"), [("open barley", "the token is wrong"), (None, "none was given")])
def test_scenario_15_node_without_the_right_token_fails_at_once_and_says_why(
    stage: Stage, token_file: Path, tmp_path: Path, token: str | None, said: str
):
    """Row 15: not at its deadline of a minute."""
    server = stage.serve(loopback(), "--token-file", str(token_file))
    url = f"tcp://{server.wait_listening()}/token?min_nodes=1&{QUICK}"
    if token is not None:
        (tmp_path / "wrong").write_text(token, encoding="utf-8")
        url += f"&token_file={tmp_path / 'wrong'}"
    node: Node = stage.node(url, "outside")
    asked, failed = node.event("JoinStarted"), node.wait("error")
    assert failed["error"] == "RendezvousConnectionError"
    assert said in failed["text"]
    assert "token_file" in failed["text"]
    assert server.wait_listening() in failed["text"]
    assert failed["at"] - asked["at"] < 10
    assert TOKEN not in server.story


def test_node_at_the_port_of_something_else_fails_at_once_and_says_what_it_is(stage: Stage):
    """The mirror of row 15: the endpoint is a web server's."""
    with socket.create_server(("127.0.0.1", 0)) as web:
        web.settimeout(PATIENCE_S)
        endpoint = f"127.0.0.1:{web.getsockname()[1]}"
        node = stage.node(f"tcp://{endpoint}/web?min_nodes=1&{QUICK}", "lost")
        one, _ = web.accept()
        with one:
            one.recv(100)
            one.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            failed = node.wait("error")
    assert failed["error"] == "RendezvousConnectionError"
    assert f"{endpoint} is not a Rallypoint server: it answered with HTTP. Is the port right?" in failed["text"]
