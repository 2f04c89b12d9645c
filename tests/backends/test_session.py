"""Sessions: renewals, and a loss that is never noticed later than the backend ends the lease."""

import asyncio
import random

import pytest

from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.backends.session import MAX_PENDING_RENEWALS, LeaseSession, first_interval_fraction
from rallypoint.errors import OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import Put
from rallypoint.testing.chaos import ChaosBackend, Faults
from rallypoint.testing.loop import run

TTL_S = 6.0


def now() -> float:
    return asyncio.get_running_loop().time()


class Scripted(MemoryBackend):
    """A backend with scripted renewals: `fault` is awaited before each one is executed, `after` before its answer."""

    def __init__(self, server=None, fault=None, after=None):
        super().__init__(server or MemoryServer())
        self.fault = fault
        self.after = after
        self.sent_at = []

    async def keep_alive(self, lease):
        self.sent_at.append(now())
        if self.fault is not None:
            await self.fault()
        alive = await super().keep_alive(lease)
        if self.after is not None:
            await self.after()
        return alive


def failing(error):
    async def fault():
        raise error

    return fault


async def hang():
    await asyncio.get_running_loop().create_future()


async def lost_at(session) -> float:
    await session.lost
    return now()


async def gone_at(server, session) -> float:
    """Write a key under the session; the time at which the backend deletes it."""
    backend = MemoryBackend(server)
    revision = (await backend.txn((), (Put("/node", b"", session.lease),))).revision
    batch = await anext(backend.watch("/node", revision))
    assert batch.changes[0].item is None
    return now()


# --- renewing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval_s", "wanted"), [(None, 2.0), (1.0, 1.0), (100.0, TTL_S / 2)])
def test_session_is_renewed_every_interval(interval_s, wanted):
    async def main():
        backend = Scripted()
        session = await backend.open_session(TTL_S, interval_s=interval_s)
        await asyncio.sleep(12.5)
        await session.close()
        return backend.sent_at

    assert run(main()) == [wanted * n for n in range(1, int(12.5 / wanted) + 1)]


def test_slow_answers_do_not_lengthen_the_interval_of_renewals():
    async def slowly():
        await asyncio.sleep(0.7)

    async def main():
        backend = Scripted(after=slowly)
        session = await backend.open_session(TTL_S, interval_s=1.0, renew_timeout_s=1.0)
        await asyncio.sleep(12.5)
        await session.close()
        return backend.sent_at

    assert run(main()) == pytest.approx([float(n) for n in range(1, 13)])


def test_renewals_pause_even_if_answers_take_longer_than_the_interval():
    async def slowly():
        await asyncio.sleep(1.5)

    async def main():
        backend = Scripted(after=slowly)
        session = await backend.open_session(TTL_S, interval_s=1.0, renew_timeout_s=2.0)
        await asyncio.sleep(10.0)
        await session.close()
        return backend.sent_at

    assert run(main()) == pytest.approx([1.0, 2.7, 4.4, 6.1, 7.8, 9.5])


@pytest.mark.parametrize("granting_s", [3.0, 5.0, 5.9])
def test_session_whose_grant_was_slow_is_renewed_before_it_expires(granting_s):
    """The time to live counts from the request."""

    class Slow(Scripted):
        async def grant(self, ttl_s):
            await asyncio.sleep(granting_s)
            return await super().grant(ttl_s)

    async def main():
        backend = Slow()
        session = await LeaseSession.open(backend, TTL_S)
        await asyncio.sleep(2 * TTL_S)
        lost = session.lost.is_set()
        await session.close()
        return lost, backend.sent_at[0]

    lost, first = run(main())
    assert not lost
    assert granting_s < first < TTL_S


def test_sessions_of_many_nodes_are_spread_over_half_an_interval():
    for leases in (range(1, 1001), random.Random(1).sample(range(1 << 52, 1 << 53), 1000)):
        parts = sorted(first_interval_fraction(lease) for lease in leases)
        assert parts[0] >= 0.5
        assert parts[-1] <= 1.0
        in_each_tenth = [sum(1 for part in parts if 0.5 + n / 20 <= part < 0.55 + n / 20) for n in range(10)]
        assert min(in_each_tenth) > 50


