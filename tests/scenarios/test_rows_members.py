"""Members that are killed, stopped, started again, or have the wrong time."""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.e2e.kit import HERE, Fact, Node, Server, Stage, loopback, members_agree
from tests.e2e.operating import ask_json
from tests.scenarios.places import Place
from tests.scenarios.record import Recorder

pytestmark = pytest.mark.scenarios

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
DAY_S = 86_400.0


def one_round(nodes: Iterable[Node], above: int = 0) -> list[Fact]:
    """The facts of these nodes about their first common round after that number, without other members."""
    nodes = list(nodes)
    facts = [node.round(above=above, size=len(nodes)) for node in nodes]
    members_agree(*facts)
    return facts


def last(facts: Iterable[Fact]) -> float:
    """The time of the last fact."""
    return max(fact["at"] for fact in facts)


def told(nodes: Iterable[Node], number: int) -> list[Fact]:
    """The facts of these nodes about the first change of that round."""
    return [node.wait("changed", lambda fact: fact["round"] == number) for node in nodes]


def test_row_01_node_is_interrupted_and_started_again_twenty_times(row: Recorder, stage: Stage, place: Place):
    url = place.url("min_nodes=2")
    stays, number, gaps, waits = stage.node(url, "stays"), 0, [], []
    for _ in range(20):
        again = stage.node(url, "again")
        asked = again.event("JoinStarted")
        facts = one_round([stays, again], above=number)
        waits.append(last(facts) - asked["at"])
        number = facts[0]["round"]
        interrupted_at = again.interrupt()
        assert again.wait_exit() != 0
        assert again.errors[-1] == "KeyboardInterrupt"
        gaps.append(last(told([stays], number)) - interrupted_at)
    assert [stays.all("error"), stays.events("SessionLost"), stays.events("JoinFailed")] == [[], [], []]
    row("it was interrupted and started again 20 times, and 20 rounds formed without an error")
    row("the longest time from Ctrl-C until the other was told", max(gaps), place.loss_s)
    row("the longest time from asking to join again until both were in a round", max(waits), place.loss_s)


@pytest.mark.quick
def test_row_03_survivors_of_a_killed_member_are_told_and_re_form(row: Recorder, stage: Stage, place: Place):
    a, b, c = stage.nodes(place.url("min_nodes=2&max_nodes=3"), "a", "b", "c")
    number = one_round([a, b, c])[0]["round"]
    killed_at = c.kill()
    facts = told([a, b], number)
    assert {fact["cause"] for fact in facts} == {"loss"}
    row("kill -9 until both survivors were told", last(facts) - killed_at, place.loss_s)
    row("until they were in a round of two", last(one_round([a, b], above=number)) - killed_at)


@pytest.mark.quick
def test_row_04_spare_takes_the_place_of_a_killed_member(row: Recorder, stage: Stage, place: Place):
    url = place.url("min_nodes=2&max_nodes=2")
    a, b = stage.nodes(url, "a", "b")
    first = one_round([a, b])
    spare = stage.node(url, "spare")
    spare.event("WaitingFor", lambda fact: "spare" in fact["reason"])
    killed_at = b.kill()
    second = one_round([a, spare], above=first[0]["round"])
    assert second[0]["rank"] == first[0]["rank"]
    assert second[1]["rank"] == first[1]["rank"]
    row(
        "kill -9 until the spare was a member",
        last(second) - killed_at,
        place.loss_s + (0.5 if place.is_told_of_deaths else 1),
    )
    row(f"the survivor kept rank {second[0]['rank']}, the spare got rank {second[1]['rank']}, which was lost")


