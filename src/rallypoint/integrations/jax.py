"""JAX: `jax.distributed` gets its coordinator, the number of processes and this one's number from a round.

    world = rallypoint.integrations.jax.initialize("tcp://head:29400/my-run?min_nodes=4")

Each process that calls it is one node of the run. A group of JAX cannot be changed while it lives: it belongs to one
round, and `world.changed` says when that is no longer whole. Then end the process and start it again.
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
"""The node of this process: its session has to last for as long as the group does, whoever keeps the world."""


def initialize(
    url: str | RendezvousParameters | Settings,
    *,
    sinks: Iterable[Sink] = (),
    jax_options: dict[str, Any] | None = None,
    **options: object,
) -> World:
    """Join the run, wait for a round, and make its members the processes of one JAX job. Blocks for both.

    Call it before anything else of JAX is used. `options` come on top of the URL's; `jax_options` go to
    `jax.distributed.initialize` as they are (`local_device_ids`, `initialization_timeout`, ...).

    Raises what `next_rendezvous` raises; RendezvousError if this process is in a group already; ModuleNotFoundError if
    there is no jax, before anything was joined; and what JAX raises, in which case the run was left again.
    """
    global _handler
    distributed = _distributed()
    settings = settings_of(url, options)
    with _lock:
        if _handler is not None or distributed.is_initialized():
            raise RendezvousError(
                "jax.distributed is initialized in this process already: call "
                "rallypoint.integrations.jax.shutdown(), or "
                "jax.distributed.shutdown() if it was done by other means, before"
            )
        handler = _handler = Handler(settings, sinks=sinks)
    try:
        world = handler.next_rendezvous()
        place = world.bootstrap_store_info
        # Nothing is left for JAX to find out: what its own detection would add (on Slurm: one device a process, by the
        # number of the task) is wrong for one process a node.
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
    """Take the group of JAX apart, which waits for its other processes, then leave the run. Never closes the run.

    Idempotent. The process may initialize again if JAX has no backend yet.
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
    """`jax.distributed`. ModuleNotFoundError with what to do if there is none."""
    try:
        import jax
    except ModuleNotFoundError as error:
        if error.name != "jax":
            raise
        raise ModuleNotFoundError(
            "rallypoint.integrations.jax needs jax, which is not installed here: pip install 'rallypoint[jax]', "
            "or the build "
            "of jax for your accelerator",
            name="jax",
        ) from None
    module: ModuleType = jax.distributed
    return module
