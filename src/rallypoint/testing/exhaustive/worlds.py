"""The worlds to explore: small enough for all orders of events, together with every fault in every phase.

`QUICK` are those of the test suite, which limits the larger ones. Most of the others can be explored completely in
minutes; those called "everything" cannot: they are searched up to a limit, with random walks from there.
"""

from __future__ import annotations

from rallypoint.testing.exhaustive.state import Budget, Setup

_EVERYTHING = Budget(crash=2, expire=1, take_over=1, close=1)

QUICK = (
    Setup("2-plain"),
    Setup("2-crash", budget=Budget(crash=1)),
    Setup("2-leave", joins=3, budget=Budget(leave=2)),
    Setup("2-late", budget=Budget(late=1)),
    Setup("2-slow", budget=Budget(slow=1)),
    Setup("2-forming-expire", begin="forming", budget=Budget(expire=1)),
    Setup("2-forming-close", joins=1, begin="forming", budget=Budget(close=1)),
    Setup("2-forming-take-over", joins=1, begin="forming", budget=Budget(take_over=1)),
    Setup("2-forming-unknown", begin="forming", budget=Budget(unknown=1)),
    Setup("2-active-cut", begin="active", budget=Budget(cut=1)),
    Setup("3-spare", nodes=3, joins=1),
    Setup("3-max3-active-crash", nodes=3, max_nodes=3, begin="active", budget=Budget(crash=1)),
)

LONG = (
    Setup("2-expire", budget=Budget(expire=1)),
    Setup("2-cut", budget=Budget(cut=1)),
    Setup("2-depart", budget=Budget(depart=1)),
    Setup("2-close", joins=1, budget=Budget(close=1)),
    Setup("2-forming-reopen", joins=1, begin="forming", budget=Budget(close=1, reopen=1)),
    Setup("2-crash-take-over", joins=1, budget=Budget(crash=1, take_over=1)),
    Setup("2-active-take-over-leave", begin="active", budget=Budget(take_over=1, leave=1)),
    Setup("2-two-crashes-expire", budget=Budget(crash=2, expire=1)),
    Setup("2-forming-expire-take-over", begin="forming", budget=Budget(expire=1, take_over=1)),
    Setup("2-forming-expire-slow", begin="forming", budget=Budget(expire=1, slow=1)),
    Setup("2-unknown", budget=Budget(unknown=1)),
    Setup("2-ghost", budget=Budget(ghost=1)),
    Setup("2-active-ghost-leave", joins=3, begin="active", budget=Budget(ghost=1, leave=2)),
    Setup("2-forming-ghost-take-over", joins=1, begin="forming", budget=Budget(ghost=1, take_over=1)),
    Setup("2-create", creates_run=True, budget=Budget(crash=1)),
    Setup("2-create-close", creates_run=True, joins=1, budget=Budget(close=1)),
    Setup("2-elected", elected=True),
    Setup("2-elected-crash", elected=True, budget=Budget(crash=1)),
    Setup("2-elected-active-expire", elected=True, begin="active", budget=Budget(expire=1)),
    Setup("2-small-transactions", joins=1, max_txn_ops=5, begin="joined", budget=Budget(take_over=1)),
    Setup("2-everything", budget=_EVERYTHING),
    Setup("2-forming-everything", begin="forming", budget=_EVERYTHING),
    Setup("2-active-everything", joins=3, begin="active", budget=_EVERYTHING),
    Setup("3-crash", nodes=3, budget=Budget(crash=1)),
    Setup("3-forming-expire", nodes=3, begin="forming", budget=Budget(expire=1)),
    Setup("3-active-take-over-leave", nodes=3, begin="active", budget=Budget(take_over=1, leave=1)),
    Setup("3-active-two-crashes", nodes=3, begin="active", budget=Budget(crash=2)),
    Setup("3-everything", nodes=3, budget=_EVERYTHING),
    Setup("3-active-everything", nodes=3, joins=3, begin="active", budget=_EVERYTHING),
    Setup("3-max3", nodes=3, max_nodes=3),
    Setup("3-max3-joined-slow", nodes=3, max_nodes=3, begin="joined", budget=Budget(slow=2)),
    Setup("3-max3-active-expire", nodes=3, max_nodes=3, begin="active", budget=Budget(expire=1)),
    Setup("3-max3-active-two-crashes", nodes=3, max_nodes=3, begin="active", budget=Budget(crash=2)),
    Setup("3-max3-everything", nodes=3, max_nodes=3, budget=_EVERYTHING),
    Setup("3-max3-active-everything", nodes=3, max_nodes=3, joins=3, begin="active", budget=_EVERYTHING),
)

WORLDS = {setup.name: setup for setup in (*QUICK, *LONG)}
