"""`rallypoint run` on three machines (network namespaces): growing, shrinking, and the sudden loss of a machine."""

import os
import signal
import subprocess
from contextlib import suppress

from tests.e2e.kit import PATIENCE_S, PORT, Machine, Stage, ip
from tests.e2e.launching import Run, consistent, marked


def power_off(machine: Machine) -> None:
    """Disconnect the machine, then kill all its processes, so that no connection is closed."""
    machine.ip("link", "set", "eth0", "down")
    found = subprocess.run(
        ["ip", "netns", "pids", machine.name], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):  # a guardian may have killed it already
            os.kill(int(pid), signal.SIGKILL)


def test_run_on_three_machines_grows_to_four_nodes_and_shrinks_to_two(network: Stage, tmp_path):
    machines = one, two, three = network.machines(3)
    conf = "keep_alive_interval=1,keep_alive_max_attempt=3"
    run = Run(network, f"{one.address}:{PORT}", tmp_path, "2:4", "--nproc-per-node", "2", conf=conf)
    a, b = run.start("a", machine=one), run.start("b", machine=two)
    assert a.wait_line(f"serves this run itself on {one.address}:{PORT}")
    first = consistent(a.workers(4, count=2), b.workers(4, count=2))
    assert first[0]["addr"] in {machine.address for machine in machines}, "the address of rank 0, for everybody"

    c, d = run.start("c", machine=three, words=("children",)), run.start("d", machine=two)
    grown = consistent(*(launcher.workers(8, count=2) for launcher in (a, b, c, d)))
    c.kill()
    d.kill()
    shrunk = consistent(*(launcher.workers(4, above=grown[0]["RALLYPOINT_ROUND"], count=2) for launcher in (a, b)))
    assert marked(f"{run.id}/c") == marked(f"{run.id}/d") == []
    os.kill(next(fact["pid"] for fact in shrunk if fact["node"] == "b"), signal.SIGKILL)
    assert (a.wait_exit(), b.wait_exit()) == (137, 137), "a worker failed, and there are no restarts"
    run.nothing_is_left()


def test_remaining_nodes_go_on_after_the_sudden_loss_of_a_machine(network: Stage, tmp_path):
    one, two, three = network.machines(3)
    conf = "keep_alive_interval=1,keep_alive_max_attempt=3,close_timeout=3"
    run = Run(network, f"{one.address}:{PORT}", tmp_path, "2:3", conf=conf)
    a, b = run.start("a", machine=one), run.start("b", machine=two)
    c = run.start("c", machine=three, words=("children",))
    grown = consistent(*(launcher.workers(3) for launcher in (a, b, c)))
    power_off(three)
    shrunk = consistent(*(launcher.workers(2, above=grown[0]["RALLYPOINT_ROUND"]) for launcher in (a, b)))
    assert a.wait_line("stopping the workers", "lost: c")
    assert marked(f"{run.id}/c") == []

    said = len(a.errors)
    ip("-n", two.name, "link", "set", "eth0", "down")  # now a machine that is disconnected but alive
    assert a.wait_line("waiting for", "1 of at least 2 nodes joined: a", after=said)
    ip("-n", two.name, "link", "set", "eth0", "up")
    ip("-n", two.name, "route", "replace", "default", "via", one.address)
    assert b.wait_line("stopping the workers")
    consistent(*(launcher.workers(2, above=shrunk[0]["RALLYPOINT_ROUND"]) for launcher in (a, b)))
    run.finish(a, b)
