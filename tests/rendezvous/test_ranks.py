"""Places and ranks: the policies by example, and properties that hold for any candidates."""

import random
from collections.abc import Callable, Sequence
from itertools import groupby, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.ranks import Candidate, choose, natural_key, rank

POLICIES = ["sticky", "node_rank", "natural", "topology:zone+rack", "topology:rack"]


def node(
    name: str,
    order: int = 0,
    *,
    last: int | None = None,
    requested: int | None = None,
    id: str | None = None,
    member: bool | None = None,
    held_back: bool = False,
    **labels: str,
) -> Candidate:
    return Candidate(
        id=id or f"{name}_1_{order}",
        name=name,
        addr=f"{name}.cluster",
        order=order,
        labels=labels,
        node_rank=requested,
        was_member=last is not None if member is None else member,
        last_rank=last,
        held_back=held_back,
    )


def names(candidates: Sequence[Candidate]) -> list[str]:
    return [c.name for c in candidates]


def ids(candidates: Sequence[Candidate]) -> list[str]:
    return [c.id for c in candidates]


# Few names, orders and labels, so that conflicts are common.
NAMES = st.sampled_from(["a1", "a01", "a2", "a10", "b", "host9", "host10", ""])
VALUES = st.sampled_from(["", "r1", "r2", "r10"])
LABELS = st.dictionaries(st.sampled_from(["zone", "rack"]), VALUES)
RANKS = st.none() | st.integers(-1, 12)


@st.composite
def candidate_lists(draw: st.DrawFn, max_size: int = 9, distinct_last_ranks: bool = False) -> list[Candidate]:
    size = draw(st.integers(0, max_size))
    if distinct_last_ranks:
        old = draw(st.lists(st.integers(0, 12), max_size=size, unique=True))
        last_ranks: list[int | None] = draw(st.permutations([*old, *[None] * (size - len(old))]))
    else:
        last_ranks = draw(st.lists(RANKS, min_size=size, max_size=size))
    return [
        Candidate(
            id=f"n{index}",
            name=draw(NAMES),
            addr=draw(NAMES),
            order=draw(st.integers(0, 5)),
            labels=draw(LABELS),
            node_rank=draw(RANKS),
            was_member=draw(st.booleans()),
            last_rank=last_ranks[index],
            held_back=draw(st.booleans()),
        )
        for index in range(size)
    ]


def moved(before: Sequence[Candidate], after: Sequence[Candidate]) -> int:
    return sum(one is not other for one, other in zip(before, after, strict=True))


def moved_survivors(ranked: Sequence[Candidate]) -> int:
    return sum(c.last_rank is not None and c.last_rank != position for position, c in enumerate(ranked))


def is_contiguous(ranked: Sequence[Candidate], group_of: Callable[[Candidate], object]) -> bool:
    groups = [group for group, _ in groupby(ranked, key=group_of)]
    return all(group not in groups[:index] for index, group in enumerate(groups))


# Natural order


def test_host9_comes_before_host10() -> None:
    assert sorted(["host10", "host9", "host1"], key=natural_key) == ["host1", "host9", "host10"]


def test_every_number_in_a_name_counts() -> None:
    hosts = ["rack10-node1", "rack2-node10", "rack2-node9"]
    assert sorted(hosts, key=natural_key) == ["rack2-node9", "rack2-node10", "rack10-node1"]


def test_leading_zeros_only_break_ties() -> None:
    assert sorted(["a1", "a01", "a2", "a01b", "a1a"], key=natural_key) == ["a01", "a1", "a1a", "a01b", "a2"]


def test_names_with_and_without_a_leading_digit_compare() -> None:
    assert sorted(["b", "10", "9", "", "10a"], key=natural_key) == ["", "9", "10", "10a", "b"]


def test_only_ascii_digits_are_numbers() -> None:
    arabic_nine, arabic_ten = "\u0669", "\u0661\u0660"
    assert sorted([arabic_nine, arabic_ten, "a\u00b2", "a3"], key=natural_key) == [
        "a3",
        "a\u00b2",
        arabic_ten,
        arabic_nine,
    ]
    assert natural_key("a1" + arabic_nine) < natural_key("a10")


def test_a_number_of_any_length_is_compared_as_a_number() -> None:
    long, longer = "9" * 5000, "1" + "0" * 5000
    assert natural_key(long) < natural_key(longer)


