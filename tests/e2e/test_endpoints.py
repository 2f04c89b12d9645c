"""Who serves, and where: names, second addresses, IPv6, services, taken ports, hosts that leave."""

import time

import pytest

from tests.e2e.kit import Stage, loopback, members_agree

QUICK = "last_call_timeout=0.3&join_timeout=60"
NAME = "rendezvous-head"


@pytest.mark.parametrize("endpoint", ["localhost", "[::1]", NAME, "10.213.7.7", "10.213.0.1", "[fd00:213::7]"])
def test_scenario_14_whoever_can_bind_the_endpoint_hosts_it(network: Stage, endpoint: str):
    """Row 14: a name, IPv6, a second address of the machine: one of two nodes on it hosts, the other connects."""
    (machine,) = network.machines(1)
    machine.ip("addr", "add", "10.213.7.7/32", "dev", "br0")
    machine.ip("addr", "add", "fd00:213::7/128", "dev", "br0", "nodad")
    machine.write_etc("hosts", f"127.0.0.1 localhost\n::1 localhost\n10.213.7.7 head.cluster.example {NAME}\n")
    url = f"tcp://{endpoint}/bind?min_nodes=2&local_addr=10.213.0.1&{QUICK}"
    nodes = network.nodes(url, "a", "b", machine=machine)
    members_agree(*(node.round() for node in nodes))
    assert sorted(len(node.events("Hosting")) for node in nodes) == [0, 1]
    assert [node.events("NobodyServes") for node in nodes] == [[], []]


@pytest.mark.parametrize("endpoint", [NAME, "10.213.7.7"])
def test_scenario_14_machine_without_the_address_waits_for_the_one_that_has_it(network: Stage, endpoint: str):
    """Row 14: the name and the second address of another machine, whose node comes last."""
    way, head, other = network.machines(3)
    head.ip("addr", "add", "10.213.7.7/32", "dev", "eth0")
    way.ip("route", "add", "10.213.7.7/32", "via", head.address)
    for machine in (head, other):
        machine.write_etc("hosts", f"127.0.0.1 localhost\n10.213.7.7 {NAME}.cluster.example {NAME}\n")
    url = f"tcp://{endpoint}:29400/machines?min_nodes=2&{QUICK}"
    waits = network.node(f"{url}&local_addr={other.address}", "waits", machine=other)
    assert endpoint in waits.event("BackendUnreachable")["reason"]
    hosts = network.node(f"{url}&local_addr={head.address}", "hosts", machine=head)
    members_agree(waits.round(), hosts.round())
    assert hosts.event("Hosting")["address"] == "10.213.7.7:29400"
    assert waits.events("Hosting") == []


def test_scenario_14_name_with_addresses_of_many_machines_has_one_host(network: Stage):
    """Row 14: a headless Kubernetes service. If each machine served its own address, there would be two groups."""
    _, first, second = network.machines(3)
    for machine in (first, second):
        machine.write_etc("hosts", f"127.0.0.1 localhost\n{second.address} {NAME}\n{first.address} {NAME}\n")
    url = f"tcp://{NAME}:29400/headless?min_nodes=2&max_nodes=4&{QUICK}"
    others = network.nodes(f"{url}&local_addr={second.address}", "c", "d", machine=second)
    for node in others:
        node.event("BackendUnreachable")  # they could bind an address of the name, and do not
    hosts = network.nodes(f"{url}&local_addr={first.address}", "a", "b", machine=first)
    members_agree(*(node.round(size=4) for node in (*others, *hosts)))
    assert [node.events("Hosting") for node in others] == [[], []]
    assert [fact["address"] for node in hosts for fact in node.events("Hosting")] == [f"{first.address}:29400"]


def test_scenario_14_machine_that_knows_its_own_name_as_loopback_says_so_and_can_be_told_to_host(network: Stage):
    """Row 14: Debian's /etc/hosts gives a machine's own name the address 127.0.1.1, which is of no use to others."""
    _, head, other = network.machines(3)
    head.write_etc("hosts", f"127.0.0.1 localhost\n127.0.1.1 {NAME}\n")
    other.write_etc("hosts", f"127.0.0.1 localhost\n{head.address} {NAME}\n")
    url = f"tcp://{NAME}:29400/debian?min_nodes=2&{QUICK}&local_addr="
    waits = network.node(f"{url}{other.address}", "waits", machine=other)
    alone = network.node(f"{url}{head.address}", "alone", machine=head)
    said = alone.event("Hosting")
    assert said["address"] == "127.0.1.1:29400"
    assert f"no other machine can: here {NAME} means this machine alone" in said["waits_for"]
    assert "is_host=true" in said["waits_for"]
    alone.kill()
    told = network.node(f"{url}{head.address}&is_host=true&insecure=true", "told", machine=head)
    members_agree(waits.round(), told.round())
    assert told.event("Hosting")["address"] == "0.0.0.0:29400"


