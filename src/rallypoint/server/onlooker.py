"""A connection that the server's own process made, for a process that it started: let in already, for looking on."""

from __future__ import annotations

from rallypoint.backends.ops import changes_something
from rallypoint.kv.types import Txn
from rallypoint.server.clients import Client
from rallypoint.server.connection import Connection
from rallypoint.wire.messages import AskStatus, ClientMessage, Do, WatchStart, WatchStop


class Onlooker(Connection):
    """Is asked for no token, takes nobody's place, and can change nothing."""

    is_stranger = False

    def _handle(self, message: ClientMessage, client: Client, acked: int) -> None:
        match message:
            case WatchStart() | WatchStop() | AskStatus():
                super()._handle(message, client, acked)
            case Do(_, Txn() as op) if not changes_something(op):
                super()._handle(message, client, acked)
            case _:
                self._refuse_frame("this connection is for looking on only")
