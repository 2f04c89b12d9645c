"""Exhaustive exploration of tiny worlds: does any order of events break a guarantee?

Two or three nodes, one or two coordinators, a few faults, and *every* interleaving of their steps, with the real
engine, `decide`, `View` and drivers. `python -m rallypoint.testing.exhaustive` explores; a broken guarantee is shown
with a shortest trace. The checkers are those of `rallypoint.testing.checkers`.

How it works. A world is a product of automata. The store is a value that the real `Engine` changes (`store_model`). A
process is the real code on a loop and a backend of its own, where nothing happens without an input (`actors`,
`controlled`). Its state is a fingerprint of everything that its tasks can reach, including suspended coroutines
(`fingerprint`), in which revisions count by their order and instants by their distance (`symbolic`). The reaction of a
process to an input is computed once, with a live process, and then cached (`automaton`); so the search (`world`,
`choices`, `explore`) runs on plain values and merges equal states. Live processes are restored to a state by repeating
the inputs that led there.

Nondeterministic choices, one at a time, in any order:

- each write, each scan of the run by a coordinator, and, if the run can be closed or has to be created, each check of
  its config and closed state. The answer arrives with the execution, or later (budget `late`), or never (`unknown`), or
  the execution comes after the loss of the answer or of the sender (`ghost`);
- for each watch of each process, when the next batch, or all pending batches, arrive;
- when a node joins, dies (`crash`), has its session ended by the store and is told later (`expire`), counts it as lost
  before the store does (`cut`), joins again because it was told of a change, joins again without being told (`leave`),
  leaves for good (`depart`); when the store ends a session that is no longer renewed;
- when a coordinator dies or loses its session (`take_over`); when an operator closes and reopens the run;
- time, for each process by its own clock: free when nothing is pending, else limited by the budget `slow`.

Deterministic:

- sessions and the run's own leases never expire by time, only by choice; there are no renewals; nodes have no deadline;
- granting a lease, renewing the run's lease, and reads of data that is immutable or followed by a watch from that
  revision (a watch's first scan, rosters, history, the coordinator) are answered at once: a later answer is equivalent
  to an early answer and a late batch;
- a process runs until it waits; two of its tasks that are ready at the same instant run in asyncio's order;
- pauses and ids are not random; the longest pause is used;
- no request is unavailable, no watch loses its history, no record is damaged, no node is drained or held back;
- sentences for people, and the reports in `history/`, are blank, and `state/waiting` is not rewritten for a sentence;
  no events are kept.

From every explored state, the world without further faults must become quiescent: every node is in the round that has
room for it, or every node was told that the run is closed. That is Completion, Admission, and half of Finality.
"""

from rallypoint.testing.exhaustive.explore import Explorer, Report, explore
from rallypoint.testing.exhaustive.state import Budget, Setup
from rallypoint.testing.exhaustive.worlds import QUICK, WORLDS

__all__ = ["QUICK", "WORLDS", "Budget", "Explorer", "Report", "Setup", "explore"]
