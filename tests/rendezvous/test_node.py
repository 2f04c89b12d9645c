"""What a node lives through: joining, being spare, waiting in vain, leaving, losing its session. Under virtual time."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from rallypoint.backends.contract import Backend
from rallypoint.backends.memory import MemoryBackend
from rallypoint.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
    SettingsMismatchError,
)
from rallypoint.events import (
    BackendReachable,
    BackendUnreachable,
    JoinFailed,
    NodeLost,
    RoundActive,
    RoundEntered,
    SessionLost,
    WorldChanged,
)
from rallypoint.kv.types import Delete, Put, TxnResult
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.records import (
    AssignRecord,
    ClaimRecord,
    ConfigRecord,
    NodePhase,
    RoundPhase,
    RoundRecord,
    encode,
)
from rallypoint.testing.chaos import ChaosBackend, Faults
from tests.rendezvous.board import node
from tests.rendezvous.kit import Meddling, Town, now, play, wait_until

Execute = Callable[[], Awaitable[TxnResult]]


class Chaos:
    """Puts a chaotic connection between each node and the backend."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.of: dict[str, ChaosBackend] = {}
        self._faults = faults or Faults.none()

    def wrap(self, name: str, backend: Backend) -> Backend:
        self.of[name] = ChaosBackend(backend, random.Random(len(self.of)), self._faults)
        return self.of[name]


async def took(awaitable: Awaitable[object]) -> float:
    before = now()
    await awaitable
    return now() - before


# Joining


def test_nobody_returns_before_the_minimum_is_there() -> None:
    async def scene(town: Town) -> None:
        calls = town.enter("a", "b")
        await asyncio.sleep(100)
        assert not any(call.done() for call in calls)
        calls += town.enter("c")
        joined = await asyncio.gather(*calls)
        assert [one.rank for one in joined] == [0, 1, 2]
        assert {(one.number, one.size, one.addr, one.port) for one in joined} == {(1, 3, "a", 20_001)}

    play(scene, min_nodes=3)


def test_last_call_lets_more_come_and_then_the_round_forms() -> None:
    async def scene(town: Town) -> None:
        calls = town.enter("a", "b")
        await asyncio.sleep(5)
        calls += town.enter("c")
        joined = await asyncio.gather(*calls)
        assert joined[0].size == 3
        assert now() == pytest.approx(10, abs=0.1)

    play(scene, min_nodes=2, max_nodes=4, last_call_timeout=10)


def test_full_round_forms_in_an_instant() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b", "c")
        assert now() < 0.1

    play(scene, min_nodes=2, max_nodes=3)


def test_late_node_waits_for_the_next_round_and_never_forms_a_second_group() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        late = town.enter("c", "d")
        await asyncio.sleep(60)
        assert not any(call.done() for call in late)
        assert len(town.of(RoundActive)) == 1
        again = town.enter("a", "b")
        joined = await asyncio.gather(*again, *late)
        assert {(one.number, one.size) for one in joined} == {(2, 4)}

    play(scene, min_nodes=2, max_nodes=4, last_call_timeout=1)


def test_members_keep_their_ranks_from_round_to_round() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b", "c", "d")
        town.crash("b")
        await asyncio.sleep(20)
        second = await town.gathered("d", "c", "a")
        assert {name: one.rank for name, one in second.items()} == {"a": 0, "d": 1, "c": 2}
        newcomers = town.enter("b")
        await wait_until(lambda: town.node("a").waiting_count() == 1, 10)
        third = await town.gathered("c", "a", "d")
        assert (await newcomers[0]).number == third["a"].number
        ranks = {name: one.rank for name, one in third.items()}
        assert (ranks["a"], ranks["d"], ranks["c"]) == (0, 1, 2)

    play(scene, min_nodes=3, max_nodes=4, last_call_timeout=1)


def test_roster_is_the_same_for_everybody() -> None:
    async def scene(town: Town) -> None:
        joined = await town.gathered("a", "b", "c")
        rosters = [await town.node(name).roster(joined[name]) for name in joined]
        assert rosters[0] == rosters[1] == rosters[2]
        assert [member.name for member in rosters[0]] == ["a", "b", "c"]

    play(scene, min_nodes=3)


def test_one_call_at_a_time() -> None:
    async def scene(town: Town) -> None:
        town.enter("a")
        await asyncio.sleep(1)
        with pytest.raises(RendezvousError, match="one call at a time"):
            await town.node("a").next_round()
        assert set(town.present()) == {"a"}

    play(scene, min_nodes=2)


