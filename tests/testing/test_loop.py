import asyncio
import time
from itertools import count

import pytest

from rallypoint.testing.loop import MACHINE, BusyLoop, Deadlock, OutOfTime, VirtualTimeLoop, run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_hours_of_virtual_time_pass_at_once():
    async def main():
        await asyncio.sleep(10_000.0)
        async with asyncio.timeout(100.0):
            await asyncio.sleep(50.0)
        return now()

    began = time.monotonic()
    assert run(main()) == 10_050.0
    assert time.monotonic() - began < 5.0


def test_timers_run_at_their_exact_time_and_in_order():
    seen = []

    async def main():
        loop = asyncio.get_running_loop()
        for when in (0.3, 0.1, 0.2, 0.1, 1e9 + 0.1):
            loop.call_at(when, lambda when=when: seen.append((when, now())))
        await asyncio.sleep(2e9)

    run(main())
    assert seen == [(0.1, 0.1), (0.1, 0.1), (0.2, 0.2), (0.3, 0.3), (1e9 + 0.1, 1e9 + 0.1)]


def test_cancelled_timers_never_run_and_are_forgotten():
    async def main():
        loop = asyncio.get_running_loop()
        for _ in range(10_000):
            loop.call_later(1.0, pytest.fail, "a cancelled timer ran").cancel()
            await asyncio.sleep(0)
        assert len(loop._timers) < 5_000
        await asyncio.sleep(2.0)

    run(main())


def test_call_soon_threadsafe_works_from_the_same_thread():
    async def main():
        done = asyncio.Event()
        asyncio.get_running_loop().call_soon_threadsafe(done.set)
        await done.wait()

    run(main())


def test_executor_runs_the_function_at_once():
    async def main():
        assert await asyncio.to_thread(sum, [1, 2]) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    run(main())


def test_deadlock_names_the_tasks_and_their_positions():
    async def wait_in_vain():
        await asyncio.Event().wait()

    async def main():
        asyncio.create_task(wait_in_vain(), name="the waiter")  # noqa: RUF006
        await asyncio.sleep(3.0)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock) as caught:
        run(main())
    assert "3 s" in str(caught.value)
    main_line, waiter_line = caught.value.pending
    assert "test_loop.py" in main_line
    assert main_line.endswith("main")
    assert waiter_line.startswith("the waiter: ")
    assert waiter_line.endswith("wait_in_vain")
    assert waiter_line in str(caught.value)


def test_task_that_never_started_is_named_too():
    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(asyncio.sleep(0), name="late")
        return loop.pending_tasks(), task

    pending, task = run(main())
    assert task in pending


def test_limit_of_virtual_time_raises_with_the_pending_tasks():
    async def main():
        for _ in count():
            await asyncio.sleep(7.0)

    with pytest.raises(OutOfTime, match=r"100 s(.|\n)*in test_limit.*main"):
        run(main(), limit_s=100.0)


def test_program_that_ends_in_time_does_not_reach_the_limit():
    assert run(asyncio.sleep(100.0, "done"), limit_s=100.0) == "done"


def test_busy_loop_fails_instead_of_hanging():
    async def main():
        for _ in count():
            await asyncio.sleep(0)

    with pytest.raises(BusyLoop, match="1000 turns"):
        run(main(), max_iterations=1_000)


def test_many_iterations_at_different_times_are_not_a_busy_loop():
    async def main():
        for _ in range(3_000):
            await asyncio.sleep(0.001)

    run(main(), max_iterations=1_000)


def test_remaining_tasks_are_cancelled_oldest_first():
    ended = []

    async def sleeper(name):
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(1.0)
            ended.append(name)

    async def main():
        tasks = [asyncio.create_task(sleeper(name)) for name in "abc"]
        await asyncio.sleep(1.0)
        return tasks

    tasks = run(main(), limit_s=1.5)
    assert ended == ["a", "b", "c"]
    assert all(task.cancelled() for task in tasks)


def test_task_that_refuses_to_end_is_an_error():
    async def stubborn():
        while True:
            try:
                await asyncio.sleep(1.0)
            except asyncio.CancelledError:
                if now() > 10_000.0:
                    raise

    async def main():
        asyncio.create_task(stubborn(), name="stubborn")  # noqa: RUF006
        await asyncio.sleep(1.0)

    with pytest.raises(OutOfTime, match="stubborn"):
        run(main())


def test_async_generators_are_closed():
    closed = []

    async def generator():
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    async def main():
        kept = generator()
        assert await anext(kept) == 1
        return kept

    run(main())
    assert closed == [True]


