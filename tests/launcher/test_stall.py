"""When a worker has stalled, and which one is named."""

import pytest

from rallypoint.launcher.stall import NodeReport, StallWatch, WorkerState, verdict

EVERY_S = 1.0


def watched(limit_s: float | None = 10.0) -> StallWatch:
    watch = StallWatch(first=4, workers=2, limit_s=limit_s)
    assert not watch.look(0.0, EVERY_S)
    return watch


def looked(watch: StallWatch, start: float, end: float) -> list[float]:
    """The times from start to end, one a second, at which a worker has stalled."""
    return [float(now) for now in range(int(start), int(end) + 1) if watch.look(float(now), EVERY_S)]


def test_worker_that_never_said_that_it_is_alive_is_never_judged():
    assert looked(watched(), 0, 1000) == []


def test_worker_that_stops_saying_so_has_stalled_after_the_time_out():
    watch = watched()
    watch.alive(1, 7, "", None, 3.0)
    assert looked(watch, 1, 15)[0] == 13.0
    watch.alive(1, 8, "", None, 16.0)
    assert looked(watch, 16, 25) == []
    states = watch.states(30.0)
    assert [(one.rank, one.silent_s, one.step, one.has_stalled) for one in states] == [
        (4, None, None, False),
        (5, 14.0, 8, True),
    ]


def test_without_a_time_out_no_worker_is_judged():
    watch = watched(limit_s=None)
    watch.alive(0, 1, "", None, 0.0)
    watch.timer(1, "scope", 1.0, 0.0)
    assert looked(watch, 0, 100) == []
    assert not any(one.has_stalled for one in watch.states(100.0))


def test_worker_may_announce_a_longer_silence():
    watch = watched()
    watch.alive(0, 1, "checkpoint", 60.0, 0.0)
    assert looked(watch, 1, 70)[0] == 60.0
    watch.alive(0, 2, "", None, 70.0)
    assert looked(watch, 71, 90)[0] == 80.0, "for one silence only"


def test_worker_that_has_ended_is_no_longer_judged():
    watch = watched()
    watch.alive(0, 1, "", None, 0.0)
    watch.ended(0)
    assert looked(watch, 1, 100) == []


def test_time_that_the_launcher_itself_was_stopped_does_not_count():
    watch = watched()
    watch.alive(0, 1, "", None, 0.0)
    assert looked(watch, 1, 5) == []
    assert not watch.look(500.0, EVERY_S), "it was stopped from 5 to 500 and heard nobody"
    assert looked(watch, 501, 520)[0] > 502.0


def test_torch_timer_that_expires_is_a_stall_and_one_that_is_cancelled_is_none():
    watch = watched()
    watch.timer(0, "train.py#50", 5.0, 0.0)
    watch.timer(0, "train.py#50", None, 4.0)
    assert looked(watch, 1, 50) == []
    watch.timer(0, "train.py#60", 5.0, 50.0)
    assert looked(watch, 51, 60)[0] == 55.0
    found = verdict([NodeReport(node="a", workers=watch.states(56.0))])
    assert found is not None
    assert found.why == "rank 4 on a: its torch timer 'train.py#60' expired"


def silent(rank: int, step: int | None, silent_s: float = 60.0, **more: object) -> WorkerState:
    return WorkerState(rank=rank, silent_s=silent_s, step=step, has_stalled=True, **more)


@pytest.mark.parametrize(
    ("a", "b", "rank", "why"),
    [
        (
            [silent(0, 1042), silent(1, 1042)],
            [silent(2, 1041), silent(3, 1042)],
            2,
            "2 on b said nothing for 60 s; last: step 1041; the others have reached step 1042",
        ),
        (
            [silent(0, 3), silent(1, 2)],
            [silent(2, 1)],
            2,
            "2 on b said nothing for 60 s; last: step 1; the others have reached step 3, also behind: 1 on a (step 2)",
        ),
        (
            [silent(0, None, 61.0)],
            [silent(1, None, 63.4, note="loading")],
            1,
            "1 on b said nothing for 63 s; last: loading; 2 of 2 ranks are silent",
        ),
        (
            [silent(0, 5, 70.0)],
            [silent(1, 5, is_stopped=True)],
            1,
            "1 on b said nothing for 60 s; last: step 5; its process is stopped by a signal; 2 of 2 ranks are silent",
        ),
        ([WorkerState(rank=0, silent_s=1.0, step=1)], [silent(1, 9)], 1, "1 on b said nothing for 60 s; last: step 9"),
        ([WorkerState(rank=0)], [silent(1, None)], 1, "1 on b said nothing for 60 s"),
    ],
)
def test_rank_that_holds_the_others_up_is_named(a, b, rank, why):
    found = verdict([NodeReport(node="a", workers=tuple(a)), NodeReport(node="b", workers=tuple(b))])
    assert found is not None
    assert (found.rank, found.why) == (rank, f"rank {why}")


def test_without_a_stalled_worker_nobody_is_named():
    assert verdict([NodeReport(node="a", workers=(WorkerState(rank=0, silent_s=1.0),))]) is None
