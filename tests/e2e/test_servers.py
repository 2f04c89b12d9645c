"""Servers that die, stop, hang or come late, and what their nodes make of it."""

import time

from tests.e2e.kit import Node, Server, Stage, loopback, members_agree

QUICK = "last_call_timeout=0.3&local_addr=127.0.0.1&join_timeout=60"
PATIENT = "last_call_timeout=3&local_addr=127.0.0.1&join_timeout=60"
"""Where all are to be in the first round, however late a busy machine starts them."""
TTL_S = 3.0
SHORT_LIVED = "keep_alive_interval=1&keep_alive_max_attempt=3"


def works_on(node: Node) -> None:
    """It can use the store of its round."""
    node.call("store.set", "from", node.name)


def test_scenario_08_members_of_a_server_restarted_without_data_form_one_new_round(stage: Stage):
    """Row 8: the members run on, are told that their round is over, and re-form under a higher number."""
    bind = loopback()
    server = stage.serve(bind)
    nodes = stage.nodes(f"tcp://{bind}/restart?min_nodes=2&max_nodes=3&keep_alive_interval=2&{PATIENT}", "a", "b", "c")
    first = [node.round(size=3) for node in nodes]
    members_agree(*first)

    server.kill()
    for node in nodes:
        said = node.event("BackendUnreachable")
        assert bind in said["reason"]
        assert node.all("changed") == []  # a server that is away ends no round
    stage.serve(bind)
    for node in nodes:
        told = node.wait("changed")
        assert told["cause"] in ("session lost", "round over")
        assert "restarted without its data" in told["reason"]
    second = [node.round(above=first[0]["round"]) for node in nodes]
    members_agree(*second)  # of three: nobody formed a group without the others
    for node in nodes:
        works_on(node)
        assert len(node.all("round")) == 2


def test_scenario_08_nothing_forms_while_a_member_may_not_know_that_its_round_is_over(stage: Stage):
    """Row 8 without data: a member that sleeps through the restart believes in its round for one time to live."""
    bind = loopback()
    server = stage.serve(bind)
    url = f"tcp://{bind}/asleep?min_nodes=2&max_nodes=3&{SHORT_LIVED}&{PATIENT}"
    a, b, c = stage.nodes(url, "a", "b", "c")
    first = [node.round(size=3) for node in (a, b, c)]
    c.stop()
    server.kill()
    began_at = time.monotonic()
    stage.serve(bind)
    told = a.event("WaitingFor", lambda fact: "restarted without its data" in fact["reason"])
    assert "2 of 3 members of round" in told["reason"] or "1 of 3 members of round" in told["reason"]
    second = [node.round(above=first[0]["round"]) for node in (a, b)]
    members_agree(*second)
    assert min(fact["at"] for fact in second) - began_at > TTL_S - 0.2
    assert max(fact["at"] for fact in second) - began_at < TTL_S + 8
    c.go_on()
    assert c.wait("changed")["cause"] == "session lost"
    members_agree(*(node.round(above=second[0]["round"], size=3) for node in (a, b, c)))


def test_scenario_08_survivors_of_a_killed_host_serve_themselves(stage: Stage):
    """Row 8, self-hosted, one machine: one of the survivors binds the endpoint, and all re-form."""
    bind = loopback()
    url = f"tcp://{bind}/host?min_nodes=2&max_nodes=3&{SHORT_LIVED}&{PATIENT}"
    host = stage.node(url, "host")
    host.event("Hosting")
    a, b = stage.nodes(url, "a", "b")
    first = [node.round(size=3) for node in (host, a, b)]
    members_agree(*first)

    host.kill()
    second = [node.round(above=first[0]["round"]) for node in (a, b)]
    members_agree(*second)
    assert sorted(len(node.events("Hosting")) for node in (a, b)) == [0, 1]
    for node in (a, b):
        told = node.wait("changed")
        assert told["cause"] in ("session lost", "round over")
        assert bind in told["reason"]
        works_on(node)


def test_scenario_08_survivors_that_cannot_serve_fail_at_their_deadline_and_name_the_endpoint(network: Stage):
    """Row 8, self-hosted, the host was another machine: the survivors say so, wait, and give up when they said."""
    far, near = network.machines(2)
    endpoint = f"{far.address}:29400"
    options = f"min_nodes=3&{SHORT_LIVED}&last_call_timeout=0.3&join_timeout=4"
    url = f"tcp://{endpoint}/gone?{options}"
    host = network.node(f"{url}&local_addr={far.address}", "host", machine=far)
    host.event("Hosting")
    a, b = network.nodes(f"{url}&local_addr={near.address}", "a", "b", machine=near)
    members_agree(*(node.round() for node in (host, a, b)))

    killed_at = host.kill()
    for node in (a, b):
        assert endpoint in node.event("BackendUnreachable")["reason"]
        told = node.wait("changed")
        assert told["cause"] == "session lost"
        assert told["at"] - killed_at < TTL_S + 5
        failed = node.wait("error")
        assert failed["error"] == "RendezvousConnectionError"
        assert endpoint in failed["text"]
        assert "refused" in failed["text"]
        assert 4 - 0.5 < failed["at"] - told["at"] < 4 + 5
        assert node.wait_exit() == 0
        assert node.events("Hosting") == []


