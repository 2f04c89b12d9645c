"""A node with a workload, as a process: rounds, the store, leaving, re-joining, replacing its handler.

    python -m tests.chaos.node URL SEED

Reports events as JSON lines (see `tests.e2e.node`), with the id of its node and everything that `history_checker`
needs: when it joined and got an answer, each round that it returned from, the changes that it was told of, and the
answers of the store. Commands on stdin: `calm` (only necessary re-joins), `busy`, `rejoin`, `leave`, `new` (close the
handler and create another, which is a new node), `close` and `reopen` (the run). The end of stdin ends the process.
"""

import os
import random
import sys
import threading
import time
from typing import Any

import rallypoint
from rallypoint.errors import OutcomeUnknown
from rallypoint.events import Event
from tests.chaos.stalls import Stalls
from tests.e2e.node import say

STORE_S = 4.0
TURN_S = 3.0
"""The interval of barriers."""
PAUSE_S = (0.02, 0.25)
RESTLESS = 0.004
"""The probability per step that a busy node leaves its round spontaneously."""


def rest(seconds: float) -> None:
    """Sleep. Not with `time.sleep`, which sometimes fails with libfaketime 0.9.10."""
    threading.Event().wait(seconds)


def tell(event: Event) -> None:
    if event.level >= 20:
        say("event", level=event.level, event=type(event).__name__, text=str(event))


class Worker:
    """One process, through all its nodes and rounds."""

    def __init__(self, url: str, seed: str) -> None:
        self.url = url
        self.rng = random.Random(seed)
        self.is_calm = True
        self.handler: rallypoint.Handler | None = None
        self._asked: list[str] = []
        self._count = 0
        self._woken = threading.Event()

    # --- commands -----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        for line in sys.stdin:
            match line.strip():
                case "calm":
                    self.is_calm = True
                case "busy":
                    self.is_calm = False
                case "close" | "reopen" as word:
                    threading.Thread(target=self._operate, args=(word,), daemon=True).start()
                case word:
                    self._asked.append(word)
                    self._woken.set()
        os._exit(3)  # the parent process has ended

    def _operate(self, word: str) -> None:
        handler = self.handler
        try:
            if handler is not None:
                handler.set_closed("chaos closes it") if word == "close" else handler.reopen("chaos is over")
        except rallypoint.RendezvousError as error:
            say("failed", did=word, error=type(error).__name__, text=str(error))
        else:
            say("did", did=word)

    # --- the main loop ------------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Run one handler after the other, for ever."""
        while True:
            handler = self.handler = rallypoint.create_handler(self.url, sinks=[tell])
            assert isinstance(handler, rallypoint.Handler)
            try:
                self._serve(handler)
            finally:
                handler.close()
            say("closed")
            rest(0.3)

    def _serve(self, handler: rallypoint.Handler) -> None:
        """Join rounds until the handler has to be replaced."""
        while True:
            say("joins", wall=time.time())
            began_at = time.monotonic()
            try:
                world = handler.next_rendezvous()
            except rallypoint.RendezvousGracefulExitError as error:
                say("exit", text=str(error), took_s=time.monotonic() - began_at)
                return
            except rallypoint.RendezvousError as error:
                took_s = time.monotonic() - began_at
                say("raised", error=type(error).__name__, text=str(error), took_s=took_s)
                rest(0.3)
                continue
            node_id = handler._core._node.identity.id
            place = {"round": world.round, "rank": world.rank, "size": world.world_size, "id": node_id}
            say("round", **place, took_s=time.monotonic() - began_at)
            why = Work(self, world, node_id).do()
            say("over", round=world.round, why=why)
            if why == "new":
                return
            if why == "leave":
                try:
                    handler.leave("chaos wants it to")
                except rallypoint.RendezvousError as error:
                    say("failed", did="leave", error=type(error).__name__, text=str(error))
                rest(0.3)

    def why_go(self, world: rallypoint.World) -> str | None:
        """Wait for a short time; the reason to leave the round, if any."""
        if world.changed.wait(self.rng.uniform(*PAUSE_S)):
            return "changed"
        if self._asked:
            return self._asked.pop(0)
        if not self.is_calm and self.rng.random() < RESTLESS:
            return self.rng.choice(("rejoin", "leave", "new"))
        return None

    def number(self) -> int:
        self._count += 1
        return self._count


class Work:
    """The workload of a member in its round."""

    def __init__(self, worker: Worker, world: rallypoint.World, node_id: str) -> None:
        self.worker = worker
        self.world = world
        self.id = node_id
        self.mine: dict[str, bytes | None] = {}
        """The last values that this node wrote under its own keys; None: unknown."""
        self.turn = 0
        world.store.set_timeout(STORE_S)
        threading.Thread(target=self._tell_change, daemon=True).start()

    def _tell_change(self) -> None:
        world = self.world
        world.changed.wait()
        assert world.changed.cause is not None
        say("changed", round=world.round, id=self.id, cause=world.changed.cause.value, reason=world.changed.reason)

    def do(self) -> str:
        """Work until there is a reason to leave the round."""
        self._attempt("members", self._members)
        while (why := self.worker.why_go(self.world)) is None:
            turn = int(time.monotonic() / TURN_S)
            if turn > self.turn:
                self.turn = turn
                self._attempt("barrier", self._meet)
            else:
                self._attempt(*self.worker.rng.choice((("add", self._add), ("set", self._set), ("get", self._get))))
        return why

    def _attempt(self, verb: str, call: Any) -> None:
        began_at = time.monotonic()
        try:
            call()
        except (rallypoint.StoreError, rallypoint.RendezvousError, OutcomeUnknown) as error:
            failed = {"did": verb, "error": type(error).__name__, "text": str(error)[:200]}
            say("store", round=self.world.round, took_s=time.monotonic() - began_at, **failed)

    def _members(self) -> None:
        members = [[member.id, member.name] for member in self.world.members]
        say("members", round=self.world.round, id=self.id, members=members)

    def _add(self) -> None:
        value = self.world.store.add("count", 1)
        say("added", round=self.world.round, id=self.id, value=value)

    def _set(self) -> None:
        key = f"own/{self.id}/{self.worker.rng.randrange(4)}"
        value = f"{self.id} {self.worker.number()}".encode()
        self.mine[key] = None
        self.world.store.set(key, value)
        self.mine[key] = value
        say("set", round=self.world.round, id=self.id)

    def _get(self) -> None:
        known = [key for key, value in self.mine.items() if value is not None]
        if not known:
            return
        key = self.worker.rng.choice(known)
        found = self.world.store.get(key)
        if found != self.mine[key]:
            say("mismatch", what=f"{key} of round {self.world.round} was {self.mine[key]!r} and came back as {found!r}")
        say("got", round=self.world.round, id=self.id)

    def _meet(self) -> None:
        name = f"turn {self.turn}"
        say("arrives", round=self.world.round, id=self.id, barrier=name)
        self.world.store.barrier(name, timeout=TURN_S * 0.8)
        say("passed", round=self.world.round, id=self.id, barrier=name)


if __name__ == "__main__":
    Stalls(lambda length_s: say("stall", length_s=length_s))
    worker = Worker(*sys.argv[1:])
    threading.Thread(target=worker.listen, name="words", daemon=True).start()
    worker.live()
