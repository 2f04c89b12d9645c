"""Events, reasons and reports: each beginning and each end is reported once, and no error names a wrong cause."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rallypoint.backends.contract import Backend, Limits, Watch
from rallypoint.errors import (
    LeaseGone,
    OutcomeUnknown,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    Unavailable,
)
from rallypoint.events import (
    BackendReachable,
    BackendUnreachable,
    JoinFailed,
    NodeLeft,
    RoundActive,
    RoundForming,
    RoundGivenUp,
    RoundOver,
)
from rallypoint.kv.types import Batch, TxnResult
from rallypoint.rendezvous.node_session import WITHDRAW_S
from rallypoint.rendezvous.records import HistoryRecord
from rallypoint.testing.cuttable import CuttableBackend
from tests.rendezvous.kit import (
    CheckedWorld,
    ForwardingBackend,
    InterceptingBackend,
    T,
    TxnHook,
    now,
    run_scenario,
    wait_until,
)

Execute = Callable[[], Awaitable[TxnResult]]


def intercept(hook: TxnHook, limits: Limits | None = None) -> Callable[[str, Backend], Backend]:
    return lambda _, backend: InterceptingBackend(backend, hook, limits)


def waiting_reason(world: CheckedWorld) -> str:
    status = world.status
    return status.reason if status is not None else ""


def report_of(world: CheckedWorld, number: int) -> HistoryRecord:
    report = world.record(HistoryRecord, world.keys.history(number))
    assert report is not None
    return report


class DelayedWatches(ForwardingBackend):
    """Its watches deliver later than requests are answered."""

    def watch(self, prefix: str, after_revision: int) -> Watch:
        return DelayedWatch(super().watch(prefix, after_revision))


class DelayedWatch(Watch):
    def __init__(self, inner: Watch) -> None:
        self._inner = inner

    async def __anext__(self) -> Batch:
        batch = await anext(self._inner)
        await asyncio.sleep(0.3)
        return batch

    def ready(self) -> Batch | None:
        return None

    def cancel(self) -> None:
        self._inner.cancel()


# Nodes


def test_new_coordinator_names_its_lost_predecessor_before_the_first_round() -> None:
    async def scenario(world: CheckedWorld) -> None:
        world.enter("c")
        await asyncio.sleep(1.0)
        assert world.coordinator() == "c"
        world.enter("a")
        await asyncio.sleep(2.0)
        world.crash("c")
        await wait_until(lambda: world.coordinator() == "a" and "1 of at least 3" in waiting_reason(world), 60.0)
        assert waiting_reason(world).endswith("gone: c (it was the coordinator before this one)")
        world.enter("c")
        await wait_until(lambda: "2 of at least 3" in waiting_reason(world), 5.0)
        assert "gone" not in waiting_reason(world)

    run_scenario(scenario, min_nodes=3, max_nodes=3)


def test_coordinator_that_is_lost_in_a_round_is_named_once() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        lost = world.coordinator()
        world.crash(lost)
        await wait_until(lambda: world.coordinator() not in ("", lost) and lost in waiting_reason(world), 60.0)
        assert waiting_reason(world).count(f"{lost} (") == 1

    run_scenario(scenario, min_nodes=3, max_nodes=3)


def test_node_that_closes_or_reopens_a_run_sees_it_at_once() -> None:
    """Also if its watch delivers later than the answer arrives."""

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        node = world.node("a")
        await node.close_run("enough")
        assert node.view.is_closed
        await node.reopen_run("more")
        assert not node.view.is_closed

    run_scenario(scenario, wrap=lambda _, backend: DelayedWatches(backend), min_nodes=2, max_nodes=2)


# Rounds


@pytest.mark.parametrize(
    "error",
    [Unavailable("once"), LeaseGone("once", lease=1), OutcomeUnknown("once")],
    ids=lambda error: type(error).__name__,
)
def test_end_of_a_round_is_reported_although_its_write_failed(error: Exception) -> None:
    failed: list[set[str]] = []

    async def fail_once(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
        if writes - {"events"} == {"history"} and not failed:
            failed.append(writes)
            raise error
        return await execute()

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await world.join_all("a", "b")
        await asyncio.sleep(5)
        assert failed
        (over,) = world.of(RoundOver)
        assert over.round == 1
        assert report_of(world, 1).ended == over.reason != ""
        assert report_of(world, 2).ended == ""

    run_scenario(scenario, wrap=intercept(fail_once), min_nodes=2)


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("limits", [Limits(), Limits(max_txn_ops=5)], ids=["whole", "split"])
def test_round_is_reported_active_once_after_an_unknown_outcome(done: bool, limits: Limits) -> None:
    unknown: list[set[str]] = []

    async def lose_answer(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
        if "active" in writes and not unknown:
            unknown.append(writes)
            if done:
                await execute()
            raise OutcomeUnknown("no answer")
        return await execute()

    async def scenario(world: CheckedWorld) -> None:
        joined = await world.join_all("a", "b")
        await asyncio.sleep(5)
        assert unknown
        assert {one.number for one in joined.values()} == {1}
        assert [event.round for event in world.of(RoundActive)] == [1]
        await world.join_all("a", "b")
        assert len(world.of(RoundActive)) == 2

    run_scenario(scenario, wrap=intercept(lose_answer, limits), min_nodes=2)


def test_attempt_with_a_missing_assignment_is_reported_as_given_up() -> None:
    failed: list[set[str]] = []

    async def fail_once(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
        if writes == {"assign"} and not failed:
            failed.append(writes)
            raise Unavailable("not executed")
        return await execute()

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all(*"abcdefgh")
        assert [event.round for event in world.of(RoundForming)] == [1, 2]
        assert [event.round for event in world.of(RoundGivenUp)] == [1]
        assert [event.round for event in world.of(RoundActive)] == [2]

    run_scenario(scenario, wrap=intercept(fail_once, Limits(max_txn_ops=5)), min_nodes=8)


def test_attempt_that_was_never_committed_is_not_reported_as_given_up() -> None:
    failed: list[set[str]] = []

    async def fail_once(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
        if "form" in writes and not failed:
            failed.append(writes)
            raise Unavailable("not executed")
        return await execute()

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        assert failed
        assert world.of(RoundGivenUp) == []
        assert [event.round for event in world.of(RoundForming)] == [1]

    run_scenario(scenario, wrap=intercept(fail_once), min_nodes=2)


@pytest.mark.parametrize("change", [True, False], ids=["another coordinator", "the same coordinator"])
def test_report_has_the_duration_only_if_the_same_coordinator_saw_the_beginning(change: bool) -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        await asyncio.sleep(100)
        leaving = next(name for name in "abc" if (name == world.coordinator()) is change)
        await world.node(leaving).leave("done")
        await world.join_all(*(name for name in "abc" if name != leaving))
        await asyncio.sleep(5)
        report = report_of(world, 1)
        assert change or report.ended == f"{leaving} left: done"
        assert report.ended
        assert report.lasted_s == (None if change else pytest.approx(100, abs=1))

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


# Nodes


def test_timeout_after_an_outage_that_is_over_does_not_name_the_backend() -> None:
    lines: list[CuttableBackend] = []

    def wrap(name: str, backend: Backend) -> Backend:
        lines.append(CuttableBackend(backend))
        return lines[-1]

    async def scenario(world: CheckedWorld) -> None:
        (call,) = world.enter("a")
        await asyncio.sleep(8)
        lines[0].refuse()
        await asyncio.sleep(12)  # longer than between two renewals of the run
        assert len(world.of(BackendUnreachable)) == 1
        lines[0].heal()
        with pytest.raises(RendezvousTimeoutError) as caught:
            await call
        assert "unreachable" not in str(caught.value)
        assert "1 of at least 2 nodes joined" in str(caught.value)
        (reachable,) = world.of(BackendReachable)
        assert reachable.after_s < 30

    run_scenario(scenario, wrap=wrap, min_nodes=2, join_timeout=60)


@pytest.mark.parametrize("cause", ["a spare of a closed run", "drained"])
def test_graceful_exit_is_reported_as_leaving_and_not_as_a_failure(cause: str) -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        (call,) = world.enter("c")
        await asyncio.sleep(5)
        if cause == "drained":
            await world.node("a")._run_config.drain("c", "repair")
        else:
            await world.node("a").close_run("done")
        with pytest.raises(RendezvousGracefulExitError) as caught:
            await call
        (left,) = world.of(NodeLeft)
        assert (left.by, left.reason) == ("c", str(caught.value))
        assert world.of(JoinFailed) == []

    run_scenario(scenario, min_nodes=2)


def test_timeout_of_the_bootstrap_is_no_join_timeout() -> None:
    async def scenario(world: CheckedWorld) -> None:
        process = world.start("a")

        async def time_out(number: int, size: int) -> tuple[str, int]:
            await asyncio.sleep(1)
            raise TimeoutError("the port server does not answer")

        process.node._bootstrap = time_out
        calls = world.enter("a", "b")
        with pytest.raises(TimeoutError, match="the port server does not answer") as caught:
            await calls[0]
        assert not isinstance(caught.value, RendezvousTimeoutError)
        assert now() < 2
        assert set(world.present()) == {"b"}, "it must withdraw"
        calls += world.enter("c")
        assert {one.size for one in await asyncio.gather(*calls[1:])} == {2}

    run_scenario(scenario, min_nodes=2, join_timeout=60)


# A backend that hangs


class Hanging(ForwardingBackend):
    """After `hangs` is set, no request is answered and none fails."""

    hangs = False

    async def call(self, name: str, execute: Callable[[], Awaitable[T]]) -> T:
        if self.hangs:
            await asyncio.Future()
        return await execute()


@pytest.mark.parametrize("way", ["leave", "stop", "time-out", "cancel"])
def test_withdrawing_from_a_hanging_backend_takes_five_seconds_at_most(way: str) -> None:
    made: dict[str, Hanging] = {}

    def wrap(name: str, backend: Backend) -> Backend:
        made[name] = Hanging(backend)
        return made[name]

    async def scenario(world: CheckedWorld) -> None:
        (call,) = world.enter("a")
        await asyncio.sleep(9)
        made["a"].hangs = True
        started_at = now()
        if way == "time-out":
            with pytest.raises((RendezvousTimeoutError, RendezvousConnectionError)):
                await call
            started_at = 10
        elif way == "cancel":
            call.cancel()
            await asyncio.wait({call})
        else:
            await (world.node("a").leave("enough") if way == "leave" else world.node("a").stop())
        assert now() - started_at <= WITHDRAW_S + 0.01
        assert WITHDRAW_S == 5
        await asyncio.sleep(30)
        assert world.present() == {}, "its lease must have ended"
        made["a"].hangs = False
        await asyncio.wait({call})

    run_scenario(scenario, wrap=wrap, min_nodes=2, join_timeout=10)
