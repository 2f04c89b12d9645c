"""Worlds that found a bug, in the product or in the simulator itself."""

import pytest

from rallypoint.testing.sim.run import run_seed

FOUND = {
    349: "rounds were numbered anew after the server had lost its data, and the checker of kept events expected more",
    444: "a round was kept as active a second time, because the first note of it was no longer kept",
    628: "a member had left in order and said so when it came back, but was still reported as gone",
    964: "a member came back and said why it had left too late for the report, and the checker expected it there",
    3404: "a round formed beside one of a short-lived server process that no returning client knew of",
    14494: "a member was lost before the round was active, and the round's end was put down to its echo",
    10287: "a member left before it was told of the active round, and the checker took its end for an untrue report",
    13715: "a round formed because a returning client knew of none",
    25910: "the run was not reopened after the faults: a disk was out for longer than the retries of the director",
    32139: "a simulated server that was paused, restarted and paused again never continued",
    33904: "a grant that was sent again was taken for a renewal",
    106859: "a confirmation from before the run was lost was taken for membership in the new round of that number",
    401666: "durable revisions that the server had not reported exceeded its history, and the simulator missed them",
    421132: "a simulated switch broke too few connections at once for the server to recognise it",
    430740: "an outage began just after a slow grant, with less than a third of the session's time left",
    501029: "sessions that were due while the disk failed were reported as ended, but then none ends",
    517764: "the world was considered settled while a member that had lost its session had yet to join again",
    554218: "a run was created under a lease that its creator had ended without an answer, and no round ever formed",
    668773: "a server without its data restarted again, and forgot that members of an earlier life might be running",
    690746: "a disk failed during the grace of a dead node, and the checker did not expect all sessions to be extended",
}


@pytest.mark.parametrize("seed", FOUND)
def test_world_that_found_a_bug_is_correct_now(seed):
    verdict = run_seed(seed)
    assert not verdict.broke, verdict.why
