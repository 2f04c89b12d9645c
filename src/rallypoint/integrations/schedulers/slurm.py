"""Slurm: what srun, and a batch script, give to a process. Pure.

Inside of a step (srun) only the variables of the step are right: those of the job speak of all nodes of the job, and
some of them are inherited from the batch script, whatever srun was told.
"""

from __future__ import annotations

from rallypoint.integrations.schedulers.detected import Detected, Environ, misplaced, number, placed, text_of, unusable
from rallypoint.integrations.schedulers.nodelist import first, tasks_per_node

SOURCE = "slurm"
FIRST_PORT = 61440
PORTS = 4096
"""Jobs that share a machine must not share a server, which would end with the job that happened to start it. Ports from
here on are above those that Linux gives to outgoing connections."""

ONCE = "it belongs once on each node and starts the workers itself"
START = 'srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 rallypoint run --nproc-per-node=8 ...'


def detect_slurm(environ: Environ) -> Detected | None:
    """What Slurm says; None outside of a job. SettingsError if the process was not started once on each node."""
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
    placed(rank, nodes, "SLURM_NODEID", "the number of nodes of the step")
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
    """The number of the job; of a heterogeneous one that of its first component, which all components know."""
    return number(environ, "SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID")


def endpoint(node_list: str, job: int) -> str:
    """The first node of the list, at the job's own port."""
    return f"{first(node_list)}:{FIRST_PORT + job % PORTS}"


def run_id(environ: Environ, job: int, step: int | None) -> str:
    """A job that was requeued keeps its number, and counts its steps anew: the restart makes it another run."""
    restarts = number(environ, "SLURM_RESTART_COUNT") or 0
    return f"slurm-{job}" + (f".{step}" if step is not None else "") + (f"-restart{restarts}" if restarts else "")


def nodes_of_job(environ: Environ) -> int | None:
    """All nodes of the job, in all its components."""
    components = number(environ, "SLURM_HET_SIZE") or 0
    if components > 1:
        sizes = [number(environ, f"SLURM_JOB_NUM_NODES_HET_GROUP_{at}") for at in range(min(components, PORTS))]
        return sum(size or 0 for size in sizes)
    return number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")


def _in_the_batch_script(environ: Environ, job: int) -> Detected:
    """Nobody but this process was started: right on one node, wrong on several."""
    nodes = nodes_of_job(environ)
    if nodes is not None and nodes > 1:
        raise misplaced(
            "SLURM_JOB_NUM_NODES",
            str(nodes),
            f"Slurm job {job} has {nodes} nodes, and this was started on one of them only, without srun",
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
    """SettingsError if srun started several tasks on a node. What was asked for does not count: srun may ignore it."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = text_of(environ, name)
    most = max(tasks for tasks, _ in tasks_per_node(text)) if text is not None else None
    local = number(environ, "SLURM_LOCALID") or 0
    if most is None:
        most, name, text = local + 1, "SLURM_LOCALID", str(local)
    elif local >= most:
        raise unusable("SLURM_LOCALID", str(local), f"is not below the tasks of a node, {name}={text}")
    if most > 1:
        raise misplaced(
            name, text, f"srun started this several times on one node, and {ONCE}", f"start it with {START}"
        )
