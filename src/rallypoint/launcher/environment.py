"""The environment variables of a worker: those that programs for torchrun expect, and Rallypoint's. See docs/run.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rallypoint.launcher.worker_ranks import RankPlan

WORKER_MARK = "RALLYPOINT_WORKER_OF"
"""Set to `run/node` in every worker, which its children inherit, so that people and tests find them in /proc."""


@dataclass(frozen=True, slots=True)
class RoundContext:
    """The values that all workers of a node share in a round."""

    run_id: str
    run_url: str
    node_name: str
    node_rank: int
    nodes: int
    round: int
    role: str
    master_addr: str
    master_port: int
    plan: RankPlan


def worker_environment(
    inherited: Mapping[str, str], context: RoundContext, local_rank: int, error_file: str
) -> dict[str, str]:
    """The environment of one worker: what it inherits, overwritten so that no value of an outer launcher remains."""
    ranks = context.plan.ranks_of(context.node_rank)
    env = dict(inherited)
    env.setdefault("PYTHONUNBUFFERED", "1")  # stdout is a pipe: without this, lines are shown late
    if ranks.workers > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: otherwise every worker uses all cores
    env.update(
        RANK=str(ranks.rank + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(context.plan.world_size),
        LOCAL_WORLD_SIZE=str(ranks.workers),
        GROUP_RANK=str(context.node_rank),
        GROUP_WORLD_SIZE=str(context.nodes),
        ROLE_NAME=context.role,
        ROLE_RANK=str(ranks.role_rank + local_rank),
        ROLE_WORLD_SIZE=str(ranks.role_size),
        MASTER_ADDR=context.master_addr,
        MASTER_PORT=str(context.master_port),
        TORCHELASTIC_RESTART_COUNT=str(context.plan.restarts),
        TORCHELASTIC_MAX_RESTARTS=str(context.plan.max_restarts),
        TORCHELASTIC_RUN_ID=context.run_id,
        TORCHELASTIC_ERROR_FILE=error_file,
        # No process listens on MASTER_PORT yet: the worker of rank 0 hosts the job's store, as without a launcher.
        TORCHELASTIC_USE_AGENT_STORE="False",
        RALLYPOINT_RUN_ID=context.run_id,
        RALLYPOINT_RUN_URL=context.run_url,
        RALLYPOINT_ROUND=str(context.round),
        RALLYPOINT_NODE=context.node_name,
        RALLYPOINT_RESTARTS=str(context.plan.restarts),
        **{WORKER_MARK: f"{context.run_id}/{context.node_name}"},
    )
    return env
