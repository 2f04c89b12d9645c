"""Our events as torch's: on a logger of torch's, at the levels its users know, and as `RdzvEvent`s.

Called on the background loop for what happens there, and by the handler for what leaves its API.
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
"""What torch calls the destination of rendezvous events, whatever the backend."""

_INFO = (JoinStarted, RoundEntered, RunClosed)
_DONE = (NodeLeft, RunClosed)

logger: logging.Logger = get_logger("torch.distributed.elastic.rendezvous.rallypoint")


class Narrator:
    """A sink, for one handler. It knows who the node is once the node does."""

    def __init__(self, settings: Settings) -> None:
        self._run_id = settings.run_id
        self._endpoint = ",".join(settings.endpoints)
        self._addr = settings.local_addr or socket.gethostname()
        self._local_id: int | None = None
        self._rank: int | None = None

    def introduce(self, identity: Identity) -> None:
        """This is the node that all of it is about."""
        self._addr, self._local_id = identity.addr, identity.local_id

    def __call__(self, event: Event) -> None:
        level = logging.DEBUG if event.level == logging.INFO and not isinstance(event, _INFO) else event.level
        logger.log(level, "%s", event)
        if isinstance(event, Hosting) and event.run_id == TORCHRUN_DEFAULT_RUN_ID:
            logger.warning(
                "this run was given no id of its own (torchrun: --rdzv-id): every other job that comes to %s without "
                "one joins it",
                event.address,
            )
        if isinstance(event, JoinStarted):
            self._rank = None
        elif isinstance(event, RoundEntered):
            self._rank = event.rank
        state = theirs.NodeState.SUCCEEDED if isinstance(event, _DONE) else theirs.NodeState.RUNNING
        self._record(type(event).__name__, event.text(), state)

    def failed(self, verb: str, error: BaseException) -> None:
        """An exception leaves the API."""
        self._record(verb, f"{type(error).__name__}: {error}", theirs.NodeState.FAILED, traceback.format_exc())

    def _record(self, name: str, message: str, state: theirs.NodeState, trace: str = "") -> None:
        if isinstance(get_logging_handler(DESTINATION), logging.NullHandler):
            return  # nobody listens
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
