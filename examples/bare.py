"""Checks a minimal installation, without any optional package; run by `make bare`.

It imports Rallypoint, forms a round over TCP, and checks that no optional package was imported. The import time is the
best of several processes, because the first one also reads the files from disk.
"""

from __future__ import annotations

import subprocess
import sys

TIMED = "import time; began = time.perf_counter(); import rallypoint; {}; print(time.perf_counter() - began)"
MAX_IMPORT_S = 0.15
OPTIONAL = {"torch", "grpc", "google.protobuf", "uvloop", "starlette", "uvicorn", "prometheus_client"}


def best_of(use: str) -> float:
    """Seconds to import Rallypoint and evaluate the expression, in the fastest of several processes."""
    command = [sys.executable, "-c", TIMED.format(use)]
    return min(float(subprocess.check_output(command, text=True)) for _ in range(10))


def main() -> None:
    took_s = best_of("pass")
    first_use_s = best_of("rallypoint.create_handler")
    print(f"import rallypoint: {took_s * 1000:.0f} ms; with its first use: {first_use_s * 1000:.0f} ms")
    if took_s > MAX_IMPORT_S:
        sys.exit(
            f"the import takes longer than {MAX_IMPORT_S * 1000:.0f} ms: see "
            "`python -X importtime -c 'import rallypoint'`"
        )

    import rallypoint
    from rallypoint.api import free_port

    handler = rallypoint.create_handler(f"tcp://127.0.0.1:{free_port()}/bare?min_nodes=1&last_call_timeout=0.1")
    world = handler.next_rendezvous()
    world.store.set("key", b"value")
    print(f"a round over TCP: rank {world.rank} of {world.world_size}")
    handler.shutdown()
    if found := sorted(OPTIONAL & sys.modules.keys()):
        sys.exit(f"optional packages were imported: {', '.join(found)}")


if __name__ == "__main__":
    main()
