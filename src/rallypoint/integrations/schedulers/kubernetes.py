"""Kubernetes: pods of an Indexed Job, of a JobSet, of a StatefulSet. Pure.

A pod knows its index, and with a headless service other pods can resolve its name. Kubernetes does not tell it the
number of pods, and a JobSet passes its data only as labels and annotations: the manifest has to copy them to
environment variables (`SIZE_VARIABLES` and `JOBSET_VARIABLES`).
"""

from __future__ import annotations

import re

from rallypoint.integrations.schedulers.detected import Detected, Environ, check_rank, invalid_variable, number, text_of

INDEXED_JOB, JOB_SET, STATEFUL_SET = "kubernetes indexed job", "kubernetes jobset", "kubernetes statefulset"

LABEL = "metadata.labels['{}']"
JOBSET_VARIABLES = {
    "JOBSET_NAME": LABEL.format("jobset.sigs.k8s.io/jobset-name"),
    "JOBSET_REPLICATED_JOB": LABEL.format("jobset.sigs.k8s.io/replicatedjob-name"),
    "JOBSET_REPLICAS": LABEL.format("jobset.sigs.k8s.io/replicatedjob-replicas"),
    "JOBSET_JOB_INDEX": LABEL.format("jobset.sigs.k8s.io/job-index"),
    "JOBSET_RESTART_ATTEMPT": LABEL.format("jobset.sigs.k8s.io/restart-attempt"),
}
"""The variables that the manifest of a JobSet must define -> the field of the downward API that each is from."""
OPTIONAL_VARIABLES = {
    "JOBSET_COORDINATOR": "metadata.annotations['jobset.sigs.k8s.io/coordinator']",
    "JOBSET_UID": LABEL.format("jobset.sigs.k8s.io/jobset-uid"),
    "JOB_UID": LABEL.format("batch.kubernetes.io/controller-uid"),
    "POD_INDEX": LABEL.format("apps.kubernetes.io/pod-index"),
}
SIZE_VARIABLES = {INDEXED_JOB: "JOB_COMPLETIONS", JOB_SET: "JOB_COMPLETIONS", STATEFUL_SET: "STATEFULSET_REPLICAS"}
"""The variables for the number of pods. The manifest repeats `completions` or `replicas` there as a plain value,
because no field of the downward API holds it."""

_ORDINAL = re.compile(r"(.+)-(0|[1-9]\d{0,8})")
UID_PREFIX = 8
"""How many characters of a uid make a run id unique."""


def detect_kubernetes(environ: Environ, hostname: str | None = None, fqdn: str | None = None) -> Detected | None:
    """What Kubernetes says about this pod; None outside of Kubernetes, and in a pod without an index.

    `hostname` is the name of the pod (default: the variable HOSTNAME, which containers have). `fqdn` is its full name,
    which contains the name of the headless service.
    """
    host, _, rest = (hostname or text_of(environ, "HOSTNAME") or "").partition(".")
    service = _service(host, fqdn) or rest.partition(".")[0] or None
    if (name := text_of(environ, "JOBSET_NAME")) is not None:
        return _job_set(environ, name, service)
    if text_of(environ, "JOB_COMPLETION_INDEX") is not None:
        return _indexed_job(environ, host, service)
    if text_of(environ, "POD_INDEX") is not None:
        return _stateful_set(environ, host, service)
    if text_of(environ, "KUBERNETES_SERVICE_HOST") is not None and service is not None:
        # A pod of a Deployment has no service in its full name, and the random suffix of its name may be all digits.
        return _stateful_set(environ, host, service) if _ORDINAL.fullmatch(host) else None
    return None


def _indexed_job(environ: Environ, host: str, service: str | None) -> Detected:
    index = number(environ, "JOB_COMPLETION_INDEX")
    nodes, size_said = _size(environ, INDEXED_JOB)
    check_rank(index, nodes, "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS")
    job = host.removesuffix(f"-{index}") if host.endswith(f"-{index}") else None
    endpoint = f"{job}-0.{service}" if job and service else None
    return Detected(
        source=INDEXED_JOB,
        endpoint=endpoint,
        nodes=nodes,
        node_rank=index,
        run_id=_run_id(job, environ, "JOB_UID"),
        why=f"JOB_COMPLETION_INDEX={index}, {_host_said(host, endpoint)}, {size_said}",
    )


