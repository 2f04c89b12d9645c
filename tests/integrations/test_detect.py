"""Detection in environments that were recorded from real launchers: endpoint, number of nodes, rank, run id."""

import subprocess
import sys

import pytest

from rallypoint.errors import SettingsError
from rallypoint.integrations.detect_scheduler import detect_scheduler
from rallypoint.integrations.schedulers import Detected, detect
from rallypoint.settings import Settings
from tests.integrations.recorded import NAMES, recorded

# name of the recording -> (source, endpoint, nodes, run id); ranks are always 0, 1, 2, ... in the order of the file.
RIGHT = {
    "slurm-srun": ("slurm", "gpu001:61441", 3, "slurm-1.0"),
    "slurm-smaller-step": ("slurm", "gpu001:61441", 2, "slurm-1.1"),
    "slurm-array": ("slurm", "gpu001:61443", 2, "slurm-3.0"),
    "slurm-heterogeneous": ("slurm", "gpu001:61445", 3, "slurm-5.0"),
    "slurm-heterogeneous-one-group": ("slurm", "gpu002:61445", 2, "slurm-5.1"),
    "slurm-before-requeue": ("slurm", "gpu001:61447", 2, "slurm-7.0"),
    "slurm-after-requeue": ("slurm", "gpu001:61447", 2, "slurm-7.0-restart1"),
    "slurm-pmi2": ("slurm", "gpu001:61441", 3, "slurm-1.3"),
    "slurm-direct": ("slurm", "gpu001:61449", 2, "slurm-9.0"),
    "openmpi4-in-slurm": ("open mpi", "gpu001:61448", 3, "slurm-8-3971153921"),
    "mpich-in-slurm": ("hydra", "gpu001:61448", 3, "slurm-8.1"),
    "intelmpi-in-slurm": ("hydra", "gpu001:61448", 3, "slurm-8-320a0000-9c4f-bd95-5460-06004b385a74"),
    "openmpi4": ("open mpi", "10.9.9.1", 2, "mpi-2978217985"),
    "openmpi5": ("open mpi", "vm", 2, "mpi-prterun-vm-22713@1"),
    "mpich": ("hydra", None, 2, None),
    "intelmpi": ("hydra", None, 2, "mpi-fd580000-7458-353e-5460-060003c4504d"),
}
# name of the recording -> a part of the error's advice.
WRONG = {
    "slurm-batch": "without srun",
    "slurm-heterogeneous-batch": "without srun",
    "slurm-salloc": "without srun",
    "slurm-several-tasks": "SLURM_STEP_TASKS_PER_NODE=4(x2)",
    "openmpi5-several": "--map-by ppr:1:node",
}


def test_every_recording_has_an_expectation():
    assert set(NAMES) == RIGHT.keys() | WRONG.keys()


@pytest.mark.parametrize("name", RIGHT)
def test_recorded_processes_are_detected(name):
    source, endpoint, nodes, run_id = RIGHT[name]
    processes = recorded(name)
    assert len(processes) == nodes
    for rank, environ in enumerate(processes):
        found = detect(environ)
        assert found is not None
        assert (found.source, found.endpoint, found.nodes, found.node_rank, found.run_id) == (
            source,
            endpoint,
            nodes,
            rank,
            run_id,
        )
        assert found.why


@pytest.mark.parametrize("name", RIGHT)
def test_detected_values_are_valid_settings(name):
    for environ in recorded(name):
        found = detect(environ)
        assert found is not None
        settings = Settings.build(
            scheme="tcp",
            endpoints=found.endpoint or "localhost",
            run_id=found.run_id or "run",
            min_nodes=found.nodes,
            node_rank=found.node_rank,
        )
        assert settings.node_rank == found.node_rank


@pytest.mark.parametrize("name", WRONG)
def test_launcher_that_was_started_wrongly_gets_an_error_with_advice(name):
    for environ in recorded(name):
        with pytest.raises(SettingsError) as caught:
            detect(environ)
        assert WRONG[name] in str(caught.value)
        assert "rallypoint run" in str(caught.value)


def test_requeued_job_is_another_run():
    before, after = recorded("slurm-before-requeue")[0], recorded("slurm-after-requeue")[0]
    assert before["SLURM_JOB_ID"] == after["SLURM_JOB_ID"]
    assert detect(before).run_id != detect(after).run_id


def test_tasks_of_an_array_are_separate_runs():
    one = recorded("slurm-array")[0]
    other = one | {"SLURM_JOB_ID": "4", "SLURM_JOBID": "4", "SLURM_ARRAY_TASK_ID": "5"}
    assert one["SLURM_ARRAY_JOB_ID"] == other["SLURM_ARRAY_JOB_ID"]
    assert detect(one).run_id != detect(other).run_id
    assert detect(one).endpoint != detect(other).endpoint


