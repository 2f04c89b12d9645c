"""What an error of etcd, or of the way to it, says about the request: was it executed, and is it worth trying again?"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rallypoint.backends.etcd.forks import grpc


class Means(enum.Enum):
    """What the caller may assume."""

    NOT_DONE = "not done"
    """It was not executed; another endpoint, or the same one later, may do it."""
    NO_LEADER = "no leader"
    """As NOT_DONE: the member knows of no leader."""
    UNKNOWN = "unknown"
    """It may have been executed, or still be."""
    TOKEN = "token"
    """It was not executed: the token is not, or no longer, accepted."""
    LEASE_GONE = "lease gone"
    LEASE_EXISTS = "lease exists"
    REJECTED = "rejected"
    """It was not executed and never will be."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in our words."""

    means: Means
    text: str
    answered: bool = True
    """Whether it was etcd that said so, and not the way to it."""


# Parts of etcd's own texts, the most telling first. They are stable: etcd's own clients go by them.
_TEXTS: tuple[tuple[str, Means, str], ...] = (
    ("requested lease not found", Means.LEASE_GONE, ""),
    ("lease already exists", Means.LEASE_EXISTS, ""),
    ("no leader", Means.NO_LEADER, "etcd has no leader: a majority of its members cannot reach each other"),
    ("invalid auth token", Means.TOKEN, ""),
    ("revision of auth store is old", Means.TOKEN, ""),
    (
        "user name is empty",
        Means.REJECTED,
        "etcd asks for a user: give user= and password_file=, or a client certificate with its name",
    ),
    (
        "authentication failed",
        Means.REJECTED,
        "etcd does not know this user with this password: check user= and password_file=",
    ),
    ("permission denied", Means.REJECTED, "this user may not do that: grant its role readwrite on etcd_prefix"),
    (
        "database space exceeded",
        Means.REJECTED,
        "etcd's database is full: compact and defragment it, disarm the alarm (etcdctl alarm disarm), raise its quota",
    ),
    ("request is too large", Means.REJECTED, "the request is larger than etcd takes (1.5 MB by default)"),
    ("message larger than max", Means.REJECTED, "the request is larger than etcd takes (1.5 MB by default)"),
    ("too many operations", Means.REJECTED, "the transaction has more operations than etcd takes (128 by default)"),
    ("too many requests", Means.NOT_DONE, "etcd has too many requests to do"),
    ("too many learners", Means.NOT_DONE, ""),
    ("rpc not supported for learner", Means.NOT_DONE, "this member is a learner and does not serve"),
    ("corrupt cluster", Means.REJECTED, "etcd says that its data is corrupt"),
    ("request timed out", Means.UNKNOWN, ""),
    ("leader changed", Means.UNKNOWN, ""),
    ("server stopped", Means.UNKNOWN, ""),
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
    """What one of etcd's own texts means; None: it is not one of those."""
    lowered = details.lower()
    for part, means, text in _TEXTS:
        if part in lowered:
            return Fault(means, text or details)
    return None


def fault_of(error: grpc.aio.AioRpcError) -> Fault:
    """What an error of a call that was sent means. Whatever is not known for certain is UNKNOWN."""
    code, details = error.code(), str(error.details() or "")
    known = fault_of_text(details)
    if known is not None:
        return known
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Fault(Means.REJECTED, f"it speaks gRPC but is no etcd v3 ({details or 'unimplemented'})")
    if code in _NEVER:
        return Fault(Means.REJECTED, details or code.name)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Fault(Means.UNKNOWN, "no answer in time", answered=False)
    return Fault(Means.UNKNOWN, details or code.name, answered=False)
