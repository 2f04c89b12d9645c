"""Slurm: the variables of a process in a step (srun) or in a batch script. Pure.

Inside of a step only the variables of the step are right: those of the job are about all nodes of the job, and some of
them are inherited from the batch script, whatever the options of srun.
"""

from __future__ import annotations

from rallypoint.integrations.schedulers.detected import (
    Detected,
    Environ,
    check_rank,
    invalid_variable,
    number,
    text_of,
    wrong_start,
)
from rallypoint.integrations.schedulers.nodelist import first, tasks_per_node

SOURCE = "slurm"
FIRST_PORT = 61440
PORTS = 4096
"""Each job has a port of its own: jobs on the same machine must not share a server, which would end with the job that
started it. Ports from FIRST_PORT on are above those that Linux uses for outgoing connections."""

ONCE = "it must run once on each node, where it starts the workers itself"
START = 'srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 rallypoint run --nproc-per-node=8 ...'


def detect_slurm(environ: Environ) -> Detected | None:
    """What Slurm says; None outside of a job. SettingsError if this process was not started once on each node."""
    job = job_id(environ)
    if job is None:
        return None
    step = number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if step is None:
        return _in_the_batch_script(environ, job)
    _check_tasks(environ)
    node_list = text_of(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    rank = number(environ, "SLURM_NODEID")
    check_rank(rank, nodes, "SLURM_NODEID", "the number of nodes of the step")
    return Detected(
        source=SOURCE,
        endpoint=None if node_list is None else endpoint(node_list, job),
        nodes=nodes,
        node_rank=rank,
        run_id=run_id(environ, job, step),
        why=(
            f"step {step} of Slurm job {job}: the first of SLURM_STEP_NODELIST={node_list}, with a port from "
            f"SLURM_JOB_ID; SLURM_STEP_NUM_NODES={nodes}, SLURM_NODEID={rank}"
        ),
    )


def job_id(environ: Environ) -> int | None:
    """The id of the job. A heterogeneous job has the id of its first component, which all components know."""
    return number(environ, "SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID")


def endpoint(node_list: str, job: int) -> str:
    """The first node of the list, with the job's port."""
    return f"{first(node_list)}:{FIRST_PORT + job % PORTS}"


def run_id(environ: Environ, job: int, step: int | None) -> str:
    """The run id. It contains the restart count: a requeued job keeps its id and counts its steps anew."""
    restarts = number(environ, "SLURM_RESTART_COUNT") or 0
    return f"slurm-{job}" + (f".{step}" if step is not None else "") + (f"-restart{restarts}" if restarts else "")


def nodes_of_job(environ: Environ) -> int | None:
    """The number of nodes of the job, in all its components."""
    components = number(environ, "SLURM_HET_SIZE") or 0
    if components > 1:
        sizes = [number(environ, f"SLURM_JOB_NUM_NODES_HET_GROUP_{at}") for at in range(min(components, PORTS))]
        return sum(size or 0 for size in sizes)
    return number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")


def _in_the_batch_script(environ: Environ, job: int) -> Detected:
    """This process was started once, without srun: right for a job of one node, an error for a larger one."""
    nodes = nodes_of_job(environ)
    if nodes is not None and nodes > 1:
        raise wrong_start(
            "SLURM_JOB_NUM_NODES",
            str(nodes),
            f"Slurm job {job} has {nodes} nodes, but this launcher was started on one of them only, without srun",
            f"start it with {START}",
        )
    node_list = text_of(environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return Detected(
        source=SOURCE,
        endpoint=None if node_list is None else endpoint(node_list, job),
        nodes=nodes,
        node_rank=0 if nodes == 1 else None,
        run_id=run_id(environ, job, None),
        why=f"Slurm job {job} without srun: SLURM_JOB_NODELIST={node_list}, SLURM_JOB_NUM_NODES={nodes}",
    )


def _check_tasks(environ: Environ) -> None:
    """SettingsError if srun started several tasks on a node.

    The variables with the requested number of tasks are not used, because srun may ignore the request.
    """
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = text_of(environ, name)
    most = max(tasks for tasks, _ in tasks_per_node(text)) if text is not None else None
    local = number(environ, "SLURM_LOCALID") or 0
    if most is None:
        most, name, text = local + 1, "SLURM_LOCALID", str(local)
    elif local >= most:
        raise invalid_variable("SLURM_LOCALID", str(local), f"is not below the number of tasks a node, {name}={text}")
    if most > 1:
        raise wrong_start(
            name, text, f"srun started this launcher several times on one node, and {ONCE}", f"start it with {START}"
        )
