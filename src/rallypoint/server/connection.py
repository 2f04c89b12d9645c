"""One connection of the server: handshake, requests in, answers and pushes out.

Invalid input costs only the connection it came on, never the server: a peer that does not speak this protocol gets one
line of text, a malformed frame gets one refusal, and the connection is closed. Outgoing messages are buffered until the
event loop has run all ready callbacks, then they are sent as one frame. The buffer is bounded: a peer that does not
read is disconnected when it is full, and can reconnect and resume.
"""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from rallypoint._marks import mark
from rallypoint.backends.forks import fileno_of
from rallypoint.backends.ops import changes_something
from rallypoint.backends.tcp.dial import tune
from rallypoint.kv.types import Batch, Origin, WatchStarted, WatchTooOld
from rallypoint.server.admission.admission import Admission, format_peer, is_inconclusive, peer_of
from rallypoint.server.admission.refusals import Refusal
from rallypoint.server.clients import Client
from rallypoint.server.connection_context import ConnectionContext, welcome_by
from rallypoint.server.frame_splitting import MAX_UNSPLIT_MESSAGES, pushed_bytes, split_frames
from rallypoint.server.key_waits import KeyWaits
from rallypoint.server.observer_watches import ClientWatch
from rallypoint.server.outbox import raw_of
from rallypoint.wire.frames import GREETING, HEADER_BYTES, FrameError, Framer, FrameTooLarge, NotRallypoint, frame
from rallypoint.wire.handshake import judge, stranger_line
from rallypoint.wire.messages import (
    NOW,
    Answer,
    AskStatus,
    Await,
    Claim,
    ClientMessage,
    Do,
    Going,
    Hold,
    MakeRun,
    PushRaw,
    RefusalCode,
    Refused,
    SentMessage,
    Status,
    WatchRefused,
    WatchStart,
    WatchStop,
    client_decoder,
    encoder,
)

MOST_WAITING_BYTES = 64 * 1024 * 1024
MOST_WAITING_MESSAGES = 100_000


