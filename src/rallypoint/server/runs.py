"""The runs of a server: a coordinator for each, and the renewal of what a run lives on while its sessions live.

A run is attended to from the first client that comes for it, until nobody is connected for it, no session of it lives
and its `config` is gone. One run's trouble is its own: a coordinator that fails is started again.
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
from rallypoint.kv.types import Delete, Exists, Grant, Item, KeepAlive, LeaseResult, Put, Txn
from rallypoint.rendezvous.coordinator import Coordinator
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import (
    ClaimRecord,
    ConfigRecord,
    CoordinatorRecord,
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

PREFIX = "rallypoint"
MOST_PAUSE_S = 5.0
LEAST_PAUSE_S = 0.1
UNMADE_PAUSE_S = 0.3
"""While a run has no config its nodes are about to make it, and what they make it on may live for a second only."""
TURN_S = 3.0
SETTLE_S = 0.05
"""A node that comes in vain is gone after this: it must not keep a closed run alive."""
_claim_decoder = msgspec.json.Decoder(ClaimRecord)


class Run:
    """One run that is attended to."""

    def __init__(self, run_id: str, returning: ReturningNodes, task: asyncio.Task[None]) -> None:
        self.keys = RunKeys(PREFIX, run_id)
        self.returning = returning
        self.task = task
        self.coordinator: Coordinator | None = None
        self._config: tuple[int, ConfigRecord] | None = None
        self._turn_of, self._turn_at = "", float("-inf")

    def takes_turn(self, client: str, now: float) -> bool:
        """Whether it is for this client to make the run: for one at a time, or thousands would at once."""
        if now - self._turn_at >= TURN_S:
            self._turn_of, self._turn_at = client, now
        return self._turn_of == client

    def config(self, item: Item | None) -> ConfigRecord | None:
        """The run's config, decoded when it has changed; None if there is none that can be read."""
        if item is None:
            return None
        if self._config is None or self._config[0] != item.mod_revision:
            try:
                self._config = (item.mod_revision, decode(ConfigRecord, item))
            except RendezvousStateError:
                return None  # the coordinator says so
        return self._config[1]


