"""Callers that have looked at their run and join by themselves, through the blocking API on a real server."""

import socket
import time
from contextlib import contextmanager

import pytest

import rallypoint
from rallypoint import _background
from rallypoint._marks import collect
from rallypoint.backends import tcp_lane, tcp_pledge
from rallypoint.backends.tcp_lane import TcpLane
from rallypoint.errors import RendezvousClosedError, RendezvousError
from rallypoint.kv.types import Revoke
from rallypoint.rendezvous.head_start import HeadStart
from rallypoint.wire import messages
from tests.patience import PATIENCE_S, in_thread, result_of, until
from tests.server.threaded import House


@contextmanager
def run_of(size, *names, options="", away_s=0.0):
    """A server, so far away in either direction, and a handler for each name, all of one run."""
    with House() as house:
        house.proxy.delay_s = away_s
        port = house.proxy.port if away_s else house.port
        url = f"tcp://127.0.0.1:{port}/run?min_nodes={size}&admission_window=0{options}"
        handlers = [rallypoint.create_handler(f"{url}&name={name}") for name in names]
        try:
            yield house, *handlers
        finally:
            for handler in handlers:
                handler.close()


def look(handler):
    """Look at a run that somebody has joined, until one can begin by oneself."""
    assert handler.is_closed() is False
    until(lambda: handler._core._node.starts._ready, "a start is ready")


def nodes_of_items(house):
    return [key for key in house.items if "/nodes/" in key]


def nodes_of(house):
    return house.ask(lambda: nodes_of_items(house))


def pledged(house):
    """Whether somebody waits who has confirmed its place beforehand."""

    def look():
        stands = [one.stands for one in house.server.connections if one.stands is not None]
        return any(one._told is not None and one._told._pledge is not None for one in stands)

    return house.ask(look)


@pytest.fixture
def patient(monkeypatch):
    """Whoever begins by itself waits for its place, on however busy a machine."""
    monkeypatch.setattr(tcp_lane, "ALONE_S", PATIENCE_S)


def test_the_last_one_is_in_by_itself_and_everything_works_as_for_any_other(patient):
    hits = collect()
    with run_of(2, "a", "b") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        worlds = [last.next_rendezvous(), result_of(call)]
        until(lambda: "node.began_and_entered" in hits, "its node has heard of it")
        assert [(world.round, world.world_size) for world in worlds] == [(1, 2), (1, 2)]
        assert {world.rank for world in worlds} == {0, 1}
        assert worlds[0].bootstrap_store_info == worlds[1].bootstrap_store_info
        assert last.num_nodes_waiting() == 0
        assert [member.name for member in worlds[0].members] == [member.name for member in worlds[1].members]
        worlds[0].store.set("k", b"v")
        assert worlds[1].store.get("k", 10.0) == b"v"
        first.leave("it goes")
        assert worlds[0].changed.wait(PATIENCE_S), "the one who is in is told like any other"
        call = in_thread(first.next_rendezvous)
        assert last.next_rendezvous().round == result_of(call).round == 2


@pytest.mark.parametrize("has_pledged", [True, False], ids=["confirmed beforehand", "asked"])
def test_the_last_one_may_be_rank_zero_and_its_port_is_free_when_it_is_in(patient, monkeypatch, has_pledged):
    if not has_pledged:
        monkeypatch.setattr(tcp_pledge, "PLEDGED_S", -1.0)
    hits = collect()
    with run_of(2, "b", "a") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        until(lambda: pledged(house) or not has_pledged, "it has confirmed beforehand")
        look(last)
        world = last.next_rendezvous()
        until(lambda: "node.began_and_entered" in hits, "its node has heard of it")
        assert world.rank == 0
        socket.create_server(("", world.bootstrap_store_info.master_port)).close()
        assert result_of(call).bootstrap_store_info == world.bootstrap_store_info
        assert ("coordinator.at_once" in hits) is has_pledged


def test_a_port_is_held_while_one_may_begin_and_let_go_when_nobody_will():
    with run_of(1, "a", "b") as (_, first, second):
        first.next_rendezvous()
        look(second)
        held = second._core._node.starts._zero._held
        assert held, "it may be rank 0"
        second.close()
        assert not held


