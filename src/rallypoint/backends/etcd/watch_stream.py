"""The stream that serves all watches of a process.

The client numbers each watch, with a new number every time it is requested. A new call requests all watches again, each
from its position, so that a lost connection causes neither a gap nor a repetition.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from itertools import count

from rallypoint._marks import mark
from rallypoint.backends.etcd import rpc_pb2 as rpc
from rallypoint.backends.etcd.channel import WATCH
from rallypoint.backends.etcd.cluster import Cluster
from rallypoint.backends.etcd.conversion import batches_of, range_of
from rallypoint.backends.etcd.faults import FaultKind, fault_of_text
from rallypoint.backends.etcd.stream import Stream, TokenRefused
from rallypoint.backends.tcp.watch import TcpWatch
from rallypoint.errors import BackendError, HistoryGone, Rejected, Unavailable

AGAIN_S = 0.2


class EtcdWatch(TcpWatch):
    """A watch that also handles etcd's progress notifications."""

    was_denied = False
    """Refused once; the cause may have been an old token of the stream."""

    def renumbered(self, number: int) -> None:
        """The stream requested the watch again under this number."""
        self._number = number

    def progress(self, revision: int) -> None:
        """All changes up to this revision have arrived."""
        if not self._buffer and revision > self._seen:
            self._seen = revision


class WatchStream(Stream[rpc.WatchRequest, rpc.WatchResponse]):
    """Where watches are requested (`backends/tcp/watch.py:WatchClient`)."""

    method = WATCH

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        super().__init__(cluster, rng)
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._watches: dict[int, EtcdWatch] = {}
        self._asked: deque[int] = deque()
        """Requested on the open call and not yet answered: etcd answers in order."""
        self._fragments: dict[int, list[rpc.Event]] = {}
        self._to_call: dict[Callable[[], None], None] = {}

    # --- for the watches ----------------------------------------------------------------------------------------------

    def start_watch(self, watch: TcpWatch) -> int:
        if self.cluster.is_closed:
            raise Unavailable(f"this connection to etcd at {self.cluster.where} was closed")
        assert isinstance(watch, EtcdWatch)
        number = next(self._numbers)
        self._watches[number] = watch
        self._ask(number, watch)
        return number

    def _ask(self, number: int, watch: EtcdWatch) -> None:
        self._asked.append(number)
        self.send(_create(number, watch))

    def stop_watch(self, number: int) -> None:
        if self._watches.pop(number, None) is not None:
            self._fragments.pop(number, None)
            if self._channel is not None:
                self.send(rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=number)))

    def call_soon(self, callback: Callable[[], None]) -> None:
        if not self._to_call:
            self._loop.call_soon(self._call)
        self._to_call[callback] = None

    def _call(self) -> None:
        callbacks, self._to_call = self._to_call, {}
        for callback in callbacks:
            callback()

    # --- the stream ---------------------------------------------------------------------------------------------------

    def begin(self) -> list[rpc.WatchRequest]:
        self._fragments.clear()
        self._asked = deque(self._watches)
        return [_create(number, watch) for number, watch in self._watches.items()]

    def take(self, answer: rpc.WatchResponse) -> None:
        number = answer.watch_id
        if answer.created and self._asked:
            number = self._asked.popleft()  # the answer to a refused watch does not contain its number
        watch = self._watches.get(number)
        if watch is None:
            return  # it was cancelled by the client
        if answer.canceled:
            self._cancelled(number, watch, answer)
        elif answer.fragment:
            self._fragments.setdefault(number, []).extend(answer.events)
        elif answer.events:
            for batch in batches_of([*self._fragments.pop(number, ()), *answer.events]):
                if number in self._watches:  # it may fall behind in between
                    watch.push(batch)
        elif answer.created:
            watch.was_denied = False
        else:
            watch.progress(answer.header.revision)

    def _cancelled(self, number: int, watch: EtcdWatch, answer: rpc.WatchResponse) -> None:
        """etcd ended a watch."""
        self._watches.pop(number)
        if answer.compact_revision:
            mark("etcd.compacted")
            watch.gone(
                HistoryGone(
                    f"changes under {watch.prefix!r} after revision {watch.after} were compacted: scan again",
                    oldest=answer.compact_revision,
                )
            )
            return
        fault = fault_of_text(answer.cancel_reason)
        if fault is not None and fault.kind is FaultKind.REJECTED and watch.was_denied:
            watch.gone(Rejected(f"etcd at {self.cluster.where} ended a watch: {fault.text}"))
            return
        number = next(self._numbers)  # request it again, whatever the cause
        self._watches[number] = watch
        watch.renumbered(number)
        if fault is not None and fault.kind in (FaultKind.REJECTED, FaultKind.TOKEN):
            watch.was_denied = True
            raise TokenRefused(fault.text)
        self._loop.call_later(AGAIN_S, self._ask_again, number)

    def _ask_again(self, number: int) -> None:
        watch = self._watches.get(number)
        if watch is not None and self._channel is not None:
            self._ask(number, watch)

    def no_endpoint(self, error: BackendError) -> None:
        if isinstance(error, Rejected):
            for watch in list(self._watches.values()):
                watch.gone(error)

    def is_needed(self) -> bool:
        return not self.cluster.is_closed


def _create(number: int, watch: EtcdWatch) -> rpc.WatchRequest:
    start, end = range_of(watch.prefix)
    return rpc.WatchRequest(
        create_request=rpc.WatchCreateRequest(
            key=start,
            range_end=end,
            start_revision=watch.after + 1,
            progress_notify=True,
            watch_id=number,
            fragment=True,
        )
    )