@given(st.text(), st.text())
def test_natural_key_is_a_total_order(one: str, other: str) -> None:
    first, second = natural_key(one), natural_key(other)
    assert (first == second) == (one == other)
    assert [first < second, first == second, first > second].count(True) == 1


@given(st.lists(st.text(alphabet="ab019-"), max_size=8), st.randoms())
def test_natural_order_does_not_depend_on_the_order_of_the_input(texts: list[str], rng: random.Random) -> None:
    shuffled = rng.sample(texts, len(texts))
    assert sorted(shuffled, key=natural_key) == sorted(texts, key=natural_key)


@given(st.text(alphabet="ab-"), st.lists(st.integers(min_value=0)))
def test_numbered_names_sort_by_number(prefix: str, numbers: list[int]) -> None:
    in_order = [f"{prefix}{number}" for number in sorted(numbers)]
    assert sorted((f"{prefix}{number}" for number in numbers), key=natural_key) == in_order


# Places


def test_places_go_to_members_of_the_last_round_and_then_by_order_of_joining() -> None:
    candidates = [node("late", 9), node("early", 1), node("survivor", 12, last=3)]
    assert names(choose(candidates, 2)) == ["survivor", "early"]


def test_held_back_node_comes_last_even_if_it_was_a_member() -> None:
    candidates = [node("silent", 1, last=0, held_back=True), node("new", 9), node("survivor", 5, last=1)]
    assert names(choose(candidates, 3)) == ["survivor", "new", "silent"]


def test_nodes_that_joined_at_the_same_time_are_chosen_by_id() -> None:
    assert ids(choose([node("a", id="2"), node("b", id="1")], 1)) == ["1"]


@pytest.mark.parametrize("places", [0, -1])
def test_no_candidate_is_chosen_without_places(places: int) -> None:
    assert choose([node("a"), node("b")], places) == []


@given(candidate_lists(), st.integers(0, 10), st.randoms())
def test_no_rejected_candidate_has_priority_over_a_chosen_one(
    pool: list[Candidate], places: int, rng: random.Random
) -> None:
    chosen = choose(pool, places)
    assert len(chosen) == min(places, len(pool))
    rejected = [c for c in pool if c.id not in ids(chosen)]
    if any(not c.held_back for c in rejected):
        assert not any(c.held_back for c in chosen)
    for held_back in (True, False):
        inside = [c for c in chosen if c.held_back is held_back]
        outside = [c for c in rejected if c.held_back is held_back]
        if any(c.was_member for c in outside):
            assert all(c.was_member for c in inside)
        for was_member in (True, False):
            latest_in = max((c.order for c in inside if c.was_member is was_member), default=-1)
            assert all(c.order >= latest_in for c in outside if c.was_member is was_member)
    assert choose(rng.sample(pool, len(pool)), places) == chosen


# Sticky


def test_the_first_round_is_in_natural_order() -> None:
    pool = [node("host10", 1), node("host2", 2), node("host1", 3)]
    assert names(rank(pool, "sticky", None)) == ["host1", "host2", "host10"]


def test_survivors_keep_their_ranks_and_the_replacement_gets_the_free_one() -> None:
    pool = [node("c", last=2), node("new", 7), node("a", last=0)]
    assert names(rank(pool, "sticky", None)) == ["a", "new", "c"]


def test_newcomers_get_the_highest_ranks_in_natural_order() -> None:
    pool = [node("z", last=0), node("y", last=1), node("host10", 1), node("host9", 2)]
    assert names(rank(pool, "sticky", None)) == ["z", "y", "host9", "host10"]


def test_shrink_moves_only_survivors_with_too_high_ranks_in_order_of_rank() -> None:
    pool = [node("f", last=5), node("b", last=1), node("e", last=4), node("c", last=2)]
    assert names(rank(pool, "sticky", None)) == ["e", "b", "c", "f"]


def test_displaced_survivors_get_lower_free_ranks_than_newcomers() -> None:
    pool = [node("aaa", 1), node("b", last=1), node("z", last=7)]
    assert names(rank(pool, "sticky", None)) == ["z", "b", "aaa"]


def test_of_two_nodes_with_one_last_rank_the_first_to_join_keeps_it() -> None:
    first, second = node("twin", 3, last=1), node("twin", 8, last=1)
    assert rank([second, first], "sticky", None) == [second, first]


