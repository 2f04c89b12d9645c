"""Counters, log lines and blocked sources of refusals, and their bounds."""

import pytest

from rallypoint.server.admission.refusals import MOST_LOGGED, MOST_SOURCES, FailedLogins, Refusal, Refusals, source_of


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
def test_source_is_an_ipv4_address_or_an_ipv6_network(address, source):
    assert source_of(address) == source


def test_all_refusals_are_counted_and_each_source_and_kind_is_logged_once_an_interval():
    refusals = Refusals(60.0)
    notes = [refusals.note(Refusal.TOKEN, "a", float(second)) for second in range(60)]
    assert notes == [0] + [None] * 59
    assert refusals.note(Refusal.TOKEN, "b", 5.0) == 0
    assert refusals.note(Refusal.STRANGER, "a", 5.0) == 0
    assert refusals.note(Refusal.TOKEN, "a", 60.0) == 59
    assert refusals.note(Refusal.TOKEN, "a", 61.0) is None
    assert refusals.counts[Refusal.TOKEN] == 63
    assert refusals.describe() == {"refused_token": "63", "refused_stranger": "1"}


def test_refusals_of_many_sources_are_counted_in_bounded_memory():
    refusals = Refusals(60.0)
    lines = sum(refusals.note(Refusal.TOKEN, f"s{number}", 0.0) is not None for number in range(3 * MOST_LOGGED))
    assert lines == MOST_LOGGED + 1
    assert refusals.counts[Refusal.TOKEN] == 3 * MOST_LOGGED
    assert len(refusals._logged) == MOST_LOGGED + 1
    assert refusals.note(Refusal.TOKEN, "later", 61.0) == 0
    assert len(refusals._logged) == 1


def test_only_the_source_with_too_many_failed_logins_is_blocked():
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


def test_failed_logins_that_are_far_apart_block_no_source():
    logins = FailedLogins(3, 60.0)
    for number in range(100):
        logins.failed("a", number * 31.0)
        assert logins.blocked_s("a", number * 31.0) == 0


def test_memory_for_failed_logins_is_bounded():
    logins = FailedLogins(1, 60.0)
    more = FailedLogins(2, 60.0)
    for number in range(2 * MOST_SOURCES):
        logins.failed(f"s{number}", 0.0)
        more.failed(f"s{number}", 0.0)
    assert len(logins._blocked_until) == len(more._failed) == MOST_SOURCES
    assert logins.blocked_s(f"s{2 * MOST_SOURCES - 1}", 0.0) == 60.0
