"""What is said on a connection. Arrays on the wire: fields are added at the end, with a default, and never taken away.

A client numbers its requests from 1 and sends them in order. Requests that were not answered when a connection broke
are sent again with their numbers on the next one; the server executes each once. Watches have numbers of the client's
choosing; after a reconnect the client asks for them again, after the last revision that it took in.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from rallypoint.kv.types import Batch, Op, Result

OLDEST_VERSION = 1
NEWEST_VERSION = 1
NOW = -1


# --- the first frame of either side ----------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A session that a client goes on with: how long the server waits for it when its connection closes."""

    lease: int
    grace_s: float


class Hello(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who connects, and what it speaks. `generation` is that of the server it last spoke to ("": none)."""

    oldest: int
    newest: int
    client: str
    token: str = ""
    run: str = ""
    software: str = ""
    generation: str = ""
    sessions: tuple[Held, ...] = ()


class Knock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of a hello: all that is read of it before the token was compared."""

    oldest: int
    newest: int
    client: str
    token: str = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The server goes on, in this version. `ended` are sessions of the hello that are over."""

    version: int
    generation: str
    software: str = ""
    ended: tuple[int, ...] = ()
    max_frame: int = 0
    max_txn_ops: int = 0
    max_txn_bytes: int = 0
    is_dedicated: bool = False
    """Somebody runs this server for its own sake and will start it again: nodes need not hurry to take its place."""
    makes_run: bool = True
    """If the run does not exist, this client is to make it. Only for one that goes on with a session: a client that
    opens one is told by `MakeRun`, and a read-only client never."""


class RefusalCode(enum.Enum):
    """Whether it makes sense to try again: only with BUSY."""

    VERSION = "version"
    TOKEN = "token"
    TLS = "tls"
    LIMIT = "limit"
    MALFORMED = "malformed"
    BUSY = "busy"

    @classmethod
    def _missing_(cls, value: object) -> RefusalCode:
        return cls.MALFORMED  # of a newer version: its message says what is wrong


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The server does not go on, and why in one sentence."""

    code: RefusalCode
    message: str


# --- client to server ------------------------------------------------------------------------------------------------


class Do(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Execute an operation; answered by `Answer` with the same number."""

    seq: int
    op: Op


class WatchStart(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Push what changes under a prefix after a revision (`NOW`: from here on). A number in use starts afresh."""

    watch: int
    prefix: str
    after: int


class WatchStop(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Push no more of it."""

    watch: int


class Hold(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """This lease is a session of this client: its time is shortened when the connection is closed."""

    lease: int
    grace_s: float


class Claim(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Said to a server of a new generation, once all sessions of the old one are given up: where the run stood."""

    claim: bytes


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """How is the server? Answered by `Status` with the same number."""

    seq: int


class Await(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """The items of keys: when all exist, or after a time as they are then. Answered by `Answer`, like a get."""

    seq: int
    keys: tuple[str, ...]
    within_s: float


ClientMessage: TypeAlias = Do | WatchStart | WatchStop | Hold | Claim | AskStatus | Await


class ClientFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Messages in order; answers up to `acked` have arrived and need not be kept."""

    acked: int
    messages: tuple[ClientMessage, ...]


# --- server to client ------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The result of a request."""

    seq: int
    result: Result


class Push(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """What changed in one revision under a watch."""

    watch: int
    batch: Batch


class PushRaw(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """`Push` as the server sends it: a batch that goes to many is encoded once."""

    watch: int
    batch: msgspec.Raw


class WatchRefused(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """What the watch asked for is no longer kept: `oldest` is the first revision to start after."""

    watch: int
    oldest: int


class Status(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The server in a few words and figures."""

    seq: int
    revision: int
    details: dict[str, str]


class Going(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The server closes this connection in good order, and why."""

    why: str


class MakeRun(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """The run does not exist, and the client that has just opened a session is to make it."""


ServerMessage: TypeAlias = Answer | Push | WatchRefused | Status | Going | MakeRun
SentMessage: TypeAlias = Answer | Push | PushRaw | WatchRefused | Status | Going | MakeRun

encoder = msgspec.msgpack.Encoder()
knock_decoder = msgspec.msgpack.Decoder(Knock)
hello_decoder = msgspec.msgpack.Decoder(Hello)
welcome_decoder = msgspec.msgpack.Decoder(Welcome | Refused)
client_decoder = msgspec.msgpack.Decoder(ClientFrame)
server_decoder = msgspec.msgpack.Decoder(tuple[ServerMessage, ...])