def test_row_05_nodes_that_do_not_fit_are_spares_and_the_run_stays_open(row: Recorder, stage: Stage, place: Place):
    run = place.run()
    url = place.url("min_nodes=2&max_nodes=2", run)
    members = stage.nodes(url, "a", "b")
    first = one_round(members)
    spares = stage.nodes(url, "c", "d", "e")
    for spare in spares:
        spare.event("WaitingFor", lambda fact: "spare" in fact["reason"])
    members[0].until(lambda: ask_json("status", run)["counts"]["spare"] == 3, "three spares are counted")
    assert [node.call("is_closed") for node in (*members, *spares)] == [False] * 5
    assert [node.call("num_nodes_waiting") for node in members] == [0, 0]
    assert [node.all("changed") for node in members] == [[], []]
    row("of five nodes for two places two are members and three are spares; the run is open, nobody was disturbed")
    left_at = time.monotonic()
    members[1].call("leave", "done here")
    second = members[0].round(above=first[0]["round"], size=2)
    row("one member left until a spare had its place", second["at"] - left_at)


# --- row 6 ------------------------------------------------------------------------------------------------------------


class Clock:
    """A wall clock with an offset that can be changed while processes run."""

    def __init__(self, path: Path, off_s: float) -> None:
        if not FAKETIME.exists():
            pytest.skip("needs libfaketime: apt-get install faketime")
        self._path = path
        self.jump(off_s)
        self.prefix = [
            "env",
            f"LD_PRELOAD={FAKETIME}",
            f"FAKETIME_TIMESTAMP_FILE={path}",
            "FAKETIME_NO_CACHE=1",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
        ]

    def jump(self, off_s: float) -> None:
        self._path.write_text(f"{off_s:+.0f}s\n", encoding="ascii")

    def off_s(self) -> float:
        """The offset that a process with this clock really has."""
        argv = [*self.prefix, sys.executable, "-c", "import time; print(time.time(), time.monotonic())"]
        said = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.split()
        assert abs(float(said[1]) - time.monotonic()) < 30, "the monotonic clock is left alone"
        return float(said[0]) - time.time()

    def node(self, stage: Stage, url: str, name: str) -> Node:
        """A node whose machine has this clock."""
        node = Node(name, [*self.prefix, sys.executable, str(HERE / "node.py"), "loop", f"{url}&name={name}"])
        stage.processes.append(node)
        return node


def test_row_06_clocks_days_apart_have_no_effect(row: Recorder, stage: Stage, place: Place, tmp_path: Path):
    ahead, behind, minute = (
        Clock(tmp_path / name, off_s) for name, off_s in (("ahead", 3 * DAY_S), ("behind", -3 * DAY_S), ("minute", 60))
    )
    assert abs(ahead.off_s() - 3 * DAY_S) < 60
    assert abs(behind.off_s() + 3 * DAY_S) < 60
    root, servers = place.root, ""
    if place.backend == "tcp":  # the clock of etcd, a static binary, cannot be changed
        bind = loopback()
        server = Server("server", [*behind.prefix, sys.executable, "-m", "rallypoint", "serve", "--bind", bind])
        stage.processes.append(server)
        root, servers = f"tcp://{server.wait_listening()}", " (that of the server as the second)"
    ttl_s = 6.0
    url = place.url("min_nodes=2&max_nodes=3", f"{root}/clocks-{tmp_path.name}", ttl_s=ttl_s)
    a, b, c = ahead.node(stage, url, "a"), behind.node(stage, url, "b"), minute.node(stage, url, "c")
    number = one_round([a, b, c])[0]["round"]
    time.sleep(ttl_s + 2)  # by now a wrong clock would have expelled a node
    ahead.jump(30 * DAY_S)
    behind.jump(-30 * DAY_S)
    minute.jump(-60)
    assert abs(ahead.off_s() - 30 * DAY_S) < 60
    time.sleep(ttl_s + 2)
    for node in (a, b, c):
        node.call("store.set", f"from {node.name}", "fine")
    assert [node.all("changed") for node in (a, b, c)] == [[], [], []]
    assert [node.events("SessionLost") for node in (a, b, c)] == [[], [], []]
    row(
        "clocks 3 days ahead, 3 days behind and a minute off, then set to 30 days ahead, 30 days behind and a minute "
        f"behind{servers}: nobody was missed for {2 * (ttl_s + 2):.0f} s, with a time to live of {ttl_s:g} s"
    )
    killed_at = c.kill()
    facts = told([a, b], number)
    row("kill -9 of one until the others, 60 days apart, were told", last(facts) - killed_at, place.loss_s)
    one_round([a, b], above=number)


