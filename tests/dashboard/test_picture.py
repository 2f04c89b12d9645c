"""What is shown of a run: whoever is told the differences knows what whoever is told everything knows."""

import asyncio
import random

import msgspec
import pytest

from rallypoint.backends.memory import MemoryBackend
from rallypoint.dashboard.picture import FEW, Picture
from rallypoint.dashboard.tracks import MOST_SPANS, MOST_TRACKS, State, Tracks
from rallypoint.dashboard.versioned import MOST_REMOVED, Versioned
from rallypoint.events import JoinStarted, NodeLost, WaitingFor
from rallypoint.observe.explain import explain
from rallypoint.observe.follower import Follower, read_report
from rallypoint.observe.report import Drain, NodeReport, Phase, Report, RoundReport, Standing
from rallypoint.observe.run_events import RunEvents
from tests.rendezvous.kit import Town, play


class Reader:
    """A page, as `store.js` is one."""

    def __init__(self) -> None:
        self.version = 0
        self.clear()

    def clear(self):
        self.sections, self.nodes, self.tracks, self.lines = {}, {}, {}, []

    def read(self, picture):
        message = msgspec.json.decode(msgspec.json.encode(picture.since(self.version, 0.0)))
        self.version = message["version"]
        if message.get("full"):
            self.clear()
        self.sections |= {name: message[name] for name in ("state", "rounds") if name in message}
        self.nodes |= {card[0]: (card, self.nodes.get(card[0], (None, None))[1]) for card in message.get("nodes", [])}
        self.nodes |= {spot[0]: (self.nodes[spot[0]][0], spot) for spot in message.get("spots", [])}
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
    async def scene(town: Town) -> None:
        rng = random.Random(seed)
        backend = MemoryBackend(town.server)
        picture, run_events = Picture("run", "memory://"), RunEvents()
        readers = [Reader() for _ in range(3)]

        async def follow():
            async for report in Follower(backend, town.keys, "memory://", on_changes=run_events.take):
                told, run_events.events = run_events.events, []
                picture.update(report, told, "", asyncio.get_running_loop().time())

        task = asyncio.create_task(follow())
        names = [f"n{number}" for number in range(6)]
        for _ in range(30):
            town.stir(rng, names)
            await asyncio.sleep(rng.choice((0.01, 0.3, 3.0)))
            for reader, share in zip(readers, (1.0, 0.3, 0.05), strict=True):
                if rng.random() < share:
                    reader.read(picture)
        await asyncio.sleep(5.0)  # let what is under way come to rest
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        fresh = Reader()
        fresh.read(picture)
        for reader in readers:
            reader.read(picture)
            assert reader.all == fresh.all
            assert not {"nodes", "spots", "tracks", "lines"} & reader.read(picture).keys()
        report = await read_report(backend, town.keys, "memory://")
        assert fresh.sections["state"]["why"] == explain(report).paragraph
        assert {node_id: spot[1] for node_id, (_, spot) in fresh.nodes.items()} == {
            node.id: node.standing.value for node in report.nodes
        }
        await backend.close()

    play(scene, seed=seed, min_nodes=2, max_nodes=4, last_call_timeout=1, hold_back_losses=2, keep_alive_interval=1)


def node(number, standing, join=1, rank=None, name=None):
    return NodeReport(
        id=f"id{number}", name=name or f"n{number}", addr="", standing=standing, join=join, rank=rank, joined_at=5.0
    )


def report(*nodes, number=1, phase=Phase.ACTIVE):
    current = RoundReport(number=number, phase="active", size=2, present=2, why="", addr="", port=0, active_at=8.0)
    return Report(run_id="run", where="memory://", revision=1, phase=phase, round=current, nodes=nodes)


def spans(picture):
    return {
        track.name: [(span.at, span.state.value, span.round) for span in track.spans]
        for track in picture.since(0, 0.0).tracks
    }


def lost(name):
    return NodeLost(run_id="run", by="server", node=name, round=1, reason="its session ended")


def test_time_line_tells_when_a_node_was_what():
    picture = Picture("run", "memory://")
    picture.update(report(node(1, Standing.MEMBER), node(2, Standing.MEMBER), node(3, Standing.WAITING)), [], "", 10.0)
    picture.update(
        report(node(1, Standing.MEMBER), node(2, Standing.GONE), node(3, Standing.WAITING)), [lost("n2")], "", 20.0
    )
    both = (node(1, Standing.MEMBER, 2), node(3, Standing.MEMBER, 2))
    picture.update(report(*both, number=2), [], "", 30.0)
    assert spans(picture) == {
        "n1": [(8.0, "member", 1), (30.0, "member", 2)],
        "n2": [(8.0, "member", 1), (20.0, "lost", 0), (30.0, "out", 0)],
        "n3": [(5.0, "waiting", 0), (30.0, "member", 2)],
    }


