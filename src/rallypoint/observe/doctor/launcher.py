"""The check of who started this process: what a launcher here would know by itself."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.errors import SettingsError
from rallypoint.integrations.here import detect_here
from rallypoint.integrations.hosts import Detected
from rallypoint.observe.doctor.checks import Check, ok, skipped, warning

NAME = "launcher"


def check_launcher(detect: Callable[[], Detected | None] = detect_here) -> Check:
    """What Slurm, Kubernetes or MPI say about this process. Never a failure: a URL says everything itself."""
    try:
        found = detect()
    except SettingsError as error:
        fix = "only for `rallypoint run`, which would refuse to start here without flags that say everything"
        return warning(NAME, str(error), fix)
    if found is None:
        return skipped(NAME, "neither Slurm nor Kubernetes nor MPI started this shell")
    known = {
        "endpoint": found.endpoint,
        "nodes": found.nodes,
        "node rank": found.node_rank,
        "run id": found.run_id,
    }
    said = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    return ok(NAME, f"{found.source}: {said or 'nothing'} ({found.why})")
