"""What a process is, as a value: two processes with equal fingerprints behave alike from here on.

It is found by walking everything that the process's tasks and timers can reachability: objects, containers, suspended
coroutines with their live variables, futures. No class of the algorithm is known here, so none can be forgotten. What
is left out is what cannot change behaviour: sentences for people, events, names of tasks, reports. Revisions count by
their order, instants by their distance from now.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import gc
import hashlib
import random
from collections import deque
from contextvars import Context, ContextVar
from functools import cache, partial
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import msgspec

from rallypoint.backends.contract import Limits
from rallypoint.events import Emitter
from rallypoint.kv.types import Put
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Identity
from rallypoint.rendezvous.rules import Rules
from rallypoint.settings import Settings, Timing
from rallypoint.testing.exhaustive.liveness import live_after
from rallypoint.testing.exhaustive.symbols import FAR_S, Moment, Rev
from rallypoint.testing.exhaustive.words import WORDS, wordless

LONG_AGO_S = 100.0
"""No rule looks back further than that."""

IGNORED: dict[str, frozenset[str]] = {
    "View": frozenset({"revision", "departures", "facts", "started_at"}),
    "SeenNode": frozenset({"joined_at"}),
    "Plan": frozenset({"last_confirmed"}),
    "Reports": frozenset({"_active_since", "_arrivals", "_first_arrival", "_gather_s", "_last_call_s"}),
    "HistoryRecord": frozenset(
        {"formed_at", "gather_s", "last_call_s", "confirm_s", "first_arrival", "last_arrivals", "last_confirmed"}
        | {"lasted_s"}
    ),
    "WatchedKeys": frozenset({"items"}),
    "Node": frozenset({"_listener"}),
}
"""What no decision reads, by class. A watch's items are what its owner has decoded from them."""
_ATOMS = (str, bytes, bool, int, type(None))
_OPAQUE = (
    *(type, ModuleType, CodeType, FrameType, Context, ContextVar, Emitter),
    *(asyncio.AbstractEventLoop, random.Random),
    *(Settings, Identity, RunKeys, Rules, Timing, Limits),  # the same in all states of a world
)
_EMPTY: tuple[Any, ...] = ((), [], {}, {}.values(), {}.items(), range(0), set())
_ITERATORS = tuple(type(iter(one)) for one in _EMPTY)
_VALUES = (msgspec.Struct, tuple, enum.Enum)


