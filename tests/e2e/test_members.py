"""Members that stall, die, come late or lose their connection, as real processes."""

import time
from pathlib import Path

from tests.e2e.kit import Stage, loopback, members_agree
from tests.patience import until

QUICK = "last_call_timeout=0.3&local_addr=127.0.0.1&join_timeout=60"
PATIENT = "last_call_timeout=3&local_addr=127.0.0.1&join_timeout=60"
"""Where all are to be in the first round, however late a busy machine starts them."""


def test_scenario_07_member_that_stalls_within_its_time_to_live_is_missed_by_nobody(stage: Stage):
    """Row 7, and what lies beyond: a longer stall costs the place, and everybody is told, the stalled one too."""
    ttl_s = 4.0
    server = stage.serve(loopback())
    options = f"min_nodes=2&max_nodes=3&keep_alive_interval=1&keep_alive_max_attempt=4&{PATIENT}"
    url = f"tcp://{server.wait_listening()}/stall?{options}"
    a, b, c = stage.nodes(url, "a", "b", "c")
    first = [node.round(size=3) for node in (a, b, c)]
    members_agree(*first)
    number = first[0]["round"]

    c.stop()
    time.sleep(1.5)  # the stall
    c.go_on()
    c.call("store.set", "still", "here")
    assert a.call("store.get", "still") == "here"
    assert a.call("num_nodes_waiting") == 0
    assert [node.all("changed") for node in (a, b, c)] == [[], [], []]

    stopped_at = c.stop()
    for node in (a, b):
        told = node.wait("changed")
        assert (told["round"], told["cause"]) == (number, "loss")
        assert "c" in told["reason"]
        # Its last renewal may be older than the first stall.
        assert ttl_s - 3 < told["at"] - stopped_at < ttl_s + 1 + 4
    second = [node.round(above=number) for node in (a, b)]
    members_agree(*second)
    assert [fact["rank"] for fact in second] == [fact["rank"] for fact in first[:2]]

    c.go_on()
    told = c.wait("changed")
    assert (told["round"], told["cause"]) == (number, "session lost")
    assert c.events("SessionLost") != []
    members_agree(*(node.round(above=second[0]["round"], size=3) for node in (a, b, c)))


def test_late_node_gets_in_at_once_without_an_admission_window(stage: Stage):
    """Promised: 0.3 s from its asking to its entering, with members that come as soon as they are told."""
    server = stage.serve(loopback())
    url = f"tcp://{server.wait_listening()}/late?min_nodes=2&max_nodes=8&admission_window=0&{QUICK}"
    a, b = stage.nodes(url, "a", "b")
    first = a.round(size=2)
    b.round(size=2)
    late = stage.node(url, "late")
    asked = late.event("JoinStarted")
    rounds = [node.round(above=first["round"]) for node in (a, b, late)]
    members_agree(*rounds)
    assert max(fact["at"] for fact in rounds) - asked["at"] < 4
    assert a.wait("changed")["cause"] == "waiting"


def test_connection_that_is_cut_is_resumed_and_nobody_notices(stage: Stage):
    """The network resets everything twice, and once holds everything for a while: the round goes on.

    Also when the grace that began with the first reset is over: coming back has ended it.
    """
    grace_s = 2.5
    server = stage.serve(loopback())
    way = loopback()
    proxy = stage.proxy(way, server.wait_listening())
    a, b = stage.nodes(
        f"tcp://{way}/cut?min_nodes=2&max_nodes=3&disconnect_grace={grace_s}&is_host=false&{QUICK}", "a", "b"
    )
    members_agree(a.round(), b.round())
    began_at = time.monotonic()
    for word in ("cut", "hold", "cut"):
        proxy.word(word)
        asked = a.ask("store.add", "n", 1)
        if word == "hold":
            time.sleep(1.0)  # the hold
            proxy.word("pass")
        assert a.outcome(asked)["kind"] == "done"
    assert b.call("store.add", "n", 0) == 3
    proxy.word("delay 0.1")
    assert b.call("store.add", "n", 1) == 4
    time.sleep(max(0.0, began_at + grace_s + 2.0 - time.monotonic()))  # what would end has ended by then
    assert b.call("store.add", "n", 1) == 5
    assert [a.all("changed"), b.all("changed")] == [[], []]
    assert [a.events("SessionLost"), b.events("SessionLost")] == [[], []]


def test_scenario_01_member_that_is_interrupted_and_started_again_is_taken_back_each_time(stage: Stage):
    """Row 1: Ctrl-C, start it again, several times in a row: a new round each time, no error, nobody held back."""
    server = stage.serve(loopback())
    url = f"tcp://{server.wait_listening()}/again?min_nodes=2&{QUICK}"
    stays = stage.node(url, "stays")
    number = 0
    for _ in range(5):
        again = stage.node(url, "again")
        members_agree(again.round(), stays.round(above=number))
        number = again.round()["round"]
        again.interrupt()
        assert again.wait_exit() != 0
        assert again.errors[-1] == "KeyboardInterrupt"
        stays.wait("changed", lambda fact, last=number: fact["round"] == last)
        assert again.events("NodeLeft") != []
    assert [stays.all("error"), stays.events("SessionLost"), stays.events("JoinFailed")] == [[], [], []]


def test_node_that_stands_still_is_not_confirmed_for(stage: Stage, tmp_path: Path):
    """Whoever waits confirms its place beforehand, for a second at a time: one that stopped before that is asked."""
    events = tmp_path / "events"
    server = stage.serve(loopback(), "--events", str(events))
    url = f"tcp://{server.wait_listening()}/still?min_nodes=3&confirm_timeout=1&{PATIENT}"
    a, b = stage.nodes(url, "a", "b")
    for node in (a, b):
        node.event("JoinStarted")
    time.sleep(0.5)  # until their callers wait on connections of their own
    b.stop()
    time.sleep(1.5)  # longer than what it has said counts
    c = stage.node(url, "c")
    until(lambda: "RoundGivenUp" in events.read_text(encoding="utf-8"), "an attempt is given up")
    assert [node.all("round") for node in (a, c)] == [[], []], "nobody is in a round with one that stands still"
    b.go_on()
    rounds = [node.round(size=3) for node in (a, b, c)]
    members_agree(*rounds)
    assert rounds[0]["round"] > 1
