"""Tasks that a node runs for its run while it has a session: renewing the run's leases, standing for election.

Only where the backend does neither itself (`renews_runs`, `has_coordinator`).
"""

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
    """The tasks of one node; they are started anew with every session."""

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        identity: Identity,
        run_config: RunConfig,
        emit: Emitter,
        rng: random.Random,
        wall: Callable[[], float],
        config: Callable[[], ConfigRecord],
        reachability: Reachability,
        tries_first: Callable[[], bool],
    ) -> None:
        self.is_elected = False
        """Elected as coordinator at least once under the current session."""
        self.on_elected: Callable[[], None] = lambda: None
        self.joined = asyncio.Event()
        """Set when the node has joined under the current session: from then on it renews the leases of the run."""
        self._backend = backend
        self._keys = keys
        self._identity = identity
        self._run_config = run_config
        self._emit = emit
        self._rng = rng
        self._wall = wall
        self._config = config
        self._reachability = reachability
        self._tries_first = tries_first

    def start(self, session: Session) -> list[asyncio.Task[None]]:
        """Start the tasks; the caller cancels them when the session ends."""
        name, tasks = self._identity.name, []
        self.joined = asyncio.Event()
        self.is_elected = False
        if not self._backend.renews_runs:
            tasks.append(asyncio.create_task(self._renew_run(session), name=f"run lease of {name}"))
        if not self._backend.has_coordinator:
            from rallypoint.rendezvous.election import Election  # imports the coordinator, which most nodes never need

            record = CoordinatorRecord(id=self._identity.id, name=name)
            election = Election(
                self._backend, self._keys, session, record, self._emit, self._rng, self._wall, self._tries_first
            )
            election.on_elected = self._elected
            tasks.append(asyncio.create_task(election.run(), name=f"election {name}"))
        return tasks

    def _elected(self) -> None:
        self.is_elected = True
        self.on_elected()

    async def _renew_run(self, session: Session) -> None:
        await self.joined.wait()
        await self._run_config.keep_alive(session, self._config, self._reachability)
