"""The checkers' memory as a value, so that it can be a part of a state: which rounds were active, who returned.

The checkers of `rallypoint.testing.checkers` see every commit with its writer and every return. They are put together
from the ledger and the store as it was, asked, and taken apart again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from rallypoint.kv.types import Change, Item
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.testing.checkers import Safety
from rallypoint.testing.exhaustive.server import Server
from rallypoint.testing.exhaustive.symbols import Rev

Ledger: TypeAlias = tuple[Any, ...]
"""For each checker its tables, as sorted tuples."""


class At(NamedTuple):
    """A revision in a ledger."""

    revision: int


class Court:
    """Judges what happens in one world. Remembers its judgements."""

    def __init__(self, keys: RunKeys, min_nodes: int, max_nodes: int) -> None:
        self._keys = keys
        self._make: Callable[[], Safety] = lambda: Safety(keys, min_nodes, max_nodes)
        self._commits: dict[tuple[Ledger, Server, tuple[Change, ...], str], Ledger] = {}
        self._returns: dict[tuple[Ledger, Server, str, tuple[int, int, int]], Ledger] = {}

    def empty(self) -> Ledger:
        """Nothing has happened yet."""
        return _frozen(self._make())

    def committed(self, ledger: Ledger, before: Server, changes: tuple[Change, ...], writer: str) -> Ledger:
        """A revision was committed on this store. Raises what it broke."""
        key = (ledger, before, changes, writer)
        found = self._commits.get(key)
        if found is None:
            safety = self._assembled(ledger, before)
            safety.committed(0, [Change(c.key, self._seen(c.item)) for c in changes], writer)
            found = self._commits[key] = _frozen(safety)
        return found

    def returned(self, ledger: Ledger, server: Server, who: str, joined: tuple[int, int, int]) -> Ledger:
        """A node returned from a round. Raises what it broke."""
        key = (ledger, server, who, joined)
        found = self._returns.get(key)
        if found is None:
            safety = self._assembled(ledger, server)
            number, rank, size = joined
            safety.returned(who, who, Joined(number, rank, size, "", 0, 0, 0))
            found = self._returns[key] = _frozen(safety)
        return found

    def _assembled(self, ledger: Ledger, server: Server) -> Safety:
        safety = self._make()
        for checker, tables in zip(safety.checkers, ledger, strict=True):
            for name, content in tables:
                table = getattr(checker, name)
                table.update({key: _thawed(value) for key, value in content} if isinstance(table, dict) else content)
        for item in server.items:
            safety.picture.apply(Change(item.key, self._seen(item)))
        return safety

    def _seen(self, item: Item | None) -> Item | None:
        """As the checkers see it. Of all revisions they keep only that of `state/closed`; records hold no term here."""
        if item is None:
            return None
        mod_revision = Rev(item.mod_revision) if item.key == self._keys.closed else item.mod_revision
        return Item(item.key, item.value, 0, mod_revision, 1, item.lease)


def renamed(ledger: Ledger, to: Callable[[int], int]) -> Ledger:
    """The ledger as if its revisions had these names."""
    return _renamed(ledger, to) if any(to(at) != at for at in revisions(ledger)) else ledger


def _renamed(part: Any, to: Callable[[int], int]) -> Any:
    if isinstance(part, At):
        return At(to(part.revision))
    return tuple([_renamed(one, to) for one in part]) if type(part) is tuple else part


@cache
def revisions(part: Any) -> frozenset[int]:
    """The revisions in a ledger, or in a part of one."""
    if isinstance(part, At):
        return frozenset({part.revision})
    return frozenset().union(*map(revisions, part)) if type(part) is tuple else frozenset()


def _frozen(safety: Safety) -> Ledger:
    frozen = []
    for checker in safety.checkers:
        tables: list[tuple[str, tuple[Any, ...]]] = []
        for name, table in sorted(vars(checker).items()):
            if isinstance(table, dict):
                tables.append((name, tuple((key, _value(table[key])) for key in sorted(table))))
            elif isinstance(table, set):
                tables.append((name, tuple(sorted(table))))
        frozen.append(tuple(tables))
    return tuple(frozen)


def _value(value: Any) -> Any:
    return At(value.at) if isinstance(value, Rev) else value


def _thawed(value: Any) -> Any:
    return Rev(value.revision) if isinstance(value, At) else value
