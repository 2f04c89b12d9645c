"""The gRPC channel to one endpoint of the cluster: opened when it is needed, and again after it was dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from rallypoint.backends.etcd import rpc_pb2 as rpc
from rallypoint.backends.etcd.grpc_fork import check_fork, grpc, keep_in_children
from rallypoint.backends.etcd.security import Security

Q = TypeVar("Q")
A = TypeVar("A")

Metadata: TypeAlias = Sequence[tuple[str, str]]

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),  # a scan has no size limit
    ("grpc.max_send_message_length", -1),  # etcd enforces its own limit
    ("grpc.enable_retries", 0),  # `Cluster.call` decides what is sent again
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must be a new connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd allows one in 5 s
    ("grpc.keepalive_timeout_ms", 4_000),
)


class Method(NamedTuple, Generic[Q, A]):
    """A remote procedure of etcd with the types of its request and response."""

    path: str
    request: type[Q]
    answer: type[A]


TXN = Method("/etcdserverpb.KV/Txn", rpc.TxnRequest, rpc.TxnResponse)
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", rpc.LeaseGrantRequest, rpc.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", rpc.LeaseRevokeRequest, rpc.LeaseRevokeResponse)
TIME_TO_LIVE = Method("/etcdserverpb.Lease/LeaseTimeToLive", rpc.LeaseTimeToLiveRequest, rpc.LeaseTimeToLiveResponse)
KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", rpc.LeaseKeepAliveRequest, rpc.LeaseKeepAliveResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", rpc.WatchRequest, rpc.WatchResponse)
STATUS = Method("/etcdserverpb.Maintenance/Status", rpc.StatusRequest, rpc.StatusResponse)
MEMBERS = Method("/etcdserverpb.Cluster/MemberList", rpc.MemberListRequest, rpc.MemberListResponse)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", rpc.AuthenticateRequest, rpc.AuthenticateResponse)


class Channel:
    """A channel to one endpoint. Belongs to one event loop."""

    def __init__(self, endpoint: str, security: Security) -> None:
        self.endpoint = endpoint
        self._security = security
        self._channel: Any = None
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self) -> bool:
        """Wait for a connection; False as soon as an attempt has failed."""
        channel = self._open()
        state = channel.get_state(try_to_connect=True)
        was_broken = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        while state is not grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not was_broken:
                return False
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                return False
            was_broken = False
        return True

    async def ask(self, method: Method[Q, A], request: Q, timeout_s: float, metadata: Metadata = ()) -> A:
        """One call. Raises grpc's error, or ConnectionResetError if the channel was dropped during the call."""
        call = self._open().unary_unary(
            method.path,
            request_serializer=_serialise,
            response_deserializer=method.answer.FromString,  # type: ignore[attr-defined]
        )(request, timeout=timeout_s, metadata=tuple(metadata))
        try:
            with keep_in_children(call):
                answer: A = await call
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise ConnectionResetError("the connection was dropped") from None
        return answer

    def stream(self, method: Method[Q, A], metadata: Metadata) -> Any:
        """A call with messages in both directions."""
        return self._open().stream_stream(
            method.path,
            request_serializer=_serialise,
            response_deserializer=method.answer.FromString,  # type: ignore[attr-defined]
        )(metadata=tuple(metadata))

    def drop(self) -> None:
        """End everything on the channel now; the next use opens a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            task = asyncio.create_task(channel.close(), name=f"close the channel to {self.endpoint}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close the channel and wait until it is closed."""
        self.drop()
        if self._closing:
            await asyncio.wait(list(self._closing))

    def _open(self) -> Any:
        if self._channel is None:
            check_fork()
            if self._security.is_tls:
                self._channel = grpc.aio.secure_channel(self.endpoint, self._security.credentials(), OPTIONS)
            else:
                self._channel = grpc.aio.insecure_channel(self.endpoint, OPTIONS)
        return self._channel


def is_cancelled() -> bool:
    """Whether the current task was cancelled, and not only the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _serialise(message: Any) -> bytes:
    return bytes(message.SerializeToString())
