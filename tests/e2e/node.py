"""A node as a process: says in JSON lines on stdout what happens to it, and does what it is told on stdin.

    python node.py loop URL [logging]  rallypoint.join: enters every round there is, until it is told to leave
    python node.py hand URL            rallypoint.create_handler: does only what it is told
    python node.py many URL N          N nodes of rallypoint.aio in this process, named after the first: one round each

Every line is a fact: `kind`, `at` (the monotonic clock, which all processes of a machine share) and what belongs to it.
A command is {"id": 1, "do": "store.get", "args": [...]}; each runs in a thread of its own and ends with one fact `done`
or `failed`. The end of stdin ends the process.
"""

import asyncio
import json
import logging
import os
import sys
import threading
import time
from typing import Any

import msgspec

import rallypoint
import rallypoint.aio
from rallypoint.events import Event

LAST_WORDS_S = 5.0
_printing = threading.Lock()


def say(kind: str, **what: Any) -> None:
    """One fact."""
    line = json.dumps({"kind": kind, "at": time.monotonic(), **what}, default=_plain)
    with _printing:
        print(line, flush=True)


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else repr(value)


def tell(event: Event) -> None:
    """The sink of all nodes here."""
    fields = msgspec.to_builtins(event)
    if "kind" in fields:  # of a round's end
        fields["end_kind"] = fields.pop("kind")
    say("event", level=event.level, text=str(event), **fields)


def entered(world: rallypoint.World) -> None:
    """A world was entered: say so, and say when it changes."""
    try:
        members = [member.name for member in world.members]
    except rallypoint.RendezvousError as error:
        members = [f"it was over too soon: {error}"]
    say("round", round=world.round, rank=world.rank, size=world.world_size, members=members)

    def watch() -> None:
        world.changed.wait()
        say("changed", round=world.round, cause=_cause(world), reason=world.changed.reason)

    threading.Thread(target=watch, daemon=True).start()


def _cause(world: rallypoint.World) -> str:
    assert world.changed.cause is not None
    return world.changed.cause.value


class Node:
    """One handler, and the world it is in."""

    def __init__(self, handler: rallypoint.Handler) -> None:
        self.handler = handler
        self.world: rallypoint.World | None = None
        self.commands: list[threading.Thread] = []

    def next(self) -> int:
        self.world = self.handler.next_rendezvous()
        entered(self.world)
        return self.world.round

    def do(self, verb: str, args: list[Any]) -> Any:
        """What a command asks for."""
        owner, _, name = verb.rpartition(".")
        if verb == "next":
            return self.next()
        if owner == "store":
            assert self.world is not None
            return getattr(self.world.store, name)(*args)
        return getattr(self.handler, name)(*args)

    def command(self, number: int, verb: str, args: list[Any]) -> None:
        began_at = time.monotonic()
        try:
            result = self.do(verb, args)
        except Exception as error:
            took_s = time.monotonic() - began_at
            say("failed", id=number, did=verb, error=type(error).__name__, text=str(error), took_s=took_s)
        else:
            say("done", id=number, did=verb, result=result, took_s=time.monotonic() - began_at)


def obey(node: Node) -> None:
    """Commands until there are no more. `exit` ends the process as a script that has come to its end does."""
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "exit":
            return
        args = (asked["id"], asked["do"], asked["args"])
        thread = threading.Thread(target=node.command, args=args, daemon=True)
        node.commands.append(thread)
        thread.start()
    os._exit(3)  # whoever started this is gone


def loop(url: str) -> None:
    """Worlds as they come."""
    with rallypoint.join(url, sinks=[tell]) as run:
        node = Node(run.handler)
        threading.Thread(target=obey, args=(node,), daemon=True).start()
        try:
            for world in run.rounds():
                node.world = world
                entered(world)
        except rallypoint.RendezvousError as error:
            say("error", error=type(error).__name__, text=str(error))
    for thread in node.commands:
        thread.join(LAST_WORDS_S)  # what ended the rounds may not have said yet that it is done
    say("end")


def hand(url: str) -> None:
    """By hand."""
    handler = rallypoint.create_handler(url, sinks=[tell])
    assert isinstance(handler, rallypoint.Handler)
    say("ready")
    obey(Node(handler))
    say("end")


async def many(url: str, count: int) -> None:
    """Many nodes at once. They stay in their round until stdin ends."""

    async def one(name: str) -> rallypoint.aio.AsyncHandler:
        handler = rallypoint.aio.create_handler(url, name=name)
        world = await handler.next_rendezvous()
        say("round", name=name, round=world.round, rank=world.rank, size=world.world_size)
        return handler

    prefix = rallypoint.Settings.from_url(url).name
    say("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)  # the starting signal
    handlers = await asyncio.gather(*(one(f"{prefix}-{number}") for number in range(count)))
    say("all", count=len(handlers))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    os._exit(0)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["loop", url]:
            loop(url)
        case ["loop", url, "logging"]:
            logging.basicConfig()
            loop(url)
        case ["hand", url]:
            hand(url)
        case ["many", url, count]:
            asyncio.run(many(url, int(count)))
        case _:
            sys.exit(__doc__)