@given(candidate_lists(distinct_last_ranks=True))
def test_every_survivor_whose_rank_still_exists_keeps_it(pool: list[Candidate]) -> None:
    for place, c in enumerate(rank(pool, "sticky", None)):
        if c.last_rank is not None and c.last_rank < len(pool):
            assert place == c.last_rank


@given(candidate_lists(max_size=5, distinct_last_ranks=True), st.none() | NAMES)
def test_no_ranking_moves_fewer_survivors_than_sticky(pool: list[Candidate], rank0: str | None) -> None:
    ranked = rank(pool, "sticky", rank0)
    pinned = ranked[0] if rank0 in names(pool) else None
    allowed = (other for other in permutations(pool) if pinned is None or other[0] is pinned)
    assert moved_survivors(ranked) == min(moved_survivors(other) for other in allowed)


@given(candidate_lists(), st.none() | NAMES)
def test_same_nodes_get_the_same_ranks_again(pool: list[Candidate], rank0: str | None) -> None:
    ranked = rank(pool, "sticky", rank0)
    again = [node(c.name, c.order, id=c.id, last=position) for position, c in enumerate(ranked)]
    assert ids(rank(again, "sticky", rank0)) == ids(ranked)


# Requested ranks


def test_requested_ranks_are_met_and_other_nodes_fill_the_rest() -> None:
    pool = [node("a", requested=3), node("host10"), node("host9"), node("b", requested=1)]
    assert names(rank(pool, "node_rank", None)) == ["host9", "b", "host10", "a"]


def test_requested_ranks_win_over_last_ranks() -> None:
    pool = [node("a", last=0, requested=1), node("b", last=1, requested=0), node("c", last=2)]
    assert names(rank(pool, "node_rank", None)) == ["b", "a", "c"]


def test_survivor_keeps_its_rank_if_it_is_not_requested() -> None:
    pool = [node("x", last=2), node("requests", requested=0), node("a"), node("y", last=0)]
    assert names(rank(pool, "node_rank", None)) == ["requests", "y", "x", "a"]


def test_requested_ranks_close_up_in_order_when_nodes_are_missing() -> None:
    pool = [node("c", requested=5), node("a", requested=0), node("b", requested=2)]
    assert names(rank(pool, "node_rank", None)) == ["a", "b", "c"]


def test_nodes_without_request_come_after_requested_ranks_that_close_up() -> None:
    pool = [node("aaa"), node("c", requested=5), node("b", requested=2)]
    assert names(rank(pool, "node_rank", None)) == ["b", "c", "aaa"]


def test_first_to_join_gets_a_rank_that_two_nodes_request() -> None:
    pool = [
        node("late", 9, requested=0),
        node("early", 1, requested=0),
        node("b", 2, requested=1),
        node("c", 3, requested=2),
    ]
    assert names(rank(pool, "node_rank", None)) == ["early", "b", "c", "late"]


@given(candidate_lists())
def test_requested_ranks_are_exact_if_they_fit_and_in_order_otherwise(pool: list[Candidate]) -> None:
    ranked = rank(pool, "node_rank", None)
    requested = {c.node_rank for c in pool if c.node_rank is not None and c.node_rank >= 0}
    if all(wanted < len(pool) for wanted in requested):
        assert all(ranked[wanted].node_rank == wanted for wanted in requested)
    else:
        assert [c.node_rank for c in ranked[: len(requested)]] == sorted(requested)


# Natural and topology


def test_natural_ranks_ignore_the_last_round() -> None:
    pool = [node("host10", last=0), node("host9", last=1)]
    assert names(rank(pool, "natural", None)) == ["host9", "host10"]


def test_topology_groups_nodes_by_zone_and_then_by_rack() -> None:
    pool = [
        node("a", zone="z2", rack="r1"),
        node("b", zone="z1", rack="r10"),
        node("c", zone="z1", rack="r9"),
        node("d", zone="z1"),
        node("e"),
        node("f", zone="z1", rack="r10"),
    ]
    assert names(rank(pool, "topology:zone+rack", None)) == ["c", "b", "f", "d", "a", "e"]


def test_survivors_keep_their_order_inside_a_group_and_newcomers_follow() -> None:
    pool = [node("a", rack="r1"), node("b", last=4, rack="r1"), node("c", last=2, rack="r1")]
    assert names(rank(pool, "topology:rack", None)) == ["c", "b", "a"]


