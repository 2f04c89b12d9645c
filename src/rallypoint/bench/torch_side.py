"""torch's c10d rendezvous, through its own public Python API; the store is hosted by a process of its own."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import msgspec

from rallypoint.bench.helper import Helper, Line, end_all, fork
from rallypoint.bench.plan import LAST_CALL_S, POLL_S
from rallypoint.bench.sides import Place, Sizes

START_S = 30.0
SHARING_OFF = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Port(msgspec.Struct, frozen=True):
    """Where a forked server listens."""

    number: int


class TorchSide:
    """`lean`: without the inspection of the stack for every event. `unshared`: with its store sharing turned off."""

    def __init__(self, lean: bool, unshared: bool) -> None:
        self._lean = lean
        self._unshared = unshared

    def load(self) -> None:
        if self._unshared:
            os.environ[SHARING_OFF] = "1"
        _ask_no_name_server()
        for name in ("registry", "c10d_rendezvous_backend"):
            importlib.import_module(f"torch.distributed.elastic.rendezvous.{name}")
        dynamic: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
        if self._lean:
            # Called for the name of every event, even where events are not recorded: inspect.stack(), twice.
            dynamic.get_method_name = lambda depth=2: "not looked up"
        else:
            dynamic.get_method_name()  # the first look reads all sources; a node with a machine of its own hides that

    def start_server(self, nodes: int) -> tuple[Helper, int]:
        return start_forked(_host_store)

    def client(self, port: int, sizes: Sizes) -> TorchClient:
        return TorchClient(port, sizes)

    def store(self, port: int, sizes: Sizes) -> Any:
        distributed = importlib.import_module("torch.distributed")
        return distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


class TorchClient:
    """One node, through the registry of rendezvous handlers as torch's agent does it."""

    def __init__(self, port: int, sizes: Sizes) -> None:
        self._port = port
        self._sizes = sizes
        self._handler: Any = None

    def rehearse(self) -> None:
        sizes = Sizes(f"rehearsal-{os.getpid()}", 1, 1, join_timeout_s=int(START_S))
        alone = TorchClient(self._port, sizes)
        alone.create()
        alone.join()
        alone._handler.shutdown()

    def connect(self) -> None:
        self.create()

    def create(self) -> None:
        """Connects to the store."""
        if self._handler is not None:
            return
        rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous")
        registry = importlib.import_module("torch.distributed.elastic.rendezvous.registry")
        parameters = rendezvous.RendezvousParameters(
            backend="c10d",
            endpoint=f"127.0.0.1:{self._port}",
            run_id=self._sizes.run_id,
            min_nodes=self._sizes.least,
            max_nodes=self._sizes.most,
            local_addr="127.0.0.1",
            is_host=False,
            join_timeout=self._sizes.join_timeout_s,
            last_call_timeout=LAST_CALL_S,
        )
        self._handler = registry.get_rendezvous_handler(parameters)

    def join(self) -> Place:
        info = self._handler.next_rendezvous()
        return Place(info.rank, info.world_size)

    def wait_told(self) -> None:
        """As its agent does: ask again and again. A loss is never told this way."""
        while self._handler.num_nodes_waiting() <= 0:
            time.sleep(POLL_S)


def start_forked(host: Any) -> tuple[Helper, int]:
    """A server that `host` starts in a forked process, and the port that it reports."""
    helper = fork(host)
    try:
        port = Line(helper.sock, Port).wait_one(START_S)
        if port is None:
            raise RuntimeError(f"the competitor's server was not ready within {START_S:g} s")
    except BaseException:
        end_all([helper])
        raise
    return helper, port.number


def report_port(sock: socket.socket, number: int) -> None:
    """A forked server is ready; it lives until it is killed."""
    say_port(sock, number)
    while True:
        signal.pause()


def say_port(sock: socket.socket, number: int) -> None:
    """A forked server is ready."""
    Line(sock, Port).send([Port(number)])


def _host_store(sock: socket.socket) -> None:
    distributed = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S)
    )
    report_port(sock, store.port)


def _ask_no_name_server() -> None:
    """Names come from /etc/hosts alone in this process and its forks, where the C library is glibc.

    Every client asks for the name of ::ffff:127.0.0.1 before it connects, and the store for that of every peer, in its
    only thread. Few machines know it, so a name server would be measured: one that dropped a question cost seconds.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", b"files")