def _stateful_set(environ: Environ, host: str, service: str | None) -> Detected:
    match = _ORDINAL.fullmatch(host)
    said = number(environ, "POD_INDEX")
    if said is not None and (match is None or int(match[2]) != said):
        raise invalid_variable("POD_INDEX", str(said), f"is not the number in the host name {host!r}")
    assert match is not None, "the caller has checked the host name"
    nodes, size_said = _size(environ, STATEFUL_SET)
    index = int(match[2])
    check_rank(index, nodes, "the number in the host name", "STATEFULSET_REPLICAS")
    endpoint = f"{match[1]}-0.{service}" if service else None
    return Detected(
        source=STATEFUL_SET,
        endpoint=endpoint,
        nodes=nodes,
        node_rank=index,
        run_id=match[1],
        why=f"number {index} in the host name, {_host_said(host, endpoint)}, {size_said}",
    )


def _job_set(environ: Environ, name: str, service: str | None) -> Detected:
    """All jobs of one replicated job are one run: they are equal, and their pods are numbered job by job.

    The headless service of a JobSet has the JobSet's name by default.
    """
    group, coordinator = text_of(environ, "JOBSET_REPLICATED_JOB"), text_of(environ, "JOBSET_COORDINATOR")
    jobs, job = number(environ, "JOBSET_REPLICAS"), number(environ, "JOBSET_JOB_INDEX")
    check_rank(job, jobs, "JOBSET_JOB_INDEX", "JOBSET_REPLICAS")
    index = number(environ, "JOB_COMPLETION_INDEX")
    pods, size_said = _size(environ, JOB_SET)
    check_rank(index, pods, "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS")
    rank = None
    if job is not None and index is not None:
        rank = job * pods + index if pods is not None else (index if jobs == 1 else None)
    first = f"{name}-{group}-0-0.{service or name}" if group is not None else None
    attempt = number(environ, "JOBSET_RESTART_ATTEMPT") or 0
    run_id = _run_id(f"{name}-{group}" if group else name, environ, "JOBSET_UID")
    missing = [variable for variable in JOBSET_VARIABLES if text_of(environ, variable) is None]
    lacks = (
        f"; {', '.join(missing)} missing: docs/kubernetes.md says what the manifest has to define" if missing else ""
    )
    return Detected(
        source=JOB_SET,
        endpoint=coordinator or first,
        nodes=jobs * pods if jobs is not None and pods is not None else None,
        node_rank=rank,
        run_id=f"{run_id}-restart{attempt}" if attempt else run_id,
        why=(
            f"JobSet {name}, job {job} of {jobs} in {group}, JOB_COMPLETION_INDEX={index}, {size_said}; "
            f"the endpoint is {'JOBSET_COORDINATOR' if coordinator else 'the first pod'}{lacks}"
        ),
    )


def _service(host: str, fqdn: str | None) -> str | None:
    """The headless service in a full name `pod.service.namespace.svc.cluster.local`; None for any other name."""
    parts = (fqdn or "").split(".")
    return parts[1] if len(parts) > 3 and parts[0] == host and parts[3] == "svc" else None


def _size(environ: Environ, kind: str) -> tuple[int | None, str]:
    """The number of pods, and a phrase about it for `why`."""
    variable = SIZE_VARIABLES[kind]
    size = number(environ, variable)
    return size, f"{variable}={size}" if size is not None else f"the size is unknown: give --nnodes, or set {variable}"


def _host_said(host: str, endpoint: str | None) -> str:
    if endpoint is not None:
        return f"host name {host}"
    return f"host name {host}, and no headless service (`subdomain`, or `serviceName`), so no endpoint"


def _run_id(name: str | None, environ: Environ, uid: str) -> str | None:
    """The run id: the name and, if known, the beginning of the uid, because a name may be used again."""
    unique = text_of(environ, uid)
    return f"{name}-{unique[:UID_PREFIX]}" if name and unique else name
