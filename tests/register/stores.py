"""Torch stores for a `StoreCell`, each as several processes would use it."""

from contextlib import contextmanager
from datetime import timedelta

import pytest

STORES = ("hash", "file", "tcp")


@contextmanager
def store_maker(kind, folder):
    """A function that makes store objects; all of them access the same store."""
    dist = pytest.importorskip("torch.distributed")
    if kind == "hash":
        store = dist.HashStore()
        yield lambda: store
    elif kind == "file":
        yield lambda: dist.FileStore(str(folder / "file store"))
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
        del server
