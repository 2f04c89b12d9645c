"""Counts the decisions of coordinators: a sink for their events, in a server as in a node.

Each event is emitted once, by the process that decides, so that sums over all processes are right.
"""

from __future__ import annotations

from rallypoint.events import Event, NodeHeldBack, NodeLost, RecordUnreadable, RoundActive, RoundGivenUp, RoundOver
from rallypoint.observe.metrics import table
from rallypoint.observe.metrics.families import Scrape, Tally
from rallypoint.rendezvous.records import LeaveKind

PHASES = ("gather", "last_call", "confirm")


class Decisions:
    """A sink. Its counters are plain numbers, which another thread may read."""

    def __init__(self) -> None:
        self._active = self._given_up = self._members_lost = self._others_lost = self._held_back = self._unreadable = 0
        self._phases = {phase: Tally(table.ROUND_PHASE.buckets) for phase in PHASES}
        self._ends = dict.fromkeys(LeaveKind, 0)
        self._lasted = Tally(table.ROUND_LASTED.buckets)

    def __call__(self, event: Event) -> None:
        match event:
            case RoundActive():
                self._active += 1
                for phase, took_s in zip(PHASES, (event.gather_s, event.last_call_s, event.confirm_s), strict=True):
                    if took_s is not None:
                        self._phases[phase].add(took_s)
            case RoundGivenUp():
                self._given_up += 1
            case RoundOver(kind=kind, lasted_s=lasted_s):
                self._ends[LeaveKind(kind)] += 1
                if lasted_s is not None:
                    self._lasted.add(lasted_s)
            case NodeLost(round=number):
                if number:
                    self._members_lost += 1
                else:
                    self._others_lost += 1
            case NodeHeldBack():
                self._held_back += 1
            case RecordUnreadable():
                self._unreadable += 1
            case _:
                pass

    def show(self, scrape: Scrape) -> None:
        """Put all metrics, also those that are still 0, so that their series exist from the start."""
        scrape.put(table.ROUNDS, self._active, "active")
        scrape.put(table.ROUNDS, self._given_up, "given_up")
        for phase, tally in self._phases.items():
            scrape.put_tally(table.ROUND_PHASE, tally, phase)
        for kind, count in self._ends.items():
            scrape.put(table.ROUND_ENDS, count, table.word(kind))
        scrape.put_tally(table.ROUND_LASTED, self._lasted)
        scrape.put(table.NODES_LOST, self._members_lost, "member")
        scrape.put(table.NODES_LOST, self._others_lost, "other")
        scrape.put(table.NODES_HELD_BACK, self._held_back)
        scrape.put(table.RECORDS_UNREADABLE, self._unreadable)
