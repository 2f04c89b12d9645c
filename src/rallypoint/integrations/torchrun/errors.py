"""Translates Rallypoint's errors to torch's, which torch's agent tells apart by class.

The message stays the same, and the original error is the cause.
"""

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
    """The corresponding error of torch. An error about settings is not translated: it is a ValueError already."""
    for kind, target in _RENDEZVOUS:
        if isinstance(error, kind):
            return target(str(error))
    return error


@contextmanager
def as_store_errors(keys: list[str], limit_ms: int) -> Iterator[None]:
    """Raise the errors that torch's TCPStore would raise.

    The message of a time-out is torch's, followed by Rallypoint's, which says what was missing.
    """
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
