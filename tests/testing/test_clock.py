import pytest

from rallypoint.testing.clock import ManualClock


def test_clock_stands_still_until_it_is_advanced():
    clock = ManualClock(10.0)
    assert clock() == clock() == 10.0
    assert clock.advance(2.5) == 12.5
    assert clock() == 12.5


def test_clock_can_be_advanced_by_zero():
    clock = ManualClock()
    assert clock.advance(0) == 0.0


@pytest.mark.parametrize("seconds", [-1, -0.001, float("inf"), float("nan")])
def test_clock_refuses_negative_and_infinite_amounts(seconds):
    clock = ManualClock(5.0)
    with pytest.raises(ValueError, match="cannot be moved"):
        clock.advance(seconds)
    assert clock() == 5.0