def test_scenario_16_nodes_that_start_long_before_their_server_wait_and_say_so(stage: Stage):
    """Row 16: they name the endpoint and the cause, and form when it is there."""
    bind = loopback()
    nodes = stage.nodes(f"tcp://{bind}/early?min_nodes=3&is_host=false&{QUICK}", "a", "b", "c")
    for node in nodes:
        said = node.event("BackendUnreachable")
        assert bind in said["reason"]
        assert "refused" in said["reason"]
    time.sleep(3)  # the lateness of the server
    stage.serve(bind)
    members_agree(*(node.round() for node in nodes))
    for node in nodes:
        assert node.event("BackendReachable")["after_s"] > 2.5


def test_terminated_server_goes_in_good_order_and_its_nodes_find_the_next_one(stage: Stage):
    """SIGTERM: everybody is told, the process ends with success; a new server on the same address takes over."""
    bind = loopback()
    server = stage.serve(bind)
    nodes = stage.nodes(f"tcp://{bind}/term?min_nodes=2&keep_alive_interval=2&{QUICK}", "a", "b")
    first = [node.round() for node in nodes]
    told_at = server.terminate()
    assert server.wait_exit() == 0
    assert time.monotonic() - told_at < 8
    assert [line for line in server.errors if "stopped: it got SIGTERM" in line] != []
    assert "Traceback" not in "\n".join(server.errors)
    for node in nodes:
        assert bind in node.event("BackendUnreachable")["reason"]
        works_at_once(node)
    stage.serve(bind)
    second = [node.round(above=first[0]["round"]) for node in nodes]
    members_agree(*second)
    for node in nodes:
        node.event("BackendReachable")
        works_on(node)


def works_at_once(node: Node) -> None:
    """What is answered from what was pushed last is answered, whatever the server does."""
    for verb in ("num_nodes_waiting", "is_closed"):
        fact = node.outcome(node.ask(verb))
        assert fact["kind"] == "done", fact
        assert fact["took_s"] < 1


def test_scenario_26_every_call_ends_in_its_own_time_while_the_server_hangs(stage: Stage):
    """Row 26: with a server that is paused, not dead; and after it goes on, so does everything."""
    server = stage.serve(loopback())
    where = f"tcp://{server.wait_listening()}"
    options = "min_nodes=2&close_timeout=2&is_host=false&last_call_timeout=0.3&local_addr=127.0.0.1&join_timeout=3"
    a, b = stage.nodes(f"{where}/hang?{options}", "a", "b", mode="hand")
    (closer,) = stage.nodes(f"{where}/other?{options}".replace("min_nodes=2", "min_nodes=1"), "closer", mode="hand")
    (fresh,) = stage.nodes(f"{where}/third?{options}", "fresh", mode="hand")
    for number, node in [(node.ask("next"), node) for node in (a, b, closer)]:
        assert node.outcome(number)["kind"] == "done"
    fresh.wait("ready")
    a.call("store.set_timeout", 1.0)
    a.call("store.set", "there", "before")

    server.stop()
    calls = {
        a.ask("store.set", "k", "v"): 1,
        a.ask("store.get", "there", 2.0): 2,
        a.ask("store.wait", ["there"], 2.0): 2,
        a.ask("store.check", ["there"]): 1,
        a.ask("store.add", "n", 1): 1,
        a.ask("store.compare_set", "there", "before", "after"): 1,
        a.ask("store.multi_get", ["there"], 2.0): 2,
        a.ask("store.barrier", "all", 2.0): 2,
    }
    closing, joining = closer.ask("set_closed"), fresh.ask("next")
    works_at_once(a)
    works_at_once(b)
    for number, limit_s in calls.items():
        ended_in_time(a.outcome(number), limit_s, "StoreTimeoutError")
    ended_in_time(closer.outcome(closing), 2, "RendezvousTimeoutError")
    ended_in_time(fresh.outcome(joining), 3, "RendezvousConnectionError")

    server.go_on()
    goes_on(server, a, b)


def ended_in_time(fact: dict, limit_s: float, error: str) -> None:
    """A call failed, as it said it would, at its own limit and not much later."""
    assert (fact["kind"], fact.get("error")) == ("failed", error), fact
    assert limit_s - 0.2 < fact["took_s"] < limit_s + 4, fact


def goes_on(server: Server, a: Node, b: Node) -> None:
    a.call("store.set_timeout", 30.0)
    assert a.call("store.add", "n", 1) in (1, 2)  # the one that timed out may have happened
    b.call("store.set", "k", "v2")
    assert a.call("store.get", "k") == "v2"
    assert [node.all("changed") for node in (a, b)] == [[], []]
    again = [(node, node.ask("next")) for node in (a, b)]
    assert [node.outcome(number)["kind"] for node, number in again] == ["done", "done"]
    assert "Traceback" not in "\n".join(server.errors)


def test_scenario_26_server_that_hangs_beyond_the_time_to_live_ends_the_round_for_everybody_alike(stage: Stage):
    """Beyond row 26: each member knows from its own clock that its session is over; then all re-form, once."""
    server = stage.serve(loopback())
    url = f"tcp://{server.wait_listening()}/long?min_nodes=3&{SHORT_LIVED}&{QUICK}"
    nodes = stage.nodes(url, "a", "b", "c")
    first = [node.round(size=3) for node in nodes]
    stopped_at = server.stop()
    for node in nodes:
        told = node.wait("changed")
        assert told["cause"] == "session lost"
        assert told["at"] - stopped_at < TTL_S + 1 + 4
        assert node.events("RenewalMissed") != []
    server.go_on()
    last = [node.round(above=first[0]["round"], size=3) for node in nodes]
    members_agree(*last)
    for node in nodes:
        works_on(node)
