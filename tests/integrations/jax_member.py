"""A process of a JAX job: `jax_member.py URL [hold]`. Reports its id and size, adds up all ranks, and ends.

With `hold` it stays, and reports when its world has changed. With `environment` instead of a URL it uses the variables
that a launcher sets for its workers, as the documentation shows.
"""

import json
import os
import sys

import jax

from rallypoint.integrations.jax import initialize, shutdown


def say(kind: str, **fact: object) -> None:
    print(json.dumps({"kind": kind, **fact}), flush=True)


def main(url: str, *words: str) -> None:
    world = None
    if url == "environment":
        jax.distributed.initialize(
            coordinator_address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            num_processes=int(os.environ["WORLD_SIZE"]),
            process_id=int(os.environ["RANK"]),
            cluster_detection_method="deactivate",
        )
    else:
        world = initialize(url)
        say("joined", rank=world.rank, size=world.world_size)
    from jax.experimental.multihost_utils import process_allgather

    say("jax", id=jax.process_index(), count=jax.process_count(), devices=jax.device_count())
    ranks = process_allgather(jax.numpy.array([jax.process_index() + 1]))
    say("summed", total=int(ranks.sum()))
    if world is not None and "hold" in words:
        world.changed.wait(60)
        say("changed", reason=world.changed.reason)
        os._exit(7)  # the group is broken: JAX would wait for the lost processes
    shutdown()
    say("left")


if __name__ == "__main__":
    main(*sys.argv[1:])
