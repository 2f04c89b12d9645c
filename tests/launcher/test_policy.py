"""The supervisor's decisions, one by one and in any order of events."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Phase_
from hypothesis import strategies as st

from rallypoint.launcher.policy import (
    BUDGET_USED_UP,
    CLOSED,
    NOT_REACHED,
    REFUSED,
    TIMED_OUT,
    AllFinished,
    AwaitOthers,
    Changed,
    CloseFinished,
    End,
    Entered,
    Exited,
    Fate,
    Fated,
    Join,
    JoinEnded,
    Leave,
    NoEntry,
    Phase,
    Policy,
    Propose,
    Spend,
    Spent,
    Start,
    StartFailed,
    Stop,
    Stopped,
    Told,
    Unfinished,
    Why,
    ended,
)

TERM = Told(15, "SIGTERM")


def running(workers: int = 2, number: int = 1) -> Policy:
    """A policy whose workers run."""
    policy = Policy()
    assert policy.begin() == [Join()]
    assert policy.handle(Entered(number, workers)) == [Start(number)]
    return policy


def finishing() -> Policy:
    """A policy whose only worker has finished, and that waits for the others."""
    policy = running(1)
    assert policy.handle(Exited(1, 0, 0, 0)) == [Stop(1, "its workers have finished")]
    assert policy.handle(Stopped(1)) == [Propose(1, Fate.FINISH, "its workers have finished")]
    assert policy.handle(Fated(1, Fate.FINISH, "x")) == [AwaitOthers(1)]
    return policy


def test_failed_worker_stops_the_others_and_costs_the_run_a_restart():
    policy = running()
    stop, spend = policy.handle(Exited(1, 1, 5, 3))
    assert stop == Stop(1, "the worker of rank 5 exited with 3")
    assert spend == Spend(1, "the worker of rank 5 exited with 3", 3)
    assert policy.handle(Exited(1, 0, 4, 143)) == [], "it was stopped: one failure, one restart"
    assert policy.handle(Stopped(1)) == [], "the restart is not counted yet"
    assert policy.handle(Spent(1, True, 0, "")) == [Join()]


def test_run_whose_budget_is_used_up_ends_with_that_code():
    policy = running()
    policy.handle(Exited(1, 0, 0, 3))
    assert policy.handle(Spent(1, False, BUDGET_USED_UP, "no more")) == [], "workers are left"
    assert policy.handle(Stopped(1)) == [Leave("no more"), End(BUDGET_USED_UP, "no more")]


def test_loss_stops_the_workers_and_costs_nothing():
    policy = running()
    assert policy.handle(Changed(1, Why.GONE, "lost: b")) == [Stop(1, "lost: b")]
    assert policy.handle(Exited(1, 0, 0, 137)) == []
    assert policy.handle(Stopped(1)) == [Join()]


@pytest.mark.parametrize(
    ("code", "words"), [(1, "exited with 1"), (137, "was killed by signal 9"), (255, "exited with 255")]
)
def test_code_of_a_program_is_not_taken_for_a_signal(code, words):
    assert ended(code) == words


def test_growth_is_agreed_on_before_anything_stops():
    policy = running()
    assert policy.handle(Changed(1, Why.WAITING, "c waits")) == [Propose(1, Fate.AGAIN, "c waits")]
    assert policy.phase is Phase.RUNNING
    assert policy.handle(Fated(1, Fate.AGAIN, "c waits")) == [Stop(1, "c waits")]


def test_growth_is_put_off_when_a_node_has_finished():
    policy = running()
    policy.handle(Changed(1, Why.WAITING, "c waits"))
    assert policy.handle(Fated(1, Fate.FINISH, "b has finished")) == []
    assert policy.phase is Phase.RUNNING


def test_nodes_that_have_finished_close_the_run_together():
    assert finishing().handle(AllFinished(1)) == [
        CloseFinished(),
        Leave("all nodes have finished"),
        End(0, "all nodes have finished"),
    ]


def test_node_that_has_finished_takes_part_again_if_another_fails():
    assert finishing().handle(Fated(1, Fate.AGAIN, "b failed")) == [Join()]
    assert finishing().handle(Changed(1, Why.GONE, "lost: b")) == [Join()]
    assert finishing().handle(Changed(1, Why.WAITING, "c waits")) == []


def test_end_of_the_workers_that_is_told_twice_is_one_end():
    policy = running(1)
    policy.handle(Exited(1, 0, 0, 0))
    assert len(policy.handle(Stopped(1))) == 1
    assert policy.handle(Stopped(1)) == []


def test_node_that_has_finished_does_not_wait_forever():
    assert finishing().handle(Unfinished(1, "missing: b")) == [Leave("missing: b"), End(TIMED_OUT, "missing: b")]


def test_signal_leaves_the_run_before_it_stops_the_workers():
    policy = running()
    why = "SIGTERM: told to stop"
    assert policy.handle(TERM) == [Leave(why, early=True), Stop(1, why)]
    assert policy.handle(Changed(1, Why.GONE, "this node left")) == []
    assert policy.handle(Stopped(1)) == [Leave(why), End(143, why)]


def test_second_signal_does_not_wait_for_the_grace_period():
    policy = running()
    policy.handle(TERM)
    assert policy.handle(TERM) == [Stop(1, "SIGTERM: told to stop", gently=False)]


def test_signal_while_it_joins_ends_it_at_once():
    assert Policy().handle(TERM)[-1] == End(143, "SIGTERM: told to stop")


def test_node_that_is_asked_to_go_ends_without_failure():
    policy = running()
    asked = policy.handle(Changed(1, Why.DRAIN, "asked to go"))
    assert asked == [Leave("asked to go", early=True), Stop(1, "asked to go")]
    assert policy.handle(Stopped(1))[-1] == End(0, "asked to go")


def test_run_that_failed_elsewhere_ends_here_with_the_same_code():
    policy = running()
    assert policy.handle(Fated(1, Fate.FAILED, "b: exited with 7", 7)) == [Stop(1, "b: exited with 7")]
    assert policy.handle(Stopped(1))[-1] == End(7, "b: exited with 7")


def test_round_that_did_not_last_until_its_workers_were_started_is_left():
    policy = running()
    assert policy.handle(StartFailed(1, "fenced")) == [Stop(1, "fenced")]
    assert policy.handle(Stopped(1)) == [Join()]


def test_joins_that_end_without_a_place_have_codes_of_their_own():
    def code(kind: NoEntry, outcome: int | None = None) -> int:
        last = Policy().handle(JoinEnded(kind, "x", outcome))[-1]
        assert isinstance(last, End)
        return last.code

    codes = [code(kind) for kind in (NoEntry.CLOSED, NoEntry.TIMED_OUT, NoEntry.NOT_REACHED, NoEntry.REFUSED)]
    assert codes == [CLOSED, TIMED_OUT, NOT_REACHED, REFUSED]
    assert code(NoEntry.LET_GO) == 0
    assert [code(NoEntry.CLOSED, 0), code(NoEntry.CLOSED, 80)] == [0, 80]


# --- any order of events ----------------------------------------------------------------------------------------------


class Driver:
    """Does what the policy says, in its own time, and checks every instruction against what is there."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.round = 0
        self.pending: list[object] = []
        """Instructions that were given and are not answered yet."""
        self.alive: set[int] = set()
        self.left = False
        self.spent: set[int] = set()
        self.ended: End | None = None
        self.told = 0
        self.gone = False
        self.follow(self.policy.begin())

    def follow(self, instructions: list[object]) -> None:
        for one in instructions:
            assert self.ended is None, "an instruction after the end"
            match one:
                case Join():
                    assert not self.left, "joined while workers are left"
                    self.pending.append(one)
                case Start():
                    assert not self.left, "started twice"
                    assert not self.gone, "started after leaving"
                    self.left, self.alive = True, {0, 1}
                case Stop():
                    assert self.left, "stopped what is not there"
                    self.pending = [other for other in self.pending if not isinstance(other, Stop)] + [one]
                case Spend():
                    assert one.round not in self.spent, "counted twice"
                    self.spent.add(one.round)
                    self.pending.append(one)
                case Propose() | AwaitOthers():
                    self.pending.append(one)
                case CloseFinished():
                    assert not self.left
                case Leave():
                    self.gone = True
                case End():
                    assert not self.left, "ended while workers are left"
                    self.ended = one

    def answers(self, one: object) -> list[object]:
        """What may come back from an instruction."""
        match one:
            case Join():
                fresh = Entered(self.round + 1, 2)
                return [fresh, fresh, fresh, *(JoinEnded(kind, "x") for kind in NoEntry)]
            case Stop():
                return [Stopped(self.round)]
            case Spend():
                return [Spent(self.round, True, 0, ""), Spent(self.round, False, 80, "no more")]
            case Propose():
                return [Fated(self.round, fate, "x", 7) for fate in Fate]
            case AwaitOthers():
                return [AllFinished(self.round), Unfinished(self.round, "b")]
        raise AssertionError(one)

    def spontaneous(self) -> list[object]:
        number = self.round
        found: list[object] = [Changed(number, what, "x") for what in Why]
        found += [Fated(number, fate, "x", 7) for fate in Fate]
        found += [Exited(number, rank, rank, code) for rank in self.alive for code in (0, 0, 0, 3)]
        found += [Stopped(number - 1), Exited(number - 1, 0, 0, 1), Changed(number - 1, Why.GONE, "old"), TERM]
        return found

    def take(self, event: object) -> None:
        if isinstance(event, Entered):
            self.round = event.round
        if isinstance(event, Stopped) and event.round == self.round:
            self.left, self.alive = False, set()
        if isinstance(event, Exited) and event.round == self.round:
            self.alive.discard(event.local_rank)
        if isinstance(event, Told):
            self.told += 1
        instructions = self.policy.handle(event)
        if isinstance(event, Told) and self.told == 1 and instructions:
            assert isinstance(instructions[0], Leave), "the others are told first"
        self.follow(instructions)


