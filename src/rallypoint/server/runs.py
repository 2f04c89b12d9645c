"""The runs of a server: one coordinator for each, and the renewal of a run's leases while it has live sessions.

A run is kept from the first client that connects for it until no client is connected for it, it has no live session and
its `config` has expired. A failure in one run must never affect another: a coordinator that fails is restarted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import msgspec

from rallypoint._marks import mark
from rallypoint.backends.backoff import Backoff
from rallypoint.errors import RendezvousStateError
from rallypoint.events import CoordinatorDeposed, CoordinatorElected, Emitter
from rallypoint.kv.types import Delete, Exists, Grant, Item, KeepAlive, LeaseResult, ModRevisionIs, Put, Txn
from rallypoint.options import DEFAULT_PREFIX
from rallypoint.rendezvous.coordinator import Coordinator
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import (
    ClaimRecord,
    ClosedMark,
    ConfigRecord,
    CoordinatorRecord,
    ListedRunRecord,
    NodeRecord,
    RoundRecord,
    WaitingRecord,
    decode,
    encode,
    prepare,
)
from rallypoint.rendezvous.returning_nodes import ReturningNodes
from rallypoint.rendezvous.run_config import DATA_TTL_S
from rallypoint.rendezvous.view import View
from rallypoint.server.clients import Clients
from rallypoint.server.engine_host import EngineHost
from rallypoint.server.local_backend import LocalBackend

MOST_PAUSE_S = 5.0
LEAST_PAUSE_S = 0.1
"""Bounds of the pause between two renewals."""
UNMADE_PAUSE_S = 0.3
"""The pause while a run with clients has no config: a node is about to create it, with a lease that may last 1 s."""
TURN_S = 3.0
"""How long one client has the turn to create a run before another client gets it."""
SETTLE_S = 0.05
"""Delay of the renewal after a run got its first session. A node that finds its run closed leaves within this time, so
that it does not keep a closed run alive."""
_claim_decoder = msgspec.json.Decoder(ClaimRecord)


class Run:
    """One run of the server."""

    def __init__(self, run_id: str, returning: ReturningNodes, task: asyncio.Task[None]) -> None:
        self.keys = RunKeys(DEFAULT_PREFIX, run_id)
        self.returning = returning
        self.task = task
        self.coordinator: Coordinator | None = None
        self._config: tuple[int, ConfigRecord] | None = None
        self._turn_of, self._turn_at = "", float("-inf")

    def takes_turn(self, client: str, now: float) -> bool:
        """Whether this client has the turn to create the run. One at a time, or thousands would try at once."""
        if now - self._turn_at >= TURN_S:
            self._turn_of, self._turn_at = client, now
        return self._turn_of == client

    def config(self, item: Item | None) -> ConfigRecord | None:
        """The run's config, decoded only if it has changed; None if it is missing or unreadable."""
        if item is None:
            return None
        if self._config is None or self._config[0] != item.mod_revision:
            try:
                self._config = (item.mod_revision, decode(ConfigRecord, item))
            except RendezvousStateError:
                return None  # the coordinator reports it
        return self._config[1]


