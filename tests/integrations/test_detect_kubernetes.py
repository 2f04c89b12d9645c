"""Detection in pods. The environments are composed by hand; names and labels are as Kubernetes documents them."""

import pytest

from rallypoint.errors import SettingsError
from rallypoint.integrations.schedulers import detect

CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
TAIL = "ns.svc.cluster.local"


def job(index: int, **more: str) -> dict[str, str]:
    return CLUSTER | {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"train-{index}"} | more


def test_pod_of_an_indexed_job_knows_all_but_the_size():
    found = detect(job(3), hostname="train-3", fqdn=f"train-3.train-nodes.{TAIL}")
    assert found.source == "kubernetes indexed job"
    assert (found.endpoint, found.nodes, found.node_rank, found.run_id) == ("train-0.train-nodes", None, 3, "train")
    assert "JOB_COMPLETIONS" in found.why
    assert "--nnodes" in found.why


def test_size_and_uid_are_taken_from_the_manifest():
    found = detect(
        job(3, JOB_COMPLETIONS="4", JOB_UID="3f9c1b2a-0000-4000-8000-000000000000"), fqdn=f"train-3.train-nodes.{TAIL}"
    )
    assert (found.nodes, found.run_id) == (4, "train-3f9c1b2a")


def test_job_without_a_headless_service_has_no_endpoint():
    found = detect(job(0), fqdn="train-0")
    assert (found.endpoint, found.node_rank) == (None, 0)
    assert "subdomain" in found.why


def test_host_name_from_the_variable_is_enough():
    assert detect(job(1)).run_id == "train"


def test_job_whose_name_ends_in_a_number_keeps_it():
    environ = CLUSTER | {"JOB_COMPLETION_INDEX": "12"}
    found = detect(environ, hostname="run-2-12", fqdn=f"run-2-12.svc1.{TAIL}")
    assert (found.endpoint, found.run_id, found.node_rank) == ("run-2-0.svc1", "run-2", 12)


def test_index_beyond_the_size_is_refused():
    with pytest.raises(SettingsError, match="JOB_COMPLETION_INDEX"):
        detect(job(4, JOB_COMPLETIONS="4"))


def test_pod_of_a_stateful_set_is_known_by_its_name_and_service():
    found = detect(CLUSTER | {"STATEFULSET_REPLICAS": "4"}, hostname="node-2", fqdn=f"node-2.nodes.{TAIL}")
    assert found.source == "kubernetes statefulset"
    assert (found.endpoint, found.nodes, found.node_rank, found.run_id) == ("node-0.nodes", 4, 2, "node")


def test_pod_of_a_stateful_set_is_known_by_its_label():
    found = detect(CLUSTER | {"POD_INDEX": "2", "HOSTNAME": "node-2"})
    assert (found.source, found.endpoint, found.node_rank) == ("kubernetes statefulset", None, 2)
    with pytest.raises(SettingsError, match="POD_INDEX"):
        detect(CLUSTER | {"POD_INDEX": "2", "HOSTNAME": "node-3"})
    with pytest.raises(SettingsError, match="POD_INDEX"):
        detect(CLUSTER | {"POD_INDEX": "2", "HOSTNAME": "node"})


@pytest.mark.parametrize("host", ["web-7d9c8b6f5d-24567", "web-7d9c8b6f5d-x2x9z", "train-05"])
def test_pod_of_a_deployment_is_not_detected(host):
    assert detect(CLUSTER, hostname=host, fqdn=host) is None


def test_host_name_with_leading_zeros_is_no_ordinal():
    assert detect(CLUSTER, hostname="node-02", fqdn=f"node-02.nodes.{TAIL}") is None


def test_machine_with_such_a_name_outside_of_kubernetes_is_not_detected():
    assert detect({}, hostname="node-2", fqdn=f"node-2.nodes.{TAIL}") is None


def jobset(job_index: int, index: int, **more: str) -> dict[str, str]:
    return (
        CLUSTER
        | {
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"big-workers-{job_index}-{index}",
            "JOBSET_NAME": "big",
            "JOBSET_REPLICATED_JOB": "workers",
            "JOBSET_REPLICAS": "3",
            "JOBSET_JOB_INDEX": str(job_index),
            "JOBSET_RESTART_ATTEMPT": "0",
            "JOB_COMPLETIONS": "4",
        }
        | more
    )


def test_pods_of_a_jobset_are_one_run_numbered_job_by_job():
    found = [detect(jobset(job_index, index)) for job_index in range(3) for index in range(4)]
    assert [one.node_rank for one in found] == list(range(12))
    assert {(one.source, one.endpoint, one.nodes, one.run_id) for one in found} == {
        ("kubernetes jobset", "big-workers-0-0.big", 12, "big-workers")
    }


def test_coordinator_of_a_jobset_is_the_endpoint():
    found = detect(jobset(0, 1, JOBSET_COORDINATOR="big-driver-0-0.big"))
    assert found.endpoint == "big-driver-0-0.big"


def test_service_of_a_jobset_may_have_another_name():
    found = detect(jobset(2, 1), fqdn=f"big-workers-2-1.elsewhere.{TAIL}")
    assert found.endpoint == "big-workers-0-0.elsewhere"


def test_restarted_jobset_is_another_run():
    uid = "3f9c1b2a-0000-4000-8000-000000000000"
    assert detect(jobset(0, 0, JOBSET_RESTART_ATTEMPT="2", JOBSET_UID=uid)).run_id == "big-workers-3f9c1b2a-restart2"


def test_values_that_the_manifest_of_a_jobset_omits_are_not_guessed():
    environ = jobset(1, 2)
    for variable in ("JOB_COMPLETIONS", "JOBSET_REPLICATED_JOB", "JOBSET_RESTART_ATTEMPT"):
        del environ[variable]
    found = detect(environ)
    assert (found.endpoint, found.nodes, found.node_rank) == (None, None, None)
    assert "JOBSET_REPLICATED_JOB, JOBSET_RESTART_ATTEMPT" in found.why


def test_jobset_of_one_job_needs_no_size_to_know_the_rank():
    environ = jobset(0, 2, JOBSET_REPLICAS="1")
    del environ["JOB_COMPLETIONS"]
    assert detect(environ).node_rank == 2
