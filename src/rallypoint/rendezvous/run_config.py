"""The `config` and `state/closed` of a run: making, checking, closing and reopening it, and draining nodes.

Each step is one transaction that compares the revisions that were read, so it works the same for a node that joins, a
node that has not joined, and an operator's tool. It never writes `state/round` or the key of a node, and never deletes
`state/closed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from rallypoint._marks import mark
from rallypoint.backends.contract import Backend, Session
from rallypoint.backends.session import first_interval_fraction
from rallypoint.errors import (
    BackendError,
    LeaseGone,
    RendezvousClosedError,
    RendezvousError,
    RendezvousStateError,
    SettingsMismatchError,
)
from rallypoint.kv.types import (
    BranchOp,
    DeleteRange,
    Exists,
    Get,
    GotItem,
    GotRange,
    Item,
    ModRevisionIs,
    Put,
    Range,
    RangeEmpty,
)
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.rendezvous.records import (
    ClosedRecord,
    ConfigRecord,
    DrainRecord,
    ListedRunRecord,
    NodeRecord,
    RefusedRecord,
    decode,
    encode,
)
from rallypoint.settings import Settings

DATA_TTL_S = 7200.0
"""Rosters, history and stores are kept for so long after the run."""
Differences: TypeAlias = dict[str, tuple[int | str | None, int | str | None]]
"""Option -> (this node's value, the run's)."""
AFTER_FAILURE = 0.2
"""The pause after a failed renewal, as a part of the usual pause."""
LEASE_ENDS_S = 0.1
"""Pause after a lease has ended: a backend may delete its keys a moment later."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """`config` and `state/closed` as they were read, with the revisions that a join compares (rule 8)."""

    config: ConfigRecord
    config_revision: int
    closed: ClosedRecord
    closed_revision: int
    empty: bool
    """No node has a key."""


class RunConfig:
    """Access to `config` and `state/closed` of one run. `by` names the acting node; `wall` gives times for people."""

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        settings: Settings,
        by: str,
        new_id: Callable[[], str],
        wall: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._keys = keys
        self._settings = settings
        self._by = by
        self._new_id = new_id
        self._wall = wall
        self._granted: list[int] = []
        """Leases granted for making the run, until the outcome of that is known."""
        self._unwanted: list[int] = []
        """Granted leases that the run does not use: to be revoked."""
        self._making = asyncio.Lock()

    async def read(self) -> RunSnapshot | None:
        """The snapshot now; None if the run does not exist."""
        keys = self._keys
        result = await self._backend.txn((), (Get(keys.config), Get(keys.closed), Range(keys.nodes, limit=1)))
        config, closed, nodes = result.results
        assert isinstance(config, GotItem)
        assert isinstance(closed, GotItem)
        assert isinstance(nodes, GotRange)
        if config.item is None:
            return None
        record = decode(ConfigRecord, config.item)
        if config.item.lease != record.run_lease:
            raise RendezvousStateError(
                f"{config.item.key} is not under the run's own lease, so it would never expire. Another program wrote "
                f"there: remove the key, or use another run id or prefix",
                key=config.item.key,
            )
        return RunSnapshot(
            record,
            config.item.mod_revision,
            decode(ClosedRecord, closed.item) if closed.item else ClosedRecord(closed=False),
            closed.item.mod_revision if closed.item else 0,
            nodes.count == 0,
        )

    def guess(self, config: Item | None, closed: Item | None) -> RunSnapshot | None:
        """A snapshot from watched values, if this node may join on it. They may be outdated: the join compares them."""
        if config is None or closed is None:
            return None
        record, state = decode(ConfigRecord, config), decode(ClosedRecord, closed)
        if state.closed or self._differences(record) or config.lease != record.run_lease:
            return None
        return RunSnapshot(record, config.mod_revision, state, closed.mod_revision, empty=False)

    async def check(self, *, is_absent: bool = False) -> RunSnapshot:
        """A snapshot on which this node may join. The run is made, renewed, replaced or reopened as the rules allow.

        Raises RendezvousClosedError or SettingsMismatchError. The join compares the revisions in the result (rule 8).
        """
        while True:
            snapshot, is_absent = await self.find_or_make(is_absent=is_absent), False
            if not self.may_join(snapshot):
                # Before the renewal: refused nodes that retry must not keep a closed run alive.
                raise closed_error(self._keys.run_id, snapshot.closed, self._settings.reopen_after_s)
            if not self._backend.renews_runs and not await self._backend.keep_alive(snapshot.config.run_lease):
                mark("run_config.lease_ended")
                await asyncio.sleep(LEASE_ENDS_S)  # it has just ended: the keys of the run are about to be deleted
                continue
            if snapshot.closed.closed:
                mark("run_config.reopened")
                await self._put_closed(
                    snapshot, ClosedRecord(closed=False, by=self._by, why="no node was left"), snapshot.empty
                )
                continue
            different = self._differences(snapshot.config)
            if not different and (not snapshot.empty or snapshot.config.timing == self._settings.timing()):
                return snapshot
            if not snapshot.empty:
                why = self._mismatch_sentence(snapshot.config, different)
                await self._note_refused(snapshot, different, why)
                raise SettingsMismatchError(why, differences={**different})
            await self._replace_config(snapshot)

    def may_join(self, snapshot: RunSnapshot) -> bool:
        """The run is open, or its id is free: with `reopen_after=0`, as soon as no node is left."""
        return not snapshot.closed.closed or (self._settings.reopen_after_s <= 0 and snapshot.empty)

    async def find_or_make(self, *, is_absent: bool = False) -> RunSnapshot:
        """The run as it is; it is made if it does not exist. `is_absent`: the caller has seen that it does not."""
        while True:
            snapshot = None if is_absent else await self.read()
            is_absent = False
            if snapshot is not None and not self._granted and not self._unwanted:
                return snapshot
            async with self._making:
                if snapshot is None:
                    snapshot = await self._make()
                    if snapshot is None:
                        continue
                await self._revoke_unused(snapshot.config.run_lease)
                return snapshot

    async def close(self, why: str, *, make: bool = True, outcome: int | None = None) -> bool:
        """Close the run. False: it was closed already. Safe to repeat after a backend error.

        A run that does not exist is made first, so that it stays closed; without `make`, the result is False.
        `outcome` is the exit code of a run that has ended.
        """
        while True:
            snapshot = await self.find_or_make() if make else await self.read()
            if snapshot is None or snapshot.closed.closed:
                return False
            record = ClosedRecord(closed=True, by=self._by, why=why, at=self._wall(), outcome=outcome)
            if await self._put_closed(snapshot, record, only_if_empty=False):
                return True

    async def reopen(self, why: str) -> bool:
        """Reopen the run. False: it was not closed, or does not exist."""
        while True:
            snapshot = await self.read()
            if snapshot is None or not snapshot.closed.closed:
                return False
            record = ClosedRecord(closed=False, by=self._by, why=why, at=self._wall())
            if await self._put_closed(snapshot, record, only_if_empty=False):
                return True

    async def drain(self, node: str, why: str) -> list[str]:
        """Ask every node of this id or name to leave; returns their ids. RendezvousError if there is none."""
        asked: list[str] = []
        scanned = await self._backend.scan(self._keys.nodes)
        known = [found for item in scanned.items if (found := _decode_node(item)) is not None]
        record = DrainRecord(by=self._by, why=why, at=self._wall())
        for found in known:
            if node in (found.id, found.name):
                await self._put_drain(found, record)
                asked.append(found.id)
        if not asked:
            names = ", ".join(sorted(found.name for found in known)[:20]) or "none"
            raise RendezvousError(
                f"run {self._keys.run_id!r} has no node with the name or id {node!r}; its nodes: {names}"
            )
        return asked

    async def keep_alive(
        self, session: Session, config: Callable[[], ConfigRecord], reachability: Reachability
    ) -> None:
        """Renew the leases of the run while this session lives: they end `reopen_after` after the last session."""
        loop = asyncio.get_running_loop()
        data_renewed_at = float("-inf")
        part = first_interval_fraction(session.lease)  # so that the nodes do not all renew at the same time
        while not session.lost.is_set():
            run_ttl_s = config().run_ttl_s or session.ttl_s
            await asyncio.sleep(min(session.ttl_s / 1.5, run_ttl_s / 3) * part)
            part = 1.0
            try:
                await self._backend.keep_alive(config().run_lease)
                if loop.time() - data_renewed_at > DATA_TTL_S / 4:
                    if not await self._backend.keep_alive(config().data_lease):
                        await self._replace_data_lease()
                    data_renewed_at = loop.time()
                reachability.succeeded()
            except BackendError as error:
                part = AFTER_FAILURE  # the lease is not renewed meanwhile: retry soon
                reachability.failed(error)

    async def note_failed_preflight(self, why: str) -> None:
        """Record for people that this node does not join because its preflight check failed."""
        snapshot = await self.find_or_make()
        record = encode(RefusedRecord(name=self._by, differences={}, why=why, at=self._wall()))
        with suppress(LeaseGone):
            await self._backend.txn((), [Put(self._keys.refusal(self._by), record, snapshot.config.data_lease)])

    # --- writes -------------------------------------------------------------------------------------------------------

    async def _make(self) -> RunSnapshot | None:
        """Make the run. None: another node was faster, or a lease has ended: read again.

        Leases that were granted for an earlier try are used again.
        """
        timing = self._settings.timing()
        run_ttl_s = max(timing.reopen_after_s + timing.session_ttl_s, 1.0)
        for ttl_s in (run_ttl_s, DATA_TTL_S + timing.reopen_after_s + timing.session_ttl_s)[len(self._granted) :]:
            self._granted.append(await self._backend.grant(ttl_s))
        run_lease, data_lease = self._granted
        config = ConfigRecord(
            incarnation=self._new_id(),
            shared=self._settings.shared(),
            timing=timing,
            run_lease=run_lease,
            data_lease=data_lease,
            run_ttl_s=run_ttl_s,
            by=self._by,
        )
        ops: list[BranchOp] = [
            Put(self._keys.config, encode(config), run_lease),
            Put(self._keys.closed, encode(ClosedRecord(closed=False)), run_lease),
            Put(self._keys.listed_run, encode(ListedRunRecord()), run_lease),
        ]
        absent = Exists(self._keys.config, False)
        # Delete the data of an earlier life: its rounds may have had the same numbers. Not while nodes of it live.
        old = DeleteRange(self._keys.data)
        try:
            result = await self._backend.txn([absent, RangeEmpty(self._keys.nodes)], [old, *ops])
            has_nodes = not result.committed and result.results[0] == GotItem(None)
            if has_nodes:
                result = await self._backend.txn([absent], ops)
        except LeaseGone:
            await self._revoke_unused()
            return None
        if result.committed:
            self._granted.clear()
            revision = result.revision
            return RunSnapshot(config, revision, ClosedRecord(closed=False), revision, empty=not has_nodes)
        mark("run_config.raced")
        made = result.results[0]
        await self._revoke_unused(made.item.lease if isinstance(made, GotItem) and made.item is not None else 0)
        return None

    async def _revoke_unused(self, used: int = 0) -> None:
        """The run exists, under the lease `used`. Revoke the granted leases, unless it is one of them."""
        if self._granted[:1] != [used]:
            self._unwanted += self._granted
        self._granted.clear()
        while self._unwanted:
            await self._backend.revoke(self._unwanted[-1])
            self._unwanted.pop()

    async def _replace_config(self, snapshot: RunSnapshot) -> None:
        """Replace the settings of a run without nodes (rule 8). Its leases and its numbers continue."""
        config = ConfigRecord(
            incarnation=self._new_id(),
            shared=self._settings.shared(),
            timing=self._settings.timing(),
            run_lease=snapshot.config.run_lease,
            data_lease=snapshot.config.data_lease,
            run_ttl_s=snapshot.config.run_ttl_s,
            by=self._by,
        )
        compares = (ModRevisionIs(self._keys.config, snapshot.config_revision), RangeEmpty(self._keys.nodes))
        try:
            await self._backend.txn(compares, [Put(self._keys.config, encode(config), snapshot.config.run_lease)])
        except LeaseGone:
            return

    async def _replace_data_lease(self) -> None:
        """Grant a new lease for rosters, reports and stores: the old one ended between two sessions."""
        snapshot = await self.read()
        if snapshot is None or await self._backend.keep_alive(snapshot.config.data_lease):
            return
        lease = await self._backend.grant(DATA_TTL_S)
        config = msgspec.structs.replace(snapshot.config, data_lease=lease)
        unchanged = ModRevisionIs(self._keys.config, snapshot.config_revision)
        await self._backend.txn([unchanged], [Put(self._keys.config, encode(config), snapshot.config.run_lease)])

    async def _put_closed(self, snapshot: RunSnapshot, record: ClosedRecord, only_if_empty: bool) -> bool:
        compares: list[ModRevisionIs | RangeEmpty] = [ModRevisionIs(self._keys.closed, snapshot.closed_revision)]
        if only_if_empty:
            compares.append(RangeEmpty(self._keys.nodes))
        try:
            result = await self._backend.txn(
                compares, [Put(self._keys.closed, encode(record), snapshot.config.run_lease)]
            )
        except LeaseGone:
            return False
        return result.committed

    async def _note_refused(self, snapshot: RunSnapshot, different: Differences, why: str) -> None:
        """Record for people why a node is missing. Tried only once: the node's own error has the same reason."""
        refused = encode(RefusedRecord(name=self._by, differences=different, why=why, at=self._wall()))
        unchanged = ModRevisionIs(self._keys.config, snapshot.config_revision)
        put = Put(self._keys.refusal(self._by), refused, snapshot.config.data_lease)
        with suppress(BackendError):
            await self._backend.txn([unchanged], [put])

    async def _put_drain(self, node: NodeRecord, record: DrainRecord) -> None:
        try:
            await self._backend.txn((), [Put(self._keys.drain(node.id), encode(record), node.session)])
        except LeaseGone:
            return  # the node is gone already

    # --- comparing settings -------------------------------------------------------------------------------------------

    def _differences(self, config: ConfigRecord) -> Differences:
        ours = self._settings.shared()
        names = [*ours, *(name for name in config.shared if name not in ours)]
        return {
            name: (ours.get(name), config.shared.get(name))
            for name in names
            if ours.get(name) != config.shared.get(name)
        }

    def _mismatch_sentence(self, config: ConfigRecord, different: Differences) -> str:
        return (
            f"this node's settings are not those of run {self._keys.run_id!r}, which {config.by or 'another node'} "
            f"started: {differences_sentence(different)}. Give all nodes the same values, or use another run id"
        )


