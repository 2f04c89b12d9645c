"""The liveness checks raise the error of the missed guarantee, and tolerate stalls of the machine."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from rallypoint.testing.checkers import BrokeAdmission, BrokeCompletion, BrokeDetection
from tests.chaos.liveness import Liveness, Loss, Times
from tests.chaos.plan import draw
from tests.chaos.stalls import Stalls, Waited
from tests.patience import until


@dataclass
class Speaker:
    """A process with its reports."""

    name: str
    facts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def popen(self) -> "Speaker":
        return self

    pid = 0

    def say(self, kind: str, ago_s: float = 0.0, **what: Any) -> None:
        self.facts.append({"kind": kind, "at": time.monotonic() - ago_s, **what})


@dataclass
class Spot:
    """A place with its node."""

    name: str
    node: Speaker
    is_proxied: bool = False


class Scene:
    """A world with the reports of its nodes."""

    def __init__(self, *names: str) -> None:
        self.plan = draw(1, 0, "tcp")
        self.places = [Spot(name, Speaker(name)) for name in names]
        self.server = Speaker("server")
        self.cluster = None

    @property
    def nodes(self) -> list[Speaker]:
        return [place.node for place in self.places]


@pytest.fixture
def stalls():
    one = Stalls()
    yield one
    one.end()


def look(scene: Scene, stalls: Stalls) -> Liveness:
    return Liveness(scene, [stalls], Times())


def test_world_is_settled_when_all_running_nodes_are_in_one_round(stalls):
    scene = Scene("a", "b", "c")
    liveness = look(scene, stalls)
    assert "has said nothing" in liveness.why_unsettled()
    for node in scene.nodes:
        node.say("round", round=4, size=3)
    assert liveness.why_unsettled() is None
    scene.nodes[1].say("changed", round=4, cause="loss")
    assert "2 of 3 are in round 4" in liveness.why_unsettled()
    scene.nodes[1].say("round", round=5, size=3)
    assert "1 of 3 are in round 5" in liveness.why_unsettled()


def test_world_that_does_not_settle_breaks_completion_after_its_bound(stalls, monkeypatch):
    scene = Scene("a", "b", "c")
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr("tests.chaos.liveness.time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("tests.chaos.liveness.time.sleep", lambda seconds: None)
    with pytest.raises(BrokeCompletion, match="0 of 3 are in round 0"):
        look(scene, stalls).settle("after healing")


def told(scene: Scene, stalls: Stalls, died_at: float, bound_s: float) -> float:
    survivor, victim = scene.places
    loss = Loss(victim, 4, died_at, bound_s, "a death is told", Waited([]))
    return look(scene, stalls)._all_told([survivor], loss)


def test_survivor_that_is_told_late_or_never_breaks_detection(stalls):
    scene = Scene("a", "b")
    died_at = time.monotonic() - 30
    with pytest.raises(BrokeDetection, match="not yet"):
        told(scene, stalls, died_at, 1.5)
    scene.nodes[0].say("changed", ago_s=20, round=4, cause="loss")
    with pytest.raises(BrokeDetection, match=r"after 10\.0 s"):
        told(scene, stalls, died_at, 1.5)
    assert told(scene, stalls, died_at, 10.5) == pytest.approx(10, abs=1)


def test_stalls_of_the_server_or_the_survivor_widen_the_bound(stalls):
    scene = Scene("a", "b")
    died_at = time.monotonic() - 30
    scene.server.say("stall", ago_s=25, length_s=3.0)
    scene.server.say("stall", ago_s=25, length_s=1.0, of="disk")
    scene.nodes[0].say("stall", ago_s=24, length_s=5.0)
    scene.nodes[0].say("changed", ago_s=20, round=4, cause="loss")
    assert told(scene, stalls, died_at, 1.5) > 9
    scene.nodes[0].facts[0]["length_s"] = 4.0
    with pytest.raises(BrokeDetection):
        told(scene, stalls, died_at, 1.5)


def test_waiting_for_a_processor_is_measured():
    command = [sys.executable, "-c", "print('ready', flush=True)\nwhile True: pass"]
    busy = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for one in busy:
            assert one.stdout is not None
            assert one.stdout.readline() == b"ready\n"
        waited = Waited([one.pid for one in busy])
        until(lambda: sum(waited.of(one.pid) for one in busy) > 0.1, "a process has waited")
    finally:
        for one in busy:
            one.kill()
            one.communicate()


def test_late_node_that_two_rounds_leave_out_breaks_admission(stalls):
    scene = Scene("a", "b", "c")
    late = scene.places[2]
    began_at = time.monotonic()
    late.node.say("joins")
    for number in (5, 6):
        for node in scene.nodes[: 2 if number == 5 else 3]:
            node.say("round", round=number, size=3)
    look(scene, stalls)._admitted_soon(late, began_at)  # one round was forming when it joined
    late.node.say("round", round=7, size=3)
    with pytest.raises(BrokeAdmission, match=r"after rounds \[5, 6\]"):
        look(scene, stalls)._admitted_soon(late, began_at)