class Connection(asyncio.Protocol):
    """The protocol of one accepted connection, until it is closed."""

    is_trusted = False
    """The peer is a process that this server started: it needs no token, and limits do not apply."""

    def __init__(self, context: ConnectionContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._framer = Framer()
        self._transport: asyncio.Transport | None = None
        self._client: Client | None = None
        self._watches: dict[int, ClientWatch] = {}
        self._is_observer = False
        self._awaiting: KeyWaits | None = None
        self._out: list[SentMessage] = []
        self._flush_due = False
        self._is_taking = False
        """`data_received` is running: it flushes at its end."""
        self._is_paused = False
        self._paused_at = 0.0
        self._waiting_bytes = 0
        """Size of the batches that were pushed since the peer stopped reading."""
        self._is_over = False
        self._dropped_here = False
        """This side closed the connection, which says nothing about the peer's process."""
        self._hello_timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tune(transport)
        self._context.connections[self] = None
        admission = self._context.admission
        refused = admission.add_pending(self, peer_of(transport)[0])
        if refused is not None:
            self._refuse(refused)
            return
        self._hello_timer = self._loop.call_later(admission.limits.hello_timeout_s, self._no_hello)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        traffic = self._context.traffic
        traffic.bytes_in += len(data)
        self._is_taking = True
        try:
            for payload in self._framer.feed(data):
                traffic.frames_in += 1
                if self._client is None:
                    self._greet(payload)
                else:
                    self._take(payload, self._client)
                if self.is_over:
                    return
        except NotRallypoint as error:
            self._send_away(stranger_line(error.first), str(error), Refusal.STRANGER)
        except FrameTooLarge as error:
            if self._client is None:
                self._refuse(Refused(RefusalCode.MALFORMED, f"the hello is too long: {error}"))
            else:
                self._refuse_frame(str(error), Refusal.FRAME)
        except (FrameError, msgspec.DecodeError, ValueError, RecursionError) as error:
            self._refuse_frame(f"a frame could not be read: {error}")
        except Exception as error:  # a bug in the server closes this connection, not the others
            self._refuse_frame(f"the server failed on a frame: {error!r}")
        finally:
            self._is_taking = False
            if self._flush_due:
                self.flush()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_paused = True
        self._paused_at = self._loop.time()

    def resume_writing(self) -> None:
        self._is_paused = False
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over = True
        self._context.connections.pop(self, None)
        self._context.admission.remove_pending(self)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        for watch in self._watches.values():
            self._unwatch(watch)
        self._watches.clear()
        if self._awaiting is not None:
            self._awaiting.end()
        self._out.clear()
        if self._client is not None:
            self._context.admission.admitted -= 1
            self._context.clients.disconnected(
                self._client, self, by_peer=not self._dropped_here and not is_inconclusive(error)
            )

    # --- the handshake ------------------------------------------------------------------------------------------------

    def _greet(self, payload: bytes) -> None:
        context = self._context
        verdict = judge(payload, None if self.is_trusted else context.tokens, context.versions)
        if isinstance(verdict, Refused):
            self._refuse(verdict)
            return
        hello = verdict.hello
        reached = None if self.is_trusted else context.limit_reached(hello.client, hello.run)
        if reached is not None:
            kind, why = reached
            self._refuse(Refused(RefusalCode.LIMIT, why), kind)
            return
        context.admission.remove_pending(self)
        context.admission.admitted += 1
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        is_returning = hello.generation not in ("", context.generation)
        held = () if is_returning else hello.sessions
        self._client, ended = context.clients.connected(hello.client, hello.run, self, held)
        self._framer.limit = context.max_frame
        if hello.run:
            context.ensure_run(hello.run, is_returning, hello.client)
        makes_run = not hello.run or (bool(self._client.sessions) and context.is_to_make(hello.run, hello.client))
        welcome = welcome_by(context, verdict.version, ended, makes_run)
        self._write(GREETING + frame(encoder.encode(welcome)))

    def _no_hello(self) -> None:
        within_s = self._context.admission.limits.hello_timeout_s
        self._refuse(Refused(RefusalCode.MALFORMED, f"no hello within {within_s:g} s"), Refusal.SILENT)

    def evict(self) -> None:
        why = "no hello yet, and newer connections are waiting"
        self._refuse(Refused(RefusalCode.BUSY, why), Refusal.PENDING)

    def _refuse(self, refused: Refused, kind: Refusal | None = None) -> None:
        message = GREETING + frame(encoder.encode(refused))
        self._send_away(message, refused.message, kind or Admission.kind_of(refused))

    def _send_away(self, message: bytes, why: str, kind: Refusal) -> None:
        """Count and log a refusal, send the message and close."""
        self._context.admission.remove_pending(self)
        self._context.admission.refused(peer_of(self._transport), why, kind)
        self._is_over = self._dropped_here = True
        if self._transport is not None:
            self._write(message)
            self._transport.close()

    def _refuse_frame(self, why: str, kind: Refusal = Refusal.MALFORMED) -> None:
        mark("server.malformed")
        if self._client is None:
            self._refuse(Refused(RefusalCode.MALFORMED, why))
        else:
            self.flush()  # the answers to earlier requests
            self._send_away(frame(encoder.encode([Going(why)])), why, kind)

    def filenos(self) -> list[int]:
        return fileno_of(self._transport)

    @property
    def is_over(self) -> bool:
        """Closed, or closing: its input is ignored."""
        return self._is_over

    @property
    def is_paused(self) -> bool:
        """The transport's buffer is full: the peer has to read first."""
        return self._is_paused

    @property
    def lag(self) -> tuple[int, float]:
        """Number of messages waiting for a peer that does not read, and since when; (0, 0) if it reads."""
        return (len(self._out), self._paused_at) if self._is_paused else (0, 0.0)

    @property
    def peer(self) -> str:
        """The peer's address, for log lines."""
        return format_peer(peer_of(self._transport))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _take(self, payload: bytes, client: Client) -> None:
        received = client_decoder.decode(payload)
        length, quota = len(payload), self._context.quota
        quota.room -= length
        is_tight = (quota.room < 0 or length > quota.max_value) and quota.is_tight(length)
        for message in received.messages:
            if is_tight and isinstance(message, Do) and self._is_refused(message, client, received.acked):
                continue
            self._handle(message, client, received.acked)
            if self._is_over:
                return

    def _is_refused(self, message: Do, client: Client, acked: int) -> bool:
        """Whether a request exceeds a quota; if so, it is answered with the failure."""
        context = self._context
        found = context.quota.refusal(message.op, Origin(client.id, message.seq, acked))
        if found is None:
            return False
        kind, failure = found
        context.admission.refused(peer_of(self._transport), failure.message, kind)
        self.send(Answer(message.seq, failure))
        return True

    def _handle(self, message: ClientMessage, client: Client, acked: int) -> None:
        context = self._context
        if type(message) is Do:  # first, because it is the most frequent
            op = message.op
            origin = Origin(client.id, message.seq, acked) if changes_something(op) else None
            self.send(Answer(message.seq, context.engine_host.execute(op, origin)))
            return
        match message:
            case Await():
                if self._awaiting is None:
                    self._awaiting = KeyWaits(context.engine_host, self, context.admission, peer_of(self._transport))
                self._awaiting.take(message)
            case WatchStart(number, prefix, after):
                self._start_watch(number, prefix, after)
            case WatchStop(number):
                self._stop_watch(number)
            case Hold(lease, grace_s):
                is_held = context.clients.hold(client, lease, grace_s)
                if is_held and context.is_to_make(client.run, client.id):
                    self.send(MakeRun())
            case Claim(claim):
                context.claimed(client.run, client.id, claim)
            case AskStatus(seq):
                self.send(Status(seq, context.engine_host.engine.revision, context.describe()))

    def _start_watch(self, number: int, prefix: str, after: int) -> None:
        self._stop_watch(number)
        most = self._context.admission.limits.max_watches
        if len(self._watches) >= most:
            self._refuse_frame(f"a connection may watch {most} prefixes at most (--max-watches)", Refusal.WATCHES)
            return
        watch = ClientWatch(self, number, prefix)
        engine_host = self._context.engine_host
        after = engine_host.engine.revision if after == NOW else after
        started: WatchStarted | WatchTooOld
        if self._client is not None and not self._client.run and after <= engine_host.engine.revision:
            self._is_observer = True
            started = self._context.observer_watches.add(self, number, prefix, after)
        else:
            watch.id, started = engine_host.watch(watch, prefix, after)
        if isinstance(started, WatchTooOld):
            self.send(WatchRefused(number, started.oldest))
            return
        self._watches[number] = watch
        for batch in started.backlog:
            self.push(number, batch)

    def _stop_watch(self, number: int) -> None:
        watch = self._watches.pop(number, None)
        if watch is not None:
            self._unwatch(watch)

    def _unwatch(self, watch: ClientWatch) -> None:
        if watch.id:
            self._context.engine_host.unwatch(watch.id)
        else:
            self._context.observer_watches.remove(self, watch.number, watch.prefix)

    # --- sending ------------------------------------------------------------------------------------------------------

    def push(self, number: int, batch: Batch) -> None:
        """Send a batch for the watch with this number."""
        raw = raw_of(batch)
        self.send(PushRaw(number, raw))
        if self._is_paused:
            self._waiting_bytes += len(raw)
            if self._waiting_bytes > MOST_WAITING_BYTES and not self._is_over:
                self._drop_slow()

    @property
    def keeps_up(self) -> bool:
        """Its buffer is empty, so that `push_frame` keeps the order of messages."""
        return not (self._out or self._is_paused or self._is_over)

    def push_frame(self, data: bytes) -> None:
        """Send an encoded frame, which several connections share. Only if it `keeps_up`."""
        if self._transport is not None:
            self._write(data)

    def send(self, message: SentMessage) -> None:
        """Buffer a message; it goes out with all others of this iteration of the event loop."""
        if self._is_observer and not isinstance(message, PushRaw):
            self._context.observer_watches.flush()
        out = self._out
        out.append(message)
        if not self._flush_due:
            if self._is_paused:
                if len(out) > MOST_WAITING_MESSAGES and not self._is_over:
                    self._drop_slow()
                return
            self._flush_due = True
            if not self._is_taking:
                self._context.engine_host.outbox.add(self)

    def flush(self) -> None:
        """Send all buffered messages. Does nothing while the peer does not read."""
        self._flush_due = False
        out = self._out
        if self._is_over or not out or self._transport is None or self._is_paused:
            return
        self._out = []
        payload = encoder.encode(out) if len(out) <= MAX_UNSPLIT_MESSAGES else b""
        length = len(payload)
        if 0 < length <= self._context.max_frame:
            self._write(length.to_bytes(HEADER_BYTES, "big") + payload)
            self._waiting_bytes = 0
        else:
            self._flush_in_parts(out)

    def _flush_in_parts(self, out: list[SentMessage]) -> None:
        """Send many messages in frames of bounded size until the peer stops reading; the rest stays buffered."""
        start = 0
        for payload, count in split_frames(
            out, self._context.max_frame, self._stop_watch, self._context.engine_host.engine
        ):
            self._write(frame(payload))
            self._waiting_bytes -= pushed_bytes(out[start : start + count])
            start += count
            if self.is_paused:
                break
        self._waiting_bytes = max(0, self._waiting_bytes) if start < len(out) else 0
        self._out = out[start:] + self._out

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        traffic = self._context.traffic
        traffic.bytes_out += len(data)
        traffic.frames_out += 1
        self._transport.write(data)

    # --- closing ------------------------------------------------------------------------------------------------------

    def shut_down(self, why: str) -> None:
        """Tell the client that the server stops, and close.

        A client that watches closes its side when it has read everything; the caller waits for that, and aborts.
        """
        if self._is_over or self._transport is None:
            return
        self.flush()
        self._dropped_here = self._is_over = True
        if self._client is not None:
            self._write(frame(encoder.encode([Going(why)])))
        if self._watches and self._transport.can_write_eof():
            self._transport.write_eof()  # `close` would discard what is on its way if the peer has just sent more
        else:
            self._transport.close()

    def _drop_slow(self) -> None:
        mark("server.slow")
        self._context.traffic.slow += 1
        why = "it does not read what it is sent; it may reconnect and resume"
        self._context.admission.refused(peer_of(self._transport), why, Refusal.SLOW)
        self.abort()

    def abort(self) -> None:
        """Close at once. Buffered messages are discarded; a client that reconnects gets them again."""
        self._dropped_here = self._is_over = True
        if self._transport is not None:
            self._transport.abort()