def _decode_node(item: Item) -> NodeRecord | None:
    """A node's record; None if it cannot be decoded: the other nodes must still be found."""
    try:
        return decode(NodeRecord, item)
    except RendezvousStateError:
        return None


def differences_sentence(different: Differences) -> str:
    """The settings that differ, as seen from this node."""
    return "; ".join(f"{name} is {ours!r} here and {theirs!r} there" for name, (ours, theirs) in different.items())


def closed_sentence(run_id: str, closed: ClosedRecord, reopen_after_s: float) -> str:
    """The message for a node that cannot join a closed run."""
    return (
        f"run {run_id!r} was closed by {closed.by or 'an unknown node'}: {closed.why or 'no reason given'}. "
        f"It can be reopened, and its id is free again {reopen_after_s:g} s after its last node has gone"
    )


def closed_error(run_id: str, closed: ClosedRecord, reopen_after_s: float) -> RendezvousClosedError:
    """The error for a node that cannot join a closed run."""
    text = closed_sentence(run_id, closed, reopen_after_s)
    return RendezvousClosedError(text, why=closed.why, outcome=closed.outcome)


def drain_sentence(drain: DrainRecord) -> str:
    """The message for a node that is asked to leave, and for the others behind "NODE was"."""
    return f"drained by {drain.by or 'an operator'}: {drain.why or 'no reason given'}"
