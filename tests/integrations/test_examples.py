"""The examples for schedulers are valid, their flags exist, and their pods and tasks find each other.

The tests add what a cluster would add to a pod, as documented: the index, the host name, the labels.
"""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rallypoint.cli import main
from rallypoint.integrations.schedulers import Detected, detect
from rallypoint.integrations.schedulers.kubernetes import JOBSET_VARIABLES, OPTIONAL_VARIABLES
from tests.integrations.recorded import recorded
from tests.tidy.sources import ROOT

EXAMPLES = ROOT / "examples"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
SCRIPTS = [EXAMPLES / "slurm" / "train.sbatch", EXAMPLES / "mpi" / "run.sh"]
FLAGS = frozenset(
    {
        *("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
        *("--standalone", "--max-restarts", "--monitor-interval", "--node-rank", "--master-addr", "--master-port"),
        *("--local-addr", "--role", "--redirects", "--tee", "--log-dir", "--no-python"),
    }
)
"""torchrun's, which `rallypoint run` takes too."""
UID = "3f9c1b2a-0000-4000-8000-000000000000"


def documents(path: Path) -> dict[str, dict[str, Any]]:
    """The objects of a manifest, by kind."""
    found = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    return {one["kind"]: one for one in found}


def commands(path: Path) -> Iterator[list[str]]:
    """Every command of an example that contains `rallypoint run`, split into words."""
    if path.suffix == ".yaml":
        text = path.read_text(encoding="utf-8")
        for line in re.findall(r"command: (\[rallypoint.*\])", text):
            yield [str(word) for word in yaml.safe_load(line)]
        return
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if "rallypoint run" in line and not line.lstrip().startswith("#"):
            yield shlex.split(line)


def run_arguments(words: list[str]) -> list[str]:
    """The words between `rallypoint run` and the program."""
    at = words.index("rallypoint")
    assert words[at + 1] == "run"
    rest = words[at + 2 :]
    return rest[: rest.index("train.py")]


@pytest.mark.parametrize("path", [*MANIFESTS, *SCRIPTS], ids=lambda path: path.name)
def test_commands_have_flags_that_exist(path):
    found = list(commands(path))
    assert found
    known = set(FLAGS)
    if "run" in main.commands:
        known = {name for param in main.commands["run"].params for name in param.opts}
    for words in found:
        flags = [word.partition("=")[0] for word in run_arguments(words) if word.startswith("-")]
        assert "--nproc-per-node" in flags
        assert set(flags) <= known


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def environment(container: dict[str, Any], labels: dict[str, str]) -> dict[str, str]:
    """The variables that the manifest defines, with the values of the labels."""
    found = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    for one in container["env"]:
        if "value" in one:
            found[one["name"]] = one["value"]
            continue
        path = one["valueFrom"]["fieldRef"]["fieldPath"]
        assert path == (JOBSET_VARIABLES | OPTIONAL_VARIABLES)[one["name"]]
        match = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        assert match is not None
        found[one["name"]] = labels[match[1]]
    return found


def place(found: list[Detected | None]) -> tuple[str | None, int | None, str | None]:
    """The endpoint, the number of nodes and the run id. Checks that all nodes agree and have ranks 0, 1, 2, ..."""
    assert all(one is not None for one in found)
    assert [one.node_rank for one in found if one] == list(range(len(found)))
    (same,) = {(one.endpoint, one.nodes, one.run_id) for one in found if one}
    return same


def check_service(service: dict[str, Any], name: str, labels: dict[str, str]) -> None:
    """Check that the service is headless, has that name, and selects these pods, also before they are ready."""
    spec = service["spec"]
    assert service["metadata"]["name"] == name
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is True
    assert spec["selector"].items() <= labels.items()


def test_pods_of_the_indexed_job_find_each_other():
    objects = documents(EXAMPLES / "kubernetes" / "indexed-job.yaml")
    job = objects["Job"]
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    labels = {"job-name": name, "batch.kubernetes.io/controller-uid": UID}
    check_service(objects["Service"], pod["subdomain"], labels)
    found = []
    for index in range(spec["completions"]):
        host = f"{name}-{index}"
        environ = environment(pod["containers"][0], labels) | {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": host}
        found.append(detect(environ, hostname=host, fqdn=f"{host}.{pod['subdomain']}.ns.svc.cluster.local"))
    assert place(found) == ("train-0.train-nodes", 4, "train-3f9c1b2a")


def test_pods_of_the_stateful_set_find_each_other():
    objects = documents(EXAMPLES / "kubernetes" / "statefulset.yaml")
    name, spec = objects["StatefulSet"]["metadata"]["name"], objects["StatefulSet"]["spec"]
    template = spec["template"]
    assert spec["podManagementPolicy"] == "Parallel"
    assert spec["selector"]["matchLabels"] == template["metadata"]["labels"]
    check_service(objects["Service"], spec["serviceName"], template["metadata"]["labels"])
    found = []
    for index in range(spec["replicas"]):
        host = f"{name}-{index}"
        environ = environment(template["spec"]["containers"][0], {}) | {"HOSTNAME": host}
        found.append(detect(environ, hostname=host, fqdn=f"{host}.{spec['serviceName']}.ns.svc.cluster.local"))
    assert place(found) == ("node-0.nodes", 4, "node")


def test_pods_of_the_jobset_find_each_other():
    jobset = documents(EXAMPLES / "kubernetes" / "jobset.yaml")["JobSet"]
    name, (group,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    spec = group["template"]["spec"]
    assert spec["parallelism"] == spec["completions"]
    found = []
    for job_index in range(group["replicas"]):
        labels = {
            "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/replicatedjob-name": group["name"],
            "jobset.sigs.k8s.io/replicatedjob-replicas": str(group["replicas"]),
            "jobset.sigs.k8s.io/job-index": str(job_index),
            "jobset.sigs.k8s.io/restart-attempt": "1",
        }
        for index in range(spec["completions"]):
            host = f"{name}-{group['name']}-{job_index}-{index}"
            more = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": host}
            environ = environment(spec["template"]["spec"]["containers"][0], labels) | more
            found.append(detect(environ, hostname=host, fqdn=f"{host}.{name}.ns.svc.cluster.local"))
    assert place(found) == ("big-workers-0-0.big", 8, "big-workers-restart1")


def test_sbatch_script_starts_one_launcher_a_node():
    text = SCRIPTS[0].read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, flags=re.MULTILINE))
    (words,) = commands(SCRIPTS[0])
    assert words[0] == "srun"
    assert asked["ntasks-per-node"] == "1"
    assert {"--ntasks=$SLURM_JOB_NUM_NODES", "--ntasks-per-node=1"} <= set(words)
    # The recorded environment of such an srun.
    assert place([detect(environ) for environ in recorded("slurm-srun")]) == ("gpu001:61441", 3, "slurm-1.0")


@pytest.mark.parametrize(
    ("kind", "recording", "once"), [("openmpi", "openmpi5", "ppr:1:node"), ("hydra", "mpich", "-ppn")]
)
def test_mpirun_lines_start_one_launcher_a_node(kind, recording, once):
    words = next(words for words in commands(SCRIPTS[1]) if once in words)
    endpoint, nodes, run_id = place([detect(environ) for environ in recorded(recording)])
    assert nodes == 2
    given = {word.partition("=")[0] for word in run_arguments(words)}
    # A value that is not detected must be given as a flag.
    assert (endpoint is None) == ("--rdzv-endpoint" in given)
    assert (run_id is None) == ("--rdzv-id" in given)
    assert f"{kind})" in SCRIPTS[1].read_text(encoding="utf-8")
