"""The settings of one run as the coordinator applies them: those that all nodes share, and the first node's timing.

Pure. Read from `config` once per change, and validated there: a broken `config` stops forming, never the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.errors import RendezvousStateError
from rallypoint.options import LastCallMode
from rallypoint.rendezvous.ranks import rank
from rallypoint.rendezvous.records import ConfigRecord
from rallypoint.settings import Timing


@dataclass(frozen=True, slots=True)
class Rules:
    """Sizes, policies and time-outs of a run."""

    min_nodes: int
    max_nodes: int
    step: int
    last_call_mode: LastCallMode
    ranks: str
    rank0: str | None
    timing: Timing

    @classmethod
    def of(cls, config: ConfigRecord) -> Rules:
        """From the `config` record. RendezvousStateError if a setting is missing or makes no sense."""
        shared = config.shared
        try:
            rules = cls(
                min_nodes=int(shared["min_nodes"]),
                max_nodes=int(shared["max_nodes"]),
                step=int(shared["step"]),
                last_call_mode=LastCallMode(shared["last_call_mode"]),
                ranks=str(shared["ranks"]),
                rank0=str(shared["rank0"]) or None,
                timing=config.timing,
            )
            rank((), rules.ranks)
            if not 0 < rules.step <= rules.min_nodes <= rules.max_nodes:
                raise ValueError(f"sizes {rules.min_nodes} to {rules.max_nodes} in steps of {rules.step}")
        except (KeyError, ValueError) as error:
            raise RendezvousStateError(f"the run's config has missing or invalid settings: {error!r}") from error
        return rules

    def usable(self, nodes: int) -> int:
        """The size of the largest round that so many nodes can form, not regarding `min_nodes`."""
        return min(nodes, self.max_nodes) // self.step * self.step
