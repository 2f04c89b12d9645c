"""The handler interface, and the result of `next_rendezvous`. Names and meaning are those of torch's rendezvous API.

It must import neither torch nor a backend.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rallypoint.rendezvous.records import RosterMember


class _KeyValue(Protocol):
    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RendezvousStoreInfo:
    """The address and port of rank 0 for the job's own communication."""

    MASTER_ADDR_KEY = "MASTER_ADDR"
    MASTER_PORT_KEY = "MASTER_PORT"

    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: _KeyValue, local_addr: str | None = None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Rank 0 publishes its address and port (by default a free one) in the store; all ranks read them."""
        if rank == 0:
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, local_addr or socket.getfqdn())
            port = server_port if server_port is not None else free_port()
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(port))
        addr = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        return RendezvousStoreInfo(addr, int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY).decode()))


class RendezvousInfo:
    """A place in a round. `members` is read at its first use; it may be empty with handlers of other packages."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        bootstrap_store_info: RendezvousStoreInfo,
        round: int = 0,
        read_members: Callable[[], tuple[RosterMember, ...]] = tuple,
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.bootstrap_store_info = bootstrap_store_info
        self.round = round
        self._read_members = read_members
        self._members: tuple[RosterMember, ...] | None = None

    @property
    def members(self) -> tuple[RosterMember, ...]:
        """All members in rank order, with name and address. The first access blocks for one read."""
        if self._members is None:
            self._members = self._read_members()
        return self._members

    def __repr__(self) -> str:
        return f"<{type(self).__name__} round={self.round} rank={self.rank} world_size={self.world_size}>"


class RendezvousHandler(ABC):
    """The interface that an agent uses."""

    @abstractmethod
    def get_backend(self) -> str:
        """The name of the backend, as it was requested."""

    @property
    def use_agent_store(self) -> bool:
        """Whether the store of a round can serve the workers' own communication."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, if any, and block until this node has a place in the next."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the run is closed; False for one that does not exist."""

    @abstractmethod
    def set_closed(self) -> None:
        """Close the run for all nodes."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """The number of waiting nodes that a new round would admit, plus the lost members if enough remain."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The run's id."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Close the run, leave it and release all resources. False, with a warning, if closing failed."""


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
