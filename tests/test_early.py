"""Callers that find their place by themselves, through the blocking API on a real server."""

import socket
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import rallypoint
from rallypoint import _background
from rallypoint._marks import collect
from rallypoint.backends import tcp_pledge
from rallypoint.backends.tcp import TcpBackend
from rallypoint.backends.tcp_lane import Practice
from rallypoint.errors import Unavailable
from rallypoint.kv.types import Grant, Put, Revoke, Txn
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import NodePhase, NodeRecord, decode, encode
from tests.patience import PATIENCE_S, in_thread, result_of, until
from tests.server.threaded import House

KEYS = RunKeys("rallypoint", "run")
LAPSED = -1.0


@pytest.mark.parametrize("counts", [True, False], ids=["confirmed beforehand", "asked"])
def test_callers_that_have_waited_find_their_place_by_themselves_and_know_as_much_as_any_other(counts, monkeypatch):
    if not counts:
        monkeypatch.setattr(tcp_pledge, "PLEDGED_S", LAPSED)
    with House() as house:
        hits = collect()
        handlers = [
            rallypoint.create_handler(f"tcp://127.0.0.1:{house.port}/run?min_nodes=3&name=n{number}&admission_window=0")
            for number in range(3)
        ]
        try:
            for round_number in (1, 2):
                calls = [in_thread(handler.next_rendezvous) for handler in handlers[:2]]
                until(lambda: _standing(house) == 2, "two wait on connections of their own")
                worlds = [handlers[2].next_rendezvous(), *(result_of(call) for call in calls)]
                assert {world.round for world in worlds} == {round_number}
                assert sorted(world.rank for world in worlds) == [0, 1, 2]
                assert len({tuple(member.id for member in world.members) for world in worlds}) == 1
                assert len({(info.master_addr, info.master_port) for info in map(_bootstrap, worlds)}) == 1
                assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0, 0]
                assert not any(world.changed.is_set() for world in worlds)
                zero = next(world for world in worlds if world.rank == 0)
                socket.create_server(("", _bootstrap(zero).master_port)).close()  # whoever needs the port can have it
                for world in worlds:
                    world.store.set(f"rank{world.rank}", b"here")
                worlds[0].store.wait(["rank0", "rank1", "rank2"], 10.0)
            assert "express.entered_elsewhere" in hits
            assert ("pledges.written" in hits) is counts
            handlers[0].leave()
            for world in worlds[1:]:
                assert world.changed.wait(PATIENCE_S)
        finally:
            for handler in handlers:
                handler.close()


@contextmanager
def two_who_have_confirmed():
    """Two callers whose places in an attempt were confirmed beforehand, and a third member that never confirms."""
    with House() as house:
        url = f"tcp://127.0.0.1:{house.port}/run?min_nodes=3&admission_window=0&confirm_timeout=60&name="
        handlers = [rallypoint.create_handler(f"{url}{name}") for name in "abc"]
        try:
            calls = [in_thread(handler.next_rendezvous) for handler in handlers[:2]]
            until(lambda: _standing(house) == 2, "two wait on connections of their own")
            lease = house.ask(lambda: house.server.hub.execute(Grant(60.0))).lease
            record = NodeRecord(id="ghost", name="ghost", addr="", session=lease, join=1, phase=NodePhase.JOINING)
            house.ask(lambda: house.server.hub.execute(Txn((), (Put(KEYS.node("ghost"), encode(record), lease),))))
            until(lambda: _members(house) == ["a", "b"], "they are confirmed")
            yield house, handlers, calls, lambda: house.ask(lambda: house.server.hub.execute(Revoke(lease)))
        finally:
            for handler in handlers:
                handler.close()


def _members(house):
    """The names of those who have confirmed a place."""
    items = house.ask(lambda: [item for key, item in house.items.items() if key.startswith(KEYS.nodes)])
    records = [decode(NodeRecord, item) for item in items]
    return sorted(record.name for record in records if record.phase is NodePhase.MEMBER)


