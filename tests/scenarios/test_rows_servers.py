"""Servers that die, hang, come late, are called by odd names, or are asked by strangers."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.backends.etcd.kit import ELECTION_S, EtcdCluster, needs
from tests.e2e import closed
from tests.e2e import test_endpoints as endpoints
from tests.e2e import test_strangers as strangers
from tests.e2e.etcd_world import TTL_S, World, three
from tests.e2e.kit import Machine, Stage, loopback
from tests.e2e.operating import command
from tests.e2e.test_many import form
from tests.e2e.test_servers import works_at_once
from tests.scenarios.places import Place
from tests.scenarios.record import Recorder
from tests.scenarios.test_rows_members import last, one_round, told

pytestmark = pytest.mark.scenarios

QUICK = "last_call_timeout=0.3&local_addr=127.0.0.1&join_timeout=120"


# --- row 8 ------------------------------------------------------------------------------------------------------------


def test_row_08_server_is_killed_and_started_again_from_its_log(row: Recorder, stage: Stage, tmp_path: Path):
    bind, data = loopback(), ("--data", str(tmp_path / "data"))
    server = stage.serve(bind, *data)
    nodes = stage.nodes(f"tcp://{bind}/kept?min_nodes=3&max_nodes=4&{QUICK}", "a", "b", "c")
    number = one_round(nodes)[0]["round"]
    nodes[0].call("store.set", "checkpoint", "step 1000")
    server.kill()
    for node in nodes:
        node.event("BackendUnreachable")
    restarted_at = time.monotonic()
    stage.serve(bind, *data).wait_line("continues with the data in")
    for node in nodes:
        assert node.call("store.get", "checkpoint") == "step 1000"
    row(
        "a new server was started on the log of the killed one until all members had read their data",
        time.monotonic() - restarted_at,
    )
    assert [node.all("changed") for node in nodes] == [[], [], []]
    assert [node.events("SessionLost") for node in nodes] == [[], [], []]
    row("all members stayed members of the same round, and none was told of anything")
    late = stage.node(f"tcp://{bind}/kept?min_nodes=3&max_nodes=4&{QUICK}", "late")
    one_round([*nodes, late], above=number)
    row("the run goes on: a fourth node was admitted afterwards")


def test_row_08_host_among_the_nodes_is_killed_and_another_serves(row: Recorder, stage: Stage):
    bind, ttl_s = loopback(), 6.0
    place = Place("tcp", f"tcp://{bind}", ttl_s, is_told_of_deaths=True)
    url = place.url("min_nodes=2&max_nodes=3")
    host = stage.node(url, "host")
    host.event("Hosting")
    others = stage.nodes(url, "a", "b")
    number = one_round([host, *others])[0]["round"]
    killed_at = host.kill()
    facts = one_round(others, above=number)
    assert sorted(len(node.events("Hosting")) for node in others) == [0, 1]
    row(
        "without a server of its own and without a log: the node that served was killed, a survivor bound the address, "
        f"and they formed a new round after one time to live of {ttl_s:g} s",
        last(facts) - killed_at,
        ttl_s + 2,
    )


def lose_coordinator(row: Recorder, world: World, number: int, when: str, extension_s: float = 0.0) -> tuple[str, int]:
    """Kill it, and note who took how long; its name, and the round of the survivors.

    `extension_s`: what etcd itself may add to the time to live (see `test_etcd_leases.py`).
    """
    name, lease, leader = world.coordinator(), world.coordinator_lease(), world.cluster.leader
    survivors = [node for other, node in world.nodes.items() if other != name]
    killed_at = world.nodes[name].kill()
    bound_s = TTL_S + extension_s + 1
    lease_seen_at = leader.lease_last_seen_at(lease)
    told_at = last(told(survivors, number))
    row(f"{when}: the coordinator was killed until the others were told", told_at - killed_at, bound_s)
    row("of that, until etcd had ended its lease", lease_seen_at - killed_at)
    row("and from then on until they were told", told_at - lease_seen_at, 0.5)
    elections = [fact for node in survivors for fact in node.events("CoordinatorElected")]
    (elected_at,) = [fact["at"] for fact in elections if fact["at"] > killed_at]
    row("until there was a new coordinator", elected_at - killed_at, bound_s)
    facts = one_round(survivors, above=number)
    row("until they were in a new round", last(facts) - killed_at, bound_s + 1)
    return name, int(facts[0]["round"])


def test_row_08_leader_of_etcd_and_coordinator_are_killed_and_nothing_is_lost(
    row: Recorder, stage: Stage, cluster: EtcdCluster
):
    world = World(stage, cluster, "row-8", 2, ("a", "b", "c"))
    number = world.settled()
    world.nodes["a"].call("store.set", "checkpoint", "step 1000")
    killed_at = time.monotonic()
    cluster.leader.kill()
    assert world.nodes["b"].call("store.get", "checkpoint") == "step 1000"
    row(
        "the leading member of etcd was killed until the store answered again, with everything in it",
        time.monotonic() - killed_at,
    )
    assert world.changes(number) == []
    assert world.settled() == number
    row("the round went on, and nobody was told of anything")
    # A new leader of etcd gives every lease its full time and an election time-out more, from when it leads. The
    # coordinator dies before it has renewed its own with that leader, so this is what the others have to wait for.
    name, number = lose_coordinator(
        row,
        world,
        number,
        f"at once after that, when a new leader of etcd gives each lease its election time-out of {ELECTION_S:g} s in "
        f"addition to the time to live of {TTL_S:g} s",
        ELECTION_S,
    )
    world.start(name)
    number = world.settled(number)
    lose_coordinator(row, world, number, "later, after it had come back, with the same leader of etcd")
    world.check()
    row("every safety guarantee was checked against what etcd had committed")


def test_row_08_coordinator_is_killed_while_the_leader_of_etcd_stays(row: Recorder, stage: Stage, cluster: EtcdCluster):
    world = World(stage, cluster, "row-8-stays", 2, ("a", "b", "c"))
    lose_coordinator(row, world, world.settled(), f"with a time to live of {TTL_S:g} s")
    world.check()
    row("every safety guarantee was checked against what etcd had committed")


# --- rows 14 to 16 ----------------------------------------------------------------------------------------------------


def test_row_14_whoever_can_bind_the_endpoint_serves_it(row: Recorder, network: Stage):
    played = {
        "localhost": "localhost",
        "IPv6 of loopback": "[::1]",
        "an alias in /etc/hosts": endpoints.NAME,
        "a second address of the machine": "10.213.7.7",
        "a second address, IPv6": "[fd00:213::7]",
    }
    for what, endpoint in played.items():
        began_at = time.monotonic()
        with Stage() as one:
            endpoints.test_scenario_14_whoever_can_bind_the_endpoint_hosts_it(one, endpoint)
        row(
            f"{what} ({endpoint}): one of two nodes served, both were in a round; processes included",
            time.monotonic() - began_at,
        )


def test_row_14_machines_that_do_not_have_the_address_wait_for_the_one_that_has(row: Recorder, network: Stage):
    with Stage() as one:
        endpoints.test_scenario_14_machine_without_the_address_waits_for_the_one_that_has_it(one, endpoints.NAME)
    row("the alias of another machine: the node there served, the other waited and connected")
    with Stage() as one:
        endpoints.test_scenario_14_name_with_addresses_of_many_machines_has_one_host(one)
    row("a headless service, whose name is many machines: one of them served, and there was one group")
    with Stage() as one:
        endpoints.test_scenario_14_machine_that_knows_its_own_name_as_loopback_says_so_and_can_be_told_to_host(one)
    row("a machine that knows its own name as 127.0.1.1 says so, and what to set")
    with Stage() as one:
        endpoints.test_scenario_14_address_of_a_service_needs_a_host_that_is_told_so(one)
    row("the address of a service, which is no machine's: after ten seconds everybody says what to set")


def test_row_15_strangers_are_refused_and_the_run_goes_on(row: Recorder, stage: Stage, tmp_path: Path):
    token = tmp_path / "token"
    token.write_text(f"{strangers.TOKEN}\n", encoding="utf-8")
    strangers.test_scenario_15_strangers_are_refused_in_one_line_each_while_a_run_goes_on(stage, token)
    row("junk, HTTP, a pickle, TLS and SSH were refused in one line each")
    row("no token, a wrong token, two foreign versions, an oversized hello, a pickled hello, a frame of 2 GB: refused")
    row("the members worked on through all of it, and a new run formed afterwards")
    began_at = time.monotonic()
    strangers.test_scenario_15_node_without_the_right_token_fails_at_once_and_says_why(
        stage, token, tmp_path, "open barley", "the token is wrong"
    )
    row("a node with a wrong token failed at once, and said why; its process included", time.monotonic() - began_at)


@pytest.mark.parametrize("place", ["tcp", "etcd"])
def test_row_16_nodes_that_start_long_before_the_server_wait_and_say_for_what(
    row: Recorder, stage: Stage, tmp_path: Path, place: str
):
    late_s = 120.0
    cluster = EtcdCluster(needs("system"), tmp_path, 3) if place == "etcd" else None
    bind = cluster.endpoints if cluster is not None else loopback()
    options = f"min_nodes=3&{QUICK.replace('join_timeout=120', 'join_timeout=300')}"
    nodes = stage.nodes(f"{place}://{bind}/early?{options}{'&is_host=false' * (place == 'tcp')}", "a", "b", "c")
    began_at = time.monotonic()
    for node in nodes:
        said = node.event("BackendUnreachable")["reason"]
        assert bind.split(",")[0] in said
    hasty = stage.node(
        f"{place}://{bind}/early?{options.replace('=300', '=5')}{'&is_host=false' * (place == 'tcp')}", "hasty"
    )
    asked, failed = hasty.event("JoinStarted"), hasty.wait("error")
    row("a node with a deadline of 5 s gave up at its own deadline", failed["at"] - asked["at"], 5 + 1)
    row(f"it said: {failed['text'].splitlines()[0][:300]}".replace(bind, "HOST:PORT"))
    time.sleep(max(0.0, began_at + late_s - time.monotonic()))
    try:
        if cluster is not None:
            cluster.start()
        else:
            stage.serve(bind)
        there_at = time.monotonic()
        row(
            f"the server came {late_s:g} s after its clients; then until they were in a round",
            last(one_round(nodes)) - there_at,
            6,
        )
    finally:
        if cluster is not None:
            cluster.stop()


# --- row 26 -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hanging:
    """A control plane that can be paused."""

    place: Place
    pause: Any
    resume: Any


@pytest.fixture(params=["tcp", "etcd"])
def hanging(request: pytest.FixtureRequest, stage: Stage, tmp_path: Path) -> Any:
    if request.param == "tcp":
        server = stage.serve(loopback())
        yield Hanging(Place("tcp", f"tcp://{server.wait_listening()}", 60.0, True), server.stop, server.go_on)
        return
    cluster = three(needs("system"), tmp_path)
    try:
        yield Hanging(
            Place("etcd", f"etcd://{cluster.endpoints}", 60.0, False),
            lambda: [member.pause() for member in cluster.members],
            lambda: [member.resume() for member in cluster.members],
        )
    finally:
        cluster.stop()


LATE_S = 0.5
"""How much later than it says a call may end."""
LOOK_S = 1.0
"""What a call that waits for keys or ranks may spend, after its time-out, on finding out which are missing."""
WITHDRAW_S = 5.0
"""What a node that goes may spend on saying so."""

STORE_CALLS: dict[str, tuple[float, list[Any]]] = {
    "set": (0.0, ["k", "v"]),
    "get": (LOOK_S, ["there", 2.0]),
    "wait": (LOOK_S, [["there"], 2.0]),
    "check": (0.0, [["there"]]),
    "add": (0.0, ["n", 1]),
    "compare_set": (0.0, ["there", "before", "after"]),
    "delete_key": (0.0, ["k"]),
    "num_keys": (0.0, []),
    "append": (0.0, ["there", "more"]),
    "multi_get": (LOOK_S, [["there"], 2.0]),
    "multi_set": (0.0, [["k"], ["v"]]),
    "barrier": (LOOK_S, ["all", 2.0]),
    "gather": (LOOK_S, ["all", "v", 2.0]),
}
HANDLER_CALLS: dict[str, tuple[str, float, float]] = {
    "closer": ("set_closed", 2.0, 0.0),
    "reopener": ("reopen", 2.0, 0.0),
    "leaver": ("leave", 0.0, WITHDRAW_S),
    "ender": ("shutdown", 2.0, WITHDRAW_S),
    "member again": ("next", 3.0, WITHDRAW_S),
    "fresh": ("next", 3.0, 0.0),
    "looker": ("is_closed", 2.0, 0.0),
    "counter": ("num_nodes_waiting", 2.0, 0.0),
}
CALLED = {"next": "next_rendezvous"}
NEW = ("fresh", "looker", "counter")
EXTRA = {0.0: "", LOOK_S: ", and 1 s to find out what is missing", WITHDRAW_S: ", and 5 s to withdraw"}


def test_row_26_every_call_keeps_its_time_out_while_the_server_is_paused(row: Recorder, stage: Stage, hanging: Hanging):
    place = hanging.place
    options = "min_nodes=1&close_timeout=2&join_timeout=3&confirm_timeout=2"
    reading = {name: "&read_timeout=2" if name in NEW else "" for name in HANDLER_CALLS}
    runs = {name: place.run() for name in ("member", *HANDLER_CALLS)}
    nodes = {
        name: stage.node(place.url(f"{options}{reading.get(name, '')}", run), name.replace(" ", "-"), "hand")
        for name, run in runs.items()
    }
    for name, node in nodes.items():
        node.wait("ready")
        if name not in NEW:
            node.call("next")
    member = nodes["member"]
    member.call("store.set_timeout", 2.0)
    member.call("store.set", "there", "before")

    hanging.pause()
    asked = [
        (f"store.{verb}", 2.0, extra_s, member, member.ask(f"store.{verb}", *args))
        for verb, (extra_s, args) in STORE_CALLS.items()
    ]
    asked += [
        (
            f"{CALLED.get(verb, verb)} of a {'new node' if name in NEW else 'member'}",
            limit_s,
            extra_s,
            nodes[name],
            nodes[name].ask(verb),
        )
        for name, (verb, limit_s, extra_s) in HANDLER_CALLS.items()
    ]
    works_at_once(member)
    row("num_nodes_waiting and is_closed of a member were answered at once, from what was pushed last")
    outcomes = [(what, limit_s, extra_s, node.outcome(number)) for what, limit_s, extra_s, node, number in asked]
    for what, limit_s, extra_s, fact in outcomes:
        ended = fact.get("error", f"returned {fact.get('result')}")
        sentence = f"{what} (time-out {limit_s:g} s{EXTRA[extra_s]}) {'raised ' * ('error' in fact)}{ended}"
        row(sentence, fact["took_s"], limit_s + extra_s + LATE_S)
        assert fact["kind"] == "failed" or not what.startswith("store."), fact
    began_at = time.monotonic()
    said = command("why", runs["member"], "--timeout", "3")
    assert said.returncode != 0
    row("`rallypoint why --timeout 3`, with starting its process", time.monotonic() - began_at, 3 + 2)

    hanging.resume()
    member.call("store.set_timeout", 30.0)
    member.call("store.get", "there")  # it answers again
    # A key that nobody wrote meanwhile: what was asked then, and given up, may still be done.
    member.call("store.set", "afterwards", "x")
    assert member.call("store.get", "afterwards") == "x"
    assert member.all("changed") == []
    row("afterwards the member's round and its store went on")


# --- row 27 -----------------------------------------------------------------------------------------------------------


def reverse_look_up_s(machine: Machine, address: str) -> float:
    """How long this machine takes to look up the name of an address."""
    code = f"""
