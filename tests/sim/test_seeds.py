"""Worlds in which something was wrong once, in the product or in the simulator itself. They stay."""

import pytest

from rallypoint.testing.sim.run import run_seed

FOUND = {
    93: "a caller that was in by itself was told of those who had waited in the round before",
    2975: "a session that a caller had opened ended, because its node came back before it knew of it",
    3404: "a round formed beside one of a short life of the server that nobody who had come back knew of",
    4312: "a node whose caller had joined by itself said that it had never reached the server",
    9001850: "a session that a caller had opened ended, because its node took it over while it was being welcomed",
    11227: "a caller went in with an attempt that its node had gone on from, and the node did not know",
    13715: "a round formed because one who had come back knew of none",
    25910: "the run was not open when the faults were over: a disk was out for longer than anybody tried",
    32139: "a simulated server that was paused, restarted and paused again never went on",
    33904: "a grant that was sent again was taken for a renewal",
    106859: "a confirmation from before the run was forgotten was taken for being in the new round of that number",
    401666: "a server remembered fewer changes than it had kept without telling anybody, and the simulator missed them",
    421132: "a simulated switch broke too few connections at once for the server to think of a switch",
    430740: "an outage came right after a session was granted slowly, which had less than a third of its time left",
    501029: "sessions whose time is over while the disk fails were said to have ended, and none does then",
    517764: "the world was said to be whole while a member that had lost its session was yet to go",
    554218: "a run was made on a lease that its maker had ended without hearing so, and no round ever formed",
    668773: "a server that had lost its data was started again, and forgot that others might be at work",
    690746: "a disk failed while a dead node was in its grace, and the net did not know that sessions then begin anew",
}


@pytest.mark.parametrize("seed", FOUND)
def test_world_that_found_something_breaks_nothing_now(seed):
    verdict = run_seed(seed)
    assert not verdict.broke, verdict.why
