"""A caller that finds its place by itself: what it confirms, when it goes on, and when it leaves that to its node."""

import errno
import socket
import time

import pytest

from rallypoint._bell import Bell
from rallypoint.backends import tcp_lane
from rallypoint.backends.contract import Begun, Done
from rallypoint.backends.tcp_lane import Practice, TcpLane, stand
from rallypoint.errors import Unavailable
from rallypoint.kv.types import Failure, FailureCode, Grant, LeaseResult, TxnResult
from rallypoint.wire.frames import GREETING, frame
from rallypoint.wire.messages import JOINS_FROM, PLACES_FROM, Answer, Do, Hold, Stand, Welcome, encoder
from tests.backends.lane_kit import (
    AS_ZERO,
    CONFIRMATION,
    JOIN,
    SHORT_S,
    LastingSession,
    Peer,
    Starting,
    beginning,
    keep_answering,
    lane_with,
    nothing_is_said,
    place,
    standing,
    terms,
    wait,
)
from tests.patience import PATIENCE_S, in_thread, result_of, until
from tests.server.threaded import listening, pool_to, soon


def test_a_place_is_confirmed_at_once_and_the_caller_goes_on_when_the_round_is_active():
    with standing(terms()) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        assert peer.hear() == Do(1, CONFIRMATION)
        peer.say(place(is_active=True), Answer(1, TxnResult(True, 1 << 40, ())))
        assert result_of(waits) == (7, 4, 9, "zero", 1234, 1 << 40)
        assert lane.account() == Done(4, 1 << 40, 7, 9, "zero", 1234)
        assert lane.account() is None, "it is told once"


def test_an_answer_to_the_confirmation_that_comes_first_is_passed_over():
    with standing(terms()) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        peer.hear()
        peer.say(Answer(1, TxnResult(True, 1 << 40, ())))
        peer.say(place(is_active=True))
        assert result_of(waits)[:2] == (7, 4)


def test_an_answer_that_comes_together_with_the_end_is_passed_over():
    with standing(terms()) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        peer.hear()
        peer.say(Answer(1, TxnResult(True, 1 << 40, ())), place(is_active=True))
        assert result_of(waits)[:2] == (7, 4)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_place_of_which_only_a_part_has_come_is_left_to_the_node(rank):
    whole = frame(encoder.encode((place(rank=rank),)))
    for length in range(1, len(whole)):
        with standing(terms()) as (lane, bell, peer):
            waits = in_thread(lambda: wait(lane, bell))
            peer._sock.sendall(whole[:length])
            assert result_of(waits) is None, length
            peer.hears_the_end()
            assert lane.account() is None


def test_practice_goes_to_the_end_says_nothing_to_the_server_and_takes_nothing_that_is_offered():
    entered = []
    with standing(terms()._replace(enter=entered.append)) as (lane, bell, peer):
        pair = lane._pool.pairs.take()
        lane._pool.pairs.give_back(pair)
        for _ in range(3):
            assert Practice(lane._pool, pair).goes_well(lane._prepared, bell.fileno)
            lane.keep_warm(bell.fileno)
            assert lane._pool.pairs._free == [pair], "it is used again, and nothing is left in it"
        nothing_is_said(peer)
        assert entered == []
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        assert peer.hear() == Do(1, CONFIRMATION)
        peer.say(place(is_active=True), Answer(1, TxnResult(True, 1 << 40, ())))
        result_of(waits)
        assert [seat.rank for seat in entered] == [4]
        assert lane.account() == Done(4, 1 << 40, 7, 9, "zero", 1234)


def test_practice_ends_when_the_bell_rings_and_its_sockets_are_not_used_again():
    with standing(terms()) as (lane, bell, peer):
        bell.ring()
        lane.keep_warm(bell.fileno)
        assert lane._pool.pairs._free == []
        bell.hush()
        lane.keep_warm(bell.fileno)
        assert len(lane._pool.pairs._free) == 1
        nothing_is_said(peer)