import contextlib, socket, time
began_at = time.monotonic()
with contextlib.suppress(socket.gaierror):
    socket.getnameinfo(({address!r}, 1), socket.NI_NAMEREQD)
print(time.monotonic() - began_at)
"""
    argv = ["ip", "netns", "exec", machine.name, sys.executable, "-c", code]
    return float(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout)


def test_row_27_server_with_a_slow_name_server_takes_many_clients_in_no_time(row: Recorder, network: Stage):
    way, slow, other = network.machines(3)
    way.ip("route", "add", "blackhole", "10.213.200.53/32")
    slow.write_etc("resolv.conf", "nameserver 10.213.200.53\noptions timeout:2 attempts:1\n")
    slow.write_etc("hosts", "127.0.0.1 localhost\n")
    look_up_s = reverse_look_up_s(slow, other.address)
    assert look_up_s > 1.5, "the name server is not slow at all"
    row("one look-up of a client's name on the server's machine, where the name server is mute", look_up_s)
    server = network.serve(f"{slow.address}:29400", "--insecure", machine=slow)
    place = Place("tcp", f"tcp://{server.wait_listening()}", 15.0, is_told_of_deaths=True)
    url = place.url("min_nodes=64&is_host=false").replace("127.0.0.1", other.address)
    took_s = form([network.node(url, "crew", "many", "64", machine=other)], 64)
    row("64 clients connected and joined: until all were in a round", took_s, 2.0)


# --- row 30 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["tcp"])
def test_row_30_closed_run_does_not_come_back_when_its_host_goes(row: Recorder, place: str):
    tries = 3
    told = {"kill": "was killed", "shutdown": "shut down", "operator": "was killed after an operator had closed it"}
    for face, how in closed.CASES:
        ends = [closed.play(face, how) for _ in range(tries)]
        assert not [end.came_back for end in ends if end.came_back]
        row(
            f"{face}: the host {told[how]}, {tries} times: never again a round; the longest time until the other node "
            f"had its answer or ended",
            max(end.others_s for end in ends),
        )
        if (face, how) == ("handler", "shutdown"):
            row("the longest `shutdown()` of the host", max(end.host_s for end in ends), 2.0)
