"""JAX: initializes `jax.distributed` with the coordinator address, process count and process id from a round.

    world = rallypoint.integrations.jax.initialize("tcp://head:29400/my-run?min_nodes=4")

Each process that calls it is one node of the run. A JAX group cannot be changed while it exists: it belongs to one
round, and `world.changed` says when that round has lost a member or nodes wait. Then end the process and restart it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from rallypoint.aio import settings_of
from rallypoint.errors import RendezvousError
from rallypoint.events import Sink
from rallypoint.handler import Handler, World
from rallypoint.parameters import RendezvousParameters
from rallypoint.settings import Settings
from rallypoint.urls import format_endpoint

_lock = threading.Lock()
_handler: Handler | None = None
"""The node of this process. Kept here because its session must last as long as the group, even if the caller drops the
world."""


def initialize(
    url: str | RendezvousParameters | Settings,
    *,
    sinks: Iterable[Sink] = (),
    jax_options: dict[str, Any] | None = None,
    **options: object,
) -> World:
    """Join the run, and make the members of its next round the processes of one JAX job. Blocks.

    Call it before any other use of JAX. `options` override those of the URL; `jax_options` are passed to
    `jax.distributed.initialize` unchanged (`local_device_ids`, `initialization_timeout`, ...).

    Raises what `next_rendezvous` raises; RendezvousError if this process is in a group already; ModuleNotFoundError
    without jax, before joining; and what JAX raises, after leaving the run again.
    """
    global _handler
    distributed = _distributed()
    settings = settings_of(url, options)
    with _lock:
        if _handler is not None or distributed.is_initialized():
            raise RendezvousError(
                "jax.distributed is already initialized in this process: call rallypoint.integrations.jax.shutdown() "
                "first, or jax.distributed.shutdown() if it was not initialized by Rallypoint"
            )
        handler = _handler = Handler(settings, sinks=sinks)
    try:
        world = handler.next_rendezvous()
        place = world.bootstrap_store_info
        # JAX's own cluster detection is turned off: on Slurm it would give each process one device, by its task number,
        # which is wrong for one process a node.
        given = {"cluster_detection_method": "deactivate", **(jax_options or {})}
        distributed.initialize(
            coordinator_address=format_endpoint(place.master_addr, place.master_port),
            num_processes=world.world_size,
            process_id=world.rank,
            **given,
        )
    except BaseException as error:
        _leave(f"jax.distributed could not be initialized: {type(error).__name__}: {error}")
        raise
    return world


def shutdown(reason: str = "the work with JAX is done") -> None:
    """Shut down the JAX group, which waits for its other processes, then leave the run. Never closes the run.

    Idempotent. The process may initialize again unless JAX has created a backend.
    """
    if _handler is None:
        return
    try:
        _distributed().shutdown()
    finally:
        _leave(reason)


def _leave(reason: str) -> None:
    global _handler
    with _lock:
        handler, _handler = _handler, None
    if handler is not None and handler.in_use:
        try:
            handler.leave(reason)
        finally:
            handler.close()


def _distributed() -> ModuleType:
    """`jax.distributed`. Without jax, a ModuleNotFoundError that says how to install it."""
    try:
        import jax
    except ModuleNotFoundError as error:
        if error.name != "jax":
            raise
        raise ModuleNotFoundError(
            "rallypoint.integrations.jax needs jax, which is not installed: pip install 'rallypoint[jax]', or the "
            "build of jax for your accelerator",
            name="jax",
        ) from None
    module: ModuleType = jax.distributed
    return module
