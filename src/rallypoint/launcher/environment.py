"""The environment of a worker: what programs for torchrun expect, and Rallypoint's own names. See docs/run.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rallypoint.launcher.plan import Plan

MARK = "RALLYPOINT_WORKER_OF"
"""In every worker and what it starts: the run and node, so that people (and tests) find them in /proc."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all workers of a node have in common in a round."""

    run_id: str
    run_url: str
    node_name: str
    node_rank: int
    nodes: int
    round: int
    role: str
    master_addr: str
    master_port: int
    plan: Plan


def worker_environment(inherited: Mapping[str, str], around: Surroundings, local_rank: int) -> dict[str, str]:
    """Everything a worker finds; what it inherits comes first, so that nothing of an outer launcher shines through."""
    place = around.plan.place(around.node_rank)
    env = dict(inherited)
    env.setdefault("PYTHONUNBUFFERED", "1")  # its output is a pipe, and a line should be shown when it is said
    if place.workers > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: else every worker takes all cores
    env.update(
        RANK=str(place.rank + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(around.plan.world_size),
        LOCAL_WORLD_SIZE=str(place.workers),
        GROUP_RANK=str(around.node_rank),
        GROUP_WORLD_SIZE=str(around.nodes),
        ROLE_NAME=around.role,
        ROLE_RANK=str(place.role_rank + local_rank),
        ROLE_WORLD_SIZE=str(place.role_size),
        MASTER_ADDR=around.master_addr,
        MASTER_PORT=str(around.master_port),
        TORCHELASTIC_RESTART_COUNT=str(around.plan.restarts),
        TORCHELASTIC_MAX_RESTARTS=str(around.plan.max_restarts),
        TORCHELASTIC_RUN_ID=around.run_id,
        # Nobody listens at MASTER_PORT yet: the worker of rank 0 hosts the job's store, as without a launcher.
        TORCHELASTIC_USE_AGENT_STORE="False",
        RALLYPOINT_RUN_ID=around.run_id,
        RALLYPOINT_RUN_URL=around.run_url,
        RALLYPOINT_ROUND=str(around.round),
        RALLYPOINT_NODE=around.node_name,
        RALLYPOINT_RESTARTS=str(around.plan.restarts),
        **{MARK: f"{around.run_id}/{around.node_name}"},
    )
    return env
