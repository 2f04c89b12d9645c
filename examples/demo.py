"""Several nodes in one process, each printing what it sees.

A round forms, a late node waits, the round re-forms with it, a node is lost, the round re-forms without it. Each node
is a thread with a handler of its own on the `memory` backend; nothing here polls. Takes a few seconds, ends by itself.
"""

from __future__ import annotations

import logging
import sys
import threading
import time

import quorate
from quorate.events import Event, NodeLost, RoundActive, RoundEntered, RoundForming, WaitingFor, WorldChanged

URL = "memory:///demo?min_nodes=2&max_nodes=4&last_call_timeout=0.5&admission_window=0.2&keep_alive_interval=0.3"
SHOWN = (WaitingFor, RoundForming, RoundActive, RoundEntered, WorldChanged, NodeLost)
COLOURS = {"alpha": 36, "bravo": 33, "charlie": 35, "delta": 32}

started_at = time.monotonic()
printing = threading.Lock()


def say(who: str, what: str) -> None:
    """One line, with the seconds since the start."""
    colour = COLOURS.get(who, 0) if sys.stdout.isatty() else 0
    name = f"\033[{colour}m{who:8}\033[0m" if colour else f"{who:8}"
    with printing:
        print(f"{time.monotonic() - started_at:6.2f} s  {name} {what}", flush=True)


def show(event: Event) -> None:
    """The sink of every node: the interesting events in words."""
    if isinstance(event, SHOWN):
        say(event.by, event.text())


class DemoNode(threading.Thread):
    """Joins, works until its world changes or it is told to stop, and joins again."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.handler = quorate.create_handler(URL, name=name, sinks=[show])
        self.stopping = threading.Event()
        self.worlds: list[tuple[int, int, int]] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            world = self.handler.next_rendezvous()
            self.worlds.append((world.round, world.rank, world.world_size))
            names = b", ".join(world.store.gather("names", self.name)).decode()
            say(self.name, f"exchanged names with everybody through the round's store: {names}")
            while not world.changed.wait(0.05) and not self.stopping.is_set():
                pass
        if self.name != "bravo":
            self.handler.leave("the demo is over")
            self.handler.close()


def until(what: str, *nodes: DemoNode, size: int) -> None:
    """Wait until all these nodes are in one round of this size."""
    deadline = time.monotonic() + 20
    while True:
        last = [node.worlds[-1] if node.worlds else (0, 0, 0) for node in nodes]
        if len({number for number, _, _ in last}) == 1 and all(world_size == size for _, _, world_size in last):
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"the demo failed: {what} did not happen within 20 s: {last}")
        time.sleep(0.02)
    ranks = ", ".join(f"{node.name}={rank}" for node, (_, rank, _) in zip(nodes, last, strict=True))
    say("demo", f"=== {what}: round {last[0][0]}, ranks {ranks}")


def main() -> None:
    logging.getLogger("quorate").setLevel(logging.ERROR)
    alpha, bravo, charlie = DemoNode("alpha"), DemoNode("bravo"), DemoNode("charlie")
    say("demo", "=== two nodes start; at least two are needed, at most four may come")
    alpha.start()
    bravo.start()
    until("a round formed", alpha, bravo, size=2)

    say("demo", "=== a third node comes late: it waits, the members are told and re-join")
    charlie.start()
    until("the round re-formed with the late node", alpha, bravo, charlie, size=3)

    say("demo", "=== bravo dies without a word: nobody renews its session any more")
    bravo.stopping.set()
    bravo.handler.abandon()
    until("the round re-formed without the lost node", alpha, charlie, size=2)

    for node in (alpha, charlie):
        node.stopping.set()
    for node in (alpha, bravo, charlie):
        node.join(10)
    say("demo", "=== done")


if __name__ == "__main__":
    main()