def test_who_a_node_is_is_told_again_only_when_that_has_changed():
    picture = Picture("run", "memory://")
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
        before = picture.version
        picture.update(report(one), [], "", 10.0)
        message = picture.since(before, 10.0)
        told.append((len(message.nodes), len(message.spots)))
    assert told == [(1, 1), (0, 1), (0, 1), (0, 1), (1, 0), (0, 1)]


def test_member_that_went_unseen_is_not_called_lost():
    picture = Picture("run", "memory://")
    picture.update(report(node(1, Standing.MEMBER), node(2, Standing.GONE)), [], "", 10.0)
    assert spans(picture)["n2"] == [(8.0, "gone", 0)]
    picture.update(report(node(1, Standing.MEMBER), number=2), [], "", 12.0)
    assert spans(picture)["n2"][-1] == (12.0, "out", 0)


def test_node_that_comes_back_goes_on_in_its_row_and_a_twin_gets_its_own():
    picture = Picture("run", "memory://")
    picture.update(report(node(1, Standing.MEMBER, name="a")), [], "", 10.0)
    picture.update(report(), [lost("a")], "", 20.0)
    again = (node(2, Standing.JOINING, name="a"), node(3, Standing.JOINING, name="a"))
    picture.update(report(*again, phase=Phase.GATHERING), [], "", 30.0)
    rows = [[state.state.value for state in track.spans] for track in picture.since(0, 0.0).tracks]
    assert rows == [["member", "lost", "out", "joining"], ["joining"]]


def test_clock_of_a_node_that_is_ahead_does_not_reach_into_the_future():
    picture = Picture("run", "memory://")
    picture.update(report(node(1, Standing.WAITING)), [], "", 2.0)
    assert spans(picture)["n1"] == [(2.0, "waiting", 0)]


def test_round_before_is_remembered():
    picture = Picture("run", "memory://")
    picture.remember(1, ["a", "b"], 1.0, 4.0)
    picture.update(report(node(1, Standing.MEMBER, name="a"), number=2), [], "", 10.0)
    assert spans(picture) == {
        "a": [(1.0, "member", 1), (4.0, "out", 0), (8.0, "member", 2)],
        "b": [(1.0, "member", 1), (4.0, "out", 0)],
    }


def test_rows_and_spans_are_bounded():
    tracks = Tracks()
    for number in range(MOST_TRACKS + 10):
        tracks.show(node(number, Standing.JOINING), 0, 1.0, 1, {})
        tracks.hide(f"id{number}", 2.0, 1, {})
    assert len(tracks.rows) == MOST_TRACKS
    for at in range(2 * MOST_SPANS):
        tracks.show(node("x", (Standing.JOINING, Standing.WAITING)[at % 2]), 0, float(at), at, {})
    (last,) = [track for track in tracks.rows.changed(-1).values() if track.node_id == "idx"]
    assert len(last.spans) == len(last.versions) == MOST_SPANS
    assert last.spans[-1].state is State.WAITING


def test_many_events_of_a_kind_are_one_line():
    picture = Picture("run", "memory://")
    picture.update(report(phase=Phase.GATHERING), [], "", 1.0)
    joins = [JoinStarted(run_id="run", by=f"n{number}", join=1) for number in range(900)]
    waits = WaitingFor(run_id="run", by="server", reason="900 of 1000")
    picture.update(report(phase=Phase.GATHERING), [*joins, waits, *(lost(f"n{n}") for n in range(FEW))], "", 2.0)
    texts = [line.text for line in picture.since(0, 0.0).lines]
    assert texts[0] == "900 nodes ask to join: n0, n1, n2, n3, n4 and 895 more"
    assert texts[1] == "server: waits: 900 of 1000"
    assert len(texts) == 2 + FEW


def test_trouble_is_shown_and_what_was_known_stays():
    picture = Picture("run", "memory://")
    picture.update(report(node(1, Standing.MEMBER)), [], "", 1.0)
    reader = Reader()
    reader.read(picture)
    assert picture.fail("nobody answers") is True
    assert picture.fail("nobody answers") is False
    reader.read(picture)
    assert reader.sections["state"]["trouble"] == "nobody answers"
    assert reader.sections["state"]["phase"] == "active"
    assert list(reader.nodes) == ["id1"]


def test_reader_from_before_what_is_remembered_gets_everything():
    one: Versioned[int, str] = Versioned()
    for number in range(MOST_REMOVED + 1):
        one.put(number, "x", number + 1)
        one.remove(number, number + 1)
    assert not one.knows(0)
    assert one.knows(1)
    assert one.put(7, "y", 9) is True
    assert one.put(7, "y", 10) is False
    assert 7 not in one.removed(1)
