"""Many nodes at once, and a server whose resolver is slow."""

from tests.e2e.kit import PATIENCE_S, Node, Stage, loopback

QUICK = "last_call_timeout=0.3&join_timeout=60"


def form(crews: list[Node], size: int) -> float:
    """Let all crews start at the same moment; how long it took until the last node was in the one round of all."""
    for crew in crews:
        crew.wait("ready")
    began_at = crews[0].wait("ready")["at"]
    for crew in crews:
        crew.write("go")
    for crew in crews:
        crew.wait("all", patience_s=2 * PATIENCE_S)
    rounds = [fact for crew in crews for fact in crew.all("round")]
    assert len({fact["round"] for fact in rounds}) == 1
    assert {fact["size"] for fact in rounds} == {size}
    assert sorted(fact["rank"] for fact in rounds) == list(range(size))
    assert len({fact["name"] for fact in rounds}) == size
    return max(fact["at"] for fact in rounds) - began_at


def test_scenario_12_two_hundred_nodes_that_start_at_once_form_one_round(stage: Stage):
    """Row 12, with real sockets: four processes of fifty nodes, and a fifth that serves."""
    server = stage.serve(loopback())
    url = f"tcp://{server.wait_listening()}/crowd?min_nodes=200&is_host=false&local_addr=127.0.0.1&{QUICK}"
    crews = [stage.node(url, f"crew{number}", "many", "50") for number in range(4)]
    form(crews, 200)
    assert len(server.errors) < 20, server.story  # it does not talk about each of them


def test_scenario_27_server_with_a_slow_resolver_takes_many_clients_in_no_time(network: Stage):
    """Row 27: a name server that never answers. Sixty-four look-ups of five seconds would be seen."""
    way, slow, other = network.machines(3)
    way.ip("route", "add", "blackhole", "10.213.200.53/32")
    slow.write_etc("resolv.conf", "nameserver 10.213.200.53\noptions timeout:5 attempts:2\n")
    slow.write_etc("hosts", "127.0.0.1 localhost\n")
    server = network.serve(f"{slow.address}:29400", "--insecure", machine=slow)
    url = f"tcp://{server.wait_listening()}/slow?min_nodes=32&is_host=false&local_addr={other.address}&{QUICK}"
    took_s = form([network.node(url, "crew", "many", "32", machine=other)], 32)
    assert took_s < 5
