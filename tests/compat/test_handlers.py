"""Handlers by torch's backend names, and over any cell."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from rallypoint.backends import schemes
from rallypoint.compat.rendezvous import (
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from rallypoint.compat.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from rallypoint.compat.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout, create_handler
from rallypoint.compat.rendezvous.etcd_rendezvous import create_rdzv_handler
from rallypoint.compat.rendezvous.prefix_store import PrefixStore
from rallypoint.compat.rendezvous.registry import get_rendezvous_handler
from rallypoint.store.blocking import Store
from rallypoint.testing.cells import MemoryCell
from tests.e2e.kit import loopback
from tests.patience import PATIENCE_S, until
from tests.register.stores import STORES, store_maker

QUICK = {"last_call_timeout": 1, "join_timeout": 60, "close_timeout": 2, "keep_alive_interval": 1}


def together(*handlers):
    """Let all handlers join; returns their infos."""
    with ThreadPoolExecutor(len(handlers)) as threads:
        calls = [threads.submit(handler.next_rendezvous) for handler in handlers]
        return [call.result(2 * PATIENCE_S) for call in calls]


def parameters(backend, endpoint, nodes=2, **more):
    return RendezvousParameters(backend, endpoint, "run", nodes, nodes, "127.0.0.1", **{**QUICK, **more})


def assert_round_of(handlers, backend):
    infos = together(*handlers)
    try:
        assert sorted(info.rank for info in infos) == list(range(len(handlers)))
        assert {info.world_size for info in infos} == {len(handlers)}
        ordered = sorted(infos, key=lambda info: info.rank)
        first, last = ordered[0], ordered[-1]
        first.store.set("key", b"value")
        assert bytes(last.store.get("key")) == b"value"
        assert len({info.bootstrap_store_info for info in infos}) == 1
        assert {handler.get_backend() for handler in handlers} == {backend}
        assert {handler.get_run_id() for handler in handlers} == {"run"}
    finally:
        for handler in handlers:
            assert handler.shutdown()


@pytest.mark.parametrize("backend", ["rallypoint", "c10d"])
def test_handlers_over_a_server_that_one_of_them_hosts(backend):
    params = parameters(backend, loopback())
    assert_round_of([get_rendezvous_handler(params) for _ in range(2)], backend)


def test_static_handlers_have_the_ranks_that_they_ask_for():
    endpoint = loopback()
    handlers = [get_rendezvous_handler(parameters("static", endpoint, rank=rank)) for rank in (1, 0)]
    infos = together(*handlers)
    assert [info.rank for info in infos] == [1, 0]
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    for handler in handlers:
        assert handler.shutdown()


def test_rallypoint_takes_a_url_as_its_endpoint(tmp_path):
    params = parameters("rallypoint", f"file://{tmp_path}")
    assert_round_of([get_rendezvous_handler(params) for _ in range(2)], "rallypoint")
    assert (tmp_path / "run.rallypoint").exists()


@pytest.mark.parametrize("kind", ["new file", "file that exists", "directory", "nothing"])
def test_c10d_over_a_file(kind, tmp_path):
    place = tmp_path / "place"
    if kind == "file that exists":
        place.write_bytes(b"")
    elif kind == "directory":
        place.mkdir()
    endpoint = "" if kind == "nothing" else str(place)
    nodes = 1 if kind == "nothing" else 2
    params = parameters("c10d", endpoint, nodes, store_type="file", is_host="1")
    assert_round_of([get_rendezvous_handler(params) for _ in range(nodes)], "c10d")


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (lambda: parameters("c10d", "", store_type="mongo"), "store_type"),
        (lambda: parameters("c10d", "/no/such/place/file", store_type="file"), "/no/such/place"),
        (lambda: parameters("c10d", "head:29400", nonsense=1), "nonsense"),
        (lambda: parameters("static", "head:29500"), "node_rank"),
        (lambda: parameters("nobody's", ""), "not registered \\(registered: c10d, etcd, etcd-v2"),
        (lambda: parameters("etcd", "head:2379", protocol="ftp"), "protocol"),
    ],
)
def test_invalid_parameter_is_a_value_error_that_names_it(params, says):
    with pytest.raises(ValueError, match=says):
        get_rendezvous_handler(params())


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_etcd_uses_the_etcd_backend_and_keeps_the_name_that_was_asked_for(backend, monkeypatch):
    monkeypatch.setitem(schemes._openers, "etcd", schemes.open_memory)
    handlers = [get_rendezvous_handler(parameters(backend, f"{backend}:2379,e2:2379")) for _ in range(2)]
    assert_round_of(handlers, backend)
    one = create_rdzv_handler(parameters("etcd", f"one-{backend}:2379", 1))
    assert one.get_backend() == "etcd"
    assert one.shutdown()


def test_missing_etcd_client_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.delitem(schemes._openers, "etcd", raising=False)
    monkeypatch.setattr(schemes, "_plug_ins", list)
    with pytest.raises(ValueError, match=r"pip install 'rallypoint\[etcd\]'"):
        rendezvous_handler_registry.create_handler(parameters("etcd-v2", "head:2379"))


# --- any cell ---------------------------------------------------------------------------------------------------------


class Watched(MemoryCell):
    """Records the calling threads, and whether two calls were made at once."""

    name = "watched"

    def __init__(self):
        super().__init__()
        self.inside = 0
        self.at_once = 0
        self.callers = set()

    def get_state(self):
        return self._call(super().get_state)

    def set_state(self, state, token=None):
        return self._call(super().set_state, state, token)

    def _call(self, function, *args):
        self.inside += 1
        self.at_once = max(self.at_once, self.inside)
        self.callers.add(threading.current_thread().name)
        try:
            return function(*args)
        finally:
            self.inside -= 1


def test_cell_is_called_by_one_thread_at_a_time_and_not_on_the_loop():
    cell = Watched()
    handlers = [DynamicRendezvousHandler.from_backend("run", None, cell, 3, 3, last_call_timeout=1) for _ in range(3)]
    assert_round_of(handlers, "watched")
    assert cell.callers == {"rallypoint cell"}
    assert cell.at_once == 1


def test_store_of_a_round_is_the_callers_store_under_a_prefix():
    class Mine(dict):
        def set(self, key, value):
            self[key] = value

        def get(self, key):
            return self[key]

    cell, store = MemoryCell(), Mine()
    handlers = [create_handler(store, cell, parameters("memory cell", "")) for _ in range(2)]
    infos = together(*handlers)
    infos[0].store.set("key", b"value")
    assert store == {f"torch.rendezvous.run.{infos[0].round}/key": b"value"}
    assert infos[0].store.underlying_store is store
    assert infos[0].round == infos[1].round > 0
    assert len(infos[0].members) == 2
    for handler in handlers:
        assert handler.shutdown()


@pytest.mark.parametrize("kind", STORES)
def test_handlers_over_a_store_of_torch(kind, tmp_path):
    dist = pytest.importorskip("torch.distributed")
    with store_maker(kind, tmp_path) as make:
        store = make()
        handlers = [
            create_handler(store, C10dRendezvousBackend(make(), "run"), parameters("c10d", "")) for _ in range(2)
        ]
        assert handlers[0].use_agent_store
        infos = together(*handlers)
        assert all(isinstance(info.store, dist.PrefixStore) for info in infos)
        place = infos[0].bootstrap_store_info
        served = dist.TCPStore("127.0.0.1", place.master_port, is_master=False, timeout=timedelta(seconds=60))
        served.set("workers", "here")
        del served
        infos[0].store.set("key", "value")
        assert infos[1].store.get("key") == b"value"
        for handler in handlers:
            assert handler.shutdown()


def test_without_a_store_of_the_caller_the_round_has_a_store_of_rallypoint():
    pytest.importorskip("torch")
    handler = DynamicRendezvousHandler.from_backend("run", None, MemoryCell(), 1, 1, last_call_timeout=1)
    store = handler.next_rendezvous().store
    store.set("key", b"value")
    assert bytes(store.get("key")) == b"value"
    assert isinstance(store, Store) or type(store).__name__ == "TorchStore"
    assert handler.shutdown()


def test_corrupt_cell_is_a_state_error_and_stays_as_it_is():
    cell = MemoryCell()
    cell.corrupt(b"somebody else's")
    handler = DynamicRendezvousHandler.from_backend("run", None, cell, 1, 1)
    with pytest.raises(RendezvousStateError, match="remove it"):
        handler.next_rendezvous()
    with pytest.raises(RendezvousStateError):
        handler.set_closed()
    assert cell.get_state()[0] == b"somebody else's"
    assert handler.shutdown() is False


def test_too_few_nodes_are_a_time_out_that_names_those_that_joined():
    timeout = RendezvousTimeout(join=timedelta(seconds=4))
    handler = DynamicRendezvousHandler.from_backend("run", None, MemoryCell(), 2, 2, timeout=timeout)
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2"):
        handler.next_rendezvous()
    assert handler.shutdown()


def test_loss_of_a_node_shows_in_the_number_of_waiting_nodes():
    cell = MemoryCell()
    options = {"keep_alive_interval": 0.5, "last_call_timeout": 1, "admission_window": 0}
    handlers = [DynamicRendezvousHandler.from_backend("run", None, cell, 1, 2, **options) for _ in range(2)]
    infos = together(*handlers)
    assert {info.world_size for info in infos} == {2}
    handlers[0]._handler.abandon()
    until(lambda: handlers[1].num_nodes_waiting() == 1, "the loss is counted")
    assert handlers[1].next_rendezvous().world_size == 1
    assert handlers[1].shutdown()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"run_id": ""}, "run id"),
        ({"min_nodes": 0}, "min_nodes"),
        ({"max_nodes": 1}, "max_nodes"),
        ({"keep_alive_interval": 0}, "keep_alive_interval"),
        ({"backend": object()}, "no name"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_invalid_argument_of_a_dynamic_handler_is_named(change, says):
    arguments = {"run_id": "run", "store": None, "backend": MemoryCell(), "min_nodes": 2, "max_nodes": 2, **change}
    with pytest.raises(ValueError, match=says):
        DynamicRendezvousHandler.from_backend(**arguments)


def test_prefix_store_has_the_methods_of_its_store():
    class Mine:
        def check(self, keys):
            return keys

        def num_keys(self):
            return 7

    store = PrefixStore("p", Mine())
    assert store.check(["a", "b"]) == ["p/a", "p/b"]
    assert store.num_keys() == 7
    assert "p" in repr(store)
    with pytest.raises(AttributeError):
        _ = store.get
    with pytest.raises(AttributeError, match="nonsense"):
        _ = store.nonsense
