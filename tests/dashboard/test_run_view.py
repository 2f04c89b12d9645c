"""The view of a run: a reader of its differences knows the same as a reader of everything."""

import asyncio
import random

import msgspec
import pytest

from rallypoint.backends.memory import MemoryBackend
from rallypoint.dashboard.run_view import RunView
from rallypoint.dashboard.timeline import MOST_SPANS, MOST_TRACKS, State, Timeline
from rallypoint.dashboard.versioned import MOST_REMOVED, Versioned
from rallypoint.events import JoinStarted, ManyJoined, NodeGone, NodeLeft, NodeLost, RoundActive, RoundOver, WaitingFor
from rallypoint.observe.explain import explain
from rallypoint.observe.follower import Follower, read_report
from rallypoint.observe.phase import Phase
from rallypoint.observe.report import (
    Config,
    Counts,
    Drain,
    Held,
    NodeReport,
    Refusal,
    Report,
    RoundReport,
    Standing,
)
from rallypoint.observe.run_events import RunEvents, SeenEvent
from rallypoint.rendezvous.view import Departure
from tests.rendezvous.kit import CheckedWorld, run_scenario


class Reader:
    """Applies updates as `store.js` does."""

    def __init__(self) -> None:
        self.version = 0
        self.clear()

    def clear(self):
        self.sections, self.nodes, self.tracks, self.lines = {}, {}, {}, []

    def read(self, view):
        message = msgspec.json.decode(msgspec.json.encode(view.since(self.version, 0.0)))
        self.version = message["version"]
        if message.get("full"):
            self.clear()
        self.sections |= {name: message[name] for name in ("state", "rounds") if name in message}
        self.nodes |= {card[0]: (card, self.nodes.get(card[0], (None, None))[1]) for card in message.get("nodes", [])}
        self.nodes |= {spot[0]: (self.nodes[spot[0]][0], spot) for spot in message.get("node_states", [])}
        for node_id in message.get("gone", []):
            self.nodes.pop(node_id, None)  # it may have come and gone since
        for key, name, node_id, rank, spans in message.get("tracks", []):
            before = self.tracks.get(key, (None,) * 4)[3] or []
            self.tracks[key] = (name, node_id, rank, (before + spans)[-MOST_SPANS:])
        for key in message.get("dropped", []):
            self.tracks.pop(key, None)
        self.lines += message.get("lines", [])
        return message

    @property
    def all(self):
        return self.sections, self.nodes, self.tracks, self.lines[-200:]


@pytest.mark.parametrize("seed", range(8))
def test_readers_of_any_pace_see_the_same(seed):
    async def scenario(world: CheckedWorld) -> None:
        rng = random.Random(seed)
        backend = MemoryBackend(world.server)
        view, run_events = RunView("run", "memory://"), RunEvents()
        readers = [Reader() for _ in range(3)]

        async def follow():
            async for report in Follower(backend, world.keys, "memory://", on_changes=run_events.take):
                told, run_events.events = run_events.events, []
                gone, run_events.departures = run_events.departures, []
                view.update(report, told, "", asyncio.get_running_loop().time(), gone)

        task = asyncio.create_task(follow())
        names = [f"n{number}" for number in range(6)]
        for _ in range(30):
            world.random_event(rng, names)
            await asyncio.sleep(rng.choice((0.01, 0.3, 3.0)))
            for reader, share in zip(readers, (1.0, 0.3, 0.05), strict=True):
                if rng.random() < share:
                    reader.read(view)
        await asyncio.sleep(5.0)  # let what is under way come to rest
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        fresh = Reader()
        fresh.read(view)
        for reader in readers:
            reader.read(view)
            assert reader.all == fresh.all
            assert not {"nodes", "node_states", "tracks", "lines"} & reader.read(view).keys()
        report = await read_report(backend, world.keys, "memory://")
        assert fresh.sections["state"]["why"] == explain(report, None).paragraph
        assert {node_id: spot[1] for node_id, (_, spot) in fresh.nodes.items()} == {
            node.id: node.standing.value for node in report.nodes
        }
        await backend.close()

    run_scenario(
        scenario, seed=seed, min_nodes=2, max_nodes=4, last_call_timeout=1, hold_back_losses=2, keep_alive_interval=1
    )