def test_two_runs_on_one_backend_do_not_know_of_each_other() -> None:
    async def scene(town: Town) -> None:
        other = Town(server=town.server, run_id="run/2", min_nodes=2)
        mine, theirs = await asyncio.gather(town.gathered("a", "b"), other.gathered("a", "x"))
        assert {one.number for one in mine.values()} == {one.number for one in theirs.values()} == {1}
        await town.node("a").close_run("done")
        await asyncio.sleep(1)
        assert not other.node("a").view.is_closed
        other.crash("x")
        await asyncio.sleep(30)
        assert town.node("a").waiting_count() == 0
        other.check()
        await other.stop()

    play(scene, min_nodes=2)


def test_assignment_for_another_join_is_not_confirmed() -> None:
    async def scene(town: Town) -> None:
        town.enter("a")
        await asyncio.sleep(1)
        number = 5
        config = town.record(ConfigRecord, town.keys.config)
        assert config is not None
        forming = RoundRecord(number=number, phase=RoundPhase.FORMING, incarnation=config.incarnation, size=1, term=1)
        for join, phase in ((99, NodePhase.JOINING), (town.present()["a"].join, NodePhase.MEMBER)):
            own = town.keys.assign(town.node("a").identity.id)
            assign = AssignRecord(number=number, rank=0, join=join)
            await MemoryBackend(town.server).txn([], [Put(own, encode(assign)), Put(town.keys.round, encode(forming))])
            await asyncio.sleep(1)
            assert town.present()["a"].phase is phase

    play(scene, min_nodes=2)


