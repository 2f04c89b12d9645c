"""The names of `torch.distributed.elastic.rendezvous.c10d_rendezvous_backend`: a cell in one key of a torch `Store`."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from typing import Any

from rallypoint.backends.register.cell import Token
from rallypoint.backends.register.store_cell import StoreCell, TextStore
from rallypoint.compat.rendezvous.api import RendezvousConnectionError, RendezvousParameters
from rallypoint.compat.rendezvous.dynamic_rendezvous import RendezvousBackend
from rallypoint.compat.rendezvous.utils import parse_rendezvous_endpoint
from rallypoint.urls import refusal

DEFAULT_PORT = 29400


class C10dRendezvousBackend(RendezvousBackend):
    """A cell in `store`, which is a store of torch, or any object with its `get` and `compare_set`."""

    def __init__(self, store: TextStore, run_id: str) -> None:
        self._cell = StoreCell(store, run_id)

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._cell.get_state()

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        return self._cell.set_state(state, token)


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """A cell in torch's `TCPStore` (with `store_type=file`: `FileStore`), and that store. Needs torch; blocks.

    A handler needs neither torch nor this function: get it from the registry, with the backend `c10d`.
    """
    store_type = params.get("store_type", "tcp")
    match str(store_type).strip().lower():
        case "file":
            store = _file_store(params)
        case "tcp":
            store = _tcp_store(params)
        case _:
            raise refusal("store_type", store_type, "is unknown", "write tcp or file")
    return C10dRendezvousBackend(store, params.run_id), store


def _dist() -> Any:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise ImportError(
            "create_backend creates a store of torch, but torch is not installed: get a handler from "
            "rallypoint.compat.rendezvous.registry.get_rendezvous_handler instead, which does not need torch"
        ) from error
    return dist


def _file_store(params: RendezvousParameters) -> Any:
    path = params.endpoint.strip() or tempfile.mkstemp()[1]
    try:
        return _dist().FileStore(path)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(f"torch's FileStore in {path!r} cannot be opened: {error}") from error


def _tcp_store(params: RendezvousParameters) -> Any:
    """Connect to a TCPStore. Without `is_host`, this process hosts it if it can bind the endpoint's address."""
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    timeout_s = params.get_as_int("read_timeout", 60)
    if timeout_s is None or timeout_s <= 0:
        raise refusal("read_timeout", timeout_s, "is not positive", "give more than 0 seconds")
    is_host = params.get_as_bool("is_host")
    dist = _dist()

    def make(is_master: bool) -> Any:
        return dist.TCPStore(host, port, is_master=is_master, multi_tenant=True, timeout=timedelta(seconds=timeout_s))

    for is_master in (_can_bind(host), False) if is_host is None else (is_host,):
        try:
            return make(is_master)
        except (ValueError, RuntimeError, TimeoutError) as error:
            if not is_master or is_host is not None:
                raise RendezvousConnectionError(f"torch's TCPStore at {host}:{port} cannot be used: {error}") from error
    raise AssertionError("the last attempt returns or raises")


def _can_bind(host: str) -> bool:
    """Whether the address can be bound on this machine."""
    import socket

    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False
