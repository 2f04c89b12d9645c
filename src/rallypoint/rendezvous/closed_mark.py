"""What a node remembers after it was told that its run is closed: who closed it, why, and which incarnation. Pure.

A node that has this mark does not join, host or form the run again, whoever serves it next. The mark belongs to one
incarnation, and only a server that knows more ends it:

- the same incarnation is open at a later revision: somebody reopened the run;
- the run is gone from a store that had it: it was left for `reopen_after`, and its id is free;
- another incarnation is open: others have made the run anew. A server that has lost its data gets the marks of its
  clients before it answers their first request (`membership.claim_of`), and closes the run again unless a round is
  active in it. So if it says "open", it has seen this mark and knows more.

A server that is not reached, or that has never heard of the run, knows less, and ends nothing.
"""

from __future__ import annotations

from rallypoint.rendezvous.records import ClosedMark, ClosedRecord, ConfigRecord


def next_mark(
    mark: ClosedMark | None,
    config: ConfigRecord | None,
    state: ClosedRecord | None,
    state_revision: int,
    revision: int,
) -> ClosedMark | None:
    """The mark after a look at `config` and `state/closed`, which are at least as new as `revision`."""
    if state is not None and state.closed:
        if config is None:
            return mark
        return ClosedMark(config=config, state=state, revision=state_revision)
    if mark is None:
        return None
    if config is None or state is None:
        return None if revision >= mark.revision else mark
    is_reopened = config.incarnation != mark.config.incarnation or state_revision > mark.revision
    return None if is_reopened else mark