def test_nobody_practises_who_has_nothing_to_wait_for_or_has_confirmed(monkeypatch):
    monkeypatch.setattr(Practice, "goes_well", lambda *_: pytest.fail("it practises"))
    with standing(terms()) as (lane, bell, peer):
        waits = in_thread(lambda: lane.wait(bell.fileno, 10 * SHORT_S))
        peer.say(place())
        assert peer.hear() == Do(1, CONFIRMATION)
        assert result_of(waits) is None
        lane.keep_warm(bell.fileno)
        lane.leave()
        lane.keep_warm(bell.fileno)


def test_practice_without_a_file_for_it_changes_nothing(monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, "no file is left")

    with standing(terms()) as (lane, bell, peer):
        monkeypatch.setattr(lane._pool.pairs, "take", refuse)
        lane.keep_warm(bell.fileno)
        nothing_is_said(peer)


def test_practice_that_is_interrupted_closes_its_sockets(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with standing(terms()) as (lane, bell, _):
        pair = lane._pool.pairs.take()
        lane._pool.pairs.give_back(pair)
        monkeypatch.setattr(Practice, "goes_well", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lane.keep_warm(bell.fileno)
        assert not any(one.fileno() >= 0 for one in pair)


def test_a_server_that_greets_in_words_of_its_own_is_not_waited_for():
    with listening(GREETING + frame(b"\xc1")) as (port, _), pool_to(port) as pool:
        lane, bell = TcpLane(pool, "client", "node", 1.0), Bell()
        lane.offer(terms())
        assert lane.wait(bell.fileno, SHORT_S) is None


def test_a_server_that_only_answers_keeps_nobody():
    with standing(terms()) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        peer.hear()
        keep_answering(peer, 1, waits)
        assert result_of(waits) is None
        assert lane.account() == Done(4), "its node goes on from the confirmation"


def test_rank_zero_is_confirmed_with_what_it_publishes():
    with standing(terms()) as (lane, bell, peer):
        in_thread(lambda: wait(lane, bell))
        peer.say(place(rank=0))
        assert peer.hear() == Do(1, AS_ZERO)


@pytest.mark.parametrize(
    ("told", "offered"),
    [
        (place(number=8), terms()),
        (place(join=1), terms()),
        (place(incarnation="another"), terms()),
        (place(is_active=True), terms()),
        (place(rank=0), terms(as_zero=None)),
        (place(), terms(session=LastingSession(lasts_s=0.1))),
        (place(), terms(lasts_s=0.1)),
    ],
    ids=["number", "join", "life", "active", "rank 0 prepares", "session ends soon", "deadline is near"],
)
def test_whatever_is_not_expected_is_left_to_the_node_which_is_told_by_the_end_of_the_connection(told, offered):
    with standing(offered) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(told)
        assert result_of(waits) is None
        peer.hears_the_end()
        assert lane.account() is None


def test_a_session_that_is_known_to_be_lost_confirms_nothing_and_enters_nothing():
    session = LastingSession()
    with standing(terms(session)) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        peer.hear()
        session.lost.set("gone")
        peer.say(place(is_active=True))
        assert result_of(waits) is None
        assert lane.account() == Done(4), "it has confirmed, and is not in"


def test_a_process_that_stood_still_beyond_its_session_does_not_go_on():
    session = LastingSession()
    with standing(terms(session)) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        peer.hear()
        session.expires_at = time.monotonic() - 1.0
        peer.say(place(is_active=True))
        assert result_of(waits) is None


def test_what_was_accounted_for_is_not_done_any_more():
    with standing(terms()) as (lane, bell, peer):
        assert lane.account() is None
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        assert result_of(waits) is None
        peer.hears_the_end()


def test_a_node_that_goes_on_from_the_confirmation_keeps_its_caller_from_going_on():
    with standing(terms()) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        peer.hear()
        assert lane.account() == Done(4)
        peer.say(place(is_active=True))
        assert result_of(waits) is None


def test_the_end_of_an_attempt_that_was_accounted_for_does_not_count_for_the_next_offer():
    with standing(terms()) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        peer.hear()
        assert lane.account() == Done(4)
        lane.offer(terms(number=8))
        peer.say(place(is_active=True))
        assert result_of(waits) is None
        assert lane.account() is None


def test_the_bell_ends_the_waiting_and_what_is_offered_then_is_made_ready():
    with standing(terms()) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        lane.account()
        lane.offer(terms(number=8))
        bell.ring()
        assert result_of(waits) is None
        bell.hush()
        in_thread(lambda: wait(lane, bell))
        peer.say(place(number=8))
        assert peer.hear() == Do(1, CONFIRMATION)


def test_a_connection_that_ends_is_made_again():
    with lane_with(terms()) as (lane, bell, came):
        came[0].shutdown(socket.SHUT_RDWR)
        assert wait(lane, bell) is None
        assert lane.wait(bell.fileno, SHORT_S) is None
        until(lambda: len(came) == 2, "it came again")
        in_thread(lambda: wait(lane, bell))
        peer = Peer(came[1])
        assert peer.hear() == Stand("client", "node")
        peer.say(place())
        assert peer.hear() == Do(1, CONFIRMATION)


def test_a_server_that_does_not_know_of_places_is_not_waited_for():
    with lane_with(terms(), version=PLACES_FROM - 1) as (lane, bell, came):
        began_at = time.monotonic()
        assert lane.wait(bell.fileno, SHORT_S) is None
        assert time.monotonic() - began_at >= SHORT_S / 2, "only the bell is"
        assert len(came) == 1


def test_a_connection_that_is_owed_nothing_serves_the_next_call():
    with standing(terms()) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        peer.hear()
        peer.say(place(is_active=True), Answer(1, TxnResult(True, 1 << 40, ())))
        assert result_of(waits) is not None
        lane.leave()
        (one,) = lane._pool._free
        assert one.sock is not None


def test_a_connection_on_which_an_answer_is_not_whole_is_not_used_again():
    with standing(terms()) as (lane, bell, peer):
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        peer.hear()
        answer = frame(encoder.encode((Answer(1, TxnResult(True, 1 << 40, ())),)))
        peer._sock.sendall(frame(encoder.encode((place(is_active=True),))) + answer[:-1])
        assert result_of(waits)[:2] == (7, 4)
        (one,) = lane._pool._free
        assert one.sock is None


def test_a_connection_whose_last_call_was_given_up_can_be_waited_on():
    welcome = Welcome(version=PLACES_FROM, generation="g", max_frame=1 << 20)
    with listening(GREETING + frame(encoder.encode(welcome))) as (port, _), pool_to(port) as pool:
        with pytest.raises(Unavailable):
            pool.await_keys(("/k",), soon(), soon(), given_up=lambda: "it left")
        found = stand(pool, Stand("client", "node"), soon())
        assert found is not None
        found.leave()


# --- beginning by oneself ---------------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(tcp_lane, "ALONE_S", PATIENCE_S)


def test_a_session_and_a_join_go_out_together_for_the_node_that_is_stood_for(patient):
    with beginning() as (_, begun, peer, _):
        assert peer.hear_all() == (
            Stand("client", "node"),
            Do(2, Grant(5.0, 77)),
            Hold(77, 1.5),
            Do(3, JOIN),
        )
        assert begun.sent_at > 0


def test_one_who_begins_confirms_its_place_and_is_in(patient):
    with beginning() as (call, begun, peer, lane):
        peer.hear_all()
        peer.say(place())
        assert peer.hear() == Do(4, CONFIRMATION)
        peer.say(Answer(4, TxnResult(True, 1 << 40, ())))
        peer.say(place(is_active=True))
        assert result_of(call) == Done(4, 1 << 40, 7, 9, "zero", 1234)
        assert begun.done == Done(4, 1 << 40, 7, 9, "zero", 1234)
        assert begun.revision == 1 << 40
        assert lane._stander is None


def test_one_who_begins_finds_the_end_behind_an_answer(patient):
    with beginning() as (call, _, peer, _):
        peer.hear_all()
        peer.say(place())
        peer.hear()
        peer.say(Answer(4, TxnResult(True, 1 << 40, ())), place(is_active=True))
        assert result_of(call) == Done(4, 1 << 40, 7, 9, "zero", 1234)


def test_one_who_begins_and_has_to_wait_is_told_that_it_has_joined_and_may_wait_there(patient):
    with beginning() as (call, begun, peer, lane):
        peer.hear_all()
        peer.say_together(Answer(2, LeaseResult(77, 5.0, True)), Answer(3, TxnResult(True, 30, ())))
        assert result_of(call) is None
        assert (begun.revision, begun.done) == (30, None)
        lane.offer(terms())
        bell = Bell()
        waits = in_thread(lambda: wait(lane, bell))
        peer.say(place())
        assert peer.hear() == Do(4, CONFIRMATION), "on the connection where it stands already"
        peer.say(place(is_active=True))
        assert result_of(waits)[:2] == (7, 4)


def test_one_whose_join_is_not_answered_in_time_leaves_so_that_its_node_is_told(monkeypatch):
    monkeypatch.setattr(tcp_lane, "ALONE_S", 0.0)
    with beginning() as (call, begun, peer, _):
        peer.hear_all()
        assert result_of(call) is None
        assert begun.sent_at > 0
        assert begun.revision == 0
        # Bug that this found: nobody read there what the server said, and held back elsewhere, of the node's place.
        peer.hears_the_end()


def test_one_who_is_told_more_than_that_it_has_joined_leaves_the_rest_to_its_node(patient):
    with beginning() as (call, begun, peer, _):
        peer.hear_all()
        answers = Answer(2, LeaseResult(77, 5.0, True)), Answer(3, TxnResult(True, 30, ()))
        peer._sock.sendall(frame(encoder.encode(answers)) + frame(encoder.encode((place(),))))
        assert result_of(call) is None
        assert (begun.revision, begun.done) == (30, None)
        peer.hears_the_end()


@pytest.mark.parametrize(
    "refused",
    [Answer(3, TxnResult(False, 30, ())), Answer(3, Failure(FailureCode.LEASE_GONE, "gone", 77)), place(number=8)],
    ids=["door", "lease", "another attempt"],
)
def test_a_join_that_did_not_go_as_expected_is_left_to_the_node(patient, refused):
    with beginning() as (call, begun, peer, _):
        peer.hear_all()
        peer.say(refused)
        assert result_of(call) is None
        assert (begun.revision, begun.done) == (0, None)
        assert begun.sent_at > 0
        peer.hears_the_end()


@pytest.mark.parametrize("start", [{"ttl_s": 0.1}, {"confirms": False}], ids=["session", "confirmation"])
def test_a_place_that_cannot_be_confirmed_is_left_to_the_node(patient, start):
    with beginning(**start) as (call, begun, peer, _):
        peer.hear_all()
        peer.say(place())
        assert result_of(call) is None
        assert (begun.revision, begun.done) == (1 << 40, None)
        peer.hears_the_end()


@pytest.mark.parametrize("told", [place(), None], ids=["something else", "nothing"])
def test_one_who_has_confirmed_and_is_not_told_that_the_round_is_active_leaves_that_to_the_node(patient, told):
    with beginning() as (call, begun, peer, _):
        peer.hear_all()
        peer.say(place())
        peer.hear()
        if told is not None:
            peer.say(told)
        assert result_of(call) is None
        assert begun.done == Done(4)
        peer.hears_the_end()


def test_a_connection_that_ends_after_the_join_leaves_it_to_the_node(patient):
    with beginning() as (call, begun, peer, _):
        peer.hear_all()
        peer._sock.shutdown(socket.SHUT_RDWR)
        assert result_of(call) is None
        assert begun.sent_at > 0
        assert begun.revision == 0


def test_nothing_is_begun_with_a_server_that_does_not_know_of_it():
    with beginning(version=JOINS_FROM - 1) as (call, begun, _, _):
        assert result_of(call) is None
        assert begun.sent_at == 0


def test_nothing_is_begun_without_a_connection_that_is_there_already():
    with pool_to(1) as pool:
        begun = Begun(Starting())
        assert TcpLane(pool, "client", "node", 1.0).begin(begun) is None
        assert begun.sent_at == 0


def test_a_peer_that_says_everything_but_what_is_waited_for_keeps_nobody(patient):
    with beginning(ttl_s=0.8) as (call, begun, peer, _):
        peer.hear_all()
        peer.say(place())
        peer.hear()
        keep_answering(peer, 4, call)
        assert result_of(call) is None
        assert begun.done == Done(4)
