"""Back-off: pauses grow up to a bound, are jittered, and are short again after a success."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.backends.backoff import Backoff
from rallypoint.testing import loop as virtual


def pauses(backoff: Backoff, count: int) -> list[float]:
    async def measure() -> list[float]:
        loop = asyncio.get_running_loop()
        found = []
        for _ in range(count):
            before = loop.time()
            await backoff.sleep()
            found.append(loop.time() - before)
        return found

    return virtual.run(measure())


@given(st.integers(0, 1000))
def test_each_pause_is_between_half_and_all_of_its_bound_which_doubles(seed: int) -> None:
    found = pauses(Backoff(random.Random(seed), first_s=0.1, most_s=1.0), 8)
    for pause, bound in zip(found, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], strict=True):
        assert bound / 2 - 1e-9 <= pause <= bound + 1e-9


def test_success_makes_the_next_pause_short_again() -> None:
    backoff = Backoff(random.Random(1), first_s=0.1, most_s=10.0)
    assert max(pauses(backoff, 6)) > 1
    backoff.reset()
    assert pauses(backoff, 1)[0] <= 0.1


def test_pauses_of_different_nodes_differ() -> None:
    assert pauses(Backoff(random.Random(1)), 3) != pauses(Backoff(random.Random(2)), 3)