def test_batch_script_of_one_node_needs_no_srun():
    environ = recorded("slurm-batch")[0] | {
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "gpu007",
        "SLURM_NTASKS_PER_NODE": "8",
    }
    found = detect(environ)
    assert (found.endpoint, found.nodes, found.node_rank, found.run_id) == ("gpu007:61441", 1, 0, "slurm-1")


def test_several_tasks_are_recognised_by_the_local_id_alone():
    environ = recorded("slurm-srun")[0] | {"SLURM_LOCALID": "1"}
    del environ["SLURM_STEP_TASKS_PER_NODE"]
    with pytest.raises(SettingsError, match="SLURM_LOCALID=1"):
        detect(environ)


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_RESTART_COUNT"])
@pytest.mark.parametrize("value", ["x", "-1", "1.5", "٣", "9" * 30])
def test_variable_that_is_no_number_is_named(variable, value):
    with pytest.raises(SettingsError) as caught:
        detect(recorded("slurm-srun")[0] | {variable: value})
    assert caught.value.option == variable


def test_rank_beyond_the_size_is_refused():
    with pytest.raises(SettingsError, match="SLURM_NODEID"):
        detect(recorded("slurm-srun")[0] | {"SLURM_NODEID": "3"})
    with pytest.raises(SettingsError, match="PMI_RANK"):
        detect(recorded("mpich")[0] | {"PMI_RANK": "2"})


def test_nothing_is_detected_in_an_ordinary_shell():
    assert detect({"HOME": "/root", "HOSTNAME": "node-7", "PATH": "/usr/bin"}) is None
    assert detect({}) is None


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "5", "HOSTNAME": "pod-5"}


def test_srun_inside_of_a_pod_takes_precedence_over_the_pod():
    found = detect(recorded("slurm-srun")[1] | POD)
    assert (found.source, found.node_rank) == ("slurm", 1)


def test_mpirun_inside_of_a_slurm_job_takes_precedence_over_the_steps_of_its_daemons():
    ranks = [detect(environ).node_rank for environ in recorded("openmpi4-in-slurm")]
    claimed = [environ["SLURM_NODEID"] for environ in recorded("openmpi4-in-slurm")]
    assert ranks == [0, 1, 2]
    assert claimed == ["0", "0", "1"]  # the numbers of the daemons are wrong for the processes


def test_mpirun_in_a_pod_gives_no_endpoint():
    found = detect(recorded("openmpi5")[1] | POD)
    assert (found.source, found.node_rank, found.nodes, found.endpoint) == ("open mpi", 1, 2, None)
    assert "--rdzv-endpoint" in found.why


@pytest.mark.parametrize(
    ("uri", "endpoint"),
    [
        ("1.0;tcp://10.1.2.3:34911", "10.1.2.3"),
        ("1.0;tcp://127.0.0.1,10.1.2.3:34911", "10.1.2.3"),
        ("1.0;tcp://10.1.2.3,172.17.0.1:34911", None),  # a container bridge has the same address on every machine
        ("1.0;tcp6://[fe80::1,fd00::7]:43370", "[fd00::7]"),
        ("1.0;tcp6://[fd00::7,fd00::8]:43370", None),
        ("1.0;tcp://10.1.2.3:34911;tcp6://[fd00::7]:43370", None),
        ("", None),
        ("nonsense", None),
    ],
)
def test_machine_of_mpirun_is_the_endpoint_only_if_it_has_one_address(uri, endpoint):
    found = detect(recorded("openmpi4")[0] | {"OMPI_MCA_orte_hnp_uri": uri})
    assert found.endpoint == endpoint


def test_single_process_of_mpirun_has_localhost_as_endpoint():
    alone = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert detect(alone).endpoint == "localhost"


@pytest.mark.parametrize("environ", [{"PMI_RANK": "3", "PMI_SIZE": "8"}, {"PMIX_RANK": "3", "PMIX_NAMESPACE": "x"}])
def test_number_of_a_process_alone_gives_nothing_about_nodes(environ):
    found = detect(environ)
    assert (found.endpoint, found.nodes, found.node_rank, found.run_id) == (None, None, None, None)
    assert "unknown" in found.why


def test_detected_is_a_value():
    found = Detected("slurm", "a:1", 2, 0, "r", "because")
    with pytest.raises(AttributeError):
        found.nodes = 3


def test_scheduler_of_this_process_is_detected(monkeypatch):
    for variable, value in recorded("slurm-srun")[2].items():
        monkeypatch.setenv(variable, value)
    assert detect_scheduler().node_rank == 2


def test_import_of_the_detection_imports_no_framework():
    code = (
        "import sys, rallypoint.integrations.detect_scheduler;"
        "print(sorted({'torch', 'jax', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