def test_missed_renewals_are_reported_once_per_outage_and_retried():
    missed = []

    async def main():
        backend = Scripted(fault=failing(Unavailable("no way there")))
        session = await backend.open_session(TTL_S, on_missed=missed.append)
        await asyncio.sleep(4.1)
        backend.fault = failing(OutcomeUnknown("no answer"))
        await asyncio.sleep(1.0)
        backend.fault = None
        await asyncio.sleep(100.0)
        backend.fault = failing(OutcomeUnknown("again"))
        await asyncio.sleep(3.0)
        lost = session.lost.is_set()
        await session.close()
        return lost

    assert run(main()) is False
    assert missed == ["no way there", "again"]


def test_long_outage_is_reported_again_after_each_time_to_live():
    missed = []

    async def main():
        async def no_leader():
            raise Unavailable("no leader", nothing_ended_at=now())

        backend = Scripted(fault=no_leader)
        session = await backend.open_session(TTL_S, on_missed=lambda _: missed.append(now()))
        await asyncio.sleep(30.0)
        lost = session.lost.is_set()
        await session.close()
        return lost

    assert run(main()) is False
    assert missed == pytest.approx([2.0, 8.0, 14.0, 20.0, 26.0], abs=1.0)


def test_renewal_that_takes_too_long_counts_as_missed():
    missed = []

    async def main():
        backend = Scripted(fault=hang)
        session = await backend.open_session(TTL_S, renew_timeout_s=0.5, on_missed=missed.append)
        await asyncio.sleep(3.0)
        backend.fault = None
        await asyncio.sleep(100.0)
        return session.lost.is_set()

    assert run(main()) is False
    assert missed == ["no answer in time"]


def test_late_answer_counts():
    """Otherwise a slow backend would lose all sessions, and all nodes would join again."""
    missed = []

    async def main():
        backend = Scripted(after=lambda: asyncio.sleep(3.5))
        session = await backend.open_session(TTL_S, renew_timeout_s=0.5, on_missed=missed.append)
        await asyncio.sleep(100.0)
        lost = session.lost.is_set()
        await session.close()
        return lost

    assert run(main()) is False
    assert set(missed) == {"no answer in time"}


def test_renewals_without_an_answer_are_few_and_end_with_the_session():
    hanging, most = 0, []

    async def hang_counted():
        nonlocal hanging
        hanging += 1
        most.append(hanging)
        try:
            await hang()
        finally:
            hanging -= 1

    async def main():
        backend = Scripted(fault=hang_counted)
        session = await backend.open_session(TTL_S, interval_s=0.5, renew_timeout_s=0.1)
        await session.lost
        await asyncio.sleep(0)
        return len(backend.sent_at), [task.get_name() for task in asyncio.all_tasks()]

    sent, tasks = run(main())
    assert sent > MAX_PENDING_RENEWALS
    assert max(most) == MAX_PENDING_RENEWALS
    assert len(tasks) == 1


def test_renewals_without_an_answer_do_not_block_later_ones():
    """Regression: after some renewals without an answer no more were sent."""

    async def main():
        backend = Scripted()

        async def first_ones_hang():
            if len(backend.sent_at) <= 2 * MAX_PENDING_RENEWALS:
                await hang()

        backend.fault = first_ones_hang
        session = await backend.open_session(TTL_S, interval_s=0.5, renew_timeout_s=0.1)
        await asyncio.sleep(5 * TTL_S)
        return session.lost.reason

    assert run(main()) is None


async def granted(backend):
    """A session on a backend that reports expired leases."""
    lease = await backend.grant(TTL_S)
    return LeaseSession(
        backend, lease, TTL_S, now(), interval_s=None, renew_timeout_s=None, on_missed=None, reports_expiry=True
    )


def test_session_without_local_expiry_is_not_lost_by_late_answers():
    async def main():
        backend = Scripted(after=lambda: asyncio.sleep(TTL_S + 1.0))  # all renewals arrive, all answers are too late
        session = await granted(backend)
        session.set_local_expiry(False)
        await asyncio.sleep(10 * TTL_S)
        lost = session.lost.is_set()
        session.set_local_expiry(True)
        return lost, session.lost.reason

    assert run(main()) == (False, "the session was not renewed within its time to live of 6 s")


