"""Many idle members on one etcd: nothing is written while nothing happens."""

import time

import pytest

from tests.backends.etcd.kit import needs, running
from tests.e2e.kit import Stage

pytest.importorskip("grpc", reason="needs grpcio: pip install 'rallypoint[etcd]'")

OPTIONS = "local_addr=127.0.0.1&join_timeout=300&confirm_timeout=60"


def idle(stage: Stage, member, processes: int, each: int, for_s: float) -> dict[str, float]:
    """So many nodes of one round do nothing for a while. What etcd did meanwhile, as far as it counts it."""
    count = processes * each
    url = f"etcd://{member.endpoint}/idle?min_nodes={count}&max_nodes={count}&{OPTIONS}"
    crowd = [stage.node(url, f"p{number}", "many", str(each)) for number in range(processes)]
    for process in crowd:
        process.wait("ready")
    began_at = time.monotonic()
    for process in crowd:
        process.write("go")
    for process in crowd:
        process.wait("all", patience_s=300)
    formed_s = time.monotonic() - began_at
    time.sleep(2.0)  # what follows a round is written
    before, revision = member.metrics(), member.status()["header"]["revision"]
    time.sleep(for_s)
    after = member.metrics()
    assert member.status()["header"]["revision"] == revision
    renewed = "etcd_debugging_lease_renewed_total"
    used = "process_cpu_seconds_total"
    return {
        "formed_s": formed_s,
        "renewals": after[renewed] - before[renewed],
        "cpu": (after[used] - before[used]) / for_s,
        "memory_mb": after["process_resident_memory_bytes"] / 1e6,
    }


def test_idle_members_write_nothing_and_stay(stage: Stage, tmp_path):
    """100 of them from 2 processes, for longer than a renewal takes."""
    with running(needs("system"), tmp_path) as cluster:
        told = idle(stage, cluster.members[0], processes=2, each=50, for_s=6.0)
    assert told["renewals"] >= 100


@pytest.mark.slow
def test_a_thousand_idle_members_of_eight_processes_write_nothing_for_a_minute(stage: Stage, tmp_path, capsys):
    with running(needs("system"), tmp_path) as cluster:
        told = idle(stage, cluster.members[0], processes=8, each=125, for_s=60.0)
    with capsys.disabled():
        print(f"\n1,000 idle members of 8 processes: {told}")
    assert told["renewals"] >= 11_000