def node(number, standing, join=1, rank=None, name=None):
    return NodeReport(
        id=f"id{number}", name=name or f"n{number}", addr="", standing=standing, join=join, rank=rank, joined_at=5.0
    )


def report(*nodes, number=1, phase=Phase.ACTIVE):
    current = RoundReport(number=number, phase="active", size=2, present=2, why="", addr="", port=0, active_at=8.0)
    return Report(run_id="run", where="memory://", revision=1, phase=phase, round=current, nodes=nodes)


def spans(view):
    return {
        track.name: [(span.at, span.state.value, span.round) for span in track.spans]
        for track in view.since(0, 0.0).tracks
    }


def lost(name):
    return Departure(name, 0.0, 1.0, 1, False, "its session ended")


def seen(at, event, *nodes):
    return SeenEvent(at, event, nodes)


def joins(name):
    return JoinStarted(run_id="run", by=name, join=1)


def active(number, size=2):
    return RoundActive(run_id="run", by="server", round=number, size=size, reason="")


def over(number):
    return RoundOver(run_id="run", by="server", round=number, kind="member lost", reason="")


def test_time_line_has_the_states_of_a_node_over_time():
    view = RunView("run", "memory://")
    view.update(report(node(1, Standing.MEMBER), node(2, Standing.MEMBER), node(3, Standing.WAITING)), [], "", 10.0)
    view.update(
        report(node(1, Standing.MEMBER), node(2, Standing.GONE), node(3, Standing.WAITING)), [], "", 20.0, [lost("n2")]
    )
    both = (node(1, Standing.MEMBER, 2), node(3, Standing.MEMBER, 2))
    view.update(report(*both, number=2), [], "", 30.0)
    assert spans(view) == {
        "n1": [(8.0, "member", 1), (30.0, "member", 2)],
        "n2": [(8.0, "member", 1), (20.0, "lost", 0), (30.0, "out", 0)],
        "n3": [(5.0, "waiting", 0), (30.0, "member", 2)],
    }


def test_details_of_a_node_are_sent_again_only_when_they_have_changed():
    view = RunView("run", "memory://")
    drained = msgspec.structs.replace(node(1, Standing.MEMBER, 2), drain=Drain(by="me", why="", drained_at=None))
    told = []
    for one in (
        node(1, Standing.JOINING),
        node(1, Standing.MEMBER),
        node(1, Standing.GONE),
        node(1, Standing.MEMBER, 2),
        drained,
        msgspec.structs.replace(drained, standing=Standing.GONE, drain=None),
    ):
        before = view.version
        view.update(report(one), [], "", 10.0)
        message = view.since(before, 10.0)
        told.append((len(message.nodes), len(message.node_states)))
    assert told == [(1, 1), (0, 1), (0, 1), (0, 1), (1, 0), (0, 1)]


def test_member_that_went_before_the_view_began_is_not_called_lost():
    view = RunView("run", "memory://")
    view.update(report(node(1, Standing.MEMBER), node(2, Standing.GONE)), [], "", 10.0)
    assert spans(view)["n2"] == [(8.0, "gone", 0)]
    view.update(report(node(1, Standing.MEMBER), number=2), [], "", 12.0)
    assert spans(view)["n2"][-1] == (12.0, "out", 0)


