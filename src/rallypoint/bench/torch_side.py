"""torch's c10d rendezvous, through its public Python API; its store is in a process of its own."""

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

from rallypoint.bench.plan import LAST_CALL_S, POLL_S
from rallypoint.bench.processes import ChildProcess, MessageSocket, fork, kill_all
from rallypoint.bench.sides import Place, RunConfig

START_TIMEOUT_S = 30.0
SHARING_OFF = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Port(msgspec.Struct, frozen=True):
    """The port of a forked server."""

    number: int


class TorchSide:
    """`lean`: without inspecting the stack for every event. `unshared`: with its store sharing turned off."""

    def __init__(self, lean: bool, unshared: bool) -> None:
        self._lean = lean
        self._unshared = unshared

    def load(self) -> None:
        if self._unshared:
            os.environ[SHARING_OFF] = "1"
        _use_no_name_server()
        for name in ("registry", "c10d_rendezvous_backend"):
            importlib.import_module(f"torch.distributed.elastic.rendezvous.{name}")
        dynamic: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
        if self._lean:
            # Called for every event, even if events are not recorded; calls inspect.stack() twice.
            dynamic.get_method_name = lambda depth=2: "not looked up"
        else:
            dynamic.get_method_name()  # the first call reads all sources: a cost that should not be measured

    def start_server(self, nodes: int) -> tuple[ChildProcess, int]:
        return start_forked(_host_store)

    def client(self, port: int, config: RunConfig) -> TorchClient:
        return TorchClient(port, config)

    def store(self, port: int, config: RunConfig) -> Any:
        distributed = importlib.import_module("torch.distributed")
        return distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


class TorchClient:
    """One node, through the registry of rendezvous handlers, like torch's agent."""

    def __init__(self, port: int, config: RunConfig) -> None:
        self._port = port
        self._config = config
        self._handler: Any = None

    def warm_up(self) -> None:
        config = RunConfig(f"warm-up-{os.getpid()}", 1, 1, join_timeout_s=int(START_TIMEOUT_S))
        alone = TorchClient(self._port, config)
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
            run_id=self._config.run_id,
            min_nodes=self._config.min_nodes,
            max_nodes=self._config.max_nodes,
            local_addr="127.0.0.1",
            is_host=False,
            join_timeout=self._config.join_timeout_s,
            last_call_timeout=LAST_CALL_S,
        )
        self._handler = registry.get_rendezvous_handler(parameters)

    def join(self) -> Place:
        info = self._handler.next_rendezvous()
        return Place(info.rank, info.world_size)

    def wait_changed(self) -> None:
        """Ask repeatedly, as its agent does. A loss is never reported this way."""
        while self._handler.num_nodes_waiting() <= 0:
            time.sleep(POLL_S)


def start_forked(host: Any) -> tuple[ChildProcess, int]:
    """Start a server in a forked process; `host` runs there and reports the port."""
    server = fork(host)
    try:
        port = MessageSocket(server.sock, Port).wait_one(START_TIMEOUT_S)
        if port is None:
            raise RuntimeError(f"the competitor's server was not ready within {START_TIMEOUT_S:g} s")
    except BaseException:
        kill_all([server])
        raise
    return server, port.number


def serve_forever(sock: socket.socket, number: int) -> None:
    """Report the port of a forked server that is ready, and wait until the process is killed."""
    send_port(sock, number)
    while True:
        signal.pause()


def send_port(sock: socket.socket, number: int) -> None:
    """Report the port of a forked server that is ready."""
    MessageSocket(sock, Port).send([Port(number)])


def _host_store(sock: socket.socket) -> None:
    distributed = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_TIMEOUT_S)
    )
    serve_forever(sock, store.port)


def _use_no_name_server() -> None:
    """Look names up in /etc/hosts only, in this process and its forks, where the C library is glibc.

    Every client looks up the name of ::ffff:127.0.0.1 before it connects, and the store that of every peer, in its only
    thread. Few machines know that name, so a name server would be measured: a dropped query costs seconds.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", b"files")
