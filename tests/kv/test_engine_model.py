"""The engine against the reference model, and properties that hold for any operations."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rallypoint.kv.engine import Engine
from rallypoint.kv.snapshot import restore, snapshot
from rallypoint.kv.types import Batch, Failure, FailureCode, Grant, KeepAlive, Op, Origin, Outcome, Tick, WatchStarted
from tests.kv.model import Model, covered
from tests.kv.strategies import (
    PREFIXES,
    Request,
    endings,
    ops,
    plain_requests,
    prefixes,
    requests,
    waits,
)


class EngineAgainstModel(RuleBasedStateMachine):
    """Every answer and every event of the engine equals the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 1_000
        self.engine = Engine(self.limit)
        self.model = Model(self.limit)
        self.now = 0.0
        self.told: dict[int, list[Batch]] = defaultdict(list)
        self.sent: list[tuple[Op, Origin]] = []
        self.last_seq = {"x": 0, "y": 0}
        self.watch_ids = 0

    @precondition(lambda self: self.model.now < 0)
    @rule(limit=st.sampled_from([0, 1, 2, 5]))
    def begin_with_a_short_history(self, limit: int) -> None:
        self.limit = limit
        self.engine = Engine(limit)
        self.model = Model(limit)
        self.told.clear()
        self.watch_ids = 0

    @rule(op=ops | endings, wait_s=waits)
    def apply_it(self, op: Op, wait_s: float) -> None:
        self.compare(op, wait_s, None)

    @rule(op=ops, client=st.sampled_from(["x", "y"]), gap=st.sampled_from([1, 1, 2]), unacked=st.integers(-1, 4))
    def apply_it_with_an_origin(self, op: Op, client: str, gap: int, unacked: int) -> None:
        self.last_seq[client] += gap
        origin = Origin(client, self.last_seq[client], self.last_seq[client] - unacked)
        self.sent.append((op, origin))
        self.compare(op, 0.0, origin)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), wait_s=waits)
    def send_again(self, data: st.DataObject, wait_s: float) -> None:
        op, origin = data.draw(st.sampled_from(self.sent))
        self.compare(op, wait_s, origin)

    @rule(prefix=prefixes, back=st.integers(-2, 8))
    def watch_from_past_or_future(self, prefix: str, back: int) -> None:
        self.watch_ids += 1
        after = self.model.revision - back
        started = self.engine.watch(self.watch_ids, prefix, after)
        assert started == self.model.watch(self.watch_ids, prefix, after)

    @rule(data=st.data())
    def unwatch_it(self, data: st.DataObject) -> None:
        watch = data.draw(st.integers(0, self.watch_ids))
        self.engine.unwatch(watch)
        self.model.unwatch(watch)

    @rule()
    def restart_from_a_snapshot(self) -> None:
        """Leases are renewed on restore, and watches start again after the last revision they saw."""
        self.engine = restore(snapshot(self.engine), self.model.now, self.limit)
        for lease, (ttl_s, _) in self.model.leases.items():
            self.model.leases[lease] = (ttl_s, self.model.now + ttl_s)
        for watch, (prefix, after) in self.model.watches.items():
            assert self.engine.watch(watch, prefix, max(after, self.model.revision)) == WatchStarted(
                self.model.revision, ()
            )

    def compare(self, op: Op, wait_s: float, origin: Origin | None) -> None:
        self.now += wait_s
        outcome = self.engine.apply(op, self.now, origin)
        wanted = self.model.apply(op, self.now, origin)
        assert (outcome.result.code if isinstance(outcome.result, Failure) else outcome.result) == wanted
        revisions = [event.batch.revision for event in outcome.events]
        assert revisions == sorted(revisions)
        for event in outcome.events:
            self.told[event.watch].append(event.batch)

    @invariant()
    def the_state_is_the_same(self) -> None:
        assert self.engine.revision == self.model.revision
        assert self.engine.items == self.model.items
        assert self.engine.now == self.model.now
        deadlines = [deadline for _, deadline in self.model.leases.values()]
        assert self.engine.next_deadline() == min(deadlines, default=None)

    @invariant()
    def every_watch_was_told_the_same(self) -> None:
        assert {watch: told for watch, told in self.model.told.items() if told} == self.told


EngineAgainstModel.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestEngineAgainstModel = EngineAgainstModel.TestCase


# Properties of any operations


def run(engine: Engine, sent: Iterable[Request], now: float = 0.0) -> list[Outcome]:
    outcomes = []
    for request in sent:
        now += request.wait_s
        outcomes.append(engine.apply(request.op, now, request.origin))
    return outcomes


