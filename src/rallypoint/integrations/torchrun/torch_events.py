"""Passes Rallypoint's events on to torch: to a logger of torch, at levels that its users know, and as `RdzvEvent`s.

The background loop calls the sink with events; the handler calls `failed` with errors that leave its API.
"""

from __future__ import annotations

import logging
import os
import socket
import traceback

from torch.distributed.elastic import events as theirs
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.utils.logging import get_logger

from rallypoint.events import Event, Hosting, JoinStarted, NodeLeft, RoundEntered, RunClosed
from rallypoint.rendezvous.membership import Identity
from rallypoint.server.hosting import TORCHRUN_DEFAULT_RUN_ID
from rallypoint.settings import Settings

DESTINATION = "dynamic_rendezvous"
"""torch's name for the destination of rendezvous events, whatever the backend."""

_INFO = (JoinStarted, RoundEntered, RunClosed)
"""Events logged as info. Other events of that level are logged as debug."""
_DONE = (NodeLeft, RunClosed)
"""Events after which the node's state is SUCCEEDED."""

logger: logging.Logger = get_logger("torch.distributed.elastic.rendezvous.rallypoint")


class TorchEventSink:
    """A sink for one handler."""

    def __init__(self, settings: Settings) -> None:
        self._run_id = settings.run_id
        self._endpoint = ",".join(settings.endpoints)
        self._addr = settings.local_addr or socket.gethostname()
        self._local_id: int | None = None
        self._rank: int | None = None

    def set_identity(self, identity: Identity) -> None:
        """Set the identity of the node, which is known only when it opens its backend."""
        self._addr, self._local_id = identity.addr, identity.local_id

    def __call__(self, event: Event) -> None:
        level = logging.DEBUG if event.level == logging.INFO and not isinstance(event, _INFO) else event.level
        logger.log(level, "%s", event)
        if isinstance(event, Hosting) and event.run_id == TORCHRUN_DEFAULT_RUN_ID:
            logger.warning(
                "this run has torchrun's default id (--rdzv-id was not given): every other job without an id that uses "
                "%s joins it",
                event.address,
            )
        if isinstance(event, JoinStarted):
            self._rank = None
        elif isinstance(event, RoundEntered):
            self._rank = event.rank
        state = theirs.NodeState.SUCCEEDED if isinstance(event, _DONE) else theirs.NodeState.RUNNING
        self._record(type(event).__name__, event.text(), state)

    def failed(self, call: str, error: BaseException) -> None:
        """Record an error that leaves the API."""
        self._record(call, f"{type(error).__name__}: {error}", theirs.NodeState.FAILED, traceback.format_exc())

    def _record(self, name: str, message: str, state: theirs.NodeState, trace: str = "") -> None:
        if isinstance(get_logging_handler(DESTINATION), logging.NullHandler):
            return  # torch would discard it
        theirs.record_rdzv_event(
            theirs.RdzvEvent(
                name=f"rallypoint:{name}",
                run_id=self._run_id,
                message=message,
                hostname=self._addr,
                pid=os.getpid(),
                node_state=state,
                master_endpoint=self._endpoint,
                rank=self._rank,
                local_id=self._local_id,
                error_trace=trace,
            )
        )