def anything_happens(data, policy: Policy) -> None:
    """Events in any order; then it is told to stop, and has to."""
    driver = Driver(policy)
    for _ in range(data.draw(st.integers(0, 40))):
        if driver.ended is not None:
            break
        choices = [(None, event) for event in driver.spontaneous()]
        choices += [(one, event) for one in driver.pending for event in driver.answers(one)] * 3
        one, event = data.draw(st.sampled_from(choices))
        if one is not None:
            driver.pending.remove(one)
        driver.take(event)
        if driver.ended is None:
            assert driver.pending or driver.alive, "nothing is under way, and nothing will ever happen"
    driver.take(TERM)
    while driver.ended is None:
        stops = [one for one in driver.pending if isinstance(one, Stop)]
        assert stops, "it waits for something else than its workers"
        driver.pending.remove(stops[0])
        driver.take(Stopped(driver.round))


@settings(max_examples=300)
@given(st.data())
def test_whatever_happens_in_whatever_order_it_keeps_its_promises_and_comes_to_an_end(data):
    anything_happens(data, Policy())


class Hurried(Policy):
    """Joins again while its workers still end."""

    def _go_on(self):
        self._are_left = False
        return super()._go_on()


class Forgetful(Policy):
    """Does not notice that its workers have been stopped."""

    def _stopped(self):
        return []


class Spendthrift(Policy):
    """Counts every worker that fails."""

    def _exited(self, event):
        found = super()._exited(event)
        return found or ([Spend(self.round, "again", event.code)] if event.code else [])


class Rude(Policy):
    """Stops its workers before it tells the others."""

    def _told(self, event):
        return list(reversed(super()._told(event)))


def test_word_of_another_node_does_not_end_the_wait_for_what_workers_left_behind():
    policy = running(1)
    policy.handle(Exited(1, 0, 0, 0))
    assert policy.handle(Fated(1, Fate.FINISH, "b has finished")) == []
    assert policy.handle(Stopped(1)) == [Propose(1, Fate.FINISH, "its workers have finished")]


@pytest.mark.parametrize("broken", [Hurried, Forgetful, Spendthrift, Rude])
def test_policy_that_breaks_a_promise_is_noticed(broken):
    @settings(database=None, max_examples=500, phases=[Phase_.generate], suppress_health_check=list(HealthCheck))
    @given(st.data())
    def tried(data):
        anything_happens(data, broken())

    with pytest.raises(AssertionError):
        tried()