@given(st.lists(requests, max_size=30))
def test_a_watch_from_any_past_revision_gets_what_one_registered_then_would_have(sent: list[Request]) -> None:
    engine = Engine()
    for number, prefix in enumerate(PREFIXES):
        assert isinstance(engine.watch(number, prefix, 0), WatchStarted)
    told: dict[int, list[Batch]] = defaultdict(list)
    for outcome in run(engine, sent):
        for event in outcome.events:
            told[event.watch].append(event.batch)
    for number, prefix in enumerate(PREFIXES):
        for after in range(engine.revision + 1):
            late = engine.watch(1_000, prefix, after)
            engine.unwatch(1_000)
            assert late == WatchStarted(engine.revision, tuple(covered(told[number], prefix, after)))


@given(st.lists(requests, max_size=30))
def test_the_same_operations_give_the_same_answers_and_the_same_bytes(sent: list[Request]) -> None:
    first, second, watched = Engine(), Engine(), Engine()
    watched.watch(1, "", 0)
    outcomes = run(first, sent)
    assert run(second, sent) == outcomes
    assert [outcome.result for outcome in run(watched, sent)] == [outcome.result for outcome in outcomes]
    assert snapshot(first) == snapshot(second) == snapshot(watched)


@given(st.lists(requests, max_size=20), st.lists(requests, max_size=20), prefixes)
def test_a_restored_engine_behaves_like_the_first(before: list[Request], after: list[Request], prefix: str) -> None:
    first = Engine()
    run(first, [Request(Tick(), 0.0, None), *before])
    for lease in list(first.leases):
        first.apply(KeepAlive(lease.id), first.now)
    second = restore(snapshot(first), first.now)
    assert snapshot(second) == snapshot(first)
    for engine in (first, second):
        engine.watch(1, prefix, first.revision)
    now = first.now
    assert run(first, after, now) == run(second, after, now)
    assert first.next_deadline() == second.next_deadline()
    assert snapshot(first) == snapshot(second)


@given(st.lists(plain_requests, max_size=20), ops, st.integers(0, 20), st.integers(0, 20))
def test_a_request_sent_again_changes_nothing_and_gets_the_same_answer(
    sent: Sequence[Request], op: Op, first_at: int, again_after: int
) -> None:
    engine = Engine()
    engine.watch(1, "", 0)
    origin = Origin("client", 1)
    run(engine, [Request(Tick(), 0.0, None), *sent[:first_at]])
    answer = engine.apply(op, engine.now, origin).result
    run(engine, sent[first_at : first_at + again_after], engine.now)
    before = snapshot(engine)
    deadline = engine.next_deadline()
    assert engine.apply(op, engine.now, origin) == Outcome(answer, ())
    assert snapshot(engine) == before
    assert engine.next_deadline() == deadline


@given(st.lists(plain_requests, max_size=30), st.lists(st.integers(0, 40), min_size=30, max_size=30))
def test_resending_all_requests_at_any_time_gives_the_same_state_as_sending_them_once(
    sent: list[Request], again: list[int]
) -> None:
    once, often = Engine(), Engine()
    numbered = [Request(r.op, r.wait_s, Origin("client", seq)) for seq, r in enumerate(sent, start=1)]
    outcomes = run(once, numbered)
    now = 0.0
    for position, request in enumerate(numbered):
        now += request.wait_s
        assert often.apply(request.op, now, request.origin) == outcomes[position]
        earlier = again[position] % (position + 1)
        repeated = often.apply(numbered[earlier].op, now, numbered[earlier].origin)
        assert repeated == Outcome(outcomes[earlier].result, ())
    assert snapshot(often) == snapshot(once)


@given(st.lists(st.tuples(ops, st.floats(-1e6, 1e6)), max_size=30))
def test_time_never_goes_back(timed: list[tuple[Op, float]]) -> None:
    jumping, steady = Engine(), Engine()
    latest = float("-inf")
    for op, now in timed:
        latest = max(latest, now)
        assert jumping.apply(op, now) == steady.apply(op, latest)
        assert jumping.now == steady.now == latest
        assert jumping.next_deadline() == steady.next_deadline()
    assert snapshot(jumping) == snapshot(steady)


@given(st.lists(requests, max_size=30))
def test_a_refused_operation_changes_nothing(sent: list[Request]) -> None:
    engine, now = Engine(), 0.0
    for request in sent:
        now += request.wait_s
        engine.apply(Tick(), now)
        before = engine.revision, dict(engine.items)
        outcome = engine.apply(request.op, now)
        if isinstance(outcome.result, Failure):
            assert outcome.result.code is not FailureCode.TOO_OLD
            assert outcome.events == ()
            assert (engine.revision, engine.items) == before


@given(st.lists(requests, max_size=30))
def test_every_leased_key_is_removed_when_all_leases_have_ended(sent: list[Request]) -> None:
    engine = Engine()
    run(engine, [Request(Grant(1.0), 0.0, None), *sent])
    unleased = {key: item for key, item in engine.items.items() if not item.lease}
    engine.apply(Tick(), 1e9)
    assert engine.items == unleased
    assert engine.next_deadline() is None
