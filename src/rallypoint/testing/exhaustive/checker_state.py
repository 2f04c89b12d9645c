"""The state of the checkers as a value, so that it can be part of a world's state: active rounds, returned nodes.

The checkers of `rallypoint.testing.checkers` get every commit with its writer and every return. For each of these they
are rebuilt from their state and the store, called, and converted to a value again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from rallypoint.kv.types import Change, Item
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.testing.checkers import Safety
from rallypoint.testing.exhaustive.store_model import StoreState
from rallypoint.testing.exhaustive.symbolic import Rev

CheckerState: TypeAlias = tuple[Any, ...]
"""For each checker its tables, as sorted tuples."""


class At(NamedTuple):
    """A revision in a checker's state."""

    revision: int


class RecordedChecks:
    """Runs the checkers of one world on their recorded states. Caches the results."""

    def __init__(self, keys: RunKeys, min_nodes: int, max_nodes: int) -> None:
        self._keys = keys
        self._make: Callable[[], Safety] = lambda: Safety(keys, min_nodes, max_nodes)
        self._commits: dict[tuple[CheckerState, StoreState, tuple[Change, ...], str], CheckerState] = {}
        self._returns: dict[tuple[CheckerState, StoreState, str, tuple[int, int, int]], CheckerState] = {}

    def empty(self) -> CheckerState:
        """The state of the checkers before the first commit."""
        return _frozen(self._make())

    def committed(
        self, checker_state: CheckerState, before: StoreState, changes: tuple[Change, ...], writer: str
    ) -> CheckerState:
        """The state after a commit on this store. Raises `Broke…` if it breaks a guarantee."""
        key = (checker_state, before, changes, writer)
        found = self._commits.get(key)
        if found is None:
            safety = self._assembled(checker_state, before)
            safety.committed(0, [Change(c.key, self._seen(c.item)) for c in changes], writer)
            found = self._commits[key] = _frozen(safety)
        return found

    def returned(
        self, checker_state: CheckerState, store: StoreState, who: str, joined: tuple[int, int, int]
    ) -> CheckerState:
        """The state after a node returned from a round. Raises `Broke…` if that breaks a guarantee."""
        key = (checker_state, store, who, joined)
        found = self._returns.get(key)
        if found is None:
            safety = self._assembled(checker_state, store)
            number, rank, size = joined
            safety.returned(who, who, Joined(number, rank, size, "", 0, 0, 0))
            found = self._returns[key] = _frozen(safety)
        return found

    def _assembled(self, checker_state: CheckerState, store: StoreState) -> Safety:
        safety = self._make()
        for checker, tables in zip(safety.checkers, checker_state, strict=True):
            for name, content in tables:
                table = getattr(checker, name)
                table.update({key: _thawed(value) for key, value in content} if isinstance(table, dict) else content)
        for item in store.items:
            safety.picture.apply(Change(item.key, self._seen(item)))
        return safety

    def _seen(self, item: Item | None) -> Item | None:
        """The item for the checkers. They keep only one revision, that of `state/closed`; records have no term here."""
        if item is None:
            return None
        mod_revision = Rev(item.mod_revision) if item.key == self._keys.closed else item.mod_revision
        return Item(item.key, item.value, 0, mod_revision, 1, item.lease)


def renamed(checker_state: CheckerState, to: Callable[[int], int]) -> CheckerState:
    """The state with its revisions renamed."""
    return _renamed(checker_state, to) if any(to(at) != at for at in revisions(checker_state)) else checker_state


def _renamed(part: Any, to: Callable[[int], int]) -> Any:
    if isinstance(part, At):
        return At(to(part.revision))
    return tuple([_renamed(one, to) for one in part]) if type(part) is tuple else part


@cache
def revisions(part: Any) -> frozenset[int]:
    """The revisions in a state, or in a part of one."""
    if isinstance(part, At):
        return frozenset({part.revision})
    return frozenset().union(*map(revisions, part)) if type(part) is tuple else frozenset()


def _frozen(safety: Safety) -> CheckerState:
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
