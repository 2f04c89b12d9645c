"""The campaign of losses: each of its judgements can fail, and one real loss of each kind is measured."""

import pytest

from tests.backends.etcd.kit import SYSTEM
from tests.e2e.kit import why_no_machines
from tests.e2e.losses import KINDS, Figures, Job, missing, report, run_all

OOM = 'rank 1 on b exited with 1: RuntimeError: "CUDA" out of memory'
SAID = {
    "b": f"rallypoint run: round 2 is over: {OOM} (restart 1 of 3)",
    "a": f"rallypoint run: {OOM}, and the run has used its 1 restart",
    "`history`": '{"why": "rank 1 on b exited with 1: RuntimeError: \\"CUDA\\" out of memory"}',
}


def test_sentence_that_is_the_same_everywhere_is_found():
    assert missing("b", SAID) == []


def test_sentence_in_other_words_is_missing():
    assert missing("b", SAID | {"a": "rallypoint run: rank 1 failed"}) == [f"a lacks {OOM!r}"]


def test_launcher_that_does_not_name_the_failure_is_found():
    (text,) = missing("b", SAID | {"b": "rallypoint run: a worker failed"})
    assert text.startswith("b does not name it")


@pytest.mark.parametrize("what", ["ended", "counted", "stuck"])
def test_campaign_fails_if_a_job_ended_or_a_restart_was_counted(what, tmp_path, capsys):
    job = Job("tcp", "ring", 0, tmp_path, 1, print)
    job.figures["kill"] = Figures(took_s=[0.5, 2.0, 1.0])
    assert report([job]) == 0
    setattr(job.figures["kill"], what, 1)
    assert report([job]) == 1
    assert "     3 " in capsys.readouterr().out


@pytest.mark.skipif(why_no_machines() is not None, reason=why_no_machines() or "")
@pytest.mark.skipif(SYSTEM is None, reason="needs Debian's etcd-server")
def test_launchers_go_on_without_one_that_is_lost(tmp_path):
    job = Job("etcd", "ring", 3, tmp_path, 1, print)
    try:
        run_all([job.losses(list(KINDS), 1)], side_by_side=1)
    finally:
        job.end()
    figures = job.figures.values()
    assert [(one.ended, one.stuck, len(one.took_s)) for one in figures] == [(0, 0, 1)] * 3
