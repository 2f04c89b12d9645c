"""Hypothesis strategies for the engine: few keys, leases and numbers, so that operations affect each other."""

from dataclasses import dataclass

from hypothesis import strategies as st

from rallypoint.kv.types import (
    Add,
    CreateRevisionIs,
    Delete,
    DeleteRange,
    Exists,
    Get,
    Grant,
    KeepAlive,
    ModRevisionIs,
    Op,
    Origin,
    Put,
    Range,
    RangeEmpty,
    Revoke,
    Shorten,
    Tick,
    Txn,
    ValueIs,
    VersionIs,
)

LAST = chr(0x10FFFF)
KEYS = ("a", "aa", "ab", "a/", "a/b", "b", "é", "a" + LAST, "a" + LAST + "a", LAST, LAST + "b")
PREFIXES = ("", "x", "\0", LAST + LAST, *KEYS)

keys = st.sampled_from(KEYS)
prefixes = st.sampled_from(PREFIXES)
values = st.sampled_from([b"", b"1", b"-20", b"x"])
leases = st.sampled_from([0, 0, 0, 1, 2, 3, 4])
revisions = st.integers(0, 12)
compares = st.lists(
    st.one_of(
        st.builds(Exists, keys, st.booleans()),
        st.builds(ValueIs, keys, values),
        st.builds(VersionIs, keys, st.integers(0, 3)),
        st.builds(CreateRevisionIs, keys, revisions),
        st.builds(ModRevisionIs, keys, revisions),
        st.builds(RangeEmpty, prefixes),
    ),
    max_size=2,
).map(tuple)
branches = st.lists(
    st.one_of(
        st.builds(Put, keys, values, leases),
        st.builds(Put, st.sampled_from(["", *KEYS]), values, leases),
        st.builds(Delete, keys),
        st.builds(DeleteRange, prefixes),
        st.builds(Get, keys),
        st.builds(Range, prefixes, st.integers(0, 3), st.booleans()),
    ),
    max_size=4,
).map(tuple)
ops: st.SearchStrategy[Op] = st.one_of(
    st.builds(Txn, compares, branches, branches),
    st.builds(lambda *put: Txn((), (Put(*put),)), keys, values, leases),
    st.builds(Add, keys, st.integers(-5, 5), leases, compares),
    st.builds(Grant, st.sampled_from([1.0, 1.5, 4.0])),
    st.builds(Grant, st.sampled_from([1.0, 4.0]), st.sampled_from([-1, 1, 2, 4])),
    st.builds(KeepAlive, st.integers(1, 4)),
    st.builds(Revoke, st.integers(1, 4)),
    st.builds(Shorten, st.integers(1, 4), st.sampled_from([0.25, 0.5, 2.0, 100.0, float("inf")])),
    st.just(Tick()),
)

endings = st.builds(Shorten, st.integers(1, 4), st.sampled_from([0.0, -1.0]))
"""Operations that let a lease end with the next operation, even if no time passes."""


@dataclass(frozen=True)
class Request:
    """An operation `wait_s` after the one before it; the time may go back."""

    op: Op
    wait_s: float
    origin: Origin | None


origins = st.none() | st.builds(Origin, st.sampled_from(["x", "y"]), st.integers(1, 8), st.integers(0, 9))
waits = st.sampled_from([0.0, 0.0, 0.0, 0.25, 0.5, 1.0, 3.0, -2.0])
requests = st.builds(Request, ops, waits, origins)
plain_requests = st.builds(Request, ops, waits, st.none())