def test_node_that_comes_back_continues_its_track_and_a_second_of_its_name_gets_its_own():
    view = RunView("run", "memory://")
    view.update(report(node(1, Standing.MEMBER, name="a")), [], "", 10.0)
    view.update(report(), [], "", 20.0, [lost("a")])
    again = (node(2, Standing.JOINING, name="a"), node(3, Standing.JOINING, name="a"))
    view.update(report(*again, phase=Phase.GATHERING), [], "", 30.0)
    rows = [[state.state.value for state in track.spans] for track in view.since(0, 0.0).tracks]
    assert rows == [["member", "lost", "out", "joining"], ["joining"]]


def test_node_whose_clock_is_ahead_has_no_span_in_the_future():
    view = RunView("run", "memory://")
    view.update(report(node(1, Standing.WAITING)), [], "", 2.0)
    assert spans(view)["n1"] == [(2.0, "waiting", 0)]


def test_time_line_begins_with_what_happened_before_the_first_viewer():
    view = RunView("run", "memory://")
    past = [
        seen(1.0, joins("a")),
        seen(1.1, joins("b")),
        seen(1.2, joins("c")),
        seen(2.0, active(1), "a", "b"),
        seen(4.0, NodeLost(run_id="run", by="server", node="b", round=1, reason="its session ended")),
        seen(4.5, joins("a")),
        seen(4.5, over(1)),
        seen(5.0, active(2), "a", "c"),
        seen(6.0, NodeGone(run_id="run", by="server", node="c", round=2, reason="it went before")),
        seen(7.0, NodeLeft(run_id="run", by="d", reason="done")),
    ]
    early = Reader()
    early.read(view)
    view.add_past(past, {})
    now = (node(1, Standing.MEMBER, name="a"), node(3, Standing.GONE, name="c"))
    view.update(report(*now, number=2), past, "", 10.0)
    assert spans(view) == {
        "a": [(1.0, "joining", 0), (2.0, "member", 1), (4.5, "joining", 0), (5.0, "member", 2)],
        "b": [(1.1, "joining", 0), (2.0, "member", 1), (4.0, "lost", 0), (4.5, "out", 0)],
        "c": [(1.2, "joining", 0), (2.0, "waiting", 0), (5.0, "member", 2), (6.0, "gone", 0)],
        "d": [(7.0, "left", 0), (7.0, "out", 0)],
    }
    assert [line.at for line in view.since(0, 0.0).lines] == [one.at for one in past]
    early.read(view)
    assert sorted(name for name, *_ in early.tracks.values()) == ["a", "b", "c", "d"]


def test_members_of_a_large_past_round_come_from_its_roster():
    view = RunView("run", "memory://")
    names = [f"n{number}" for number in range(40)]
    many = ManyJoined(run_id="run", by="server", nodes=tuple(names[:32]), count=40)
    view.add_past([seen(1.0, many), seen(2.0, active(1, 40), *names[:32])], {1: names})
    view.update(report(*(node(number, Standing.MEMBER, name=names[number]) for number in range(39))), [], "", 10.0)
    found = spans(view)
    assert found["n0"] == [(1.0, "joining", 0), (2.0, "member", 1)]
    assert found["n38"] == [(2.0, "member", 1)]
    assert found["n39"] == [(2.0, "member", 1), (10.0, "out", 0)], "it is not there any more, and no event says why"


def test_tracks_and_spans_are_bounded():
    timeline = Timeline()
    for number in range(MOST_TRACKS + 10):
        timeline.show(node(number, Standing.JOINING), 0, 1.0, 1, {})
        timeline.hide(f"id{number}", 2.0, 1, {})
    assert len(timeline.tracks) == MOST_TRACKS
    for at in range(2 * MOST_SPANS):
        timeline.show(node("x", (Standing.JOINING, Standing.WAITING)[at % 2]), 0, float(at), at, {})
    (last,) = [track for track in timeline.tracks.changed(-1).values() if track.node_id == "idx"]
    assert len(last.spans) == len(last.versions) == MOST_SPANS
    assert last.spans[-1].state is State.WAITING


