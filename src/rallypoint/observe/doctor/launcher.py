"""The check of the scheduler that started this process: what `rallypoint run` would detect here."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.errors import SettingsError
from rallypoint.integrations.detect_scheduler import detect_scheduler
from rallypoint.integrations.schedulers import Detected
from rallypoint.observe.doctor.checks import Check, ok, skipped, warning

NAME = "launcher"


def check_launcher(detect: Callable[[], Detected | None] = detect_scheduler) -> Check:
    """What Slurm, Kubernetes or MPI tell this process. Never a failure: a URL contains everything that is needed."""
    try:
        found = detect()
    except SettingsError as error:
        fix = "this concerns `rallypoint run` only: here it needs flags for the endpoint, the run id and --nnodes"
        return warning(NAME, str(error), fix)
    if found is None:
        return skipped(NAME, "this shell was not started by Slurm, Kubernetes or MPI")
    known = {
        "endpoint": found.endpoint,
        "nodes": found.nodes,
        "node rank": found.node_rank,
        "run id": found.run_id,
    }
    detected = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    return ok(NAME, f"{found.source}: {detected or 'nothing'} ({found.why})")
