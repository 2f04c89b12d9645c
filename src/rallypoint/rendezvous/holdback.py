"""Hold-back: a node that is lost again and again is not admitted for a while, so that it cannot end every round.

Nodes are counted by name. A name that was lost `hold_back_losses` times within `hold_back_window_s` is held back for
`hold_back_s`; each further hold is twice as long. Times are by the coordinator's own clock: a new coordinator counts
losses from zero, and starts the holds that it finds in `health/` anew. Pure.
"""

from __future__ import annotations

from rallypoint.rendezvous.records import HealthRecord
from rallypoint.settings import Timing

LONGEST_HOLD_S = 3600.0


class HoldBack:
    """The names that are held back, and the losses that were counted. `Timing` and times are arguments."""

    def __init__(self) -> None:
        self.records: dict[str, HealthRecord] = {}
        """The records of `health/`: names that are held back, or were and are not forgiven yet."""
        self.due: dict[str, HealthRecord] = {}
        """Records to be written to `health/`."""
        self._until: dict[str, float] = {}
        self._forgiven_at: dict[str, float] = {}
        self._losses: dict[str, list[float]] = {}

    def is_held(self, name: str) -> bool:
        return name in self._until or name in self.due

    def held(self) -> list[str]:
        """The names that may not be admitted now."""
        return [*self._until, *(name for name in self.due if name not in self._until)]

    def note_loss(self, name: str, timing: Timing, now: float) -> None:
        """Count a loss: a member of a round or of an attempt lost its session, or did not confirm in time."""
        if timing.hold_back_losses == 0:
            return
        recent = [at for at in self._losses.get(name, ()) if now - at < timing.hold_back_window_s]
        recent.append(now)
        self._losses[name] = recent
        if len(recent) < timing.hold_back_losses:
            return
        del self._losses[name]
        before = self.records.get(name)
        hold_s = min(before.hold_s * 2, LONGEST_HOLD_S) if before else timing.hold_back_s
        why = f"it was lost {len(recent)} times in {now - recent[0]:.0f} s"
        losses = len(recent) + (before.losses if before else 0)
        self.due[name] = HealthRecord(name=name, losses=losses, hold_s=hold_s, why=why)

    def note_record(self, record: HealthRecord, timing: Timing | None, now: float) -> None:
        """`health/` holds this record: its hold starts now."""
        self.due.pop(record.name, None)
        self.records[record.name] = record
        self._until[record.name] = now + record.hold_s
        window_s = timing.hold_back_window_s if timing else 0.0
        self._forgiven_at[record.name] = now + record.hold_s + window_s

    def note_gone(self, name: str) -> None:
        """`health/` no longer holds a record of this name: it counts as never lost."""
        for table in (self.records, self._until, self._forgiven_at, self._losses):
            table.pop(name, None)

    def forget_losses(self) -> None:
        """Reset all counts: all nodes are gone, so no single one is at fault."""
        self._losses.clear()

    def released(self, now: float) -> list[str]:
        """End the holds that are over at `now`; returns their names."""
        names = [name for name, until in self._until.items() if until <= now]
        for name in names:
            del self._until[name]
        return names

    def forgiven(self, now: float) -> str | None:
        """A name without losses for `hold_back_window_s` after its hold: its record is to be deleted."""
        return next((name for name, at in self._forgiven_at.items() if at <= now), None)

    def next_at(self) -> float | None:
        """The next time at which a hold or a record ends; None if there is none."""
        return min([*self._until.values(), *self._forgiven_at.values()], default=None)
