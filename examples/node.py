"""One node of a job, in a process of its own: joins, "works" until its world changes, and joins again.

    python examples/node.py tcp://127.0.0.1:29400/demo?min_nodes=2&max_nodes=4 --name alpha

Prints one line for each thing that happens. It ends when the run is closed, and `kill -9` is a fair way to lose it.
"""

from __future__ import annotations

import argparse
import logging

import rallypoint
from rallypoint.events import Event, RoundEntered, WaitingFor, WorldChanged


def say(what: str) -> None:
    print(what, flush=True)


def show(event: Event) -> None:
    """The interesting events in words."""
    if isinstance(event, WaitingFor | WorldChanged | RoundEntered):
        say(event.text())


def main() -> None:
    parser = argparse.ArgumentParser(description="one node of a job")
    parser.add_argument("url", help="tcp://host:port/run-id?min_nodes=2&max_nodes=4")
    parser.add_argument("--name", required=True, help="what the others call it")
    arguments = parser.parse_args()
    logging.getLogger("rallypoint").setLevel(logging.ERROR)
    try:
        with rallypoint.join(arguments.url, name=arguments.name, sinks=[show]) as run:
            for world in run.rounds():
                names = b", ".join(world.store.gather("names", arguments.name)).decode()
                say(f"WORLD {world.round} {world.rank} {world.world_size}")
                say(f"exchanged names with everybody through the round's store: {names}")
    except rallypoint.RendezvousClosedError:
        say("the run is closed: done")


if __name__ == "__main__":
    main()