@given(candidate_lists(), st.none() | NAMES)
def test_equal_labels_are_adjacent_with_or_without_a_pinned_node(pool: list[Candidate], rank0: str | None) -> None:
    ranked = rank(pool, "topology:zone+rack", rank0)
    assert is_contiguous(ranked, lambda c: c.labels.get("zone"))
    assert is_contiguous(ranked, lambda c: (c.labels.get("zone"), c.labels.get("rack")))


# Pinned rank 0


def test_pinned_node_swaps_with_rank_0_and_no_other_node_moves() -> None:
    pool = [node(name, last=place) for place, name in enumerate("abcd")]
    assert names(rank(pool, "sticky", "c")) == ["c", "b", "a", "d"]


def test_pinned_node_takes_rank_0_from_the_node_that_requested_it() -> None:
    pool = [node("a", requested=0), node("b", requested=1), node("c", requested=2)]
    assert names(rank(pool, "node_rank", "c")) == ["c", "b", "a"]


def test_natural_order_continues_after_the_pinned_node() -> None:
    assert names(rank([node(name) for name in "abcd"], "natural", "c")) == ["c", "a", "b", "d"]


def test_neighbours_of_the_pinned_node_move_to_the_front_with_it() -> None:
    pool = [
        node("a", zone="z1", rack="r2"),
        node("b", zone="z2", rack="r1"),
        node("c", zone="z2", rack="r2"),
        node("d", zone="z2", rack="r2"),
        node("e", zone="z1", rack="r1"),
    ]
    assert names(rank(pool, "topology:zone+rack", "d")) == ["d", "c", "b", "e", "a"]


def test_of_two_nodes_with_the_pinned_name_the_first_to_join_gets_rank_0() -> None:
    early, late = node("head", 1, last=5), node("head", 2, last=0)
    assert rank([late, early], "sticky", "head") == [early, late]


@pytest.mark.parametrize("policy", POLICIES)
def test_absent_pinned_name_changes_nothing(policy: str) -> None:
    pool = [node("b", last=1, requested=0), node("a", last=0), node("c")]
    assert rank(pool, policy, "absent") == rank(pool, policy, None)


@given(candidate_lists(), NAMES, st.sampled_from(["sticky", "node_rank"]))
def test_pinning_moves_at_most_two_nodes_under_sticky_and_node_rank(
    pool: list[Candidate], rank0: str, policy: str
) -> None:
    assert moved(rank(pool, policy, None), rank(pool, policy, rank0)) in (0, 2)


# Every policy


@given(candidate_lists(), st.sampled_from(POLICIES), st.none() | NAMES, st.randoms())
def test_ranks_are_a_permutation_independent_of_the_order_of_the_input(
    pool: list[Candidate], policy: str, rank0: str | None, rng: random.Random
) -> None:
    ranked = rank(pool, policy, rank0)
    assert sorted(ids(ranked)) == sorted(ids(pool))
    assert rank(rng.sample(pool, len(pool)), policy, rank0) == ranked


@given(candidate_lists(), st.sampled_from(POLICIES), NAMES)
def test_present_pinned_name_has_rank_0(pool: list[Candidate], policy: str, rank0: str) -> None:
    ranked = rank(pool, policy, rank0)
    namesakes = [c for c in pool if c.name == rank0]
    if namesakes:
        assert ranked[0] is min(namesakes, key=lambda c: (c.order, c.id))


@pytest.mark.parametrize("policy", ["", "Sticky", "sticky:", "natural:a", "topology", "topology:", "topology:a+", "x"])
def test_unknown_policy_is_refused_even_without_candidates(policy: str) -> None:
    with pytest.raises(ValueError, match="unknown rank policy") as caught:
        rank([], policy, None)
    assert repr(policy) in str(caught.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_nodes_are_chosen_and_ranked(policy: str) -> None:
    size = 10_000
    pool = [
        node(f"host{i}", i, last=i if i % 3 else None, requested=i if i % 5 == 0 else None, rack=f"r{i % 100}")
        for i in range(size)
    ]
    random.Random(1).shuffle(pool)
    ranked = rank(choose(pool, size - 1000), policy, "host7")
    assert len(set(ids(ranked))) == size - 1000
    assert ranked[0].name == "host7"
