"""The history checker finds the broken guarantee in falsified logs, and nothing in correct ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Batch, Change, Item, Put, Txn
from rallypoint.rendezvous.records import NodePhase
from rallypoint.testing.checkers import (
    BrokeAgreement,
    BrokeBarrier,
    BrokeExclusivity,
    BrokeFencing,
    BrokeFinality,
    BrokeFreshness,
    BrokeMonotonicity,
    BrokeOutageTolerance,
    BrokeRanks,
    BrokeRelease,
)
from tests.chaos.history_checker import BrokeStore, Crashed, Fact, History, ProcessLog, check_history
from tests.chaos.server import Audit, AuditLine, Committed, ServerStart, read_audit
from tests.testing.test_checkers import FORMING, KEYS, Scenario


class Recorder:
    """Replaces the checkers and records their input as logs."""

    def __init__(self) -> None:
        self.lines: list[AuditLine] = [ServerStart(0.0, "first", 0)]
        self.facts: dict[str, list[Fact]] = {}
        self.at = 0.0

    def committed(self, revision: int, changes: Any, writer: str = "") -> None:
        self.lines.append(Committed(self.at, Batch(revision, tuple(changes))))

    def returned(self, process: str, node_id: str, joined: Any) -> None:
        self.say(node_id, "round", round=joined.number, rank=joined.rank, size=joined.size, took_s=1.0)

    def say(self, who: str, kind: str, **what: Any) -> None:
        self.at += 1.0
        self.facts.setdefault(who, []).append({"kind": kind, "at": self.at, "id": who, **what})


class Logs(Scenario):
    """A scenario, recorded as logs."""

    def __init__(self) -> None:
        self.recorder = self.safety = Recorder()  # type: ignore[assignment]
        self._revision = 1
        self._created = {}
        self.open()
        self.elect("boss")

    def say(self, who: str, kind: str, **what: Any) -> None:
        self.recorder.say(who, kind, **what)

    def write(self, who: str, number: int) -> None:
        """Write to the store of a round, like the workload."""
        self._revision += 1
        key = f"{KEYS.store(number)}k/own/{who}/0"
        item = Item(key, f"{who} 1".encode(), self._revision, self._revision, 1, 1)
        self.recorder.committed(self._revision, [Change(key, item)])

    def meet(self, number: int, *names: str) -> None:
        for name in names:
            self.say(name, "arrives", round=number, barrier="t")
        for name in names:
            self.say(name, "passed", round=number, barrier="t")

    def judged(self, **more: Any) -> Any:
        nodes = [ProcessLog(name, facts) for name, facts in self.recorder.facts.items()]
        return check_history(History(KEYS, 2, 3, self.recorder.lines, nodes, **{"waits_s": 20.0, **more}))


def good() -> Logs:
    """Two rounds with all kinds of reports."""
    logs = Logs()
    logs.whole_round(1, "a", "b")
    logs.say("a", "members", round=1, members=[["a", "a"], ["b", "b"]])
    logs.write("a", 1)
    logs.say("a", "added", round=1, value=1)
    logs.say("b", "added", round=1, value=2)
    logs.say("b", "store", did="add", round=1, error="OutcomeUnknown", text="", took_s=1.0)
    logs.say("a", "added", round=1, value=4)
    logs.meet(1, "a", "b")
    logs.whole_round(2, "a", "b", "c", join=2)
    return logs


def test_correct_logs_break_nothing():
    findings = good().judged()
    assert (findings.rounds, findings.returns, findings.adds, findings.barriers) == (2, 5, 3, 1)
    assert findings.errors == {"OutcomeUnknown": 1}


def too_few(logs: Logs) -> None:
    logs.node("a", join=3)
    logs.lose("b")
    logs.lose("c")
    logs.form(3, "a", join=3)
    logs.node("a", NodePhase.MEMBER, 3, join=3)
    logs.activate(3, 1)


def returned_from_nothing(logs: Logs) -> None:
    logs.say("a", "round", round=7, rank=0, size=2, took_s=1.0)


def other_rank(logs: Logs) -> None:
    logs.recorder.facts["c"][-1]["rank"] = 0


def other_members(logs: Logs) -> None:
    logs.say("c", "members", round=2, members=[["a", "a"], ["c", "c"]])


def twice_in_a_roster(logs: Logs) -> None:
    for name in "abc":
        logs.node(name, join=3)
    logs.form(3, "a", "b", "a", join=3)


def while_some_are_inside(logs: Logs) -> None:
    logs.node("a", join=3)
    logs.node("b", join=3)
    logs.form(3, "a", "b", join=3)


def number_again(logs: Logs) -> None:
    for name in "abc":
        logs.node(name, join=3)
    logs.form(2, "a", "b", "c", join=2)


def numbers_go_back_for_a_node(logs: Logs) -> None:
    one, two = (fact for fact in logs.recorder.facts["b"] if fact["kind"] == "round")
    one["round"], two["round"] = 2, 1
    one["size"], two["size"] = 3, 2


def without_a_session(logs: Logs) -> None:
    for name in "abc":
        logs.node(name, join=3)
    logs.form(3, "a", "b", "c", join=3)
    logs.node("a", NodePhase.MEMBER, 3, join=3)
    logs.node("b", NodePhase.MEMBER, 3, join=3)
    logs.lose("c")
    logs.activate(3, 3)


def written_by_another_term(logs: Logs) -> None:
    for name in "abc":
        logs.node(name, join=3)
    logs.put("boss", logs.roster(3, "a", "b", "c", join=3), logs.round(3, FORMING, 3, term=1))


def store_of_an_old_round(logs: Logs) -> None:
    logs.write("a", 1)


def active_after_closing(logs: Logs) -> None:
    for name in "abc":
        logs.node(name, join=3)
    logs.form(3, "a", "b", "c", join=3)
    for name in "abc":
        logs.node(name, NodePhase.MEMBER, 3, join=3)
    logs.close()
    logs.activate(3, 3)


def told_and_gone(logs: Logs) -> None:
    logs.recorder.lines.append(ServerStart(99.0, "first", 5, lost=3))


def revision_again(logs: Logs) -> None:
    logs.recorder.lines.append(logs.recorder.lines[-1])


def answered_twice(logs: Logs) -> None:
    logs.recorder.facts["b"][1]["value"] = 1


def counted_too_often(logs: Logs) -> None:
    next(fact for fact in reversed(logs.recorder.facts["a"]) if fact["kind"] == "added")["value"] = 7


def counts_go_back(logs: Logs) -> None:
    first, second = (fact for fact in logs.recorder.facts["a"] if fact["kind"] == "added")
    first["value"], second["value"] = 4, 1


def past_the_barrier(logs: Logs) -> None:
    arrival = next(fact for fact in logs.recorder.facts["b"] if fact["kind"] == "arrives")
    arrival["at"] += 10


def never_came(logs: Logs) -> None:
    logs.recorder.facts["b"] = [fact for fact in logs.recorder.facts["b"] if fact["kind"] != "arrives"]


def read_something_else(logs: Logs) -> None:
    logs.say("a", "mismatch", what="k was 1 and came back as 2")


def waited_for_nobody(logs: Logs) -> None:
    text = "barrier('t') of round 2: 3 of 3 ranks came within 2.4 s; absent: "
    logs.say("a", "store", did="barrier", round=2, error="StoreTimeoutError", text=text, took_s=2.4)


def store_took_too_long(logs: Logs) -> None:
    logs.say("a", "store", did="add", round=2, error="StoreTimeoutError", text="", took_s=13.0)


def waited_too_long(logs: Logs) -> None:
    logs.say("c", "raised", error="RendezvousTimeoutError", text="", took_s=31.0)


FALSIFIED: list[tuple[Callable[[Logs], None], type[AssertionError]]] = [
    (too_few, BrokeBarrier),
    (returned_from_nothing, BrokeBarrier),
    (other_rank, BrokeAgreement),
    (other_members, BrokeAgreement),
    (twice_in_a_roster, BrokeRanks),
    (while_some_are_inside, BrokeExclusivity),
    (number_again, BrokeMonotonicity),
    (numbers_go_back_for_a_node, BrokeMonotonicity),
    (revision_again, BrokeMonotonicity),
    (without_a_session, BrokeFreshness),
    (written_by_another_term, BrokeFencing),
    (store_of_an_old_round, BrokeFencing),
    (active_after_closing, BrokeFinality),
    (told_and_gone, BrokeOutageTolerance),
    (answered_twice, BrokeStore),
    (counted_too_often, BrokeStore),
    (counts_go_back, BrokeStore),
    (past_the_barrier, BrokeStore),
    (never_came, BrokeStore),
    (read_something_else, BrokeStore),
    (waited_for_nobody, BrokeStore),
    (waited_too_long, BrokeRelease),
    (store_took_too_long, BrokeRelease),
]


@pytest.mark.parametrize(("falsify", "broken"), FALSIFIED, ids=[falsify.__name__ for falsify, _ in FALSIFIED])
def test_falsified_logs_break_the_expected_guarantee(falsify, broken):
    logs = good()
    falsify(logs)
    with pytest.raises(AssertionError) as caught:
        logs.judged()
    assert type(caught.value) is broken, caught.value


def test_round_of_an_earlier_store_does_not_count_for_a_store_without_data():
    logs = good()
    logs.recorder.lines.append(ServerStart(50.0, "second", 100))
    logs._created.clear()
    logs._revision = 100
    logs.elect("other")
    for name in "de":
        logs.node(name)
    logs.form(1, "d", "e")
    for name in "de":
        logs.node(name, NodePhase.MEMBER, 1)
    logs.activate(1, 2)
    logs.come_back("d", 1, 0, 2)
    assert logs.judged().rounds == 3


def test_time_in_which_a_process_was_paused_does_not_count_as_waiting():
    logs = good()
    waited_too_long(logs)
    facts = logs.recorder.facts
    at = facts["c"][-1]["at"]
    nodes = [ProcessLog(name, said, stalled=[(at - 10, at)] if name == "c" else []) for name, said in facts.items()]
    assert check_history(History(KEYS, 2, 3, logs.recorder.lines, nodes, waits_s=20.0)).longest_join_s == 21.0


@pytest.mark.parametrize("spoilt", [{"errors": ["Traceback (most recent call last):"]}, {"is_crashed": True}])
def test_crashed_process_is_noticed(spoilt):
    logs = good()
    history = History(KEYS, 2, 3, logs.recorder.lines, [ProcessLog(n, f) for n, f in logs.recorder.facts.items()])
    with pytest.raises(Crashed):
        check_history(replace(history, servers=[ProcessLog("server", [], **spoilt)]))


def test_durable_revision_that_was_not_recorded_before_a_kill_is_recorded_at_the_next_start(tmp_path):
    kept = Engine(first=5)
    audit = Audit(tmp_path / "audit")
    audit.begin("same", kept)
    kept.apply(Txn((), (Put("/a", b"1"),)), 1.0)
    audit.begin("same", kept)  # it was killed before it recorded the write
    kept.apply(Txn((), (Put("/a", b"2"),)), 2.0)
    audit.commit(*kept.history.after(6, ""))
    lines = read_audit(tmp_path / "audit")
    assert [line.revision if isinstance(line, ServerStart) else line.batch.revision for line in lines] == [5, 6, 6, 7]
    history = History(KEYS, 1, 2, lines, ())
    assert check_history(history).commits == 2