def test_exceptions_of_main_are_raised():
    async def main():
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(main())


def test_pause_makes_timers_late_all_at_once():
    seen = []

    async def main():
        loop = asyncio.get_running_loop()
        for delay in (1.0, 2.0, 3.0):
            loop.call_later(delay, lambda: seen.append(now()))
        loop.pause(10.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="cannot pause"):
            loop.pause(-1.0)

    run(main())
    assert seen == [10.0, 10.0, 10.0]


def order_of(seed, *, timers: bool) -> str:
    seen = []

    async def step(name):
        if timers:
            await asyncio.sleep(1.0)
        for _ in range(3):
            seen.append(name)
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(*(step(name) for name in "abcdef"))

    run(main(), seed=seed)
    return "".join(seen)


@pytest.mark.parametrize("timers", [False, True])
def test_seed_draws_the_order_of_tasks_and_repeats_it(timers):
    assert order_of(None, timers=timers) == "abcdef" * 3
    orders = {seed: order_of(seed, timers=timers) for seed in range(20)}
    assert orders == {seed: order_of(seed, timers=timers) for seed in range(20)}
    assert len(set(orders.values())) == 20
    assert all(sorted(order) == sorted("abcdef" * 3) for order in orders.values())


@pytest.mark.parametrize("seed", range(20))
def test_seed_leaves_the_order_that_asyncio_promises(seed):
    seen = []

    async def waiter(future, name):
        await future
        seen.append(name)

    async def main():
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        future.add_done_callback(lambda _: seen.append("before"))
        tasks = [asyncio.create_task(waiter(future, name)) for name in "ab"]
        await asyncio.sleep(0.1)
        future.add_done_callback(lambda _: seen.append("after"))
        for n in range(3):
            loop.call_soon(seen.append, n)
        future.set_result(None)
        await asyncio.gather(*tasks)

    run(main(), seed=seed)
    assert seen[:4] == [0, 1, 2, "before"]
    assert sorted(seen[4:6]) == ["a", "b"]
    assert seen[6:] == ["after"]


def test_tasks_without_a_name_are_numbered_by_their_loop():
    async def main():
        return [asyncio.create_task(asyncio.sleep(0)).get_name() for _ in range(2)]

    assert run(main()) == run(main())


def test_closed_loop_takes_no_more_timers():
    loop = VirtualTimeLoop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1.0, print)


# --- frozen machines --------------------------------------------------------------------------------------------------


async def _on_machine(name, coro):
    MACHINE.set(name)
    return await coro


def test_frozen_machine_is_paused_while_others_run():
    seen = []

    async def tick(name):
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append((name, asyncio.get_running_loop().time()))

    async def main():
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(_on_machine(name, tick(name))) for name in "ab"]
        await asyncio.sleep(1.5)
        loop.freeze("b")
        await asyncio.sleep(10)
        loop.thaw("b")
        await asyncio.gather(*tasks)

    run(main())
    assert seen == [("a", 1), ("b", 1), ("a", 2), ("a", 3), ("b", 11.5), ("b", 12.5)]


def test_task_of_a_frozen_machine_is_frozen_with_it():
    async def parent():
        return await asyncio.create_task(asyncio.sleep(1, "done"))

    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(_on_machine("a", parent()))
        await asyncio.sleep(0.5)
        loop.freeze("a")
        await asyncio.sleep(5)
        frozen = not task.done()
        loop.thaw("a")
        return frozen, await task, loop.time()

    assert run(main()) == (True, "done", 5.5)


def test_thawing_a_machine_that_is_not_frozen_has_no_effect():
    async def main():
        asyncio.get_running_loop().thaw("nobody")

    run(main())


def test_tasks_of_a_machine_that_stays_frozen_end_with_the_loop():
    async def main():
        asyncio.create_task(_on_machine("a", asyncio.sleep(1)), name="left over")  # noqa: RUF006
        asyncio.get_running_loop().freeze("a")
        await asyncio.sleep(5)

    run(main())


def test_loop_is_idle_when_only_later_timers_are_left():
    async def main():
        loop = asyncio.get_running_loop()
        idle = [loop.is_idle]
        loop.call_soon(lambda: None)
        idle.append(loop.is_idle)
        await asyncio.sleep(0)
        loop.call_later(1.0, lambda: None)
        idle.append(loop.is_idle)
        loop.call_later(0.0, lambda: None)
        idle.append(loop.is_idle)
        return idle

    assert run(main()) == [True, False, True, False]
