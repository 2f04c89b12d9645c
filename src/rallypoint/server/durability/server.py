"""A server that keeps its data: what leaves it, on a connection or through its coordinators, was kept before.

Everything is executed as without data, at once and in order; then it waits. The bytes for a client wait in `_write`,
the one way out of a connection. A coordinator's calls return, and its watches tell, when what they speak of is kept.
Clients of a server whose disk fails are told so: their requests are not executed. Renewals are the exception, since
nothing about them has to be kept: a full disk ends no session, and time stands still for leases until the disk is back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rallypoint._marks import mark
from rallypoint.backends.contract import Watch
from rallypoint.backends.ops import changes_something
from rallypoint.kv.engine import Engine
from rallypoint.kv.log import perform, renew_all
from rallypoint.kv.types import (
    Batch,
    Failure,
    FailureCode,
    Grant,
    KeepAlive,
    LeaseResult,
    Op,
    Origin,
    Result,
    Revoke,
    Shorten,
)
from rallypoint.server.admission.refusals import Refusal
from rallypoint.server.clients import Client
from rallypoint.server.connection import Connection
from rallypoint.server.connection_context import ConnectionContext
from rallypoint.server.durability.journal import Journal
from rallypoint.server.engine_host import EngineHost
from rallypoint.server.local_backend import LocalBackend, LocalWatch
from rallypoint.server.server import Server
from rallypoint.wire.frames import frame
from rallypoint.wire.handshake import Accepted, judge
from rallypoint.wire.messages import Answer, ClientMessage, Do, RefusalCode, Refused, encoder


class DurableEngineHost(EngineHost):
    """Writes down what it executes, before anybody can be told of it."""

    def __init__(self, engine: Engine, journal: Journal) -> None:
        self._journal = journal
        journal.on_able = self._able
        super().__init__(engine)

    def execute(self, op: Op, origin: Origin | None = None) -> Result:
        engine, journal = self.engine, self._journal
        if journal.is_failing:
            if isinstance(op, KeepAlive | Shorten):
                return self._unchanged(op)
            now = engine.now
        else:
            now = self._loop.time()
        outcome, ended, entries = perform(engine, op, now, origin)
        self.executed[type(op)] += 1
        for entry in entries:
            journal.append(entry)
        if ended:
            self._notify(ended)
        if outcome.events:
            self._notify(outcome.events)
        if isinstance(op, Grant | Shorten):
            self.arm()
        elif isinstance(op, Revoke):
            self.on_revoked(op.lease)
        return outcome.result

    def _unchanged(self, op: KeepAlive | Shorten) -> LeaseResult:
        """While nothing can be kept no time passes for leases, and they begin anew afterwards."""
        lease = self.engine.leases.get(op.lease)
        return LeaseResult(op.lease, lease.ttl_s if lease else 0.0, lease is not None)

    def _tick(self) -> None:
        if self._journal.is_failing:
            self._timer = None
        else:
            super()._tick()

    def _able(self) -> None:
        renew_all(self.engine, self._loop.time())
        self.arm()


class DurableConnection(Connection):
    """Sends what it has to send once that is kept."""

    def __init__(self, context: ConnectionContext, journal: Journal) -> None:
        super().__init__(context)
        self._journal = journal
        self._speaks_freely = False
        """What is written says nothing of the store that was not so before."""

    def _write(self, data: bytes) -> None:
        if self._speaks_freely:
            self._write_now(data)
        else:
            self._journal.when_durable(partial(self._write_now, data))

    def _write_now(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            super()._write(data)

    def _send_away(self, last_words: bytes, why: str, kind: Refusal) -> None:
        self._speaks_freely = True
        super()._send_away(last_words, why, kind)

    def shut_down(self, why: str) -> None:
        if not self._journal.is_settled:  # what is not kept now never will be
            self._out.clear()
            self._speaks_freely = True
        super().shut_down(why)

    def _greet(self, payload: bytes) -> None:
        """While the disk fails: whoever goes on with sessions that live may, since that is as it was."""
        if not self._journal.is_failing:
            super()._greet(payload)
            return
        verdict = judge(payload, self._context.tokens, self._context.versions)
        leases = self._context.engine_host.engine.leases
        if isinstance(verdict, Accepted) and any(leases.get(held.lease) is None for held in verdict.hello.sessions):
            self._refuse(Refused(RefusalCode.BUSY, self._why_not()))
            return
        self._speaks_freely = True
        super()._greet(payload)
        self._speaks_freely = False

    def _handle(self, message: ClientMessage, client: Client, acked: int) -> None:
        if not self._journal.is_failing:
            super()._handle(message, client, acked)
            return
        match message:
            case Do(seq, KeepAlive() as op):
                result = self._context.engine_host.execute(op)
                assert isinstance(result, LeaseResult)
                if result.alive:  # that it lives was so before; that it does not may be undone
                    self._answer_at_once(Answer(seq, result))
                else:
                    self.send(Answer(seq, result))
            case Do(seq, op) if self._was_executed(Origin(client.id, seq, acked), op):
                super()._handle(message, client, acked)  # and answered when that is kept
            case Do(seq):
                mark("journal.refused")
                self._answer_at_once(Answer(seq, Failure(FailureCode.UNAVAILABLE, self._why_not())))
            case _:
                super()._handle(message, client, acked)

    def _was_executed(self, origin: Origin, op: Op) -> bool:
        return changes_something(op) and self._context.engine_host.engine.dedupe.lookup(origin) is not None

    def _answer_at_once(self, answer: Answer) -> None:
        self._write_now(frame(encoder.encode([answer])))

    def _why_not(self) -> str:
        return f"the server cannot write its data, and executes nothing meanwhile: {self._journal.trouble}"


class DurableWatch(LocalWatch):
    """Tells of what is kept."""

    def __init__(self, engine_host: EngineHost, journal: Journal, prefix: str, after_revision: int) -> None:
        super().__init__(engine_host, prefix, after_revision)
        self._journal = journal

    def push(self, batch: Batch) -> None:
        self._journal.when_durable(partial(self._push, self._id, batch))

    def _push(self, watch: int | None, batch: Batch) -> None:
        if watch == self._id:  # else it has begun again since, and will be told of it then
            super().push(batch)

    def _take(self, backlog: tuple[Batch, ...]) -> None:
        for batch in backlog:
            self.push(batch)


class DurableLocal(LocalBackend):
    """For coordinators: a call returns when what it did is kept."""

    def __init__(self, engine_host: EngineHost, journal: Journal) -> None:
        super().__init__(engine_host)
        self._journal = journal

    async def execute(self, op: Op) -> Result:
        await self._journal.wait_able()
        result = await super().execute(op)
        await self._journal.wait_durable()
        return result

    def watch(self, prefix: str, after_revision: int) -> Watch:
        return DurableWatch(self._host, self._journal, prefix, after_revision)


class DurableServer(Server):
    """Serves from the store of a directory, until `stop`."""

    def __init__(self, engine: Engine, journal: Journal, **options: Any) -> None:
        self.journal = journal
        super().__init__(engine=engine, generation=journal.generation, **options)

    def make_engine_host(self, engine: Engine) -> EngineHost:
        return DurableEngineHost(engine, self.journal)

    def make_local(self) -> LocalBackend:
        return DurableLocal(self.engine_host, self.journal)

    def make_connection(self) -> Connection:
        return DurableConnection(self, self.journal)

    async def settle(self) -> None:
        await self.journal.settle()

    async def stop(self, why: str = "the server stops") -> None:
        await super().stop(why)
        await self.journal.close()

    def describe(self) -> dict[str, str]:
        journal = self.journal
        return {
            **super().describe(),
            "data": journal.disk.where,
            "sync": journal.sync.value,
            "trouble": journal.trouble,
            "commits": str(journal.commits),
            "snapshots": str(journal.snapshots),
        }
