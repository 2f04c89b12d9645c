"""Torch's names on a real etcd: the registry opens it under the requested backend name and key prefix."""

import pytest

from rallypoint.compat.rendezvous.etcd_rendezvous import create_rdzv_handler
from rallypoint.compat.rendezvous.registry import get_rendezvous_handler
from tests.compat.test_handlers import assert_round_of, parameters


def keys_under(etcd, prefix: str) -> int:
    """The number of keys under a prefix."""
    import base64

    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return int(etcd.ask("kv/range", key=encoded(prefix), range_end=encoded(end), count_only=True).get("count", 0))


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_registry_leads_to_a_real_etcd_under_the_name_that_was_asked_for(etcd, backend):
    prefix = f"/compat/{backend}"
    handlers = [
        get_rendezvous_handler(parameters(backend, etcd.endpoint, etcd_prefix=prefix, protocol="http"))
        for _ in range(2)
    ]
    assert keys_under(etcd, f"{prefix}/run") == 0
    assert_round_of(handlers, backend)
    assert keys_under(etcd, f"{prefix}/run") > 0, "the record of a closed run stays for a while"


def test_handler_of_the_older_module_is_on_the_real_etcd_and_takes_torchs_options(etcd):
    options = {"min_workers": 1, "max_workers": 1, "etcd_prefix": "older/", "timeout": 30}
    handler = create_rdzv_handler(parameters("etcd", etcd.endpoint, 1, **options))
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    info.store.set("key", b"value")
    assert bytes(info.store.get("key")) == b"value"
    assert keys_under(etcd, "/older/run") > 0
    handler.set_closed()
    assert handler.is_closed()
    assert handler.shutdown()
