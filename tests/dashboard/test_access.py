"""Sessions are bounded and end; wrong tokens are counted."""

import asyncio

import pytest

from rallypoint.dashboard.access import IDLE_S, MOST_SESSIONS, SESSION_S, Access, LoginBlocked, LoginMethod
from rallypoint.dashboard.http_security import host_of, is_own, own_names
from rallypoint.events import Emitter
from rallypoint.server.admission.admission import Admission
from rallypoint.server.admission.limits import ServerLimits

PEER = ("10.0.0.7", 1234)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def access(clock, *tokens, may_act_openly=True, **limits):
    return access_by(clock, lambda: tokens, may_act_openly=may_act_openly, **limits)


def access_by(clock, tokens, may_act_openly=True, **limits):
    async def make():
        admission = Admission(ServerLimits(**limits), Emitter(), "test")
        admission._loop = type("Loop", (), {"time": staticmethod(clock)})()
        return Access(tokens, admission, clock, may_act_openly=may_act_openly)

    return asyncio.run(make())


def test_any_of_several_tokens_opens_a_session(clock):
    one = access(clock, "a", "b")
    for token in ("a", "b"):
        cookie = one.login(token, PEER)
        viewer = one.viewer(cookie, "", PEER)
        assert (viewer.method, viewer.may_act) == (LoginMethod.SESSION, True)
        assert viewer.is_valid()
    assert one.login("c", PEER) is None
    assert one.login("", PEER) is None
    assert one.login("a" * 10_000, PEER) is None
    assert one.viewer("made up", "", PEER) is None
    assert one.viewer("", "", PEER) is None


def test_bearer_token_is_accepted_while_it_is_valid(clock):
    tokens = ["old"]
    one = access_by(clock, lambda: tuple(tokens))
    viewer = one.viewer("", "Bearer old", PEER)
    assert (viewer.method, viewer.is_valid()) == (LoginMethod.TOKEN, True)
    tokens[:] = ["new"]
    assert not viewer.is_valid()


def test_other_authorization_schemes_are_ignored(clock):
    one = access(clock, "a")
    cookie = one.login("a", PEER)
    assert one.viewer(cookie, "Basic dXNlcjpwYXNz", PEER).method is LoginMethod.SESSION
    assert one.viewer("", "Basic dXNlcjpwYXNz", PEER) is None


def test_session_ends_after_its_time_and_when_it_is_idle(clock):
    one = access(clock, "a")
    used, idle = one.login("a", PEER), one.login("a", PEER)
    viewer = one.viewer(used, "", PEER)
    for _ in range(int(SESSION_S / IDLE_S * 2) - 1):
        clock.now += IDLE_S / 2
        assert one.viewer(used, "", PEER) is not None
    assert one.viewer(idle, "", PEER) is None
    clock.now += IDLE_S / 2
    assert one.viewer(used, "", PEER) is None
    assert not viewer.is_valid()


def test_page_that_is_open_keeps_its_session_in_use(clock):
    one = access(clock, "a")
    viewer = one.viewer(one.login("a", PEER), "", PEER)
    for _ in range(int(SESSION_S / IDLE_S * 2) - 1):
        clock.now += IDLE_S / 2
        assert viewer.is_valid()
    clock.now += IDLE_S / 2
    assert not viewer.is_valid()


def test_sessions_are_bounded_and_the_longest_idle_one_ends(clock):
    one = access(clock, "a")
    first, second = one.login("a", PEER), one.login("a", PEER)
    for _ in range(MOST_SESSIONS - 2):
        clock.now += 1
        one.login("a", PEER)
    one.viewer(first, "", PEER)
    one.login("a", PEER)
    assert one.viewer(first, "", PEER) is not None
    assert one.viewer(second, "", PEER) is None
    assert len(one._sessions) == MOST_SESSIONS


def test_source_with_failed_logins_is_blocked_for_a_while_and_others_are_not(clock):
    one = access(clock, "a", max_failed_logins=3, login_block_s=30)
    for _ in range(3):
        assert one.login("guess", PEER) is None
    with pytest.raises(LoginBlocked) as caught:
        one.login("a", PEER)
    assert caught.value.for_s == 30
    with pytest.raises(LoginBlocked):
        one.viewer("", "Bearer a", PEER)
    assert one.login("a", ("10.0.0.8", 1)) is not None
    clock.now += 31
    assert one.login("a", PEER) is not None


def test_viewers_without_a_login_may_act_only_if_that_is_set(clock):
    assert access(clock).viewer("", "", PEER).may_act is True
    assert access(clock, may_act_openly=False).viewer("", "", PEER).may_act is False


def test_csrf_secret_belongs_to_one_session(clock):
    one = access(clock, "a")
    first, second = (one.viewer(one.login("a", PEER), "", PEER) for _ in range(2))
    assert one.is_current(first.csrf, first)
    assert not one.is_current(first.csrf, second)
    assert not one.is_current("", second)


@pytest.mark.parametrize(
    ("header", "host"),
    [("a.example", "a.example"), ("a.example:80", "a.example"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("::1", "::1")],
)
def test_host_is_read_from_its_header(header, host):
    assert host_of(header) == host


def test_only_addresses_and_own_names_are_ours():
    names = own_names("head", ["page.example"])
    for host in ("head", "HEAD:80", "page.example.", "localhost", "x.localhost:1", "192.168.1.1:80", "[fe80::1]:80"):
        assert is_own(host, names), host
    for host in ("", "elsewhere.example", "head.elsewhere.example", "1.2.3.4.example", "localhost.example", "[junk]:1"):
        assert not is_own(host, names), host
