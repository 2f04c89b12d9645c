"""A call with messages in both directions that is made again whenever it ends, on whichever endpoint is current."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, TypeVar

from rallypoint.backends.backoff import Backoff
from rallypoint.backends.etcd.cluster import Cluster
from rallypoint.backends.etcd.faults import Fault, Means, fault_of
from rallypoint.backends.etcd.forks import grpc, keep_in_children
from rallypoint.backends.etcd.link import Link, Method, is_cancelled
from rallypoint.errors import BackendError, Rejected

Q = TypeVar("Q")
A = TypeVar("A")


class TokenRefused(Exception):
    """What was sent on this call needs a newer token than the one it began with."""


class Stream(ABC, Generic[Q, A]):
    """Begins when it is first needed. A subclass says what is sent first on each new call, and takes the answers."""

    method: Method[Q, A]

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster = cluster
        self._backoff = Backoff(rng, most_s=0.5)
        self._out: deque[Q] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._link: Link | None = None
        """Where it goes through now."""

    @abstractmethod
    def begin(self) -> list[Q]:
        """What a new call has to be told; from here on `take` speaks of it."""

    @abstractmethod
    def take(self, answer: A) -> None:
        """An answer has arrived."""

    @abstractmethod
    def trouble(self, error: BackendError) -> None:
        """There is no endpoint that could be used; it is tried again."""

    @abstractmethod
    def is_needed(self) -> bool:
        """Whether anybody waits for anything."""

    def send(self, request: Q) -> None:
        """Send on the call that is open, if there is one: a new one is told everything at its beginning."""
        self.start()
        if self._link is not None:
            self._out.append(request)
            self._wake.set()

    def start(self) -> None:
        """See to it that there is a call."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"{self.method.path} of etcd at {self.cluster.where}")

    async def close(self) -> None:
        """End it."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while self.is_needed():
            try:
                link = await self.cluster.ready()
            except BackendError as error:
                self.trouble(error)
                if isinstance(error, Rejected):
                    return
                await self._backoff.sleep()
                continue
            fault = await self._converse(link)
            if fault.means is Means.TOKEN:
                self.cluster.forget_token()
            elif fault.means is Means.REJECTED:
                self.trouble(Rejected(f"etcd at {link.endpoint}: {fault.text}"))
                return
            self.cluster.failed(link, fault)
            await self._backoff.sleep()

    async def _converse(self, link: Link) -> Fault:
        """One call, until it ends; why it did."""
        call = link.stream(self.method, self.cluster.metadata())
        self._out = deque(self.begin())
        self._wake.set()
        self._link = link
        sender = asyncio.create_task(self._send_all(call), name=f"send on {self.method.path}")
        try:
            with keep_in_children(call):
                while (answer := await call.read()) is not grpc.aio.EOF:
                    self._backoff.reset()
                    self.take(answer)
            code, details = await call.code(), await call.details()
            return Fault(Means.UNKNOWN, f"the stream ended ({code.name}: {details})")
        except grpc.aio.AioRpcError as error:
            return fault_of(error)
        except TokenRefused as error:
            return Fault(Means.TOKEN, str(error))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return Fault(Means.UNKNOWN, "the connection was dropped")
        finally:
            self._link = None
            sender.cancel()
            call.cancel()

    async def _send_all(self, call: Any) -> None:
        while True:
            while self._out:
                try:
                    await call.write(self._out.popleft())
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # whoever reads learns why
                except asyncio.CancelledError:
                    if is_cancelled():
                        raise
                    return
            self._wake.clear()
            await self._wake.wait()