def test_join_through_a_door_that_closes_in_this_instant_is_refused() -> None:
    async def scene(town: Town) -> None:
        operator = town.start("operator")

        async def closes(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if "join" in what:
                await operator.node.close_run("enough")
            return await execute()

        town._wrap = lambda name, backend: Meddling(backend, closes)
        with pytest.raises(RendezvousClosedError):
            await town.enter("a")[0]
        changes = [change.key for batch in town.server.engine.history.batches for change in batch.changes]
        assert not [key for key in changes if key.startswith(town.keys.nodes)]

    play(scene, min_nodes=2)


def test_join_under_a_config_that_is_replaced_in_this_instant_is_refused() -> None:
    async def scene(town: Town) -> None:
        other = town.start("other", min_nodes=7)
        met: list[str] = []

        async def replaces(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if "join" in what and not met:
                met.append("join")
                await other.node._run_config.check()
            return await execute()

        town._wrap = lambda name, backend: Meddling(backend, replaces)
        joined = await town.gathered("a", "b")
        assert met
        assert {one.size for one in joined.values()} == {2}
        config = town.record(ConfigRecord, town.keys.config)
        assert config is not None
        assert config.shared["min_nodes"] == 2

    play(scene, min_nodes=2)


# Settings and damage


def test_node_with_other_settings_is_refused_and_leaves_nothing_behind() -> None:
    async def scene(town: Town) -> None:
        town.enter("a")
        await asyncio.sleep(1)
        leases = len(town.server.engine.leases)
        town.start("b", min_nodes=3)
        with pytest.raises(SettingsMismatchError, match="min_nodes is 3 here and 2 there"):
            await town.join("b")
        assert len(town.server.engine.leases) == leases
        assert set(town.present()) == {"a"}

    play(scene, min_nodes=2)


def test_settings_may_change_when_all_nodes_have_gone() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        await town.node("a").leave("done")
        town.start("c", min_nodes=3)
        with pytest.raises(SettingsMismatchError):
            await town.join("c")
        await town.node("b").leave("done")
        joined = await town.gathered("c", "d", "e", min_nodes=3)
        assert {(one.number, one.size) for one in joined.values()} == {(2, 3)}

    play(scene, min_nodes=2)


def test_run_does_not_vanish_under_nodes_whose_settings_replaced_shorter_ones() -> None:
    """The run's lease was made for keep-alives of half a second; those who come after renew every five."""

    async def scene(town: Town) -> None:
        await town.gathered("a", "b", keep_alive_interval=0.5, reopen_after=0)
        for name in ("a", "b"):
            await town.node(name).leave("done")
        joined = await town.gathered("c", "d")
        assert {one.number for one in joined.values()} == {2}
        await asyncio.sleep(100)
        assert town.round is not None
        assert town.of(WorldChanged) == []

    play(scene, min_nodes=2)


def test_run_does_not_vanish_when_the_node_with_the_shortest_times_leaves() -> None:
    async def scene(town: Town) -> None:
        town.start("a", keep_alive_interval=0.5, reopen_after=0)
        town.enter("a")
        await asyncio.sleep(0.1)
        await town.gathered("b", "c")
        await town.node("a").leave("done")
        await asyncio.sleep(100)
        assert town.round is not None
        assert {event.cause for event in town.of(WorldChanged)} == {"loss"}

    play(scene, min_nodes=3)


@pytest.mark.parametrize("value", [b"damaged", b"{}", encode(node("b", id="another")), b'{"v": 99}'])
def test_damaged_record_of_one_node_never_breaks_the_others(value: bytes) -> None:
    async def scene(town: Town) -> None:
        town.enter("a")
        await asyncio.sleep(1)
        await town.node("a").backend.txn([], [Put(town.keys.node("stranger"), value)])
        first = await town.gathered("b", "c")
        assert {one.number for one in first.values()} == {1}
        own = town.server.engine.items[town.keys.node(town.node("b").identity.id)]
        await town.node("a").backend.txn([], [Put(own.key, value, own.lease)])
        await asyncio.sleep(1)
        assert {event.cause for event in town.of(WorldChanged)} == {"loss"}
        second = await town.gathered("a", "b", "c")
        assert {one.number for one in second.values()} == {2}

    play(scene, min_nodes=3)


def test_node_whose_own_key_belongs_to_something_else_says_so_at_once() -> None:
    async def scene(town: Town) -> None:
        process = town.start("a")
        own = town.keys.node(process.node.identity.id)
        await process.node.backend.txn([], [Put(own, b"not under any session")])
        with pytest.raises(RendezvousStateError, match="remove the key") as caught:
            await town.join("a")
        assert caught.value.key == own
        assert now() < 1
        await process.node.backend.txn([], [Delete(own)])
        await town.gathered("a", "b")

    play(scene, min_nodes=2)


def test_absurd_floor_of_a_stranger_makes_the_numbers_jump_and_nothing_else() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        record = node("x", phase=NodePhase.LEFT, floor=2**40)
        await town.node("a").backend.txn([], [Put(town.keys.node("x"), encode(record))])
        second = await town.gathered("a", "b")
        assert {one.number for one in second.values()} == {2**40 + 1}
        third = await town.gathered("a", "b")
        assert {one.number for one in third.values()} == {2**40 + 2}

    play(scene, min_nodes=2)


@pytest.mark.parametrize("part", ["round", "closed", "config"])
def test_damaged_key_of_the_run_is_a_state_error_that_names_it(part: str) -> None:
    async def scene(town: Town) -> None:
        calls = town.enter("a")
        await asyncio.sleep(1)
        key = getattr(town.keys, part)
        item = town.server.engine.items.get(key)
        await town.node("a").backend.txn([], [Put(key, b"damaged", item.lease if item else 0)])
        if part != "config":  # which a node that has joined does not look at again
            with pytest.raises(RendezvousStateError) as caught:
                await calls[0]
            assert caught.value.key == key
        town.start("b")
        with pytest.raises(RendezvousStateError) as caught:
            await town.join("b")
        assert caught.value.key == key
        assert "b" not in town.present()
        await town.node("b").backend.txn([], [Delete(key)])

    play(scene, min_nodes=3)


def test_damaged_word_of_what_is_waited_for_is_told_until_it_is_repaired() -> None:
    """Bug that this found: once it had been told, it was told for ever, repaired or not."""

    async def scene(town: Town) -> None:
        (call,) = town.enter("a")
        await asyncio.sleep(1)
        backend, key = town.node("a").backend, town.keys.waiting
        item = town.server.engine.items[key]
        await backend.txn([], [Put(key, b"damaged", item.lease)])
        with pytest.raises(RendezvousStateError) as caught:
            await call
        assert caught.value.key == key
        await backend.txn([], [Put(key, item.value, item.lease)])
        await asyncio.sleep(1)
        await town.gathered("a", "b")

    play(scene, min_nodes=2)


def test_node_that_enters_when_its_session_is_over_is_told_in_its_new_world() -> None:
    """Bug that this found: the listener of the world before was told, and before the new one was announced."""

    async def scene(town: Town) -> None:
        await town.gathered("a")
        one, told = town.node("a"), []
        one.listen(lambda cause, reason: told.append(cause))
        entered = one._node_session.entered

        def too_late() -> None:
            assert one._node_session.session is not None
            one._node_session.session.lost.set("no renewal was answered in time")
            entered()

        one._node_session.entered = too_late  # type: ignore[method-assign]
        joined = await town.join("a")
        assert told == []
        one.listen(lambda cause, reason: told.append(cause))
        await asyncio.sleep(1)
        assert told == [Cause.SESSION_LOST]
        events = [type(event) for _, event in town.events if isinstance(event, RoundEntered | WorldChanged)]
        assert events == [RoundEntered, RoundEntered, WorldChanged]
        assert joined.number == 2

    play(scene, min_nodes=1)


def test_damaged_assignment_is_told_until_it_is_repaired() -> None:
    async def scene(town: Town) -> None:
        (call,) = town.enter("a")
        await asyncio.sleep(1)
        own = town.keys.assign(town.node("a").identity.id)
        await town.node("a").backend.txn([], [Put(own, b"damaged")])
        with pytest.raises(RendezvousStateError) as caught:
            await call
        assert caught.value.key == own
        await town.node("a").backend.txn([], [Delete(own)])
        await asyncio.sleep(1)
        await town.gathered("a", "b")

    play(scene, min_nodes=2)


def test_bootstrap_that_fails_withdraws_the_node() -> None:
    async def scene(town: Town) -> None:
        process = town.start("a")

        async def no_port(number: int, size: int) -> tuple[str, int]:
            raise OSError("no port is free")

        process.node._bootstrap = no_port
        calls = town.enter("a", "b")
        with pytest.raises(OSError, match="no port is free"):
            await calls[0]
        assert set(town.present()) == {"b"}
        calls += town.enter("c")
        assert {one.size for one in await asyncio.gather(*calls[1:])} == {2}

    play(scene, min_nodes=2)


# Waiting in vain


def test_join_timeout_says_who_was_there_and_who_was_lost() -> None:
    async def scene(town: Town) -> None:
        (call,) = town.enter("a")
        await asyncio.sleep(12)
        town.enter("b", "c")
        await asyncio.sleep(8)
        town.crash("c")
        with pytest.raises(RendezvousTimeoutError) as caught:
            await call
        assert now() == pytest.approx(60, abs=0.1)
        text = str(caught.value)
        assert text.startswith("no round after 60 s: 2 of at least 4 nodes joined: ")
        assert "a" in text
        assert "b" in text
        assert "c (joined at 12 s, lost at 3" in text
        assert "a" not in town.present(), "it has withdrawn at once"
        (failure,) = town.of(JoinFailed)
        assert (failure.by, failure.error) == ("a", "RendezvousTimeoutError")

    play(scene, min_nodes=4, join_timeout=60)


def test_node_that_gave_up_may_join_again() -> None:
    async def scene(town: Town) -> None:
        with pytest.raises(RendezvousTimeoutError):
            await town.enter("a")[0]
        joined = await town.gathered("a", "b")
        assert {one.number for one in joined.values()} == {1}

    play(scene, min_nodes=2, join_timeout=10)


def test_cancelling_a_call_withdraws() -> None:
    async def scene(town: Town) -> None:
        calls = town.enter("a", "b")
        await asyncio.sleep(1)
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        assert set(town.present()) == {"b"}
        assert now() == pytest.approx(1, abs=0.1)

    play(scene, min_nodes=3)


def test_node_that_confirmed_waits_for_the_outcome_a_little_longer() -> None:
    """Its deadline passes while another has still to confirm: it gets the round, not an error."""

    async def scene(town: Town) -> None:
        async def slow(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if "confirm" in what:
                await asyncio.sleep(4)
            return await execute()

        town._wrap = lambda name, backend: Meddling(backend, slow if name == "b" else None)
        (call,) = town.enter("a")
        await asyncio.sleep(9)
        calls = [call, *town.enter("b")]
        joined = await asyncio.gather(*calls)
        assert {one.number for one in joined} == {1}
        assert now() == pytest.approx(13, abs=0.1)

    play(scene, min_nodes=2, join_timeout=10, confirm_timeout=5)


def test_node_that_confirmed_does_not_wait_for_ever() -> None:
    async def scene(town: Town) -> None:
        async def never(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if "confirm" in what:
                await asyncio.sleep(1000)
            return await execute()

        town._wrap = lambda name, backend: Meddling(backend, never if name == "b" else None)
        (call,) = town.enter("a")
        await asyncio.sleep(9)
        town.enter("b")
        with pytest.raises(RendezvousTimeoutError):
            await call
        assert now() <= 15.1

    play(scene, min_nodes=2, join_timeout=10, confirm_timeout=5)


def test_node_tells_of_a_confirmation_that_was_not_answered_yet() -> None:
    """A backend that lost its memory must not give the number to another round: the first may have become active."""

    async def scene(town: Town) -> None:
        async def unanswered(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            result = await execute()
            if "confirm" in what:
                await asyncio.sleep(1000)
            return result

        town._wrap = lambda name, backend: Meddling(backend, unanswered if name == "b" else None)
        calls = town.enter("a", "b")
        assert (await calls[0]).number == 1
        claim = msgspec.json.decode(town.node("b")._claim(), type=ClaimRecord)
        assert (claim.floor, claim.is_member) == (1, False)

    play(scene, min_nodes=2)


# Spares


def test_spare_has_no_deadline_and_a_fresh_one_when_a_place_is_free() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        (spare,) = town.enter("c")
        await asyncio.sleep(500)
        assert not spare.done()
        assert town.told is not None
        assert (town.told.waiting, town.told.spare) == (0, 1)
        assert town.node("a").waiting_count() == 0
        town.crash("b")
        await asyncio.sleep(20)
        assert town.told.number == 1
        lost_at = now()
        with pytest.raises(RendezvousTimeoutError):
            await spare
        assert 500 + 10 + 60 <= now() <= lost_at + 60

    play(scene, min_nodes=2, join_timeout=60)


def test_spare_is_promoted_when_a_member_is_lost() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        (spare,) = town.enter("c")
        await asyncio.sleep(500)
        town.crash("b")
        await asyncio.sleep(16)
        assert town.node("a").waiting_count() > 0
        (again,) = town.enter("a")
        joined = await asyncio.gather(again, spare)
        assert [(one.number, one.rank) for one in joined] == [(2, 0), (2, 1)]

    play(scene, min_nodes=2, join_timeout=60)


def test_dying_spare_changes_nothing() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        town.enter("c")
        await asyncio.sleep(5)
        town.crash("c")
        await asyncio.sleep(60)
        assert town.of(WorldChanged) == []
        assert [town.node(name).waiting_count() for name in ("a", "b")] == [0, 0]

    play(scene, min_nodes=2)


def test_spare_that_loses_the_backend_for_good_does_not_wait_for_ever() -> None:
    chaos = Chaos()

    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        (spare,) = town.enter("c")
        await asyncio.sleep(100)
        chaos.of["c"].cut()
        with pytest.raises(RendezvousTimeoutError, match="unreachable"):
            await spare
        assert now() <= 100 + 20 + 60 + 10
        chaos.of["c"].heal()

    play(scene, wrap=chaos.wrap, min_nodes=2, join_timeout=60)


def test_node_that_waits_where_too_few_are_left_has_a_deadline() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b", "c")
        town.crash("a")
        town.crash("b")
        await asyncio.sleep(20)
        (call,) = town.enter("d")
        with pytest.raises(RendezvousTimeoutError, match="2 of at least 3 nodes"):
            await call
        assert now() == pytest.approx(80, abs=0.5)

    play(scene, min_nodes=3, join_timeout=60)


def test_node_that_waits_after_a_round_is_over_has_a_deadline() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        for name in "ab":
            await town.node(name).leave("done")
        (call,) = town.enter("c")
        with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes joined: c"):
            await call
        assert now() == pytest.approx(60, abs=0.5)

    play(scene, min_nodes=2, join_timeout=60)


def test_waiting_node_is_admitted_within_one_further_round() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        await asyncio.sleep(60)
        (late,) = town.enter("c")
        await asyncio.sleep(0.9)
        assert town.node("a").waiting_count() == 0
        await asyncio.sleep(0.3)
        assert town.node("a").waiting_count() == 1
        assert {(event.by, event.cause) for event in town.of(WorldChanged)} == {("a", "waiting"), ("b", "waiting")}
        again = town.enter("a", "b")
        assert {(one.number, one.size) for one in await asyncio.gather(*again, late)} == {(2, 3)}

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1)


# Loss


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_loss_of_a_member_is_known_to_every_survivor_in_time(victim: str) -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b", "c")
        await asyncio.sleep(32)
        town.crash(victim)
        survivors = [name for name in "abc" if name != victim]
        await wait_until(lambda: all(town.node(name).waiting_count() for name in survivors), 15 + 1)
        assert {(event.by, event.cause) for event in town.of(WorldChanged)} == {(name, "loss") for name in survivors}
        joined = await town.gathered(*survivors)
        assert {(one.number, one.size) for one in joined.values()} == {(2, 2)}

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_loss_below_the_minimum_is_told_but_nobody_is_asked_to_join_again() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        town.crash("b")
        await asyncio.sleep(20)
        assert town.node("a").waiting_count() == 0
        assert [event.cause for event in town.of(WorldChanged)] == ["loss"]

    play(scene, min_nodes=2)


@pytest.mark.parametrize("victim", ["a", "b", "c", "d"])
@pytest.mark.parametrize("after", [False, True], ids=["before confirming", "after confirming"])
def test_node_that_dies_around_its_confirmation_is_not_waited_for(victim: str, after: bool) -> None:
    async def scene(town: Town) -> None:
        async def dies(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if "confirm" not in what:
                return await execute()
            if after:
                await execute()
            town.crash(victim)
            return await asyncio.Future()

        town._wrap = lambda name, backend: Meddling(backend, dies if name == victim else None)
        calls = dict(zip("abcd", town.enter(*"abcd"), strict=True))
        del calls[victim]
        joined = await asyncio.gather(*calls.values())
        sizes = {one.size for one in joined}
        assert sizes in ({3}, {4})  # all four had confirmed: the loss comes after
        if not after:
            assert sizes == {3}
            assert now() <= 15 + 30

    play(scene, min_nodes=3, max_nodes=4, last_call_timeout=5, confirm_timeout=10)


def test_live_member_that_does_not_confirm_is_dropped() -> None:
    async def scene(town: Town) -> None:
        async def never(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if "confirm" in what:
                await asyncio.sleep(1000)
            return await execute()

        town._wrap = lambda name, backend: Meddling(backend, never if name == "b" else None)
        calls = town.enter("a", "b", "c")
        joined = await asyncio.gather(calls[0], calls[2])
        assert {one.size for one in joined} == {2}
        assert now() == pytest.approx(10, abs=0.5)
        assert "b" in town.present()

    play(scene, min_nodes=2, max_nodes=3, confirm_timeout=10, last_call_timeout=5)


def test_node_whose_session_is_lost_is_told_and_may_join_again() -> None:
    chaos = Chaos()

    async def scene(town: Town) -> None:
        await town.gathered("a", "b", "c")
        chaos.of["b"].cut()
        await wait_until(lambda: bool(town.of(SessionLost)), 15.1)
        assert town.of(SessionLost)[0].by == "b"
        assert town.node("b").waiting_count() == 1
        assert [event.cause for event in town.of(WorldChanged) if event.by == "b"] == ["session lost"]
        chaos.of["b"].heal()
        await asyncio.sleep(2)
        joined = await town.gathered("a", "b", "c")
        assert {(one.number, one.size) for one in joined.values()} == {(2, 3)}
        assert {name: one.rank for name, one in joined.items()} == {"a": 0, "b": 1, "c": 2}

    play(scene, wrap=chaos.wrap, min_nodes=2, max_nodes=3)


def test_outage_shorter_than_the_time_to_live_goes_unnoticed() -> None:
    chaos = Chaos()

    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        for one in chaos.of.values():
            one.cut()
        await asyncio.sleep(8)
        for one in chaos.of.values():
            one.heal()
        await asyncio.sleep(60)
        assert town.of(WorldChanged) == []
        assert town.of(SessionLost) == []

    play(scene, wrap=chaos.wrap, min_nodes=2)


def test_run_whose_keys_vanish_is_made_again_by_those_who_wait() -> None:
    async def scene(town: Town) -> None:
        calls = town.enter("a", "b")
        await asyncio.sleep(5)
        await MemoryBackend(town.server).revoke(town.server.engine.items[town.keys.config].lease)
        joined = await asyncio.gather(*calls)
        assert {one.size for one in joined} == {2}
        assert now() < 5 + 30 + 1

    play(scene, min_nodes=2, max_nodes=3)


def test_state_that_vanishes_ends_the_round_of_its_members_and_numbers_go_on() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        await town.gathered("a", "b")
        await town.node("a").backend.txn([], [Delete(town.keys.round)])
        await asyncio.sleep(1)
        assert {(event.by, event.cause) for event in town.of(WorldChanged)} == {
            ("a", "round over"),
            ("b", "round over"),
        }
        assert [town.node(name).waiting_count() for name in "ab"] == [1, 1]
        joined = await town.gathered("a", "b")
        assert {one.number for one in joined.values()} == {3}

    play(scene, min_nodes=2)


# Leaving


def test_leaving_ends_the_session_at_once_and_is_told_with_its_reason() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b", "c")
        leases = len(town.server.engine.leases)
        assert await took(town.node("c").leave("done here")) < 0.1
        assert set(town.present()) == {"a", "b"}
        assert len(town.server.engine.leases) == leases - 1
        await asyncio.sleep(1)
        assert town.told is not None
        assert "c (done here)" in town.told.reason
        assert town.node("a").waiting_count() == 1
        await town.node("c").leave("again")

    play(scene, min_nodes=2, max_nodes=3)


def test_leaving_while_a_confirmation_is_under_way_is_no_loss() -> None:
    sent = asyncio.Event()

    async def slow(what: set[str], decision: bool, execute: Execute) -> TxnResult:
        result = await execute()
        if "confirm" in what:
            sent.set()
            await asyncio.sleep(1)  # it was executed, and the node does not know it yet
        return result

    async def scene(town: Town) -> None:
        town._wrap = lambda name, backend: Meddling(backend, slow if name == "b" else None)
        _, joining = town.enter("a", "b")
        await sent.wait()
        await town.node("b").leave("done here")
        with pytest.raises(RendezvousError, match="done here"):
            await joining
        await asyncio.sleep(1)
        assert town.told is not None
        assert "left: b (done here)" in town.told.reason
        assert town.of(NodeLost) == []

    play(scene, min_nodes=2)


def slow_join(sent: asyncio.Event, *, executed: bool) -> Callable[[set[str], bool, Execute], Awaitable[TxnResult]]:
    """A hook under which the answer to the first word of a node takes a second, and what it says may be done late."""

    async def slow(what: set[str], decision: bool, execute: Execute) -> TxnResult:
        if "join" not in what:
            return await execute()
        sent.set()
        if executed:
            result = await execute()
            await asyncio.sleep(1)
            return result
        await asyncio.sleep(1)
        return await execute()

    return slow


def test_leaving_while_the_first_word_is_under_way_is_no_loss() -> None:
    sent = asyncio.Event()

    async def scene(town: Town) -> None:
        town.enter("a")
        await asyncio.sleep(10)
        town._wrap = lambda name, backend: Meddling(backend, slow_join(sent, executed=True))
        (joining,) = town.enter("b")
        await sent.wait()
        await town.node("b").leave("done here")
        with pytest.raises(RendezvousError, match="done here"):
            await joining
        await asyncio.sleep(10)
        assert town.told is not None
        assert "left: b (done here)" in town.told.reason
        assert town.of(NodeLost) == []
        assert set(town.present()) == {"a"}

    play(scene, min_nodes=2)


def test_goodbye_of_a_node_whose_first_word_was_not_executed_makes_no_key() -> None:
    sent = asyncio.Event()

    async def scene(town: Town) -> None:
        town.enter("a")
        await asyncio.sleep(10)
        town._wrap = lambda name, backend: Meddling(backend, slow_join(sent, executed=False))
        (joining,) = town.enter("b")
        await sent.wait()
        await town.node("b").leave("done here")
        with pytest.raises(RendezvousError, match="done here"):
            await joining
        await asyncio.sleep(10)
        changes = [change.key for batch in town.server.engine.history.batches for change in batch.changes]
        assert len({key for key in changes if key.startswith(town.keys.nodes)}) == 1

    play(scene, min_nodes=2)


def test_leaving_takes_seconds_at_most_whatever_the_backend_does() -> None:
    chaos = Chaos()

    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        chaos.of["b"].cut()
        assert await took(town.node("b").leave("no answer")) <= 10.1
        await asyncio.sleep(20)
        assert set(town.present()) == {"a"}
        chaos.of["b"].heal()

    play(scene, wrap=chaos.wrap, min_nodes=2)


def test_node_that_left_may_join_again() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        await town.node("b").leave("a break")
        joined = await town.gathered("a", "b")
        assert {one.number for one in joined.values()} == {2}

    play(scene, min_nodes=2)


# Draining


def test_drained_member_is_told_and_drained_node_that_waits_exits_gracefully() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        (waiting,) = town.enter("c")
        await asyncio.sleep(5)
        entry = town.node("a")._run_config
        await entry.drain("c", "repair")
        with pytest.raises(RendezvousGracefulExitError, match="asked to go by a: repair"):
            await waiting
        assert set(town.present()) == {"a", "b"}
        await entry.drain("b", "power")
        await asyncio.sleep(1)
        event = [event for event in town.of(WorldChanged) if event.by == "b"][-1]
        assert (event.cause, event.reason) == ("drain", "asked to go by a: power")
        assert town.node("b").waiting_count() == 1
        again = town.enter("b")[0]
        with pytest.raises(RendezvousGracefulExitError):
            await again

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1)


# Closing


def test_close_ends_the_waiting_of_nodes_and_spares_each_in_its_way() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        (spare,) = town.enter("c")
        await asyncio.sleep(5)
        await town.node("a").close_run("done")
        with pytest.raises(RendezvousGracefulExitError, match="closed by a: done"):
            await spare
        await asyncio.sleep(60)
        assert town.of(WorldChanged) == []
        assert [town.node(name).waiting_count() for name in "ab"] == [0, 0]
        assert town.node("b").view.is_closed
        (again,) = town.enter("b")
        with pytest.raises(RendezvousClosedError):
            await again

    play(scene, min_nodes=2)


def test_close_is_an_error_for_a_node_that_waits_for_a_free_place() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        (waiting,) = town.enter("c")
        await asyncio.sleep(5)
        await town.node("a").close_run("done")
        with pytest.raises(RendezvousClosedError, match="closed by a: done"):
            await waiting

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1)


@pytest.mark.parametrize("moment", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
def test_close_while_a_round_forms_lets_nobody_in_or_everybody(moment: float) -> None:
    """Each step of the forming takes a second; the close comes before, in or after any of them."""
    chaos = Chaos(Faults(delay_s=(0.25, 0.25), watch_delay_s=(0.25, 0.25)))

    async def scene(town: Town) -> None:
        calls = town.enter("a", "b")
        await asyncio.sleep(moment)
        operator = town.start("operator")
        await operator.node.close_run("enough")
        results = await asyncio.gather(*calls, return_exceptions=True)
        entered = [one for one in results if not isinstance(one, BaseException)]
        for one in results:
            assert isinstance(one, RendezvousClosedError) or one in entered
        assert len(entered) in (0, 2)
        if not entered:
            assert "a" not in town.present()

    play(scene, wrap=chaos.wrap, min_nodes=2)


def test_close_ends_everybody_who_waits_for_more_nodes() -> None:
    async def scene(town: Town) -> None:
        calls = town.enter("a", "b")
        await asyncio.sleep(5)
        operator = town.start("operator")
        await operator.node.close_run("enough")
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in results] == [RendezvousClosedError, RendezvousClosedError]
        assert now() <= 5.1

    play(scene, min_nodes=3)


def test_reopened_run_goes_on_with_higher_numbers() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        await town.node("a").close_run("pause")
        await town.node("a").close_run("pause again")
        assert await town.node("b").reopen_run("on we go")
        assert not await town.node("b").reopen_run("on we go")
        joined = await town.gathered("a", "b")
        assert {one.number for one in joined.values()} == {2}

    play(scene, min_nodes=2)


def test_node_that_has_not_seen_the_reopening_yet_joins_all_the_same() -> None:
    chaos = Chaos(Faults(watch_delay_s=(2.0, 2.0)))

    async def scene(town: Town) -> None:
        (call,) = town.enter("a")
        await asyncio.sleep(10)
        operator = town.start("operator")
        await operator.node.close_run("pause")
        with pytest.raises(RendezvousClosedError):
            await call
        await operator.node.reopen_run("on we go")
        calls = town.enter("a", "b")
        assert town.node("a").view.is_closed
        await asyncio.gather(*calls)

    play(scene, wrap=chaos.wrap, min_nodes=2)


def test_closing_an_unreachable_run_times_out_with_its_reason() -> None:
    chaos = Chaos()

    async def scene(town: Town) -> None:
        town.start("a")
        chaos.of["a"].cut()
        with pytest.raises(RendezvousTimeoutError, match="could not be closed within 7 s"):
            await town.node("a").close_run("done")
        assert now() == pytest.approx(7)
        chaos.of["a"].heal()

    play(scene, wrap=chaos.wrap, min_nodes=2, close_timeout=7)


def test_run_id_is_free_again_after_its_last_node_has_been_gone_for_long_enough() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        await asyncio.sleep(1000)
        await town.node("a").close_run("done")
        for name in "ab":
            await town.node(name).leave("done")
        gone_at = now()
        for _ in range(100):
            (call,) = town.enter("c")
            try:
                await asyncio.wait_for(call, 1)
            except RendezvousClosedError:
                await asyncio.sleep(5)
            except TimeoutError:
                break
        assert 50 <= now() - gone_at <= 60 + 15 + 5 + 1.1
        joined = await town.gathered("c", "d")
        assert town.of(WorldChanged) == []
        assert {one.size for one in joined.values()} == {2}

    play(scene, min_nodes=2)


# Reaching the backend


def test_backend_that_is_never_reached_is_a_connection_error() -> None:
    chaos = Chaos()

    async def scene(town: Town) -> None:
        town.start("a")
        chaos.of["a"].cut()
        with pytest.raises(RendezvousConnectionError, match="could not reach memory://") as caught:
            await town.join("a")
        assert "Is it running there" in str(caught.value)
        assert now() == pytest.approx(60, abs=5.1)
        chaos.of["a"].heal()

    play(scene, wrap=chaos.wrap, min_nodes=2, join_timeout=60)


def test_backend_that_starts_late_is_waited_for() -> None:
    chaos = Chaos()

    async def scene(town: Town) -> None:
        for name in "ab":
            town.start(name)
            chaos.of[name].cut()
        calls = town.enter("a", "b")
        await asyncio.sleep(50)
        for one in chaos.of.values():
            one.heal()
        await asyncio.gather(*calls)
        assert len(town.of(BackendUnreachable)) == len(town.of(BackendReachable)) == 2

    play(scene, wrap=chaos.wrap, min_nodes=2, join_timeout=60)


def test_backend_that_went_away_is_a_timeout_that_says_so() -> None:
    chaos = Chaos()

    async def scene(town: Town) -> None:
        (call,) = town.enter("a")
        await asyncio.sleep(5)
        chaos.of["a"].cut()
        with pytest.raises(RendezvousTimeoutError, match="the backend has been unreachable for") as caught:
            await call
        assert not isinstance(caught.value, RendezvousConnectionError)
        chaos.of["a"].heal()

    play(scene, wrap=chaos.wrap, min_nodes=2, join_timeout=60)


def test_members_work_on_while_the_backend_is_away() -> None:
    chaos = Chaos()

    async def scene(town: Town) -> None:
        joined = await town.gathered("a", "b")
        for one in chaos.of.values():
            one.cut()
        await asyncio.sleep(10)
        for name in "ab":
            assert town.node(name).current == joined[name]
            assert town.node(name).waiting_count() == 0
        for one in chaos.of.values():
            one.heal()
        await asyncio.sleep(30)
        assert town.round is not None
        assert (town.round.number, town.round.phase) == (1, RoundPhase.ACTIVE)

    play(scene, wrap=chaos.wrap, min_nodes=2)
