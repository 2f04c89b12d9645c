"""What a node does for its run while it has a session, where the backend does not: renew it, and seek its office."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from rallypoint.backends.contract import Backend, Session
from rallypoint.events import Emitter
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Identity
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.rendezvous.records import ConfigRecord, CoordinatorRecord
from rallypoint.rendezvous.run_config import RunConfig


class NodeTasks:
    """Of one node; they begin anew with every session."""

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        identity: Identity,
        entry: RunConfig,
        emit: Emitter,
        rng: random.Random,
        wall: Callable[[], float],
        config: Callable[[], ConfigRecord],
        reachability: Reachability,
        is_first_in_line: Callable[[], bool],
    ) -> None:
        self.is_elected = False
        """Under the current session, at least once."""
        self.on_elected: Callable[[], None] = lambda: None
        self.joined = asyncio.Event()
        """Under the current session: the run's own leases are this node's business too."""
        self._backend = backend
        self._keys = keys
        self._identity = identity
        self._run_config = entry
        self._emit = emit
        self._rng = rng
        self._wall = wall
        self._config = config
        self._reachability = reachability
        self._is_first_in_line = is_first_in_line

    def start(self, session: Session) -> list[asyncio.Task[None]]:
        """What runs as long as the session does."""
        name, tasks = self._identity.name, []
        self.joined = asyncio.Event()
        self.is_elected = False
        if not self._backend.renews_runs:
            tasks.append(asyncio.create_task(self._renew_run(session), name=f"run lease of {name}"))
        if not self._backend.has_coordinator:
            from rallypoint.rendezvous.election import Election  # and so the coordinator: only where nodes elect one

            record = CoordinatorRecord(id=self._identity.id, name=name)
            candidate = Election(
                self._backend, self._keys, session, record, self._emit, self._rng, self._wall, self._is_first_in_line
            )
            candidate.on_elected = self._elected
            tasks.append(asyncio.create_task(candidate.run(), name=f"candidate {name}"))
        return tasks

    def _elected(self) -> None:
        self.is_elected = True
        self.on_elected()

    async def _renew_run(self, session: Session) -> None:
        await self.joined.wait()
        await self._run_config.keep_alive(session, self._config, self._reachability)
