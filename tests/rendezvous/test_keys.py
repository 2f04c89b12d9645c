"""The names of keys: the ranges of two runs never overlap, whatever their ids."""

from hypothesis import example, given
from hypothesis import strategies as st

from rallypoint.rendezvous.keys import RunKeys

RUN_IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def all_keys(keys: RunKeys) -> list[str]:
    return [
        keys.config,
        keys.coordinator,
        keys.node("i"),
        keys.round,
        keys.waiting,
        keys.closed,
        keys.drain("i"),
        keys.health("name"),
        keys.assign("i"),
        keys.roster_chunk(1, 0),
        keys.history(1),
        keys.store(1) + "key",
    ]


@given(RUN_IDS, RUN_IDS)
@example("a", "a/")
@example("a", "a:data")
@example("a", "a:data/assign")
@example("a", "a/nodes")
@example("a/b", "a%2Fb")
@example("a", "../a")
@example("é", "e\u0301")
def test_no_key_of_a_run_is_in_a_range_of_another_run(one: str, other: str) -> None:
    if one == other:
        return
    first, second = RunKeys("rallypoint", one), RunKeys("rallypoint", other)
    for prefix in (first.control, first.data):
        assert not any(key.startswith(prefix) for key in all_keys(second))


@given(RUN_IDS)
def test_control_range_does_not_cover_the_data_range(run_id: str) -> None:
    keys = RunKeys("rallypoint", run_id)
    assert not keys.data.startswith(keys.control)
    assert not keys.control.startswith(keys.data)


@given(RUN_IDS)
def test_run_id_is_one_segment_of_printable_ascii(run_id: str) -> None:
    segment = RunKeys("rallypoint", run_id).control.removeprefix("/rallypoint/").removesuffix("/")
    assert "/" not in segment
    assert segment.isascii()
    assert segment.isprintable()


def test_coordinator_watches_only_the_keys_that_it_decides_on() -> None:
    keys = RunKeys("rallypoint", "run")
    watched = [key for key in all_keys(keys) if key.startswith(keys.control)]
    assert watched == [
        "/rallypoint/run/config",
        "/rallypoint/run/coordinator",
        "/rallypoint/run/nodes/i",
        "/rallypoint/run/state/round",
        "/rallypoint/run/state/waiting",
        "/rallypoint/run/state/closed",
        "/rallypoint/run/drain/i",
        "/rallypoint/run/health/name",
    ]


def test_nodes_watch_only_state_and_their_own_keys() -> None:
    keys = RunKeys("rallypoint", "run")
    watched = [key for key in all_keys(keys) if key.startswith(keys.state)]
    assert watched == [keys.round, keys.waiting, keys.closed]


@given(st.integers(0, 10**12 - 2))
def test_keys_of_rounds_sort_by_number(number: int) -> None:
    keys = RunKeys("rallypoint", "run")
    assert keys.history(number) < keys.history(number + 1)
    assert keys.roster(number) < keys.roster(number + 1)
    assert keys.store(number) < keys.store(number + 1)
    assert not keys.store(number + 1).startswith(keys.store(number))


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_health_keys_of_different_names_differ(one: str, other: str) -> None:
    keys = RunKeys("rallypoint", "run")
    assert (keys.health(one) == keys.health(other)) == (one == other)
