"""A server that plays a round of its own while somebody waits for one, and leaves nothing of it behind."""

import asyncio
import errno
import gc
import os
import weakref
from types import SimpleNamespace

import pytest

from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import RoundPhase, RoundRecord, decode
from rallypoint.server import rehearsal
from rallypoint.server.rehearsal import BUSY_S, PLAYERS, RUN, STAY_S, Cores, Rehearsal, Stage
from rallypoint.server.server import Server, _alone
from rallypoint.server.traffic import Traffic
from rallypoint.wire.messages import NOW, Stand, WatchStart
from tests.server.kit import eventually, run, serving
from tests.server.standing_kit import KEYS, NODE, come

EVERY_S = 0.001
SOMEBODY = SimpleNamespace(stands=SimpleNamespace(is_told_elsewhere=True))
NOBODY = SimpleNamespace(stands=SimpleNamespace(is_told_elsewhere=False))
"""As far as it looks at connections."""


def rehearsing(connections, make_server=_alone, traffic=None, also=lambda: None):
    return Rehearsal(make_server, connections, traffic or Traffic(), EVERY_S, also)


def test_something_else_may_be_done_after_each_round():
    async def main():
        done = []
        one = rehearsing([SOMEBODY], also=lambda: done.append(one.rounds))
        one.wanted()
        await eventually(lambda: len(done) > 2, "it is done")
        await one.stop()
        assert done == list(range(1, len(done) + 1))

    run(main())


def test_a_stage_plays_one_whole_round_after_the_other():
    async def main():
        server = _alone()
        stage = Stage(server)
        await stage.put_up()
        for number in (1, 2, 3):
            await stage.play()
            record = decode(RoundRecord, server.hub.engine.items[RunKeys("rallypoint", RUN).round])
            assert (record.number, record.phase, record.size) == (number, RoundPhase.ACTIVE, PLAYERS)
        assert stage.rounds == 3
        await stage.clear()
        assert not server.connections

    run(main())


def test_a_server_plays_while_somebody_waits_and_clears_up_when_nobody_does():
    async def main():
        seen = []
        async with serving(is_dedicated=True) as server:
            server.emit.add(seen.append)
            node = await come(server, "node", "run")
            node.send(WatchStart(1, KEYS.round, NOW), WatchStart(2, KEYS.assign(NODE), NOW))
            await asyncio.sleep(3 * rehearsal.EVERY_S)
            assert server.rehearsal._timer is None, "nobody waits yet"
            keys, inside = set(server.hub.engine.items), len(server.connections)
            other = await come(server, "other")
            other.send(Stand("node", NODE))
            await eventually(lambda: server.rehearsal.rounds > 2, "it plays")
            assert set(server.hub.engine.items) == keys, "on a stage of its own"
            assert len(server.connections) == inside + 1
            assert RUN not in server.runs
            other.close()
            await eventually(lambda: server.rehearsal._stage is None, "it is cleared up")
            await eventually(lambda: server.rehearsal._timer is server.rehearsal._task is None, "nothing is looked at")
            again = await come(server, "again")
            again.send(Stand("node", NODE))
            await eventually(lambda: server.rehearsal.rounds > 0, "it plays again")
        assert server.rehearsal._stage is None
        assert not [event for event in seen if RUN in (event.run_id, event.by)]

    run(main())


@pytest.mark.parametrize("is_dedicated", [True, False])
def test_only_a_server_of_its_own_rehearses(is_dedicated):
    async def main():
        server = Server(is_dedicated=is_dedicated)
        await server.stop()
        return server.rehearsal is not None

    assert asyncio.run(main()) is is_dedicated


def test_nothing_is_played_while_there_is_something_to_do():
    async def main():
        traffic = Traffic()
        one = rehearsing([SOMEBODY], traffic=traffic)
        one.wanted()
        for _ in range(50):
            traffic.frames_in += 1
            await asyncio.sleep(EVERY_S / 2)
        assert one.rounds == 0
        await eventually(lambda: one.rounds > 0, "it plays when there is nothing to do")
        await one.stop()

    run(main())


def test_it_is_cleared_up_when_nobody_waits_whatever_else_there_is_to_do():
    async def main():
        traffic, connections = Traffic(), [SOMEBODY]
        one = rehearsing(connections, traffic=traffic)
        one.wanted()
        await eventually(lambda: one.rounds > 0, "it plays")
        connections[:] = [NOBODY]

        def is_over():
            traffic.frames_in += 1
            return one._stage is one._task is one._timer is None

        await eventually(is_over, "it is cleared up")
        await one.stop()

    run(main())


def test_nothing_of_a_stage_is_kept_when_it_is_cleared_up():
    async def main():
        engines = []
        for _ in range(3):
            server = _alone()
            engines.append(weakref.ref(server.hub.engine))
            stage = Stage(server)
            await stage.put_up()
            await stage.play()
            await stage.clear()
            del stage, server

        def are_gone():
            gc.collect()
            return not any(engine() for engine in engines)

        await eventually(are_gone, "no timer knows it any more", patience_s=5.0)

    run(main())


