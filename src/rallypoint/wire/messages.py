"""The messages of the protocol. They are arrays on the wire: a new field is added at the end, with a default.

A field or a tag must never be removed or reused. A client numbers its requests from 1 and sends them in order. After a
reconnect it sends unanswered requests again under their numbers; the server executes each once. The client chooses the
numbers of watches; after a reconnect it requests them again, after the last revision that it received.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from rallypoint.kv.types import Batch, Op, Result

OLDEST_VERSION = 1
NEWEST_VERSION = 1
NOW = -1
"""As the start of a watch: the current revision."""


# --- the first frame of either side ----------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An open session of a client, and its disconnect grace."""

    lease: int
    grace_s: float


class Hello(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The client, its versions and sessions. `generation` is that of its last connection to the server ("": none)."""

    oldest: int
    newest: int
    client: str
    token: str = ""
    run: str = ""
    software: str = ""
    generation: str = ""
    sessions: tuple[Held, ...] = ()


class HelloPrefix(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first fields of a hello, the only ones that are decoded before the token is checked."""

    oldest: int
    newest: int
    client: str
    token: str = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The server accepts, with this version. `ended` contains the sessions of the hello that have ended."""

    version: int
    generation: str
    software: str = ""
    ended: tuple[int, ...] = ()
    max_frame: int = 0
    is_dedicated: bool = False
    """The server was started by `rallypoint serve` and is expected to restart: nodes wait before they host one."""
    makes_run: bool = True
    """If the run does not exist, this client is to make it. For reconnecting clients with a session; `MakeRun` tells a
    client that opens a session, and read-only clients never make a run."""


class RefusalCode(enum.Enum):
    """Only BUSY may be retried."""

    VERSION = "version"
    TOKEN = "token"
    TLS = "tls"
    LIMIT = "limit"
    MALFORMED = "malformed"
    BUSY = "busy"

    @classmethod
    def _missing_(cls, value: object) -> RefusalCode:
        return cls.MALFORMED  # a code of a newer version: the message explains it


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The server refuses the client, with the reason in one sentence."""

    code: RefusalCode
    message: str


# --- client to server ------------------------------------------------------------------------------------------------


class Do(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Execute an operation; answered by `Answer` with the same number."""

    seq: int
    op: Op


class WatchStart(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Push changes under a prefix after a revision, or from `NOW`. A number that is in use is restarted."""

    watch: int
    prefix: str
    after: int


class WatchStop(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Cancel a watch."""

    watch: int


class Hold(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Make this lease a session of this client: a closed connection shortens it to the grace."""

    lease: int
    grace_s: float


class Claim(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The state of the run, for a server that was restarted without its data. Sent when the old sessions are lost."""

    claim: bytes


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Request the state of the server; answered by `Status` with the same number."""

    seq: int


class Await(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Get keys when all exist, or after `within_s` those that do. Answered by `Answer`, like a get."""

    seq: int
    keys: tuple[str, ...]
    within_s: float


ClientMessage: TypeAlias = Do | WatchStart | WatchStop | Hold | Claim | AskStatus | Await


class ClientFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Messages in order. The server can drop the answers up to `acked`, which have arrived."""

    acked: int
    messages: tuple[ClientMessage, ...]


# --- server to client ------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The result of a request."""

    seq: int
    result: Result


class Push(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The changes of one revision under a watch."""

    watch: int
    batch: Batch


class PushRaw(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """`Push` as the server sends it: the batch is encoded once for all watches."""

    watch: int
    batch: msgspec.Raw


class WatchRefused(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The revisions of the watch are no longer kept; it can start after `oldest` at the earliest."""

    watch: int
    oldest: int


class Status(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The state of the server, for display."""

    seq: int
    revision: int
    details: dict[str, str]


class Going(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The server is about to close this connection, with the reason."""

    why: str


class MakeRun(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """The run does not exist; this client, which has just opened a session, is to make it."""


ServerMessage: TypeAlias = Answer | Push | WatchRefused | Status | Going | MakeRun
SentMessage: TypeAlias = Answer | Push | PushRaw | WatchRefused | Status | Going | MakeRun

encoder = msgspec.msgpack.Encoder()
hello_prefix_decoder = msgspec.msgpack.Decoder(HelloPrefix)
hello_decoder = msgspec.msgpack.Decoder(Hello)
welcome_decoder = msgspec.msgpack.Decoder(Welcome | Refused)
client_decoder = msgspec.msgpack.Decoder(ClientFrame)
server_decoder = msgspec.msgpack.Decoder(tuple[ServerMessage, ...])
