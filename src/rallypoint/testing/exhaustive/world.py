"""The transition function of a tiny world: the store, the processes, and the effect of a choice.

`World.take` executes one choice; for its caller it is a pure function of the state. Deterministic events (see the
package) happen in the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rallypoint.backends.contract import Limits
from rallypoint.kv.types import Change, Get, Grant, KeepAlive, Op, Range, Revoke, Txn
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.settings import Settings
from rallypoint.testing.exhaustive.actors import Actor, CoordinatorActor, Input, NodeActor, OperatorActor
from rallypoint.testing.exhaustive.automaton import Automaton, LocalState
from rallypoint.testing.exhaustive.checker_state import RecordedChecks
from rallypoint.testing.exhaustive.state import Choice, Proc, Setup, State
from rallypoint.testing.exhaustive.store_model import StoreModel, StoreState, is_write
from rallypoint.testing.exhaustive.symbolic import FAR_S

RUN_ID = "run"
NEVER_S = 10 * FAR_S
SPAN, OTHER_LEASES = 1000, 100
"""Lease ids: process * SPAN + n for its n-th session, process * SPAN + OTHER_LEASES + n for its other leases."""
OPERATOR = 9

Listener = Callable[[Any], None]
"""Called with the answer of the store."""


class World:
    """The rules of one setup."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        options: dict[str, Any] = {"min_nodes": setup.min_nodes, "max_nodes": setup.max_nodes, "hold_back_losses": 0}
        for name in ("keep_alive_interval", "join_timeout", "close_timeout", "reopen_after"):
            options[name] = NEVER_S
        self.settings = Settings.build(scheme="memory", run_id=RUN_ID, **options)
        self.keys = RunKeys(self.settings.etcd_prefix, RUN_ID)
        self.names = [chr(ord("a") + index) for index in range(setup.nodes)]
        self.coordinators: list[int] = []
        limits = Limits(max_txn_ops=setup.max_txn_ops)
        makers: list[Callable[[], Actor]] = [
            partial(NodeActor, name, self.settings, has_coordinator=not setup.elected, limits=limits)
            for name in self.names
        ]
        if not setup.elected:
            for index in range(setup.budget.take_over + 1):
                name = f"c{index}"
                self.names.append(name)
                self.coordinators.append(len(makers))
                makers.append(partial(CoordinatorActor, name, self.keys, self.settings.session_ttl_s, limits=limits))
        if setup.budget.close or setup.budget.reopen:
            self.names.append("operator")
            makers.append(partial(OperatorActor, self.settings, self.keys, limits=limits))
        self.automata = [Automaton(make) for make in makers]
        self.store_model = StoreModel(self.keys)
        self.checks = RecordedChecks(self.keys, setup.min_nodes, setup.max_nodes)

    def close(self) -> None:
        """Discard all processes."""
        for automaton in self.automata:
            automaton.close()

    # --- queries ------------------------------------------------------------------------------------------------------

    def local(self, state: State, index: int) -> LocalState | None:
        """The state of a process; None if it is dead."""
        local = state.procs[index].local
        return None if local < 0 else self.automata[index].states[local]

    def requests(self, state: State, index: int) -> tuple[Op, ...]:
        """The unanswered requests of a living process."""
        proc = state.procs[index]
        return self.automata[index].states[proc.local].requests(proc.binding)

    @staticmethod
    def owner_of_session(lease: int) -> int | None:
        """The process whose session a lease is; None: it is not a session."""
        owner, place = divmod(lease, SPAN)
        return owner if place < OTHER_LEASES else None

    # --- the initial state --------------------------------------------------------------------------------------------

    def initial(self) -> State:
        """No node has started; the coordinators have, the first is elected. The run exists unless nodes create it."""
        state = State(StoreState(), tuple(Proc(0) for _ in self.automata), (), self.setup.budget, self.checks.empty())
        if not self.setup.creates_run:
            state = state._replace(store=self._made_run()).compressed()
        for index in self.coordinators:
            state = self._feed(state, index, ("do", "start"))
            while pending := self.requests(state, index):
                state = self._execute(state, index, pending[0], 0, None).compressed()
        for index in self.coordinators:
            while any(queues := state.procs[index].queues):
                place = next(place for place, queue in enumerate(queues) if queue)
                state = self.take(state, ("deliver", index, place, len(queues[place])))
        return state.compressed()

    def _made_run(self) -> StoreState:
        """A store with a run that was created by an operator's tool."""
        actor = OperatorActor(self.settings, self.keys, limits=Limits())
        actor.feed(("do", "make"))
        store, revision = StoreState(), 1
        while actor.backend.requests:
            lease = OPERATOR * SPAN + OTHER_LEASES + len(store.leases)
            applied = self.store_model.apply(store, revision, actor.backend.requests[0].op, lease, ())
            store, revision = applied.store, revision + 1
            actor.feed(("answer", 0, applied.answer))
        actor.discard()
        return store

    # --- transitions --------------------------------------------------------------------------------------------------

    def take(self, state: State, choice: Choice, listener: Listener | None = None) -> State:
        """The state after a choice. Raises `Broke…` if it breaks a guarantee."""
        return self._take(state, choice, listener).compressed()

    def _take(self, state: State, choice: Choice, listener: Listener | None) -> State:
        match choice:
            case ("do", index, place):
                return self._execute(state, index, self.requests(state, index)[place], place, listener)
            case ("answer", index, place):
                answer = next(answer for at, answer in state.procs[index].answers if at == place)
                return self._feed(state, index, ("answer", place, answer))
            case ("deliver", index, place, count):
                queues = list(state.procs[index].queues)
                batches, queues[place] = queues[place][:count], queues[place][count:]
                return self._feed(state.with_changes(index, queues=tuple(queues)), index, ("deliver", place, batches))
            case ("lost", index):
                return self._feed(state, index, ("lost",))
            case ("join", index):
                return self._join(state, index)
            case ("tick", index):
                return self._feed(state, index, ("tick",))
            case ("end", _, lease):
                return self._commit(state, Revoke(lease), None, listener)[0]
            case ("arrive", _, place):
                owner, op = state.ghosts[place]
                ghosts = state.ghosts[:place] + state.ghosts[place + 1 :]
                return self._commit(state._replace(ghosts=ghosts), op, owner, listener)[0]
            case _:
                return self._fault(state, choice, listener)

    def _fault(self, state: State, choice: Choice, listener: Listener | None) -> State:
        match choice:
            case ("crash", index, budget):
                return state.spend(budget).with_proc(index, Proc(-1))
            case ("crash", index, budget, place):
                ghosts = (*state.ghosts, (index, self.requests(state, index)[place]))
                state = state.spend(budget).spend("ghost")._replace(ghosts=ghosts)
                return state.with_proc(index, Proc(-1))
            case ("expire", _, budget, lease):
                return self._commit(state.spend(budget), Revoke(lease), None, listener)[0]
        kind, index = choice[0], choice[1]
        state = state.spend(kind)
        match choice:
            case ("cut", _):
                return self._feed(state, index, ("lost",))
            case ("slow", _):
                return self._feed(state, index, ("tick",))
            case ("leave", _):
                return self._join(state, index)
            case ("depart", _):
                return self._feed(state, index, ("do", "leave"))
            case ("close", _) | ("reopen", _):
                return self._feed(state, index, ("do", kind))
            case ("late", _, place):
                state, answer = self._commit(state, self.requests(state, index)[place], index, listener)
                return state.with_changes(index, answers=(*state.procs[index].answers, (place, answer)))
            case ("unknown", _, place, was_done):
                if was_done:
                    state, _ = self._commit(state, self.requests(state, index)[place], index, listener)
                return self._feed(state, index, ("unknown", place))
            case ("ghost", _, place):
                ghosts = (*state.ghosts, (index, self.requests(state, index)[place]))
                return self._feed(state._replace(ghosts=ghosts), index, ("unknown", place))
            case _:
                raise ValueError(f"no such choice: {choice!r}")

    def _join(self, state: State, index: int) -> State:
        state = state.with_changes(index, joins=state.procs[index].joins + 1)
        return self._feed(state, index, ("do", "join"))

    # --- the store ----------------------------------------------------------------------------------------------------

    def _execute(self, state: State, index: int, op: Op, place: int, listener: Listener | None) -> State:
        state, answer = self._commit(state, op, index, listener)
        return self._feed(state, index, ("answer", place, answer))

    def _commit(self, state: State, op: Op, index: int | None, listener: Listener | None) -> tuple[State, Any]:
        """The store executes a request (`index` None: an expiry); watches get events, the checkers run."""
        watches: list[tuple[int, int, str]] = []
        for owner, proc in enumerate(state.procs):
            if proc.local >= 0:
                prefixes = self.automata[owner].states[proc.local].watches
                watches += [(owner, place, prefix) for place, (prefix, _) in enumerate(prefixes)]
        lease = 0
        if isinstance(op, Grant):
            assert index is not None
            state, lease = self._named(state, index, op)
        prefixes_only = tuple([prefix for _, _, prefix in watches])
        applied = self.store_model.apply(state.store, state.revision, op, lease, prefixes_only)
        before, state = state.store, state._replace(store=applied.store)
        for number, batch in applied.events:
            owner, place, _ = watches[number]
            queues = list(state.procs[owner].queues)
            queues[place] = (*queues[place], batch)
            state = state.with_changes(owner, queues=tuple(queues))
        if listener is not None:
            listener(applied.answer)
        if is_write(op) and applied.store.items != before.items:
            writer = "" if index is None else self.names[index]
            checker_state = self.checks.committed(state.checker_state, before, _changes(before, applied.store), writer)
            state = state._replace(checker_state=checker_state, revision=state.revision + 1)
        return state, applied.answer

    def _named(self, state: State, index: int, op: Grant) -> tuple[State, int]:
        """An id for a lease that does not depend on the requests of other processes."""
        sessions, others = state.procs[index].grants
        if op.ttl_s == self.settings.session_ttl_s:
            sessions += 1
            lease = index * SPAN + sessions
        else:
            others += 1
            lease = index * SPAN + OTHER_LEASES + others
        return state.with_changes(index, grants=(sessions, others)), lease

    # --- the processes ------------------------------------------------------------------------------------------------

    def _feed(self, state: State, index: int, given: Input) -> State:
        """A process handles an input; deterministic requests are answered at once."""
        automaton = self.automata[index]
        while True:
            proc = state.procs[index]
            was = automaton.states[proc.local].status.joined
            step = automaton.step(proc.local, proc.binding, given)
            executed = dict(proc.answers)
            queues = tuple([proc.queues[old] if old >= 0 else () for old in step.watches])
            answers = tuple([(new, executed[old]) for new, old in enumerate(step.requests) if old in executed])
            proc = Proc(step.state, step.binding, queues, answers, proc.grants, proc.joins)
            state = state.with_proc(index, proc)
            joined = automaton.states[step.state].status.joined
            if joined is not None and joined != was:
                checker_state = self.checks.returned(state.checker_state, state.store, self.names[index], joined)
                state = state._replace(checker_state=checker_state)
            requests = self.requests(state, index)
            at_once = next((place for place, op in enumerate(requests) if self._is_at_once(op)), None)
            if at_once is None:
                is_over = automaton.states[step.state].status.is_over and not requests
                return state.with_proc(index, Proc(-1, joins=proc.joins)) if is_over else state
            state, answer = self._commit(state, requests[at_once], index, None)
            given = ("answer", at_once, answer)

    def _is_at_once(self, op: Op) -> bool:
        """Whether the request is answered at once, and is not a choice."""
        match op:
            case Grant() | KeepAlive():
                return True
            case Txn(_, (Range(prefix), *_)) if prefix == self.keys.control:
                return False
            case Txn(_, (Get(key), *_)) if key == self.keys.config:
                return not (self.setup.creates_run or self.setup.budget.close or self.setup.budget.reopen)
            case _:
                return not is_write(op)


def _changes(before: StoreState, after: StoreState) -> tuple[Change, ...]:
    old = {item.key: item for item in before.items}
    new = {item.key: item for item in after.items}
    gone = [Change(key, None) for key in old if key not in new]
    return (*gone, *(Change(key, item) for key, item in new.items() if old.get(key) != item))