class Runs:
    """All runs of one server. `start` before use, `stop` at the end."""

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
        self._keeper: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()
        clients.on_run_alive = self._soon.set

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._runs

    def views(self) -> Iterator[tuple[str, View]]:
        """What the coordinators know, in the order in which the runs came; for whoever looks on."""
        return ((run_id, run.coordinator.view) for run_id, run in self._runs.items() if run.coordinator is not None)

    def start(self) -> None:
        """Begin to look after runs, those included that a restored store knows."""
        control = f"/{PREFIX}/"
        for key in list(self._host.engine.items):
            run, _, name = key.removeprefix(control).partition("/")
            if key.startswith(control) and name == "config" and not run.startswith(":"):
                self.attend(unquote(run))
        self._keeper = asyncio.create_task(self._keep(), name="keeper of runs")

    async def stop(self) -> None:
        """Stop deciding. The coordinators' keys go: whoever starts next need not wait for anything."""
        tasks = [run.task for run in self._runs.values()]
        if self._keeper is not None:
            tasks.append(self._keeper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in self._runs.values():
            self._host.execute(Txn((), (Delete(run.keys.coordinator),)))
        self._runs.clear()
        await self._backend.close()

    def attend(self, run_id: str) -> Run:
        """See to it that the run has a coordinator."""
        run = self._runs.get(run_id)
        if run is None:
            returning = ReturningNodes(self._started_at)
            keys = RunKeys(PREFIX, run_id)
            if (told := self._told(keys)) is not None:
                returning.claim("", told)
            task = asyncio.create_task(self._coordinate(keys, returning), name=f"coordinator of {run_id}")
            run = self._runs[run_id] = Run(run_id, returning, task)
        return run

    def expect(self, run: Run, client: str) -> None:
        """A client of an earlier life of the server is back, and will say where the run stood."""
        run.returning.expect(client)
        self._remember(run)  # before it is welcome: who dies now is not told again

    def claimed(self, run_id: str, client: str, claim: bytes) -> None:
        """A client of an earlier life of the server says where the run stood."""
        run = self.attend(run_id)
        try:
            run.returning.claim(client, _claim_decoder.decode(claim))
        except msgspec.DecodeError:
            run.returning.claim(client, ClaimRecord(id=client))
        self._remember(run)

    def _remember(self, run: Run) -> None:
        """Keep what those who came back have told: who goes on from this data must know that others may be at work."""
        summary, told = run.returning.summary(), self._told(run.keys)
        if not summary.ttl_s and told is not None:
            self._host.execute(Txn((), (Delete(run.keys.returned),)))
        elif summary.ttl_s and told != summary:
            granted = self._host.execute(Grant(summary.ttl_s))
            assert isinstance(granted, LeaseResult)
            self._host.execute(Txn((), (Put(run.keys.returned, encode(summary), granted.lease),)))

    def _told(self, keys: RunKeys) -> ClaimRecord | None:
        item = self._host.engine.items.get(keys.returned)
        try:
            return decode(ClaimRecord, item) if item is not None else None
        except RendezvousStateError:
            return None  # somebody else wrote there

    async def _coordinate(self, keys: RunKeys, returning: ReturningNodes) -> None:
        """Hold the office for as long as the run is attended to."""
        prepare(NodeRecord, RoundRecord, WaitingRecord)
        backoff = Backoff(self._rng)
        while True:
            term = 0
            try:
                term = await self._take_office(keys)
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

    async def _take_office(self, keys: RunKeys) -> int:
        """Our own term: a predecessor's key, left by a server that is no more, is replaced."""
        record = encode(CoordinatorRecord(id=self._name, name=self._name))
        while True:
            await self._backend.txn((), [Delete(keys.coordinator)])
            result = await self._backend.txn([Exists(keys.coordinator, False)], [Put(keys.coordinator, record)])
            if result.committed:
                return result.revision

    # --- while sessions live ------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            pause_s = self._look_after_all()
            try:
                async with asyncio.timeout(pause_s):
                    await self._soon.wait()
                    self._soon.clear()
                    await asyncio.sleep(SETTLE_S)
            except TimeoutError:
                continue

    def _look_after_all(self) -> float:
        """Renew the leases of runs with live sessions, let go of runs that are over; how long until the next time."""
        self._clients.sweep()
        present, alive = self._clients.connected_runs(), self._clients.live_runs()
        pause_s = MOST_PAUSE_S
        for run_id, run in list(self._runs.items()):
            config = run.config(self._host.engine.items.get(run.keys.config))
            if config is None:
                if run_id in present or run_id in alive:
                    pause_s = min(pause_s, UNMADE_PAUSE_S)
                elif run.returning.holds_until(self._loop.time()) is None:  # else what was claimed would be forgotten
                    self._let_go(run_id, run)
                continue
            pause_s = min(pause_s, config.run_ttl_s / 3)
            if run_id in alive:
                self._host.execute(KeepAlive(config.run_lease))
                renewed = self._host.execute(KeepAlive(config.data_lease))
                if isinstance(renewed, LeaseResult) and not renewed.alive:
                    self._replace_data_lease(run.keys.config, config)
        return max(LEAST_PAUSE_S, pause_s)

    def _replace_data_lease(self, key: str, config: ConfigRecord) -> None:
        """Nothing can be decided without the lease of rosters, reports and stores."""
        granted = self._host.execute(Grant(DATA_TTL_S))
        assert isinstance(granted, LeaseResult)
        config = msgspec.structs.replace(config, data_lease=granted.lease)
        self._host.execute(Txn((), (Put(key, encode(config), config.run_lease),)))

    def _let_go(self, run_id: str, run: Run) -> None:
        mark("server.collected")
        del self._runs[run_id]
        run.task.cancel()
        self._host.execute(Txn((), (Delete(run.keys.coordinator),)))
