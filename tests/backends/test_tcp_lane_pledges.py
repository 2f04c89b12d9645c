"""A caller that confirms its place beforehand: what it says, until when, and how it goes on when it is in."""

import time

import pytest

from rallypoint._bell import Bell
from rallypoint.backends import tcp_lane
from rallypoint.backends.contract import Done
from rallypoint.backends.tcp_lane import Practice
from rallypoint.backends.tcp_pledge import PLEDGED_S
from rallypoint.kv.types import Grant, LeaseResult, TxnResult
from rallypoint.wire.frames import frame
from rallypoint.wire.messages import PLEDGES_FROM, Answer, Do, Hold, Pledge, Stand, encoder
from tests.backends.lane_kit import (
    CONFIRMATION,
    JOIN,
    LastingSession,
    beginning,
    nothing_is_said,
    place,
    standing,
    terms,
    wait,
)
from tests.patience import PATIENCE_S, in_thread, result_of

PLEDGE = Pledge(PLEDGED_S, 7, 2, "life", 1, 3, b"member", b"member, rank 0")
AT_ONCE = Pledge(PLEDGED_S, 7, 2, "life", 77, 0, b"member", b"as zero")
ENTERED = (7, 4, 9, "zero", 1234, 1 << 40)
DONE = Done(4, 1 << 40, 7, 9, "zero", 1234)


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(tcp_lane, "ALONE_S", PATIENCE_S)


def pledging(offered):
    return standing(offered, PLEDGES_FROM)


def test_what_is_offered_is_confirmed_beforehand_and_the_caller_goes_on_when_the_round_is_active():
    with pledging(terms()) as (lane, bell, peer):
        assert peer.hear() == PLEDGE
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place(is_active=True))
        assert result_of(waits) == ENTERED
        assert lane.account() == DONE
        nothing_is_said(peer)
        (one,) = lane._pool._free
        assert one.sock is not None, "it is owed nothing, and serves the next call"


def test_a_place_that_is_told_after_all_is_confirmed_as_ever():
    with pledging(terms()) as (lane, bell, peer):
        peer.hear()
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        assert peer.hear() == Do(1, CONFIRMATION)
        peer.say(place(is_active=True), Answer(1, TxnResult(True, 1 << 40, ())))
        assert result_of(waits) == ENTERED


def test_without_a_port_rank_0_is_not_confirmed_beforehand():
    with pledging(terms(as_zero=None)) as (_, _, peer):
        assert peer.hear().as_zero == b""


@pytest.mark.parametrize(
    "offered",
    [terms(session=LastingSession(lasts_s=PLEDGED_S)), terms(lasts_s=PLEDGED_S)],
    ids=["the session ends soon", "the deadline is near"],
)
def test_nothing_is_confirmed_beforehand_that_may_not_be_good_any_more_when_it_counts(offered):
    with pledging(offered) as (lane, bell, peer):
        nothing_is_said(peer)
        lane.keep_warm(bell.fileno)
        nothing_is_said(peer)
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place(is_active=True))
        assert result_of(waits) is None, "that is not what it waits for, then"
        assert lane.account() is None
        peer.hears_the_end()


def test_an_older_server_hears_nothing_of_it():
    with standing(terms(), PLEDGES_FROM - 1) as (_, _, peer):
        nothing_is_said(peer)


def test_it_is_said_again_while_the_caller_is_about_and_not_too_often(monkeypatch):
    with pledging(terms()) as (lane, bell, peer):
        assert peer.hear() == PLEDGE
        lane.keep_warm(bell.fileno)
        nothing_is_said(peer)
        monkeypatch.setattr(lane, "_pledge_at", time.monotonic())
        lane.keep_warm(bell.fileno)
        assert peer.hear() == Pledge(PLEDGED_S)
        lane.keep_warm(bell.fileno)
        nothing_is_said(peer)


def test_what_is_offered_next_is_confirmed_beforehand_instead():
    with pledging(terms()) as (lane, bell, peer):
        peer.hear()
        lane.account()
        lane.offer(terms(number=8))
        waits = in_thread(lambda: wait(lane, bell))
        assert peer.hear().number == 8
        peer.say(place(is_active=True, number=8))
        assert result_of(waits)[0] == 8


