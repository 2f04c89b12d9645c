"""How long etcd itself keeps a lease after its last renewal, which bounds the detection of losses on etcd.

A leader checks every half second which leases have expired. A new leader gives each lease its full time plus an
election time-out, counted from its election: it does not know the last renewals. A renewal ends that addition.
"""

import base64
import time

import pytest

from tests.backends.etcd.kit import ELECTION_S, EtcdCluster, Member, needs, running, ticks

pytestmark = pytest.mark.slow

TTL_S = 2
LOOK_S = 0.5
"""How often a leader checks for expired leases."""
SLACK_S = 3.0
"""How much later something may happen on a busy machine."""
TICK_S = 0.02


@pytest.fixture
def three(tmp_path):
    with running(needs("system"), tmp_path, 3) as cluster:
        yield cluster


def granted(member: Member) -> int:
    return int(member.ask("lease/grant", TTL=TTL_S)["ID"])


def renew(member: Member, lease: int) -> float:
    """Renew it; the time shortly before the renewal."""
    now = time.monotonic()
    assert int(member.ask("lease/keepalive", ID=lease)["result"]["TTL"]) == TTL_S
    return now


def change_leader(cluster: EtcdCluster) -> tuple[Member, float, float]:
    """Kill the leader; the new one, and times shortly before and after its election."""
    cluster.leader.kill()
    before = time.monotonic()
    for _ in ticks(tick_s=TICK_S):
        now = time.monotonic()
        for member in cluster.members:
            if member.is_running and member.is_leader():
                member.ask("kv/range", key=base64.b64encode(b"any").decode())  # answered once the election is complete
                return member, before, time.monotonic()
        before = now
    raise AssertionError("no leader")


def test_lease_lives_for_its_time_and_half_a_second_at_most_while_the_leader_stays(three):
    leader = three.leader
    lease = granted(leader)
    renewed_at = renew(leader, lease)
    seen_at = leader.lease_last_seen_at(lease)
    assert TTL_S - 5 * TICK_S < seen_at - renewed_at < TTL_S + LOOK_S + SLACK_S


def test_new_leader_gives_a_lease_its_election_time_out_more(three):
    lease = granted(three.leader)
    leader, before, after = change_leader(three)
    seen_at = leader.lease_last_seen_at(lease)
    assert seen_at - before > TTL_S + ELECTION_S - 5 * TICK_S
    assert seen_at - after < TTL_S + ELECTION_S + LOOK_S + SLACK_S


def test_lease_that_is_renewed_with_the_new_leader_has_no_more_than_its_time(three):
    renewed, other = granted(three.leader), granted(three.leader)
    leader, _, _ = change_leader(three)
    renew(leader, renewed)
    first_at = leader.lease_last_seen_at(renewed)
    assert leader.has_lease(other)
    assert leader.lease_last_seen_at(other) > first_at
