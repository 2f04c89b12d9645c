"""One node of a job: it joins a run, "works" until its world changes, and joins again.

    python examples/node.py tcp://127.0.0.1:29400/demo?min_nodes=2&max_nodes=4 --name alpha

It prints a line for each event, and ends when the run is closed. Use `kill -9` to see how the other nodes react to its
loss.
"""

from __future__ import annotations

import argparse
import logging

import rallypoint
from rallypoint.events import Event, RoundEntered, WaitingFor, WorldChanged


def say(text: str) -> None:
    print(text, flush=True)


def show(event: Event) -> None:
    """A sink that prints some events."""
    if isinstance(event, WaitingFor | WorldChanged | RoundEntered):
        say(event.text())


def main() -> None:
    parser = argparse.ArgumentParser(description="one node of a job")
    parser.add_argument("url", help="tcp://host:port/run-id?min_nodes=2&max_nodes=4")
    parser.add_argument("--name", required=True, help="the name of the node")
    arguments = parser.parse_args()
    logging.getLogger("rallypoint").setLevel(logging.ERROR)
    try:
        with rallypoint.join(arguments.url, name=arguments.name, sinks=[show]) as run:
            for world in run.rounds():
                names = b", ".join(world.store.gather("names", arguments.name)).decode()
                say(f"WORLD {world.round} {world.rank} {world.world_size}")
                say(f"exchanged names with all members through the round's store: {names}")
    except rallypoint.RendezvousClosedError:
        say("the run is closed: done")


if __name__ == "__main__":
    main()