class Fingerprint:
    """The walk over one process at one moment. `digest` is its fingerprint, `revs` its revisions in order."""

    def __init__(self, roots: list[Any], now: float) -> None:
        self._now = now
        self._tokens: list[Any] = []
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []
        self._revs: dict[int, Rev] = {}
        for root in roots:
            self._walk(root)
        self.revs = sorted(self._revs.values(), key=lambda rev: rev.at)
        rank = {rev.at: index for index, rev in enumerate(self.revs)}
        tokens = [("rev", rank[token.at]) if isinstance(token, Rev) else token for token in self._tokens]
        self.digest = hashlib.blake2b(msgspec.msgpack.encode(tokens), digest_size=16).digest()

    def _emit(self, *tokens: Any) -> None:
        self._tokens.extend(tokens)

    def _walk(self, thing: Any) -> None:
        kind: Any = type(thing)
        if kind in _ATOMS:
            self._tokens.append(thing)
        elif kind is Rev:
            self._revs[thing.at] = thing
            self._tokens.append(thing)
        elif isinstance(thing, float):
            self._tokens.append(self._distance(thing) if kind is Moment else thing)
        elif isinstance(thing, _OPAQUE):
            self._emit("opaque", kind.__name__)
        elif isinstance(thing, BaseException):
            self._emit("error", kind.__name__)
        elif isinstance(thing, _VALUES) or _is_frozen(kind):
            self._walk_content(thing, kind)
        elif id(thing) in self._seen:
            self._emit("again", self._seen[id(thing)])
        else:
            self._seen[id(thing)] = len(self._seen)
            self._held.append(thing)
            self._walk_content(thing, kind)

    def _distance(self, moment: float) -> float | str:
        away_s = round(float(moment) - self._now, 6)
        if away_s > FAR_S:
            return "far"
        return away_s if away_s > -LONG_AGO_S else "long ago"

    def _walk_content(self, thing: Any, kind: type) -> None:
        if isinstance(thing, enum.Enum):
            self._emit(kind.__name__, thing.name)
        elif kind is Put:
            self._emit("put", thing.key, wordless(thing.value), thing.lease)
        elif isinstance(thing, dict):
            self._emit("dict", len(thing))
            for key, value in thing.items():
                self._walk(key)
                self._walk(value)
        elif isinstance(thing, list | tuple | deque):
            self._emit(kind.__name__, len(thing))
            for part in thing:
                self._walk(part)
        elif isinstance(thing, set | frozenset):
            self._emit("set", len(thing))
            for part in sorted(thing):
                self._walk(part)
        elif isinstance(thing, asyncio.Future):
            self._walk_future(thing)
        elif isinstance(thing, CoroutineType | GeneratorType | AsyncGeneratorType):
            self._walk_suspended(thing)
        elif isinstance(thing, asyncio.Handle):
            self._walk_handle(thing)
        else:
            self._walk_other(thing, kind)

    def _walk_other(self, thing: Any, kind: type) -> None:
        if isinstance(thing, FunctionType):
            self._emit("function", thing.__qualname__)
            self._walk(thing.__defaults__)
            self._walk(thing.__closure__)
        elif isinstance(thing, MethodType | BuiltinFunctionType):
            self._emit("method", thing.__name__)
            self._walk(thing.__self__)
        elif isinstance(thing, partial):
            self._walk((thing.func, thing.args, thing.keywords))
        elif isinstance(thing, CellType):
            self._emit("cell")
            try:
                self._walk(thing.cell_contents)
            except ValueError:
                self._emit("empty")
        elif isinstance(thing, _ITERATORS):
            self._walk(thing.__reduce__()[1:])
        elif (names := _attributes(kind)) is not None or hasattr(thing, "__dict__"):
            self._walk_object(thing, kind, names or ())
        else:  # something of the interpreter
            self._emit("other", kind.__name__)
            for part in gc.get_referents(thing):
                self._walk(part)

    def _walk_object(self, thing: Any, kind: type, names: tuple[str, ...]) -> None:
        self._emit("object", kind.__qualname__)
        ignored = IGNORED.get(kind.__name__, frozenset())
        for name in (*names, *sorted(getattr(thing, "__dict__", ()))):
            if name not in ignored and hasattr(thing, name):
                value = getattr(thing, name)
                self._tokens.append(name)
                self._walk(value if name not in WORDS or value is None else bool(value))

    def _walk_future(self, future: asyncio.Future[Any]) -> None:
        inner: Any = future
        self._emit("future", inner._state)
        if isinstance(future, asyncio.Task) and not future.done():
            self._emit(future.cancelling(), inner._must_cancel)
            self._walk(future.get_coro())
        if future.done() and not future.cancelled():
            self._walk(inner._exception if inner._exception is not None else inner._result)
        for callback, _ in inner._callbacks or ():
            self._walk(callback)

    def _walk_handle(self, handle: asyncio.Handle) -> None:
        """What is cancelled, and what is due only when nobody looks any more, is as good as nothing."""
        inner: Any = handle
        is_far = isinstance(handle, asyncio.TimerHandle) and handle.when() - self._now > FAR_S
        if handle.cancelled() or is_far:
            self._emit(None)
            return
        self._emit("handle")
        if isinstance(handle, asyncio.TimerHandle):
            self._walk(handle.when())
        self._walk(inner._callback)
        self._walk(inner._args)

    def _walk_suspended(self, suspended: Any) -> None:
        """A coroutine by where it stands, its live variables and what is on its stack, in the interpreter's order."""
        prefix = {CoroutineType: "cr", GeneratorType: "gi"}.get(type(suspended), "ag")
        frame = getattr(suspended, f"{prefix}_frame")
        if frame is None:
            self._emit("ended", suspended.__qualname__)
            return
        code = frame.f_code
        self._emit("suspended", code.co_qualname, frame.f_lasti)
        held = frame.f_locals
        live = live_after(code, frame.f_lasti)
        dead = [held[name] for name in code.co_varnames if name in held and name not in live | _cells(code)]
        left_out = {id(part): 0 for part in dead}
        for part in (suspended.__name__, suspended.__qualname__, *dead):
            left_out[id(part)] = left_out.get(id(part), 0) + 1
        for part in gc.get_referents(suspended):
            if left_out.get(id(part), 0) > 0:
                left_out[id(part)] -= 1
            elif part is not held and not isinstance(part, CodeType | FrameType) and not _is_own(part, code):
                self._walk(part)


def _is_own(part: Any, code: CodeType) -> bool:
    return isinstance(part, FunctionType) and part.__code__ is code


@cache
def _cells(code: CodeType) -> frozenset[str]:
    return frozenset(code.co_cellvars)


@cache
def _is_frozen(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return dataclasses.is_dataclass(kind) and parameters is not None and bool(parameters.frozen)


@cache
def _attributes(kind: type) -> tuple[str, ...] | None:
    """The slots of a class, or the fields of a struct; None if it has none."""
    fields = getattr(kind, "__struct_fields__", None)
    if fields is not None:
        return tuple(fields)
    names: list[str] = []
    found = False
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__")
        if slots is not None:
            found = True
            names += [slots] if isinstance(slots, str) else [slot for slot in slots if not slot.startswith("__")]
    return tuple(names) if found else None