def test_one_who_is_far_from_its_server_waits_for_the_answer_and_is_in_by_itself_all_the_same():
    """Bug that this found: it waited for 5 ms, and whatever it had begun was done again over four round trips."""
    hits = collect()
    with run_of(2, "a", "b", away_s=0.1, options="&is_host=false") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        worlds = [last.next_rendezvous(), result_of(call)]
        until(lambda: "node.began_and_entered" in hits, "its node has heard of it")
        assert {world.rank for world in worlds} == {0, 1}


def test_one_whose_join_was_not_answered_in_time_knows_of_what_was_confirmed_on_top_of_it():
    """Bug that this found: it was a member that nobody represented, and its caller waited for good."""
    with run_of(3, "x", "y", "z", options="&join_timeout=20") as (house, *handlers):
        calls = [in_thread(handlers[0].next_rendezvous)]
        until(lambda: nodes_of(house), "one has joined")
        for handler in handlers[1:]:
            look(handler)
        until(lambda: pledged(house), "the first has confirmed beforehand")
        house._loop.call_soon_threadsafe(time.sleep, 0.06)
        for handler in handlers[1:]:
            calls.append(in_thread(handler.next_rendezvous))
            time.sleep(0.04)  # for which the server stands still
        assert {result_of(call).round for call in calls} == {1}


def test_one_whose_session_was_lost_while_it_waited_is_in_the_round_that_was_expected_next():
    """Bug that this found: it counted as a floor what it had confirmed beforehand, and that number was left out."""
    options = "&keep_alive_interval=1&keep_alive_max_attempt=2"
    with run_of(2, "a", "b", options=options) as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: pledged(house), "it has confirmed beforehand")
        before = nodes_of(house)
        (lease,) = house.ask(lambda: [house.items[key].lease for key in nodes_of_items(house)])
        house.ask(lambda: house.server.hub.execute(Revoke(lease)))
        until(lambda: nodes_of(house) == before, "it has joined again")
        until(lambda: pledged(house), "it has confirmed beforehand")
        assert {last.next_rendezvous().round, result_of(call).round} == {1}


def test_one_who_is_not_the_last_waits_like_any_other():
    hits = collect()
    with run_of(3, "a", "b", "c") as (house, first, second, last):
        calls = [in_thread(first.next_rendezvous)]
        until(lambda: nodes_of(house), "one has joined")
        look(second)
        calls.append(in_thread(second.next_rendezvous))
        until(lambda: "node.began" in hits, "its node goes on")
        worlds = [last.next_rendezvous(), *map(result_of, calls)]
        assert sorted(world.rank for world in worlds) == [0, 1, 2]


def test_the_session_is_the_nodes_own_and_goes_with_its_connection(patient):
    with run_of(2, "a", "b") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        last.next_rendezvous()
        result_of(call)
        node = last._core._node
        until(lambda: node._presence.session is not None, "its node has heard of it")
        known = house.ask(lambda: dict(house.server.clients.known(node.backend._client).sessions))
        assert known == {node._presence.session.lease: 1.0}
        last.abandon()
        until(lambda: len(nodes_of(house)) == 1, "it is lost within its grace")


def test_a_door_that_has_moved_is_found_out_by_the_join(patient):
    with run_of(2, "a", "b") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        starts = last._core._node.starts
        start = starts.take()
        starts.stop()  # it sees nothing of what follows
        first.set_closed("enough")
        with pytest.raises(RendezvousClosedError):
            result_of(call)
        starts._ready.append(start)
        with pytest.raises(RendezvousClosedError, match="enough"):
            last.next_rendezvous()
        until(lambda: not nodes_of(house), "nobody is left")


def test_a_start_fits_what_was_seen_last():
    with run_of(2, "a", "b") as (_, first, last):
        assert last.is_closed() is False
        starts = last._core._node.starts
        assert not starts._ready, "there is no run yet"
        call = in_thread(first.next_rendezvous)
        until(lambda: starts._ready, "there is")
        before = starts._ready[0].door
        first.set_closed("for a while")
        until(lambda: not starts._ready, "nobody may join")
        with pytest.raises(RendezvousClosedError):
            result_of(call)
        assert first.reopen()
        until(lambda: starts._ready, "who looks may join again")
        assert starts._ready[0].door.closed_revision > before.closed_revision


