"""Why torch's agent leaves a round, as far as torch's interface shows it.

The agent calls `next_rendezvous` again in two cases only: nodes wait or were lost, of which it was told, or a worker
has failed. When the job fails, torch raises ChildFailedError with all failures, and then shuts the handler down.
"""

from __future__ import annotations

import os

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from rallypoint.rendezvous.records import LeaveCause, LeaveKind


def restart_cause(name: str) -> LeaveCause:
    """The agent of node `name` joins again although it was told of no change. It does not say which worker failed."""
    why = f"a worker on {name} failed, and the agent restarts its workers"
    return LeaveCause(kind=LeaveKind.WORKER_FAILED, why=why)


def failure_cause(name: str, error: BaseException | None) -> LeaveCause | None:
    """The first failure of the job on node `name`; None if `error` is no failure of workers."""
    if not isinstance(error, ChildFailedError):
        return None
    rank, failure = error.get_first_failure()
    how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"exited with {failure.exitcode}"
    why = f"rank {rank} on {name} {how}"
    if os.path.isfile(failure.error_file):  # written by torch's `@record`
        message = failure.message
        why += f": {message['message'] if isinstance(message, dict) else message}"
    return LeaveCause(kind=LeaveKind.WORKER_FAILED, why=why, rank=rank)
