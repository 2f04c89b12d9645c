"""`rallypoint why` and `rallypoint doctor` when an etcd cannot be reached or used.

`test_operating.py` tests why runs wait, on etcd as on a server.
"""

import sys

import pytest

from tests.backends.etcd.kit import needs, running, ticks
from tests.e2e.kit import Process, Stage, loopback
from tests.e2e.operating import ask, ask_json, checks, until_said, write


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """An etcd without authentication, which a test pauses."""
    with running(needs("system"), tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster.members[0]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """An etcd with authentication and one user, root."""
    with running(needs("system"), tmp_path_factory.mktemp("etcd")) as cluster:
        member = cluster.members[0]
        member.ask("auth/user/add", name="root", password="open sesame")
        member.ask("auth/role/add", name="root")
        member.ask("auth/user/grant", user="root", role="root")
        member.ask("auth/enable")
        yield member


def test_etcd_that_is_not_running_is_diagnosed():
    needs("system")
    endpoint = loopback()
    url = f"etcd://{endpoint}/run"
    said = ask("why", url, "--timeout", "2", code=4)
    assert f"etcd at {endpoint} cannot be used: connection refused" in said
    assert "rallypoint doctor" in said
    found = checks(ask_json("doctor", url, code=1))
    assert "no process listens there" in found[f"connect {endpoint}"]["found"]
    assert "start the etcd member" in found[f"connect {endpoint}"]["fix"]
    assert found["cluster"]["verdict"] == "failed"
    assert found["run"]["verdict"] == "skipped"


def test_wrong_and_missing_passwords_are_told_apart(guarded, tmp_path):
    url = f"etcd://{guarded.endpoint}/run"
    right, wrong = write(tmp_path / "right", "open sesame"), write(tmp_path / "wrong", "open barley")
    refused = f"{url}?user=root&password_file={wrong}"
    assert "etcd asks for a user: give user= and password_file=" in ask("why", url, code=5)
    assert "etcd does not know this user with this password" in ask("why", refused, code=5)
    found = checks(ask_json("doctor", refused, code=1))
    assert found["cluster"]["verdict"] == "ok", "the cluster is fine"
    assert "check user= and password_file=" in found["backend"]["found"]
    assert "the backend refused" in found["backend"]["fix"]
    assert checks(ask_json("doctor", f"{url}?user=root&password_file={right}"))["backend"]["verdict"] == "ok"


def test_wrong_port_says_what_listens_there(stage):
    needs("system")
    address = loopback().partition(":")[0]
    web = Process("web", [sys.executable, "-u", "-m", "http.server", "--bind", address, "8080"])
    stage.processes.append(web)
    web.until(lambda: any("Serving HTTP" in str(fact) for fact in web.facts), "it serves")
    url = f"etcd://{address}:8080/run"
    assert f"etcd at {address}:8080 cannot be used: it is not an etcd" in ask("why", url, "--timeout", "2", code=5)
    found = checks(ask_json("doctor", url, "--timeout", "2", code=1))[f"member {address}:8080"]
    assert "it is not an etcd: it is an HTTP server (SimpleHTTP" in found["found"]
    assert found["fix"] == "correct the port in the URL"


def test_name_that_does_not_resolve_is_diagnosed():
    needs("system")
    url = "etcd://no-such-host.invalid:2379/run"
    assert "no-such-host.invalid:2379 cannot be used: name or service not known" in ask("why", url, code=4)
    found = checks(ask_json("doctor", url, code=1))
    assert "'no-such-host.invalid' does not resolve" in found["name no-such-host.invalid:2379"]["found"]
    assert "/etc/hosts" in found["name no-such-host.invalid:2379"]["fix"]


def test_paused_etcd_is_told_apart_from_one_that_is_not_running(own):
    url = f"etcd://{own.endpoint}/run"
    own.pause()
    try:
        said = ask("why", url, "--timeout", "1", code=4)
        assert f"no answer from etcd://{own.endpoint} within 1 s: it is paused or overloaded" in said
        found = checks(ask_json("doctor", url, "--timeout", "1", code=1))
        assert found[f"connect {own.endpoint}"]["verdict"] == "ok"
        assert "accepts connections but does not answer" in found[f"member {own.endpoint}"]["found"]
        assert "kill -CONT" in found[f"member {own.endpoint}"]["fix"]
    finally:
        own.resume()
    for _ in ticks():
        if own.has_leader():
            break
    assert checks(ask_json("doctor", url))["cluster"]["verdict"] == "ok"


@pytest.mark.slow
def test_paused_members_of_three_are_named_and_a_majority_goes_on(tmp_path):
    with running(needs("system"), tmp_path, 3) as cluster, Stage() as stage:
        url = f"etcd://{cluster.endpoints}/run"
        stage.node(f"{url}?min_nodes=2", "a")
        until_said("why", url, parts=("1 of at least 2 nodes joined: a",))
        leader = cluster.leader
        paused, other = [member for member in cluster.members if member is not leader]
        paused.pause()
        assert "1 of at least 2 nodes joined: a" in ask("why", url), "a majority is there"
        found = checks(ask_json("doctor", url, "--timeout", "2"))
        assert found["cluster"]["verdict"] == "warning"
        assert "2 of 3 endpoints healthy" in found["cluster"]["found"]
        assert "does not answer" in found[f"member {paused.endpoint}"]["found"]
        other.pause()
        for _ in ticks():
            if not leader.has_leader():
                break
        said = ask("why", url, "--timeout", "2", code=4)
        assert "rallypoint doctor" in said
        found = checks(ask_json("doctor", url, "--timeout", "2", code=1))
        assert "0 of 3 endpoints healthy" in found["cluster"]["found"]
        assert "a majority of etcd's members must be up" in found["cluster"]["fix"]
        for member in (paused, other):
            member.resume()
        until_said("why", url, parts=("1 of at least 2 nodes joined: a",))
