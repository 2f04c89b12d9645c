"""Holding back nodes that are lost again and again, so that one bad machine does not churn the whole job.

By node name. A name that was lost `hold_back_losses` times within `hold_back_window_s` is not admitted for
`hold_back_s`; each further time the hold doubles. Time is the coordinator's own clock: a new coordinator starts a hold
that it finds anew, and counts losses anew. Pure.
"""

from __future__ import annotations

from rallypoint.rendezvous.records import HealthRecord
from rallypoint.settings import Timing

LONGEST_HOLD_S = 3600.0


class HoldBack:
    """Who is held back, and who is about to be."""

    def __init__(self) -> None:
        self.records: dict[str, HealthRecord] = {}
        """What `health/` holds: names that are or were held back."""
        self.due: dict[str, HealthRecord] = {}
        """What has to be written to `health/` next."""
        self._until: dict[str, float] = {}
        self._forgiven_at: dict[str, float] = {}
        self._losses: dict[str, list[float]] = {}

    def is_held(self, name: str) -> bool:
        return name in self._until or name in self.due

    def held(self) -> list[str]:
        """The names that may not be chosen now."""
        return [*self._until, *(name for name in self.due if name not in self._until)]

    def note_loss(self, name: str, timing: Timing, now: float) -> None:
        """A member of a round or of an attempt went away without a word."""
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
        """`health/` says so: the hold starts now."""
        self.due.pop(record.name, None)
        self.records[record.name] = record
        self._until[record.name] = now + record.hold_s
        window_s = timing.hold_back_window_s if timing else 0.0
        self._forgiven_at[record.name] = now + record.hold_s + window_s

    def note_gone(self, name: str) -> None:
        """`health/` says nothing of this name any more: it starts afresh."""
        for table in (self.records, self._until, self._forgiven_at, self._losses):
            table.pop(name, None)

    def forget_losses(self) -> None:
        """Everybody went: nobody in particular is to blame."""
        self._losses.clear()

    def released(self, now: float) -> list[str]:
        """The names whose hold is over since the last call."""
        names = [name for name, until in self._until.items() if until <= now]
        for name in names:
            del self._until[name]
        return names

    def forgiven(self, now: float) -> str | None:
        """A name that behaved for long enough for its record to go."""
        return next((name for name, at in self._forgiven_at.items() if at <= now), None)

    def next_at(self) -> float | None:
        """When something here changes by time alone."""
        return min([*self._until.values(), *self._forgiven_at.values()], default=None)