@pytest.mark.parametrize("knows", [True, False])
def test_an_attempt_that_comes_to_nothing_is_followed_by_another_whoever_knows_of_its_confirmation(knows):
    hits = collect()
    with two_who_have_confirmed() as (_, handlers, calls, give_up):
        if knows:
            until(lambda: "presence.found_out" in hits, "a node has found out")
        give_up()
        last = in_thread(handlers[2].next_rendezvous)
        worlds = [result_of(call) for call in (*calls, last)]
        assert {world.round for world in worlds} == {2}
        assert sorted(world.rank for world in worlds) == [0, 1, 2]
        for world in worlds:
            world.store.set(f"rank{world.rank}", b"here")
        worlds[0].store.wait(["rank0", "rank1", "rank2"], 10.0)


def test_whoever_cannot_ask_whether_its_place_was_confirmed_asks_again(monkeypatch):
    asked = []
    get = TcpBackend.get

    async def cut_once(backend, key):
        if KEYS.nodes in key and key not in asked:
            asked.append(key)
            raise Unavailable("cut, once")
        return await get(backend, key)

    monkeypatch.setattr(TcpBackend, "get", cut_once)
    hits = collect()
    with two_who_have_confirmed() as (house, *_):
        until(lambda: asked and "presence.found_out" in hits, "it has asked again")
        assert _members(house) == ["a", "b"]
        records = house.ask(lambda: [item for key, item in house.items.items() if key.startswith(KEYS.nodes)])
        assert {decode(NodeRecord, item).join for item in records} == {1}, "nobody joined anew"


@pytest.mark.parametrize("knows", [True, False])
def test_one_whose_place_was_confirmed_beforehand_can_leave_all_the_same(knows):
    hits = collect()
    with two_who_have_confirmed() as (house, handlers, calls, give_up):
        if knows:
            until(lambda: "presence.found_out" in hits, "a node has found out")
        handlers[0].leave("it goes")
        give_up()
        with pytest.raises(rallypoint.RendezvousError, match="it goes"):
            result_of(calls[0])
        assert _members(house) == ["b"]
        again = [in_thread(handler.next_rendezvous) for handler in (handlers[0], handlers[2])]
        assert len({result_of(call).round for call in (*again, calls[1])}) == 1, "it may come again"


@pytest.mark.parametrize("warm_for_s", [60.0, 0.0])
def test_a_caller_that_waits_practises_for_a_while_and_finds_its_place_all_the_same(monkeypatch, warm_for_s):
    monkeypatch.setattr(_background, "WARM_S", 0.01)
    monkeypatch.setattr(_background, "WARM_FOR_S", warm_for_s)
    went_well = []
    practised = Practice.goes_well
    monkeypatch.setattr(Practice, "goes_well", lambda *args: went_well.append(practised(*args)) or went_well[-1])
    with House() as house:
        first, second = (
            rallypoint.create_handler(f"tcp://127.0.0.1:{house.port}/run?min_nodes=2&name=n{number}")
            for number in (0, 1)
        )
        try:
            call = in_thread(first.next_rendezvous)
            until(lambda: _standing(house) == 1, "it waits on a connection of its own")
            if warm_for_s:
                until(lambda: len(went_well) > 5, "it practises")
            else:
                time.sleep(0.1)  # ten times as long as it would take
                assert not went_well
            ranks = {second.next_rendezvous().rank, result_of(call).rank}
            assert ranks == {0, 1}
            assert all(went_well[:5])
        finally:
            for handler in (first, second):
                handler.close()


@pytest.mark.parametrize(
    ("takes_s", "is_standing", "pause_s"), [(0.0, True, 50.0), (3.0, True, 400.0), (0.0, False, 1000.0)]
)
def test_practice_that_takes_long_is_put_off(monkeypatch, takes_s, is_standing, pause_s):
    clock = SimpleNamespace(now=100.0)

    def practise(bell):
        clock.now += takes_s

    monkeypatch.setattr(_background, "WARM_S", 50.0)
    monkeypatch.setattr(_background, "PUT_OFF_S", 400.0)
    monkeypatch.setattr(_background, "LISTEN_S", 1000.0)
    monkeypatch.setattr(_background, "LONG_S", 2.0)
    monkeypatch.setattr(_background, "time", SimpleNamespace(monotonic=lambda: clock.now))
    lane = SimpleNamespace(keep_warm=practise, is_standing=is_standing)
    assert _background._practised(lane, 0) == 100.0 + takes_s + pause_s


def _standing(house):
    def count():
        known = [one.stands for one in house.server.connections if one.stands is not None]
        return sum(stands._told is not None for stands in known)

    return house.ask(count)


def _bootstrap(world):
    return world.bootstrap_store_info
