"""A bidirectional gRPC call that is opened again on the current endpoint whenever it ends."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, TypeVar

from rallypoint.backends.backoff import Backoff
from rallypoint.backends.etcd.channel import Channel, Method, is_cancelled
from rallypoint.backends.etcd.cluster import Cluster
from rallypoint.backends.etcd.faults import Fault, FaultKind, fault_of
from rallypoint.backends.etcd.grpc_fork import grpc, keep_in_children
from rallypoint.errors import BackendError, Rejected

Q = TypeVar("Q")
A = TypeVar("A")


class TokenRefused(Exception):
    """The token that this call was opened with is no longer accepted."""


class Stream(ABC, Generic[Q, A]):
    """Opened when first used. A subclass says what is sent first on each new call, and handles the responses."""

    method: Method[Q, A]

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster = cluster
        self._backoff = Backoff(rng, most_s=0.5)
        self._out: deque[Q] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        """The channel of the open call."""

    @abstractmethod
    def begin(self) -> list[Q]:
        """The first requests of a new call; later responses (`take`) are to these and to what is sent after them."""

    @abstractmethod
    def take(self, answer: A) -> None:
        """Handle a response."""

    @abstractmethod
    def no_endpoint(self, error: BackendError) -> None:
        """No endpoint can be used; unless the error is Rejected, connecting is tried again."""

    @abstractmethod
    def is_needed(self) -> bool:
        """Whether the call is to be opened again."""

    def send(self, request: Q) -> None:
        """Send on the open call, if there is one. A new call starts with everything that `begin` returns."""
        self.start()
        if self._channel is not None:
            self._out.append(request)
            self._wake.set()

    def start(self) -> None:
        """Open the call if it is not open."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"{self.method.path} of etcd at {self.cluster.where}")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while self.is_needed():
            try:
                channel = await self.cluster.ready()
            except BackendError as error:
                self.no_endpoint(error)
                if isinstance(error, Rejected):
                    return
                await self._backoff.sleep()
                continue
            fault = await self._converse(channel)
            if fault.kind is FaultKind.TOKEN:
                self.cluster.forget_token()
            elif fault.kind is FaultKind.REJECTED:
                self.no_endpoint(Rejected(f"etcd at {channel.endpoint}: {fault.text}"))
                return
            self.cluster.failed(channel, fault)
            await self._backoff.sleep()

    async def _converse(self, channel: Channel) -> Fault:
        """Run one call until it ends; why it ended."""
        call = channel.stream(self.method, self.cluster.metadata())
        self._out = deque(self.begin())
        self._wake.set()
        self._channel = channel
        sender = asyncio.create_task(self._send_all(call), name=f"send on {self.method.path}")
        try:
            with keep_in_children(call):
                while (answer := await call.read()) is not grpc.aio.EOF:
                    self._backoff.reset()
                    self.take(answer)
            code, details = await call.code(), await call.details()
            return Fault(FaultKind.UNKNOWN, f"the stream ended ({code.name}: {details})")
        except grpc.aio.AioRpcError as error:
            return fault_of(error)
        except TokenRefused as error:
            return Fault(FaultKind.TOKEN, str(error))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return Fault(FaultKind.UNKNOWN, "the connection was dropped")
        finally:
            self._channel = None
            sender.cancel()
            call.cancel()

    async def _send_all(self, call: Any) -> None:
        while True:
            while self._out:
                try:
                    await call.write(self._out.popleft())
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the reader gets the error
                except asyncio.CancelledError:
                    if is_cancelled():
                        raise
                    return
            self._wake.clear()
            await self._wake.wait()