def test_session_expires_on_time_once_local_expiry_is_enabled_again():
    """Regression: the session expired only when the renewal task woke up."""

    async def main():
        backend = Scripted(fault=hang)
        session = await granted(backend)
        session.set_local_expiry(False)
        await asyncio.sleep(TTL_S + 0.5)  # locally expired, and a renewal waits for its answer
        session.expires_at = now() + 0.3  # an older renewal has been answered
        ends_at = session.expires_at
        session.set_local_expiry(True)
        return await lost_at(session) - ends_at

    assert run(main()) == pytest.approx(0.0)


def test_process_that_was_stopped_during_a_renewal_processes_its_answer_first():
    """Regression: the answer had arrived, but the session was considered lost."""

    async def main():
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        backend = Scripted(after=lambda: answer)
        session = await backend.open_session(TTL_S)
        await asyncio.sleep(2.1)
        assert backend.sent_at == [2.0]
        loop.pause(TTL_S - 1.5)
        for _ in range(3):  # timers run before received data is processed
            await asyncio.sleep(0)
        answer.set_result(None)
        await asyncio.sleep(0.5)
        return session.lost.reason

    assert run(main()) is None


def test_session_without_local_expiry_is_lost_when_the_backend_reports_its_end():
    async def main():
        backend = Scripted(fault=lambda: asyncio.sleep(TTL_S + 1.0))  # all renewals arrive too late
        session = await granted(backend)
        session.set_local_expiry(False)
        return await lost_at(session), session.lost.reason

    at, reason = run(main())
    assert at == pytest.approx(2.0 + TTL_S + 1.0)
    assert reason == "the backend ended the session: it had not been renewed in time, or was revoked"


def test_session_without_local_expiry_is_lost_in_time_if_the_backend_is_unreachable():
    async def main():
        session = await granted(Scripted(fault=failing(Unavailable("down"))))
        session.set_local_expiry(False)
        return await lost_at(session)

    assert run(main()) == TTL_S


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [failing(Unavailable("down")), failing(OutcomeUnknown("?")), failing(RuntimeError("a bug")), hang]
)
def test_session_is_lost_when_nothing_was_renewed_for_its_time_to_live(fault):
    async def main():
        server = MemoryServer()
        backend = Scripted(server)
        session = await backend.open_session(TTL_S)
        gone = asyncio.create_task(gone_at(server, session))
        await asyncio.sleep(2.5)
        backend.fault = fault
        return await lost_at(session), await gone, session.lost.reason, backend.sent_at

    lost, gone, reason, sent_at = run(main(), limit_s=100.0)
    assert sent_at[0] == 2.0
    assert lost == gone == 2.0 + TTL_S
    assert reason == "the session was not renewed within its time to live of 6 s"


def test_slow_renewal_counts_from_the_time_of_sending():
    async def main():
        server = MemoryServer()
        backend = Scripted(server, fault=lambda: asyncio.sleep(1.5), after=lambda: asyncio.sleep(1.0))
        session = await backend.open_session(TTL_S, renew_timeout_s=3.0)
        gone = asyncio.create_task(gone_at(server, session))
        await asyncio.sleep(4.6)
        backend.fault = hang
        return await lost_at(session), await gone

    lost, gone = run(main(), limit_s=100.0)
    assert (lost, gone) == (2.0 + TTL_S, 3.5 + TTL_S)


@pytest.mark.parametrize("seed", range(40))
def test_session_is_lost_on_this_side_before_the_backend_deletes_its_keys(seed):
    rng = random.Random(seed)
    faults = Faults(
        delay_s=(0.0, rng.choice([0.0, 0.5, 3.0])),
        unavailable=rng.uniform(0.0, 0.4),
        unknown_done=rng.uniform(0.0, 0.2),
        unknown_not_done=rng.uniform(0.0, 0.2),
        unknown_late=rng.uniform(0.0, 0.2),
        call_timeout_s=rng.choice([0.5, 5.0]),
    )

    async def main():
        server = MemoryServer()
        chaos = ChaosBackend(MemoryBackend(server), rng, Faults.none())
        session = await chaos.open_session(TTL_S)
        lost, gone = asyncio.create_task(lost_at(session)), asyncio.create_task(gone_at(server, session))
        chaos.faults = faults
        await asyncio.sleep(rng.uniform(0.0, 60.0))
        chaos.cut()
        return await lost, await gone

    lost, gone = run(main(), seed=seed, limit_s=10_000.0)
    assert lost <= gone