# --- rows 7 and 9 -----------------------------------------------------------------------------------------------------


def test_row_07_stall_within_the_time_to_live_is_not_noticed_and_beyond_it_is_told(
    row: Recorder, stage: Stage, place: Place
):
    ttl_s, stall_s = 15.0, 10.0
    a, b, c = stage.nodes(place.url("min_nodes=2&max_nodes=3", ttl_s=ttl_s), "a", "b", "c")
    number = one_round([a, b, c])[0]["round"]
    c.stop()
    time.sleep(stall_s)  # the node is stopped
    c.go_on()
    c.call("store.set", "still", "here")
    assert a.call("store.get", "still") == "here"
    assert [node.all("changed") for node in (a, b, c)] == [[], [], []]
    row(f"SIGSTOP for {stall_s:g} s with a time to live of {ttl_s:g} s: nothing happened, its next call worked")

    stopped_at = c.stop()
    facts = told([a, b], number)
    assert {fact["cause"] for fact in facts} == {"loss"}
    row("SIGSTOP for good until the others were told", last(facts) - stopped_at, ttl_s + 1)
    second = one_round([a, b], above=number)[0]["round"]
    going_at = c.go_on()
    (own,) = told([c], number)
    assert own["cause"] == "session lost"
    row("SIGCONT until the stalled one was told that its session is lost", own["at"] - going_at, 1.0)
    row("until it was a member again", last(one_round([a, b, c], above=second)) - going_at)


@pytest.mark.quick
def test_row_07_machine_whose_cable_is_pulled_knows_that_it_is_out(row: Recorder, network: Stage):
    """Neither side sees the end of a connection; only time passes."""
    ttl_s = 6.0
    way, head, far = network.machines(3)
    server = network.serve(f"{head.address}:29400", "--insecure", machine=head)
    place = Place("tcp", f"tcp://{server.wait_listening()}", ttl_s, is_told_of_deaths=True)
    url = place.url("min_nodes=2&max_nodes=3")
    a, b = network.nodes(url, "a", "b", machine=head)
    c = network.node(url, "c", machine=far)
    number = one_round([a, b, c])[0]["round"]
    way.ip("link", "set", "to3", "down")
    pulled_at = time.monotonic()
    row("the cable was pulled until the others were told", last(told([a, b], number)) - pulled_at, ttl_s + 1)
    row("until the one without a network knew it, too", last(told([c], number)) - pulled_at, ttl_s + 1)
    second = one_round([a, b], above=number)[0]["round"]
    way.ip("link", "set", "to3", "up")
    up_at = time.monotonic()
    row("the cable was back until it was a member again", last(one_round([a, b, c], above=second)) - up_at)


def test_row_09_node_that_dies_before_it_confirms_blocks_nobody(row: Recorder, stage: Stage, place: Place):
    place = dataclasses.replace(place, ttl_s=15.0)  # so that the stopped node is not lost before it is killed
    url = place.url("min_nodes=3&confirm_timeout=60")
    a = stage.node(url, "a")
    a.event("WaitingFor", lambda fact: "1 of at least 3" in fact["reason"])  # on etcd, this makes a the coordinator
    half = stage.node(url, "half-in")
    for node in (a, half):
        node.event("WaitingFor", lambda fact: "2 of at least 3" in fact["reason"])
    half.stop()
    others = stage.nodes(url, "c", "d")  # the first of them starts an attempt, in which the stopped node cannot confirm
    for node in (a, *others):
        node.event("WaitingFor", lambda fact: "is forming with 3 nodes" in fact["reason"])
    assert a.all("round") == []
    killed_at = half.kill()
    facts = one_round([a, *others])
    assert facts[0]["round"] > 1, "an attempt with the dead one came first"
    row(
        "a node joined and was killed before it had confirmed: that attempt was given up, and the others formed another"
    )
    row("kill -9 until they were in it", last(facts) - killed_at, place.loss_s + 0.5)