def test_each_event_is_a_line_and_waiting_reasons_only_while_no_round_forms_or_is_active():
    waits = seen(None, WaitingFor(run_id="run", by="server", reason="1 of 2"))
    texts = {}
    for phase in (Phase.GATHERING, Phase.FORMING):
        view = RunView("run", "memory://")
        view.update(report(phase=phase), [seen(1.0, joins("a")), waits], "", 2.0)
        texts[phase] = [(line.at, line.text) for line in view.since(0, 0.0).lines]
    assert texts == {
        Phase.GATHERING: [(1.0, "a: asks to join (join 1)"), (2.0, "server: waits: 1 of 2")],
        Phase.FORMING: [(1.0, "a: asks to join (join 1)")],
    }


def state(view):
    return view.since(0, 0.0).state


def test_tiles_and_edge_agree_with_what_is_said():
    view = RunView("run", "memory://")
    whole = report(node(1, Standing.MEMBER), node(2, Standing.MEMBER))
    whole = msgspec.structs.replace(whole, counts=Counts(member=2))
    refused = Refusal(name="odd", why="max_nodes differs", differences={"max_nodes": (8, 4)}, refused_at=9.0)
    held = Held(name="c", is_held=True, losses=3, hold_s=30.0, why="it was lost 3 times")
    cases = {
        "good": whole,
        "look": msgspec.structs.replace(whole, refused=(refused,)),
        "bad": msgspec.structs.replace(whole, phase=Phase.INCOMPLETE, counts=Counts(member=1, gone=1)),
    }
    for edge, one in cases.items():
        view.update(one, [], "", 10.0)
        assert state(view)["edge"] == edge
    view.update(cases["look"], [], "", 10.0)
    assert state(view)["tiles"]["refused"] == 1
    view.update(cases["look"], [], "", 9_999.0)
    assert (state(view)["tiles"]["refused"], state(view)["edge"]) == (0, "good"), "it was long ago"
    waits = msgspec.structs.replace(
        whole, phase=Phase.BELOW_MINIMUM, counts=Counts(joining=1), held=(held,), missing=("b", "c")
    )
    view.update(waits, [], "", 10.0)
    assert {name: count for name, count in state(view)["tiles"].items() if count} == {
        "joining": 1,
        "held back": 1,
        "lost": 2,
    }
    assert state(view)["edge"] == "bad"


def test_commands_to_copy_name_the_run():
    view = RunView("my run", "tcp://head:29400")
    config = Config(incarnation="x", started_by="a", shared={"min_nodes": 2, "max_nodes": 4, "step": 1}, timing={})
    one = msgspec.structs.replace(report(), run_id="my run", where="tcp://head:29400", config=config)
    view.update(one, [], "", 10.0)
    assert [line for _, line in state(view)["commands"]] == [
        "rallypoint why tcp://head:29400/my%20run",
        "rallypoint events tcp://head:29400/my%20run",
        "rallypoint run --url 'tcp://head:29400/my%20run?min_nodes=2&max_nodes=4' PROGRAM",
    ]


def test_outage_is_shown_and_what_was_known_stays():
    view = RunView("run", "memory://")
    view.update(report(node(1, Standing.MEMBER)), [], "", 1.0)
    reader = Reader()
    reader.read(view)
    assert view.fail("nobody answers") is True
    assert view.fail("nobody answers") is False
    reader.read(view)
    assert reader.sections["state"]["trouble"] == "nobody answers"
    assert reader.sections["state"]["phase"] == "active"
    assert list(reader.nodes) == ["id1"]


def test_reader_from_before_the_oldest_remembered_removal_gets_everything():
    one: Versioned[int, str] = Versioned()
    for number in range(MOST_REMOVED + 1):
        one.put(number, "x", number + 1)
        one.remove(number, number + 1)
    assert not one.knows(0)
    assert one.knows(1)
    assert one.put(7, "y", 9) is True
    assert one.put(7, "y", 10) is False
    assert 7 not in one.removed(1)
