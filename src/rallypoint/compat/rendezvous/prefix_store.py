"""A caller's store under the prefix of one round: torch's `PrefixStore` for a store of torch, else `PrefixStore`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rallypoint.compat.rendezvous.handlers import torch_is_in_use

_ONE_KEY = frozenset({"set", "get", "add", "compare_set", "delete_key", "append"})
_SEVERAL_KEYS = frozenset({"wait", "check", "multi_get", "multi_set"})


def prefixed(prefix: str, store: Any, owner: object) -> Any:
    """The store under the prefix. Keeps `owner` alive."""
    if torch_is_in_use():
        import torch.distributed as dist

        if isinstance(store, dist.Store):
            return dist.PrefixStore(prefix, store)
    return PrefixStore(prefix, store, owner)


class PrefixStore:
    """As `torch.distributed.PrefixStore`, for any object with the methods of a store."""

    def __init__(self, prefix: str, store: Any, owner: object = None) -> None:
        self._prefix = prefix
        self._store = store
        self._owner = owner

    @property
    def underlying_store(self) -> Any:
        """The store without the prefix."""
        return self._store

    def __getattr__(self, name: str) -> Any:
        if name in _ONE_KEY:
            method = getattr(self._store, name)
            return lambda key, *args, **kwargs: method(self._path(key), *args, **kwargs)
        if name in _SEVERAL_KEYS:
            method = getattr(self._store, name)
            return lambda keys, *args, **kwargs: method(self._paths(keys), *args, **kwargs)
        if name in ("set_timeout", "timeout", "num_keys", "has_extended_api"):
            return getattr(self._store, name)
        raise AttributeError(f"{type(self._store).__name__} under the prefix {self._prefix!r} has no {name!r}")

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _paths(self, keys: Sequence[str]) -> list[str]:
        return [self._path(key) for key in keys]

    def __repr__(self) -> str:
        return f"<PrefixStore {self._prefix!r} of {self._store!r}>"
