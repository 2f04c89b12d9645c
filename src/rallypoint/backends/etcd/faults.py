"""Classifies errors of etcd and of the connection to it: was the request executed, and is a retry useful?"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rallypoint.backends.etcd.grpc_fork import grpc


class FaultKind(enum.Enum):
    """What the caller may assume about the request."""

    NOT_DONE = "not done"
    """Not executed; another endpoint, or the same one later, may execute it."""
    NO_LEADER = "no leader"
    """As NOT_DONE: the member knows of no leader."""
    UNKNOWN = "unknown"
    """It may have been executed, or may still be."""
    TOKEN = "token"
    """Not executed: the token is not (or no longer) accepted."""
    LEASE_GONE = "lease gone"
    LEASE_EXISTS = "lease exists"
    REJECTED = "rejected"
    """Not executed; a retry would fail, too."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A classified error."""

    kind: FaultKind
    text: str
    answered: bool = True
    """Whether etcd itself answered; else the connection failed."""


# Parts of etcd's error texts, the most specific first. They are stable: etcd's own clients depend on them.
_TEXTS: tuple[tuple[str, FaultKind, str], ...] = (
    ("requested lease not found", FaultKind.LEASE_GONE, ""),
    ("lease already exists", FaultKind.LEASE_EXISTS, ""),
    ("no leader", FaultKind.NO_LEADER, "etcd has no leader: a majority of its members cannot reach each other"),
    ("invalid auth token", FaultKind.TOKEN, ""),
    ("revision of auth store is old", FaultKind.TOKEN, ""),
    (
        "user name is empty",
        FaultKind.REJECTED,
        "etcd asks for a user: give user= and password_file=, or a client certificate with its name",
    ),
    (
        "authentication failed",
        FaultKind.REJECTED,
        "etcd does not know this user with this password: check user= and password_file=",
    ),
    ("permission denied", FaultKind.REJECTED, "this user may not do that: grant its role readwrite on etcd_prefix"),
    (
        "database space exceeded",
        FaultKind.REJECTED,
        "etcd's database is full: compact and defragment it, disarm the alarm (etcdctl alarm disarm), raise its quota",
    ),
    ("request is too large", FaultKind.REJECTED, "the request is larger than etcd accepts (1.5 MB by default)"),
    ("message larger than max", FaultKind.REJECTED, "the request is larger than etcd accepts (1.5 MB by default)"),
    (
        "too many operations",
        FaultKind.REJECTED,
        "the transaction has more operations than etcd accepts (128 by default)",
    ),
    ("too many requests", FaultKind.NOT_DONE, "etcd has too many pending requests"),
    ("too many learners", FaultKind.NOT_DONE, ""),
    ("rpc not supported for learner", FaultKind.NOT_DONE, "this member is a learner and does not serve"),
    ("corrupt cluster", FaultKind.REJECTED, "etcd says that its data is corrupt"),
    ("request timed out", FaultKind.UNKNOWN, ""),
    ("leader changed", FaultKind.UNKNOWN, ""),
    ("server stopped", FaultKind.UNKNOWN, ""),
)

_NEVER = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
}


def fault_of_text(details: str) -> Fault | None:
    """The fault that one of etcd's error texts means; None: an unknown text."""
    lowered = details.lower()
    for part, means, text in _TEXTS:
        if part in lowered:
            return Fault(means, text or details)
    return None


def fault_of(error: grpc.aio.AioRpcError) -> Fault:
    """The fault that an error of a sent call means. UNKNOWN unless it is certain that the call was not executed."""
    code, details = error.code(), str(error.details() or "")
    known = fault_of_text(details)
    if known is not None:
        return known
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Fault(FaultKind.REJECTED, f"it speaks gRPC but is not an etcd v3 ({details or 'unimplemented'})")
    if code in _NEVER:
        return Fault(FaultKind.REJECTED, details or code.name)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Fault(FaultKind.UNKNOWN, "no answer in time", answered=False)
    return Fault(FaultKind.UNKNOWN, details or code.name, answered=False)
