"""Exhaustive worlds: is any order of events in a tiny world wrong?

Two or three nodes, one or two coordinators, a few faults, and *every* interleaving of what they do, with the real
engine, `decide`, `View` and drivers. `python -m rallypoint.testing.exhaustive` explores; a broken guarantee is shown
with a shortest trace of what happened. The checkers are those of `rallypoint.testing.checkers`.

How it works. A world is a product of automata. The store is a value that the real `Engine` moves (`server`). A process
is the real code on a loop and a backend of its own, where nothing happens by itself (`actors`, `controlled`); its state
is a fingerprint of everything that its tasks can reachability, suspended coroutines included (`fingerprint`), in which
revisions count by their order and instants by their distance (`symbols`). What a process does on an input is found out
once, by feeding it to a live one, and then remembered (`automaton`); so the search itself (`world`, `choices`,
`explore`) runs on plain values, and merges what is the same. Live processes are brought back to a state by repeating
the inputs that led there.

Left to choice, one at a time, in any order:

- each write of anybody, each scan that a coordinator makes of the run, and, where the run can be closed or has to be
  made, each look at its door; the answer comes with the execution, or later (budget `late`), or never (`unknown`), or
  the execution comes later than the loss of the answer or of the sender (`ghost`);
- for each watch of each process on its own, when the next batch, or all that there are, arrive;
- when a node joins, is lost (`crash`), has its session ended by the store and is told later (`expire`), counts it as
  lost before the store does (`cut`), joins again because it was told of a change, joins again without being told
  (`leave`), leaves for good (`depart`); when the store notices that a session is not renewed any more;
- when a coordinator dies or loses its session (`take_over`); when somebody closes and reopens;
- time, for each process on its own clock: free when nothing is under way, at the price of `slow` when something is.

Not left to choice:

- sessions and the run's own leases never end by time, only by choice; renewals do not happen; nodes have no deadline;
- granting a lease, renewing the run's lease, and reads of what cannot change any more or is followed by a watch from
  there (a watch's first scan, rosters, history, who is coordinator) are answered at once: later is the same as an
  early answer and a late batch;
- a process runs until it waits; two of its own tasks that could go on at the same instant do so in asyncio's order;
- pauses and ids are not drawn; the longest pause is taken;
- no request is unavailable, no watch loses its history, no record is damaged, nobody is drained or held back;
- sentences for people, and the reports in `history/`, are blank, and `state/waiting` is not written for a sentence.

From every state that is explored, the world in which no further fault happens must come to rest: everybody in the round
that has room for it, or everybody told that the run is closed. That is Completion, Admission, and half of Finality.
"""

from rallypoint.testing.exhaustive.explore import Explorer, Report, explore
from rallypoint.testing.exhaustive.values import Budget, Setup
from rallypoint.testing.exhaustive.worlds import QUICK, WORLDS

__all__ = ["QUICK", "WORLDS", "Budget", "Explorer", "Report", "Setup", "explore"]