def test_scenario_14_address_of_a_service_needs_a_host_that_is_told_so(network: Stage):
    """Row 14: an address that is no machine's. Everybody who waits there says after ten seconds what to do: is_host."""
    way, behind, other = network.machines(3)
    refusing, silent = "10.213.100.1", "10.213.100.2"
    way.ip("addr", "add", f"{refusing}/32", "dev", "lo")
    way.ip("route", "add", "blackhole", f"{silent}/32")
    options = f"min_nodes=2&{QUICK}"
    url = f"tcp://{refusing}:29400/service?{options}&local_addr="
    waits = network.node(f"{url}{other.address}", "waits", machine=other)
    lost = network.node(f"tcp://{silent}:29400/lost?{options}&local_addr={other.address}", "lost", machine=other)
    began_at = time.monotonic()
    for node, endpoint in ((waits, refusing), (lost, silent)):
        said = node.event("NobodyServes")
        assert said["level"] == 40
        assert f"{endpoint}:29400" in said["reason"]
        assert "is_host=true" in said["reason"]
        assert 9 < said["at"] - began_at < 18, f"promised: ten seconds\n{node.story}"
        assert node.events("Hosting") == []

    # The service now has its endpoint: connections are accepted, and closed as long as nobody listens behind it.
    network.proxy(f"{refusing}:29400", f"{behind.address}:29400", machine=way)
    host = network.node(f"{url}{behind.address}&is_host=true&insecure=true", "host", machine=behind)
    members_agree(host.round(), waits.round())
    assert host.event("Hosting")["address"] in ("0.0.0.0:29400", "[::]:29400")


def test_scenario_20_node_that_hosts_itself_says_loudly_where_and_for_whom(stage: Stage):
    """Row 20: as an event, and on the stderr of a program that logs in Python's own way."""
    bind = loopback()
    node = stage.node(f"tcp://{bind}/alone?min_nodes=2&local_addr=127.0.0.1&{QUICK}", "alone", "loop", "logging")
    said = node.event("Hosting")
    assert said["level"] == 30
    assert said["address"] == bind
    assert said["waits_for"].startswith("at least 1 more node must reach it there")
    line = node.wait_line("serves this run itself", bind)
    assert line.startswith("WARNING:rallypoint:")
    assert "at least 1 more node must reach it there" in line
    node.event("WaitingFor", lambda fact: fact["reason"] == "1 of at least 2 nodes joined: alone")


def test_scenario_23_second_server_on_a_taken_port_says_who_could_have_it(stage: Stage):
    """Row 23: one line, a status that is not zero, what to do; the first server has noticed nothing."""
    first = stage.serve(loopback())
    bind = first.wait_listening()
    second = stage.serve(bind, listens=False)
    assert second.wait_exit() not in (0, None)
    (line,) = second.errors
    for part in (bind, "taken", "rallypoint serve", "ss -ltnp", "--bind"):
        assert part in line
    node = stage.node(f"tcp://{bind}/fine?min_nodes=1&local_addr=127.0.0.1&{QUICK}", "a")
    node.round()


def test_scenario_23_self_hosted_jobs_of_one_endpoint_share_the_first_ones_server(stage: Stage):
    """Row 23: two runs, one address, nobody told to serve. A host that leaves stays until the others are done."""
    bind = loopback()
    urls = [f"tcp://{bind}/{run}?min_nodes=1&local_addr=127.0.0.1&close_timeout=60&{QUICK}" for run in ("one", "two")]
    host = stage.node(urls[0], "host", "hand")
    host.call("next")
    guest = stage.node(urls[1], "guest")
    guest.round()
    assert [len(node.events("Hosting")) for node in (host, guest)] == [1, 0]
    guest.call("store.set", "k", "v")

    leaving = host.ask("close")
    host.event("NodeLeft")
    assert guest.call("store.get", "k") == "v"
    assert [fact for fact in host.facts if fact.get("id") == leaving] == []  # it lingers
    guest.write('{"id": 99, "do": "leave", "args": []}')
    guest.wait("end")
    assert guest.wait_exit() == 0
    assert host.outcome(leaving, patience_s=20)["kind"] == "done"
    host.write('{"id": 99, "do": "exit", "args": []}')
    assert host.wait_exit() == 0


@pytest.mark.parametrize(("ending", "least_s"), [("close", 1.5), ("shutdown", 0.0)])
def test_host_that_ends_serves_no_longer_than_its_bound(stage: Stage, ending: str, least_s: float):
    """Then the others are told, and serve themselves. `close_timeout` bounds it; a closed run is not waited for."""
    bind = loopback()
    options = f"max_nodes=2&local_addr=127.0.0.1&close_timeout=2&keep_alive_interval=2&{QUICK}"
    host = stage.node(f"tcp://{bind}/linger?min_nodes=1&{options}", "host", "hand")
    host.call("next")
    guest = stage.node(f"tcp://{bind}/stays?min_nodes=1&{options}", "guest")
    first = guest.round()
    fact = host.outcome(host.ask(ending))
    assert fact["kind"] == "done", fact
    assert least_s <= fact["took_s"] < 7
    guest.event("Hosting")
    guest.round(above=first["round"])
