"""What works with nothing installed but what Rallypoint always needs; run by `make bare`.

Imports it, forms a round over TCP, and sees to it that no optional package was needed. The time that importing takes is
the best of several processes, because the first one also reads the files.
"""

from __future__ import annotations

import subprocess
import sys

TIMED = "import time; began = time.perf_counter(); import rallypoint; {}; print(time.perf_counter() - began)"
MOST_S = 0.15
OPTIONAL = {"torch", "grpc", "google.protobuf", "uvloop", "starlette", "uvicorn", "prometheus_client"}


def best_of(use: str) -> float:
    """Seconds to import it and use it so, in the quickest of several processes."""
    command = [sys.executable, "-c", TIMED.format(use)]
    return min(float(subprocess.check_output(command, text=True)) for _ in range(10))


def main() -> None:
    took_s = best_of("pass")
    first_use_s = best_of("rallypoint.create_handler")
    print(f"import rallypoint: {took_s * 1000:.0f} ms; with its first use: {first_use_s * 1000:.0f} ms")
    if took_s > MOST_S:
        sys.exit(
            f"importing takes longer than {MOST_S * 1000:.0f} ms: see `python -X importtime -c 'import rallypoint'`"
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
