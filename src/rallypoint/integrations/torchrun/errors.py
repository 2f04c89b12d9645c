"""Our errors as torch's: its agent tells them apart by class. The original is the cause, and the sentence is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.elastic import rendezvous as theirs

from rallypoint import errors as ours
from rallypoint.integrations.torchrun.queues import QueueEmpty

_RENDEZVOUS: tuple[tuple[type[ours.RallypointError], type[Exception]], ...] = (
    (ours.RendezvousClosedError, theirs.RendezvousClosedError),
    (ours.RendezvousTimeoutError, theirs.RendezvousTimeoutError),
    (ours.RendezvousConnectionError, theirs.RendezvousConnectionError),
    (ours.RendezvousStateError, theirs.RendezvousStateError),
    (ours.RendezvousGracefulExitError, theirs.RendezvousGracefulExitError),
    (ours.BackendError, theirs.RendezvousConnectionError),
    (ours.RendezvousError, theirs.RendezvousError),  # also a mismatch of settings, a lost session, a fork
    (ours.StoreError, theirs.RendezvousError),
)

QUEUE_EMPTY: type[Exception] = getattr(dist, "QueueEmptyError", dist.DistStoreError)


def rendezvous_error(error: ours.RallypointError) -> Exception:
    """The error that torch's agent knows. One about settings stays what it is: a ValueError."""
    for kind, target in _RENDEZVOUS:
        if isinstance(error, kind):
            return target(str(error))
    return error


@contextmanager
def as_store_errors(keys: list[str], limit_ms: int) -> Iterator[None]:
    """What torch's TCPStore would raise. A time-out has its words, then ours, which say what was missing."""
    try:
        yield
    except ours.StoreTimeoutError as error:
        named = ", ".join(f"/{key}" for key in keys)
        raise dist.DistStoreError(f"wait timeout after {limit_ms}ms, keys: {named} ({error})") from error
    except QueueEmpty:
        raise
    except ours.RallypointError as error:
        kind = dist.DistNetworkError if isinstance(error, ours.BackendError) else dist.DistStoreError
        raise kind(str(error)) from error
