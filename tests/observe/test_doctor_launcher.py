"""The doctor's check of the scheduler that started a process."""

from functools import partial

from rallypoint.integrations.schedulers import detect
from rallypoint.observe.doctor.checks import Verdict
from rallypoint.observe.doctor.launcher import check_launcher
from tests.integrations.recorded import recorded


def test_doctor_reports_what_slurm_tells_a_process():
    check = check_launcher(partial(detect, recorded("slurm-srun")[1]))
    assert check.verdict is Verdict.OK
    assert "endpoint gpu001:61441, nodes 3, node rank 1, run id slurm-1.0" in check.found


def test_doctor_warns_if_the_launcher_would_refuse_to_start():
    check = check_launcher(partial(detect, recorded("slurm-several-tasks")[0]))
    assert check.verdict is Verdict.WARNING
    assert "SLURM_STEP_TASKS_PER_NODE=4(x2)" in check.found


def test_doctor_skips_the_check_in_an_ordinary_shell():
    assert check_launcher(partial(detect, {})).verdict is Verdict.SKIPPED