def test_session_that_was_revoked_elsewhere_is_lost_at_the_next_renewal():
    async def main():
        server = MemoryServer()
        session = await MemoryBackend(server).open_session(TTL_S)
        await asyncio.sleep(3.0)
        await MemoryBackend(server).revoke(session.lease)
        return await lost_at(session), session.lost.reason

    lost, reason = run(main(), limit_s=100.0)
    assert lost == 4.0
    assert "the backend ended the session" in reason


def test_session_that_the_backend_refuses_to_renew_is_lost_at_once():
    async def main():
        session = await Scripted(fault=failing(Rejected("who are you?"))).open_session(TTL_S)
        return await lost_at(session), session.lost.reason

    assert run(main(), limit_s=100.0) == (2.0, "the backend refused to renew the session: who are you?")


def test_process_stopped_beyond_the_time_to_live_loses_its_session():
    async def main():
        backend = Scripted()
        session = await backend.open_session(TTL_S)
        await asyncio.sleep(3.0)
        asyncio.get_running_loop().pause(TTL_S)
        lost = await lost_at(session)
        return lost, backend.sent_at

    assert run(main(), limit_s=100.0) == (9.0, [2.0])


def test_process_stopped_for_less_than_the_time_to_live_keeps_its_session():
    async def main():
        backend = Scripted()
        session = await backend.open_session(TTL_S)
        for _ in range(5):
            await asyncio.sleep(3.0)
            asyncio.get_running_loop().pause(TTL_S / 2)
        await asyncio.sleep(10.0)
        alive = await backend.keep_alive(session.lease)
        return alive, session.lost.is_set()

    assert run(main(), limit_s=100.0) == (True, False)


# --- ending -----------------------------------------------------------------------------------------------------------


def test_closing_ends_the_lease_and_does_not_set_lost():
    async def main():
        server = MemoryServer()
        backend = Scripted(server)
        session = await backend.open_session(TTL_S)
        gone = asyncio.create_task(gone_at(server, session))
        await asyncio.sleep(1.0)
        await session.close()
        await session.close()
        gone_when = await gone
        await asyncio.sleep(20.0)
        return gone_when, session.lost.is_set(), backend.sent_at

    assert run(main(), limit_s=100.0) == (1.0, False, [])


def test_abandoned_session_is_never_renewed_again():
    async def main():
        server = MemoryServer()
        backend = Scripted(server)
        session = await backend.open_session(TTL_S)
        gone = asyncio.create_task(gone_at(server, session))
        await asyncio.sleep(3.0)
        session.abandon()
        return await gone, backend.sent_at

    assert run(main(), limit_s=100.0) == (2.0 + TTL_S, [2.0])


@pytest.mark.parametrize("fault", [failing(Unavailable("down")), failing(OutcomeUnknown("?")), hang])
def test_closing_does_not_raise_or_hang_when_the_backend_is_unreachable(fault):
    class Unreachable(MemoryBackend):
        async def revoke(self, lease):
            await fault()

    async def main():
        session = await Unreachable(MemoryServer()).open_session(TTL_S)
        await session.close()
        return now()

    assert run(main(), limit_s=100.0) <= TTL_S


@pytest.mark.parametrize("begins_s", [0.1, 0.5, 1.0, 1.5, 1.9, 2.1])
def test_outage_of_less_than_half_the_time_to_live_loses_no_session(begins_s):
    async def main():
        backend = Scripted()
        session = await backend.open_session(TTL_S)
        await asyncio.sleep(begins_s)
        backend.fault = hang
        await asyncio.sleep(TTL_S * 0.45)
        backend.fault = None
        await asyncio.sleep(3 * TTL_S)
        assert session.lost.reason is None
        await session.close()

    run(main())


def test_session_survives_an_outage_in_which_no_lease_can_end():
    """The backend reports that it has no leader that could end a lease: the time to live starts anew."""

    async def scene():
        backend = Scripted()
        session = await backend.open_session(TTL_S, interval_s=1.0)

        async def no_leader():
            raise Unavailable("no leader", nothing_ended_at=now())

        backend.fault = no_leader
        await asyncio.sleep(5 * TTL_S)
        outlasted = not session.lost.is_set()
        backend.fault = failing(Unavailable("nothing is known"))
        began_at = now()
        return outlasted, await lost_at(session) - began_at

    outlasted, after_s = run(scene())
    assert outlasted
    assert TTL_S - 1.0 <= after_s <= TTL_S