class Runs:
    """All runs of one server, from `start` until `stop`."""

    def __init__(
        self,
        engine_host: EngineHost,
        clients: Clients,
        name: str,
        emit: Emitter,
        rng: random.Random,
        wall: Callable[[], float],
        backend: LocalBackend,
    ) -> None:
        self._host = engine_host
        self._clients = clients
        self._backend = backend
        self._name = name
        self._emit = emit
        self._rng = rng
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._runs: dict[str, Run] = {}
        self._renewer: asyncio.Task[None] | None = None
        self._renew_now = asyncio.Event()
        clients.on_run_alive = self._renew_now.set

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._runs

    def views(self) -> Iterator[tuple[str, View]]:
        """The views of the coordinators, for metrics. In the order in which the runs were added."""
        return ((run_id, run.coordinator.view) for run_id, run in self._runs.items() if run.coordinator is not None)

    def start(self) -> None:
        """Start renewing, and start the coordinators of runs in a recovered store."""
        control = f"/{DEFAULT_PREFIX}/"
        for key in list(self._host.engine.items):
            run, _, name = key.removeprefix(control).partition("/")
            if key.startswith(control) and name == "config" and not run.startswith(":"):
                self.ensure_run(unquote(run))
        self._renewer = asyncio.create_task(self._renew(), name="renewal of runs")

    async def stop(self) -> None:
        """Stop the coordinators and delete their keys."""
        tasks = [run.task for run in self._runs.values()]
        if self._renewer is not None:
            tasks.append(self._renewer)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in self._runs.values():
            self._host.execute(Txn((), (Delete(run.keys.coordinator),)))
        self._runs.clear()
        await self._backend.close()

    def ensure_run(self, run_id: str) -> Run:
        """The run, added and with a running coordinator if it is new."""
        run = self._runs.get(run_id)
        if run is None:
            returning = ReturningNodes(self._started_at)
            keys = RunKeys(DEFAULT_PREFIX, run_id)
            if (stored := self._stored_claims(keys)) is not None:
                returning.claim("", stored)
            task = asyncio.create_task(self._coordinate(keys, returning), name=f"coordinator of {run_id}")
            run = self._runs[run_id] = Run(run_id, returning, task)
        return run

    def expect(self, run: Run, client: str) -> None:
        """A client of an earlier generation reconnected, and will report the state of its run there."""
        run.returning.expect(client)
        self._store_claims(run)  # before its welcome: a server that restarts after that must know of it

    def claimed(self, run_id: str, client: str, claim: bytes) -> None:
        """A client of an earlier generation reports the state of its run there. An unreadable claim counts as empty."""
        run = self.ensure_run(run_id)
        try:
            record = _claim_decoder.decode(claim)
        except msgspec.DecodeError:
            record = ClaimRecord(id=client)
        run.returning.claim(client, record)
        self._store_claims(run)
        if record.closed is not None:
            self._close_again(run, record.closed)

    def _close_again(self, run: Run, told: ClosedMark) -> None:
        """A client was told in the earlier life of this server that the run is closed: close it before a round forms.

        If nobody has made the run yet, it is made with its old incarnation. If it has that incarnation, this server
        knows as much or more. A run that was made anew is left alone once a round of it was active, or once it was
        closed here: those who made it know nothing of the old one, or somebody has reopened it.
        """
        keys, items = run.keys, self._host.engine.items
        state = msgspec.structs.replace(told.state, closed=True)
        if keys.config not in items:
            mark("server.closed_again")
            config = told.config
            leases = [self._host.execute(Grant(ttl_s)) for ttl_s in (max(config.run_ttl_s, 1.0), DATA_TTL_S)]
            run_lease, data_lease = [granted.lease for granted in leases if isinstance(granted, LeaseResult)]
            config = msgspec.structs.replace(config, run_lease=run_lease, data_lease=data_lease)
            puts = (
                Put(keys.config, encode(config), run_lease),
                Put(keys.closed, encode(state), run_lease),
                Put(keys.listed_run, encode(ListedRunRecord()), run_lease),
            )
            self._host.execute(Txn((Exists(keys.config, False),), puts))
            return
        made, item = run.config(items.get(keys.config)), items.get(keys.closed)
        if made is None or item is None or made.incarnation == told.config.incarnation:
            return
        if item.version > 1 or self._was_active(items.get(keys.round)):
            return
        mark("server.closed_new")
        self._host.execute(
            Txn((ModRevisionIs(keys.closed, item.mod_revision),), (Put(keys.closed, encode(state), made.run_lease),))
        )

    def _was_active(self, item: Item | None) -> bool:
        """Whether a round of the run was ever active here."""
        try:
            return item is not None and decode(RoundRecord, item).last_active > 0
        except RendezvousStateError:
            return True  # the coordinator reports it

    def _store_claims(self, run: Run) -> None:
        """Store a summary of all claims, so that a server that recovers this data waits for the same nodes."""
        summary, stored = run.returning.summary(), self._stored_claims(run.keys)
        if not summary.ttl_s and stored is not None:
            self._host.execute(Txn((), (Delete(run.keys.returned),)))
        elif summary.ttl_s and stored != summary:
            granted = self._host.execute(Grant(summary.ttl_s))
            assert isinstance(granted, LeaseResult)
            self._host.execute(Txn((), (Put(run.keys.returned, encode(summary), granted.lease),)))

    def _stored_claims(self, keys: RunKeys) -> ClaimRecord | None:
        item = self._host.engine.items.get(keys.returned)
        try:
            return decode(ClaimRecord, item) if item is not None else None
        except RendezvousStateError:
            return None  # another program wrote this key

    async def _coordinate(self, keys: RunKeys, returning: ReturningNodes) -> None:
        """Run the coordinator, restarted when it ends, until the run is removed."""
        prepare(NodeRecord, RoundRecord, WaitingRecord)
        backoff = Backoff(self._rng)
        while True:
            term = 0
            try:
                term = await self._elect(keys)
                self._emit(CoordinatorElected(run_id=keys.run_id, by=self._name, term=term))
                coordinator = Coordinator(
                    self._backend, keys, term, self._name, self._emit, Backoff(self._rng), self._wall, returning
                )
                if (run := self._runs.get(keys.run_id)) is not None:
                    run.coordinator = coordinator
                reason = await coordinator.run()
            except Exception as error:
                mark("server.coordinator_failed")
                reason = f"it failed: {error!r}"
            self._emit(CoordinatorDeposed(run_id=keys.run_id, by=self._name, term=term, reason=reason))
            await backoff.sleep()

    async def _elect(self, keys: RunKeys) -> int:
        """The new term. Replaces the key of an earlier coordinator, which has ended with its server or failed."""
        record = encode(CoordinatorRecord(id=self._name, name=self._name))
        while True:
            await self._backend.txn((), [Delete(keys.coordinator)])
            result = await self._backend.txn([Exists(keys.coordinator, False)], [Put(keys.coordinator, record)])
            if result.committed:
                return result.revision

    # --- renewal ------------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        while True:
            pause_s = self._renew_all()
            try:
                async with asyncio.timeout(pause_s):
                    await self._renew_now.wait()
                    self._renew_now.clear()
                    await asyncio.sleep(SETTLE_S)
            except TimeoutError:
                continue

    def _renew_all(self) -> float:
        """Renew the leases of runs with live sessions, and remove runs that are over. The pause until the next time."""
        self._clients.sweep()
        present, alive = self._clients.connected_runs(), self._clients.live_runs()
        pause_s = MOST_PAUSE_S
        for run_id, run in list(self._runs.items()):
            config = run.config(self._host.engine.items.get(run.keys.config))
            if config is None:
                if run_id in present or run_id in alive:
                    pause_s = min(pause_s, UNMADE_PAUSE_S)
                elif run.returning.holds_until(self._loop.time()) is None:  # else its claims would be lost
                    self._remove(run_id, run)
                continue
            pause_s = min(pause_s, config.run_ttl_s / 3)
            if run_id in alive:
                self._host.execute(KeepAlive(config.run_lease))
                renewed = self._host.execute(KeepAlive(config.data_lease))
                if isinstance(renewed, LeaseResult) and not renewed.alive:
                    self._replace_data_lease(run.keys.config, config)
        return max(LEAST_PAUSE_S, pause_s)

    def _replace_data_lease(self, key: str, config: ConfigRecord) -> None:
        """Without this lease, of rosters, reports and stores, no round can form."""
        granted = self._host.execute(Grant(DATA_TTL_S))
        assert isinstance(granted, LeaseResult)
        config = msgspec.structs.replace(config, data_lease=granted.lease)
        self._host.execute(Txn((), (Put(key, encode(config), config.run_lease),)))

    def _remove(self, run_id: str, run: Run) -> None:
        mark("server.collected")
        del self._runs[run_id]
        run.task.cancel()
        self._host.execute(Txn((), (Delete(run.keys.coordinator),)))
