"""What is remembered of those who were refused: every one counted, few lines, and bounds that hold."""

import pytest

from rallypoint.server.admission.refusals import MOST_SOURCES, MOST_TOLD, FailedLogins, Refusal, Refusals, source_of


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("", ""),
        ("a pipe", "a pipe"),
    ],
)
def test_source_is_an_address_or_the_network_that_one_machine_has(address, source):
    assert source_of(address) == source


def test_one_line_for_each_source_kind_and_interval_and_everything_is_counted():
    refusals = Refusals(60.0)
    told = [refusals.note(Refusal.TOKEN, "a", float(second)) for second in range(60)]
    assert told == [0] + [None] * 59
    assert refusals.note(Refusal.TOKEN, "b", 5.0) == 0
    assert refusals.note(Refusal.STRANGER, "a", 5.0) == 0
    assert refusals.note(Refusal.TOKEN, "a", 60.0) == 59
    assert refusals.note(Refusal.TOKEN, "a", 61.0) is None
    assert refusals.counts[Refusal.TOKEN] == 63
    assert refusals.describe() == {"refused_token": "63", "refused_stranger": "1"}


def test_many_sources_are_counted_and_not_remembered():
    refusals = Refusals(60.0)
    lines = sum(refusals.note(Refusal.TOKEN, f"s{number}", 0.0) is not None for number in range(3 * MOST_TOLD))
    assert lines == MOST_TOLD + 1
    assert refusals.counts[Refusal.TOKEN] == 3 * MOST_TOLD
    assert len(refusals._said) == MOST_TOLD + 1
    assert refusals.note(Refusal.TOKEN, "later", 61.0) == 0
    assert len(refusals._said) == 1


def test_source_that_fails_too_often_is_blocked_for_a_while_and_others_are_not():
    logins = FailedLogins(3, 60.0)
    for second in (0.0, 1.0):
        logins.failed("a", second)
    assert logins.blocked_s("a", 1.0) == 0
    logins.failed("a", 2.0)
    assert logins.blocked_s("a", 2.0) == 60.0
    assert logins.blocked_s("b", 2.0) == 0
    assert logins.blocked_s("a", 61.0) == 1.0
    assert logins.blocked_s("a", 62.0) == 0
    logins.failed("a", 62.0)
    assert logins.blocked_s("a", 62.0) == 0


def test_failures_that_are_far_apart_block_nobody():
    logins = FailedLogins(3, 60.0)
    for number in range(100):
        logins.failed("a", number * 31.0)
        assert logins.blocked_s("a", number * 31.0) == 0


def test_failures_of_many_sources_are_bounded():
    logins = FailedLogins(1, 60.0)
    more = FailedLogins(2, 60.0)
    for number in range(2 * MOST_SOURCES):
        logins.failed(f"s{number}", 0.0)
        more.failed(f"s{number}", 0.0)
    assert len(logins._blocked_until) == len(more._failed) == MOST_SOURCES
    assert logins.blocked_s(f"s{2 * MOST_SOURCES - 1}", 0.0) == 60.0
