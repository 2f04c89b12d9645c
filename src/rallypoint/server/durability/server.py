"""The server with data: nothing may leave it, to a client or to a coordinator, before the state behind it is durable.

Operations are executed at once and in order, as without data; their results are held back. Bytes for a client wait in
`_write`, through which all bytes of a connection go. Calls of a coordinator return, and its watches deliver, when the
state is durable. While the disk is failing, requests are refused without being executed. Renewals are the exception,
because they are not logged: a full disk ends no session, and no lease expires until the disk works again.
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
    """Logs the operations that it executes."""

    def __init__(self, engine: Engine, journal: Journal) -> None:
        self._journal = journal
        journal.on_recovered = self._recovered
        super().__init__(engine)

    def execute(self, op: Op, origin: Origin | None = None) -> Result:
        engine, journal = self.engine, self._journal
        if journal.is_failing:
            if isinstance(op, KeepAlive | Shorten):
                return self._current_lease(op)
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

    def _current_lease(self, op: KeepAlive | Shorten) -> LeaseResult:
        """The result while the disk is failing: leases do not expire then, and are all renewed afterwards."""
        lease = self.engine.leases.get(op.lease)
        return LeaseResult(op.lease, lease.ttl_s if lease else 0.0, lease is not None)

    def _tick(self) -> None:
        if self._journal.is_failing:
            self._timer = None
        else:
            super()._tick()

    def _recovered(self) -> None:
        renew_all(self.engine, self._loop.time())
        self.arm()


class DurableConnection(Connection):
    """Sends bytes when the state behind them is durable."""

    def __init__(self, context: ConnectionContext, journal: Journal) -> None:
        super().__init__(context)
        self._journal = journal
        self._writes_at_once = False
        """The bytes being written do not depend on state that is not durable."""

    def _write(self, data: bytes) -> None:
        if self._writes_at_once:
            self._write_now(data)
        else:
            self._journal.when_durable(partial(self._write_now, data))

    def _write_now(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            super()._write(data)

    def _send_away(self, message: bytes, why: str, kind: Refusal) -> None:
        self._writes_at_once = True
        super()._send_away(message, why, kind)

    def shut_down(self, why: str) -> None:
        if not self._journal.is_settled:  # the server stops, so answers that are not durable now never will be
            self._out.clear()
            self._writes_at_once = True
        super().shut_down(why)

    def _greet(self, payload: bytes) -> None:
        """While the disk is failing, a client is accepted if all its sessions are alive: its welcome changes nothing.

        If one of them has ended, that may not be durable yet, and the client must not be told.
        """
        if not self._journal.is_failing:
            super()._greet(payload)
            return
        verdict = judge(payload, self._context.tokens, self._context.versions)
        leases = self._context.engine_host.engine.leases
        if isinstance(verdict, Accepted) and any(leases.get(held.lease) is None for held in verdict.hello.sessions):
            self._refuse(Refused(RefusalCode.BUSY, self._failure()))
            return
        self._writes_at_once = True
        super()._greet(payload)
        self._writes_at_once = False

    def _handle(self, message: ClientMessage, client: Client, acked: int) -> None:
        if not self._journal.is_failing:
            super()._handle(message, client, acked)
            return
        match message:
            case Do(seq, KeepAlive() as op):
                result = self._context.engine_host.execute(op)
                assert isinstance(result, LeaseResult)
                if result.alive:  # its end may not be durable yet
                    self._answer_at_once(Answer(seq, result))
                else:
                    self.send(Answer(seq, result))
            case Do(seq, op) if self._was_executed(Origin(client.id, seq, acked), op):
                super()._handle(message, client, acked)  # a resend: answered when its first execution is durable
            case Do(seq):
                mark("journal.refused")
                self._answer_at_once(Answer(seq, Failure(FailureCode.UNAVAILABLE, self._failure())))
            case _:
                super()._handle(message, client, acked)

    def _was_executed(self, origin: Origin, op: Op) -> bool:
        return changes_something(op) and self._context.engine_host.engine.dedupe.lookup(origin) is not None

    def _answer_at_once(self, answer: Answer) -> None:
        self._write_now(frame(encoder.encode([answer])))

    def _failure(self) -> str:
        return f"the server cannot write its data, and executes nothing meanwhile: {self._journal.trouble}"


class DurableWatch(LocalWatch):
    """Delivers batches when they are durable."""

    def __init__(self, engine_host: EngineHost, journal: Journal, prefix: str, after_revision: int) -> None:
        super().__init__(engine_host, prefix, after_revision)
        self._journal = journal

    def push(self, batch: Batch) -> None:
        self._journal.when_durable(partial(self._deliver, self._id, batch))

    def _deliver(self, watch: int | None, batch: Batch) -> None:
        if watch == self._id:  # else the watch was restarted, and gets the batch from its backlog
            super().push(batch)

    def _take(self, backlog: tuple[Batch, ...]) -> None:
        for batch in backlog:
            self.push(batch)


class DurableLocal(LocalBackend):
    """The backend of the coordinators: a call returns when its effect is durable."""

    def __init__(self, engine_host: EngineHost, journal: Journal) -> None:
        super().__init__(engine_host)
        self._journal = journal

    async def execute(self, op: Op) -> Result:
        await self._journal.wait_working()
        result = await super().execute(op)
        await self._journal.wait_durable()
        return result

    def watch(self, prefix: str, after_revision: int) -> Watch:
        return DurableWatch(self._host, self._journal, prefix, after_revision)


class DurableServer(Server):
    """A server with the store of a data directory."""

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