def test_what_was_accounted_for_meanwhile_is_left_to_the_node():
    with pledging(terms()) as (lane, bell, peer):
        peer.hear()
        assert lane.account() is None
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place(is_active=True))
        assert result_of(waits) is None
        assert lane.account() is None
        peer.hears_the_end()


def test_a_caller_that_stood_still_beyond_its_session_does_not_go_on():
    session = LastingSession()
    with pledging(terms(session=session)) as (lane, bell, peer):
        peer.hear()
        session.expires_at = time.monotonic()
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place(is_active=True))
        assert result_of(waits) is None
        assert lane.account() is None, "its node finds out what was written"


def test_a_word_of_which_only_a_part_has_come_is_left_to_the_node():
    whole = frame(encoder.encode((place(is_active=True),)))
    for length in range(1, len(whole)):
        with pledging(terms()) as (lane, bell, peer):
            peer.hear()
            waits = in_thread(lambda: wait(lane, bell))
            peer._sock.sendall(whole[:length])
            assert result_of(waits) is None, length
            assert lane.account() is None


def test_who_confirms_beforehand_practises_what_it_will_do_then():
    with pledging(terms()) as (lane, bell, peer):
        peer.hear()
        pair = lane._pool.pairs.take()
        lane._pool.pairs.give_back(pair)
        for _ in range(3):
            assert Practice(lane._pool, pair).goes_well(lane._prepared, bell.fileno)
        nothing_is_said(peer)
        lane.keep_warm(bell.fileno)
        assert lane._pool.pairs._free == [pair], "nothing is left in it"


# --- beginning by oneself ---------------------------------------------------------------------------------------------


def test_one_who_begins_confirms_its_place_beforehand(patient):
    with beginning(PLEDGES_FROM) as (call, begun, peer, lane):
        said = Stand("client", "node"), Do(2, Grant(5.0, 77)), Hold(77, 1.5), Do(3, JOIN), AT_ONCE
        assert peer.hear_all() == said
        answers = Answer(2, LeaseResult(77, 5.0, True)), Answer(3, TxnResult(True, 30, ()))
        peer._sock.sendall(frame(encoder.encode((place(is_active=True),))) + frame(encoder.encode(answers)))
        assert result_of(call) == DONE
        assert begun.done == DONE
        (one,) = lane._pool._free
        assert one.sock is not None, "it is owed nothing"
        nothing_is_said(peer)


def test_one_who_begins_and_is_in_before_its_answers_have_come_does_not_use_the_connection_again(patient):
    with beginning(PLEDGES_FROM) as (call, _, peer, lane):
        peer.hear_all()
        peer.say(place(is_active=True))
        assert result_of(call) == DONE
        (one,) = lane._pool._free
        assert one.sock is None


def test_one_who_begins_and_is_told_its_place_confirms_it(patient):
    with beginning(PLEDGES_FROM) as (call, _, peer, _):
        peer.hear_all()
        peer.say(place())
        assert peer.hear() == Do(4, CONFIRMATION)
        peer.say(place(is_active=True), Answer(4, TxnResult(True, 1 << 40, ())))
        assert result_of(call) == DONE


def test_one_who_begins_and_has_to_wait_confirms_beforehand_what_its_node_offers_then(patient):
    with beginning(PLEDGES_FROM) as (call, begun, peer, lane):
        peer.hear_all()
        peer.say_together(Answer(2, LeaseResult(77, 5.0, True)), Answer(3, TxnResult(True, 30, ())))
        assert result_of(call) is None
        assert begun.revision == 30
        lane.offer(terms())
        bell = Bell()
        waits = in_thread(lambda: wait(lane, bell))
        assert peer.hear() == PLEDGE
        peer.say(place(is_active=True))
        assert result_of(waits) == ENTERED


def test_one_whose_session_would_not_last_confirms_nothing_beforehand(patient):
    with beginning(PLEDGES_FROM, ttl_s=PLEDGED_S) as (call, begun, peer, _):
        assert not any(isinstance(one, Pledge) for one in peer.hear_all())
        peer.say(place(is_active=True))
        assert result_of(call) is None
        assert begun.done is None
        peer.hears_the_end()
