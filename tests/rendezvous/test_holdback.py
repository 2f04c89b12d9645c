"""Hold-back: after how many losses, for how long, and when a name is forgiven."""

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.holdback import LONGEST_HOLD_S, HoldBack
from rallypoint.rendezvous.records import HealthRecord
from rallypoint.settings import Timing

TIMING = Timing(hold_back_losses=3, hold_back_window_s=600.0, hold_back_s=30.0)


def lost_times(hold_back: HoldBack, times: int, start: float = 0.0, every: float = 10.0) -> float:
    """Count some losses of a node; returns the time of the last one."""
    for index in range(times):
        hold_back.note_loss("a", TIMING, start + index * every)
    return start + (times - 1) * every


def hold_times(hold_back: HoldBack, times: int = 1, start: float = 0.0) -> float:
    """Hold a node back some times; returns the start of the last hold."""
    now = start
    for _ in range(times):
        now = lost_times(hold_back, 3, start=now)
        hold_back.note_record(hold_back.due["a"], TIMING, now)
    return now


def test_third_loss_within_the_window_makes_a_hold_due() -> None:
    hold_back = HoldBack()
    lost_times(hold_back, 2)
    assert not hold_back.is_held("a")
    hold_back.note_loss("a", TIMING, 590.0)
    assert hold_back.due == {
        "a": HealthRecord(name="a", losses=3, hold_s=30.0, why="it was lost 3 times in 590 s"),
    }
    assert hold_back.is_held("a")
    assert hold_back.held() == ["a"]


def test_losses_outside_the_window_do_not_add_up() -> None:
    hold_back = HoldBack()
    for index in range(20):
        hold_back.note_loss("a", TIMING, index * 300.0)
    assert not hold_back.due


def test_losses_of_different_names_do_not_add_up() -> None:
    hold_back = HoldBack()
    for index in range(20):
        hold_back.note_loss(f"node{index}", TIMING, 0.0)
    assert not hold_back.due


def test_hold_back_losses_of_zero_turns_it_off() -> None:
    hold_back = HoldBack()
    off = Timing(hold_back_losses=0)
    for _ in range(20):
        hold_back.note_loss("a", off, 0.0)
    assert not hold_back.due


def test_hold_starts_with_its_record_and_is_released_once() -> None:
    hold_back = HoldBack()
    now = hold_times(hold_back)
    assert hold_back.due == {}
    assert hold_back.is_held("a")
    assert hold_back.next_at() == now + 30
    assert hold_back.released(now + 29.9) == []
    assert hold_back.released(now + 30) == ["a"]
    assert hold_back.released(now + 31) == []
    assert not hold_back.is_held("a")
    assert "a" in hold_back.records


def test_each_further_hold_is_twice_as_long_up_to_a_limit() -> None:
    hold_back = HoldBack()
    holds = []
    now = 0.0
    for _ in range(10):
        now = hold_times(hold_back, start=now + 1)
        holds.append(hold_back.records["a"].hold_s)
    assert holds[:4] == [30, 60, 120, 240]
    assert holds[-1] == LONGEST_HOLD_S
    assert hold_back.records["a"].losses == 30


def test_name_without_losses_for_a_window_after_its_hold_is_forgiven() -> None:
    hold_back = HoldBack()
    now = hold_times(hold_back)
    hold_back.released(now + 30)
    assert hold_back.next_at() == now + 630
    assert hold_back.forgiven(now + 629) is None
    assert hold_back.forgiven(now + 630) == "a"
    hold_back.note_gone("a")
    assert hold_back.forgiven(now + 631) is None
    assert hold_back.next_at() is None


def test_forgiven_name_starts_with_the_first_hold_again() -> None:
    hold_back = HoldBack()
    now = hold_times(hold_back, times=3)
    hold_back.note_gone("a")
    hold_times(hold_back, start=now + 1000)
    assert hold_back.records["a"].hold_s == 30


def test_loss_of_all_nodes_resets_the_counts() -> None:
    hold_back = HoldBack()
    lost_times(hold_back, 2)
    hold_back.forget_losses()
    hold_back.note_loss("a", TIMING, 20.0)
    assert not hold_back.due


def test_new_coordinator_restarts_an_existing_hold() -> None:
    first, second = HoldBack(), HoldBack()
    now = hold_times(first)
    second.note_record(first.records["a"], TIMING, now + 25)
    assert second.released(now + 54.9) == []
    assert second.released(now + 55) == ["a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 400)), max_size=40))
def test_hold_is_due_only_after_enough_losses_within_the_window(losses: list[tuple[str, float]]) -> None:
    hold_back = HoldBack()
    now = 0.0
    seen: dict[str, list[float]] = {}
    for name, pause in losses:
        now += pause
        hold_back.note_loss(name, TIMING, now)
        seen.setdefault(name, []).append(now)
        if name in hold_back.due:
            times = seen.pop(name)
            assert len(times) >= 3
            assert times[-1] - times[-3] < TIMING.hold_back_window_s
            hold_back.note_record(hold_back.due[name], TIMING, now)
        else:
            times = seen[name]
            assert len(times) < 3 or times[-1] - times[-3] >= TIMING.hold_back_window_s
