"""Pairs of sockets that are opened once and used again."""

import pytest

from rallypoint.backends.pairs import Pairs, let_go


def is_open(pair):
    return [one.fileno() >= 0 for one in pair] == [True, True]


def test_what_is_given_back_is_taken_again():
    pairs = Pairs()
    near, far = first = pairs.take()
    near.send(b"x")
    assert far.recv(1) == b"x"
    second = pairs.take()
    assert second is not first
    pairs.give_back(first)
    assert pairs.take() is first
    let_go(first)
    let_go(second)
    pairs.close()


@pytest.mark.parametrize("is_given_back_before", [True, False])
def test_none_is_left_open_once_it_is_closed(is_given_back_before):
    pairs = Pairs()
    pair = pairs.take()
    if is_given_back_before:
        pairs.give_back(pair)
    pairs.close()
    if not is_given_back_before:
        assert is_open(pair), "somebody uses it"
        pairs.give_back(pair)
    assert not any(one.fileno() >= 0 for one in pair)
