"""Places that are confirmed beforehand: what a caller says that waits for one, and for how long it holds.

The coordinator writes the confirmation with the place, and the server wakes the caller once instead of twice. It is the
same write with the same compare, for one attempt and one join. It holds for a moment only, and is said again
while the caller is about: a process that stands still, or is cut off, is asked as before.
"""

from __future__ import annotations

from rallypoint.backends.contract import Start, Terms
from rallypoint.kv.types import ModRevisionIs, Put
from rallypoint.wire.messages import Pledge

PLEDGED_S = 1.0
"""For so long a place is confirmed beforehand: who stands still meanwhile may be in a round for a moment."""
PLEDGE_EVERY_S = 0.4
"""How often it is said again, while whoever waits is about."""


def may_pledge(terms: Terms, now: float) -> bool:
    """Whether a place can be confirmed beforehand: it must be good for as long as that counts."""
    return now + PLEDGED_S + terms.held_s < min(terms.deadline, terms.session.expires_at)


def may_pledge_at_once(start: Start) -> bool:
    """The same, for one who joins by itself."""
    return PLEDGED_S + start.held_s <= min(start.ttl_s, start.join_timeout_s)


def pledge_at_once(start: Start) -> Pledge:
    """What is confirmed beforehand by one who joins by itself."""
    return Pledge(PLEDGED_S, start.number, start.join, start.incarnation, start.lease, 0, *start.pledges())


def pledge_of(terms: Terms) -> Pledge:
    """What is confirmed beforehand, on these terms."""
    own_key, put = terms.op.compares[0], terms.op.then[0]
    as_zero = terms.as_zero.then[0] if terms.as_zero is not None else None
    assert isinstance(own_key, ModRevisionIs)
    assert isinstance(put, Put)
    return Pledge(
        PLEDGED_S,
        terms.number,
        terms.join,
        terms.incarnation,
        put.lease,
        own_key.revision,
        put.value,
        as_zero.value if isinstance(as_zero, Put) else b"",
    )