@pytest.mark.parametrize("is_known_before", [True, False])
def test_a_player_that_is_sent_away_ends_the_play(is_known_before):
    async def main():
        stage = Stage(_alone())
        await stage.put_up()
        for connection in list(stage._server.connections):
            if connection._transport.get_extra_info("socket") is not None:
                connection.replaced()
        if is_known_before:
            await eventually(lambda: stage._has_lost, "they have noticed")
        with pytest.raises(ConnectionError):
            await stage.play()
        await stage.clear()

    run(main())


def test_nothing_is_played_long_after_the_last_one_has_begun_to_wait(monkeypatch):
    async def main():
        monkeypatch.setattr(rehearsal, "KEEP_S", 0.1)
        one = rehearsing([SOMEBODY])
        one.wanted()
        await eventually(lambda: one.rounds > 0, "it plays")
        await eventually(lambda: one._stage is None and one._timer is one._task is None, "it is over")
        one.wanted()
        await eventually(lambda: one.rounds > 0, "it plays again")
        await one.stop()

    run(main())


def test_whoever_begins_to_wait_meanwhile_does_not_make_it_play_twice_as_often():
    async def main():
        one = rehearsing([SOMEBODY])
        one.wanted()
        await eventually(lambda: one._task is not None, "it plays")
        one.wanted()
        assert one._timer is None, "it is armed when that is done"
        await eventually(lambda: one.rounds > 0, "it has played")
        await one.stop()

    run(main())


def test_somebody_who_begins_to_wait_while_it_is_cleared_up_is_not_forgotten():
    async def main():
        connections = [SOMEBODY]
        one = rehearsing(connections)
        one.wanted()
        await eventually(lambda: one.rounds > 0, "it plays")
        connections[:] = [NOBODY]
        await eventually(lambda: one._stage is None, "it is cleared up")
        connections[:] = [SOMEBODY]
        one.wanted()
        await eventually(lambda: one.rounds > 0, "it plays again")
        await one.stop()

    run(main())


def test_no_file_for_it_is_nobodys_trouble():
    async def main():
        made = []

        def make():
            made.append(None)
            raise OSError(errno.EMFILE, "no file is left")

        one = rehearsing([SOMEBODY], make)
        one.wanted()
        await eventually(lambda: made and one._task is None, "it has tried")
        assert len(made) == 1
        assert one._timer is None, "until somebody else begins to wait"
        await one.stop()

    run(main())


def test_what_cannot_be_played_to_its_end_is_put_up_anew_for_the_next_who_waits(monkeypatch):
    async def main():
        made = []

        def make():
            made.append(_alone())
            return made[-1]

        monkeypatch.setattr(rehearsal, "PATIENCE_S", 0.0)
        one = rehearsing([SOMEBODY], make)
        one.wanted()
        await eventually(lambda: made and one._stage is one._task is one._timer is None, "it has given up")
        monkeypatch.undo()
        one.wanted()
        await eventually(lambda: one.rounds > 0, "it plays")
        assert len(made) == 2
        await one.stop()

    run(main())


def test_a_defect_of_it_is_said_and_ends_it():
    async def main():
        said = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))

        def make():
            raise ZeroDivisionError

        one = rehearsing([SOMEBODY], make)
        one.wanted()
        await eventually(lambda: said, "it is said")
        assert isinstance(said[0]["exception"], ZeroDivisionError)
        assert one._timer is None
        await one.stop()

    run(main())


def test_a_stage_that_is_stopped_in_the_middle_leaves_nothing():
    async def main():
        one = rehearsing([SOMEBODY])
        one.wanted()
        await eventually(lambda: one._task is not None, "it is put up or plays")
        await one.stop()
        assert one._stage is None
        one.wanted()
        assert one._timer is None

    run(main())


class Machine:
    """Notes on which cores this thread may run, and how long it takes to get there."""

    def __init__(self, monkeypatch, cores, takes_s=0.0):
        self.cores, self.takes_s, self.now, self.set = cores, takes_s, 1.0, []
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(self.cores))
        monkeypatch.setattr(os, "sched_setaffinity", self._set)

    def _set(self, _, cores):
        self.set.append(set(cores))
        self.now += self.takes_s

    def clock(self):
        return self.now


def test_cores_take_turns_and_all_of_them_may_be_used_at_once_again(monkeypatch):
    machine = Machine(monkeypatch, {3, 5})
    cores = Cores(machine.clock)
    for _ in range(3):
        cores.change()
    assert machine.set == [{5}, {3, 5}, {3}, {3, 5}, {5}, {3, 5}]


@pytest.mark.parametrize("cores", [{0}, set(range(64))])
def test_where_there_is_one_core_or_there_are_many_it_stays_where_it_is(monkeypatch, cores):
    machine = Machine(monkeypatch, cores)
    Cores(machine.clock).change()
    assert machine.set == []


def test_cores_that_others_need_are_left_alone_for_a_while(monkeypatch):
    machine = Machine(monkeypatch, {0, 1}, takes_s=BUSY_S)
    cores = Cores(machine.clock)
    cores.change()
    assert len(machine.set) == 2
    cores.change()
    assert len(machine.set) == 2
    machine.now += STAY_S
    cores.change()
    assert len(machine.set) == 4


def test_a_process_that_may_not_choose_its_core_stays_where_it_is(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    Cores().change()
