"""The types of the public interface, and the cost of importing the package."""

import socket

import pytest

from rallypoint.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo, free_port
from tests.patience import script


class DictStore(dict):
    """The part of the store interface that `build` uses."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]


# --- bootstrap --------------------------------------------------------------------------------------------------------


def test_rank_zero_publishes_and_all_ranks_read():
    store = DictStore()
    assert RendezvousStoreInfo.build(0, store, "10.1.2.3", 4321) == RendezvousStoreInfo("10.1.2.3", 4321)
    assert store == {"MASTER_ADDR": b"10.1.2.3", "MASTER_PORT": b"4321"}
    assert RendezvousStoreInfo.build(1, store, "ignored", 1) == RendezvousStoreInfo("10.1.2.3", 4321)


def test_default_address_is_the_fqdn_and_default_port_is_free():
    info = RendezvousStoreInfo.build(0, DictStore())
    assert info.master_addr == socket.getfqdn()
    with socket.socket() as server:
        server.bind(("", info.master_port))  # it is free


def test_port_zero_is_kept_as_it_was_given():
    assert RendezvousStoreInfo.build(0, DictStore(), "here", 0).master_port == 0


def test_store_info_is_a_value():
    info = RendezvousStoreInfo("a", 1)
    assert {info, RendezvousStoreInfo("a", 1)} == {info}
    with pytest.raises(AttributeError):
        info.master_port = 2
    assert (RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY) == ("MASTER_ADDR", "MASTER_PORT")


def test_free_ports_can_be_bound():
    for _ in range(20):
        with socket.socket() as server:
            server.bind(("", free_port()))


# --- info and handler -------------------------------------------------------------------------------------------------


def test_members_are_read_once_at_first_use():
    reads = []
    info = RendezvousInfo(None, 1, 2, RendezvousStoreInfo("a", 1), 3, lambda: reads.append(True) or ("x", "y"))
    assert (info.rank, info.world_size, info.round, info.store) == (1, 2, 3, None)
    assert reads == []
    assert info.members == info.members == ("x", "y")
    assert reads == [True]
    assert repr(info) == "<RendezvousInfo round=3 rank=1 world_size=2>"


def test_handler_interface_has_the_methods_of_torchs():
    assert RendezvousHandler.__abstractmethods__ == {
        "get_backend",
        "get_run_id",
        "is_closed",
        "next_rendezvous",
        "num_nodes_waiting",
        "set_closed",
        "shutdown",
    }
    assert isinstance(RendezvousHandler.use_agent_store, property)


# --- importing --------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_heavy_and_starts_nothing():
    done = script(
        """
        import sys
        import threading
        import rallypoint
        import rallypoint.aio
        heavy = {"torch", "grpc", "google.protobuf", "click", "rich", "starlette", "uvicorn", "prometheus_client"}
        heavy |= {"jax", "numpy", "pytest", "hypothesis", "multiprocessing", "rallypoint.testing", "rallypoint.cli"}
        print(sorted(heavy & set(sys.modules)), threading.active_count())
        """
    )
    assert done.stdout == "[] 1\n"