@pytest.mark.parametrize("sent", [False, True])
def test_an_interrupted_start_is_taken_back(monkeypatch, sent):
    begin = TcpLane.begin

    def interrupted(lane, begun):
        if sent:
            begin(lane, begun)
        raise KeyboardInterrupt

    with run_of(3, "a", "b") as (house, first, second):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(second)
        monkeypatch.setattr(TcpLane, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            second.next_rendezvous()
        assert len(nodes_of(house)) == 1, "it has withdrawn"
        monkeypatch.undo()
        again = in_thread(second.next_rendezvous)
        until(lambda: len(nodes_of(house)) == 2, "it may join again")
        first.set_closed("enough")
        for one in (call, again):
            with pytest.raises(RendezvousClosedError):
                result_of(one)


def test_a_server_that_does_not_know_of_it_is_joined_in_the_ordinary_way(monkeypatch, patient):
    monkeypatch.setattr(tcp_lane, "JOINS_FROM", messages.NEWEST_VERSION + 1)
    hits = collect()
    with run_of(2, "a", "b") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        assert {last.next_rendezvous().rank, result_of(call).rank} == {0, 1}
        assert not any(hit.startswith("node.began") for hit in hits)


def test_a_server_that_went_and_came_back_without_its_data_is_joined_anew(patient):
    soon_lost = "&keep_alive_interval=0.5&keep_alive_max_attempt=2&is_host=false"
    with run_of(2, "a", "b", options=soon_lost) as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        house.restart()
        assert {last.next_rendezvous().rank, result_of(call).rank} == {0, 1}


def test_who_only_looks_has_no_session():
    with run_of(2, "a", "b") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        assert house.ask(lambda: house.server.clients.session_count) == 1
        first.set_closed("enough")
        with pytest.raises(RendezvousClosedError):
            result_of(call)


def test_what_was_begun_and_is_taken_over_by_nobody_is_no_obstacle_to_the_next_call():
    with run_of(2, "a", "b") as (house, first, second):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(second)
        ready, second._ready = second._ready, None
        starts = second._core._node.starts
        starts._ready[0].number = 99  # so that it confirms nothing
        assert ready.begin() is False
        assert ready.begun.sent_at > 0
        assert {second.next_rendezvous().rank, result_of(call).rank} == {0, 1}


def test_one_who_has_looked_and_joins_in_the_ordinary_way_has_a_store_that_works():
    with run_of(1, "a") as (house, only):
        assert only.is_closed() is False
        world = only.next_rendezvous()  # which makes the run: there was nothing to begin with
        waits = in_thread(lambda: world.store.get("k", PATIENCE_S))
        until(lambda: house.awaiting, "somebody waits for a key")
        world.store.set("k", b"v")
        assert result_of(waits) == b"v"
        assert world.store.barrier("b", PATIENCE_S) is None


def test_one_who_has_looked_and_left_has_a_store_that_works_when_it_joins(patient):
    with run_of(2, "a", "b") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        last.leave("not yet")
        world = last.next_rendezvous()
        waits = in_thread(lambda: world.store.get("k", PATIENCE_S))
        until(lambda: house.awaiting, "somebody waits for a key")
        result_of(call).store.set("k", b"v")
        assert result_of(waits) == b"v"


def test_nothing_is_begun_that_could_not_be_waited_for(monkeypatch):
    def no_bell():
        raise OSError(24, "too many open files")

    with run_of(2, "a", "b") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        with monkeypatch.context() as patched:
            patched.setattr(_background, "Bell", no_bell)
            look(last)
            with pytest.raises(OSError, match="too many open files"):
                last.next_rendezvous()
        assert len(nodes_of(house)) == 1
        assert not call.done()
        assert {last.next_rendezvous().rank, result_of(call).rank} == {0, 1}


def test_one_who_is_in_and_interrupted_before_its_node_knows_leaves_nothing_behind(patient, monkeypatch):
    submit, tried = _background.BackgroundLoop._submit, []

    def interrupted(loop, call, start=None):
        tried.append(start)
        if len(tried) == 1:
            raise KeyboardInterrupt
        submit(loop, call, start)

    with run_of(2, "a", "b", options="&keep_alive_interval=60") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        with monkeypatch.context() as patched:
            patched.setattr(_background.BackgroundLoop, "_submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                last.next_rendezvous()
        world = result_of(call)
        assert world.changed.wait(PATIENCE_S), "the other one is told"
        until(lambda: len(nodes_of(house)) == 1, "it has left")


@pytest.mark.parametrize("where", [(_background.BackgroundLoop, "_submit"), (_background._Call, "wait_result")])
def test_one_who_has_joined_and_is_interrupted_before_its_node_knows_leaves_nothing_behind(monkeypatch, where):
    whole, tried = getattr(*where), []

    def interrupted(*arguments):
        tried.append(where)
        if len(tried) == 1:
            raise KeyboardInterrupt
        return whole(*arguments)

    with run_of(3, "a", "b", options="&keep_alive_interval=60") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        with monkeypatch.context() as patched:
            patched.setattr(*where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                last.next_rendezvous()
        until(lambda: len(nodes_of(house)) == 1, "it has left")
        first.leave("enough")
        with pytest.raises(RendezvousError):
            result_of(call)


def test_one_who_has_joined_and_waits_is_taken_back_when_it_is_interrupted(monkeypatch):
    wait = _background._Call.wait_result

    def interrupted(call):
        until(lambda: call._lane, "its node has taken over")
        raise KeyboardInterrupt

    with run_of(3, "a", "b", options="&keep_alive_interval=60") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        with monkeypatch.context() as patched:
            patched.setattr(_background._Call, "wait_result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                last.next_rendezvous()
            patched.setattr(_background._Call, "wait_result", wait)
            until(lambda: len(nodes_of(house)) == 1, "it has left")
        first.leave("enough")
        with pytest.raises(RendezvousError):
            result_of(call)


def test_one_who_is_interrupted_before_it_has_joined_leaves_its_place_to_the_next(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    with run_of(2, "a", "b") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        lane = last._ready.lane
        with monkeypatch.context() as patched:
            patched.setattr(HeadStart, "joins", interrupted)
            with pytest.raises(KeyboardInterrupt):
                last.next_rendezvous()
        assert lane._stander is None
        assert {last.next_rendezvous().rank, result_of(call).rank} == {0, 1}


def test_a_handler_that_has_looked_and_is_closed_keeps_no_file():
    with run_of(2, "a", "b") as (_, first, last):
        assert first.is_closed() is False
        assert last.is_closed() is False
        first.close()
        assert first._ready is None
        last.abandon()
        assert last._ready is None


def test_sessions_that_nobody_opened_are_not_remembered():
    with run_of(3, "a", "b", "c") as (house, first, second, looks):
        calls = [in_thread(first.next_rendezvous)]
        until(lambda: nodes_of(house), "one has joined")
        look(looks)
        for _ in range(2):
            first.set_closed("for now")
            with pytest.raises(RendezvousClosedError):
                result_of(calls.pop())
            until(looks.is_closed, "it is seen")
            assert second.reopen("again")
            until(lambda: not looks.is_closed(), "that is seen, too")
            calls.append(in_thread(first.next_rendezvous))
            look(looks)
        assert len(looks._core._node._presence._had_leases) == 1
        until(lambda: nodes_of(house), "it has joined again")
        first.leave("enough")
        with pytest.raises(RendezvousError):
            result_of(calls.pop())


def test_a_caller_that_is_in_stays_in_its_last_world_if_its_handler_is_closed_before_its_node_has_heard(patient):
    with run_of(2, "a", "b") as (house, first, last):
        call = in_thread(first.next_rendezvous)
        until(lambda: nodes_of(house), "one has joined")
        look(last)
        world = last.next_rendezvous()
        last.close()
        assert world.round == result_of(call).round == 1
        until(lambda: len(nodes_of(house)) == 1, "it has left, and does not come again")
