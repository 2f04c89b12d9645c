"""What the doctor says about who started a process."""

from functools import partial

from rallypoint.integrations.hosts import detect
from rallypoint.observe.doctor.checks import Verdict
from rallypoint.observe.doctor.launcher import check_launcher
from tests.integrations.recorded import recorded


def test_doctor_says_what_slurm_says():
    check = check_launcher(partial(detect, recorded("slurm-srun")[1]))
    assert check.verdict is Verdict.OK
    assert "endpoint gpu001:61441, nodes 3, node rank 1, run id slurm-1.0" in check.found


def test_doctor_warns_of_a_launcher_that_would_refuse():
    check = check_launcher(partial(detect, recorded("slurm-several-tasks")[0]))
    assert check.verdict is Verdict.WARNING
    assert "SLURM_STEP_TASKS_PER_NODE=4(x2)" in check.found


def test_doctor_finds_nobody_in_an_ordinary_shell():
    assert check_launcher(partial(detect, {})).verdict is Verdict.SKIPPED
