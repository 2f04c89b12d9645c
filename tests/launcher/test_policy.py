"""The launcher's decisions: single events, and random sequences of events."""

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
    ChangeCause,
    CloseFinished,
    End,
    Entered,
    Exited,
    Join,
    JoinEnded,
    JoinEndReason,
    Leave,
    OthersUnfinished,
    OutcomeDecided,
    Phase,
    Policy,
    Propose,
    RestartDecided,
    RoundChanged,
    RoundOutcome,
    SignalReceived,
    SpendRestart,
    Start,
    StartFailed,
    Stop,
    Stopped,
    ended,
)

TERM = SignalReceived(15, "SIGTERM")


def running(workers: int = 2, number: int = 1) -> Policy:
    """A policy whose workers are running."""
    policy = Policy()
    assert policy.begin() == [Join()]
    assert policy.handle(Entered(number, workers)) == [Start(number)]
    return policy


def finishing() -> Policy:
    """A policy whose only worker has finished, and which waits for the other nodes."""
    policy = running(1)
    assert policy.handle(Exited(1, 0, 0, 0)) == [Stop(1, "its workers have finished")]
    assert policy.handle(Stopped(1)) == [Propose(1, RoundOutcome.FINISH, "its workers have finished")]
    assert policy.handle(OutcomeDecided(1, RoundOutcome.FINISH, "x")) == [AwaitOthers(1)]
    return policy


def test_failed_worker_stops_the_others_and_costs_the_run_a_restart():
    policy = running()
    stop, spend = policy.handle(Exited(1, 1, 5, 3))
    assert stop == Stop(1, "the worker of rank 5 exited with 3")
    assert spend == SpendRestart(1, "the worker of rank 5 exited with 3", 3)
    assert policy.handle(Exited(1, 0, 4, 143)) == [], "this worker was stopped: one failure costs one restart"
    assert policy.handle(Stopped(1)) == [], "the restart is not counted yet"
    assert policy.handle(RestartDecided(1, True, 0, "")) == [Join()]


def test_run_whose_budget_is_used_up_ends_with_that_code():
    policy = running()
    policy.handle(Exited(1, 0, 0, 3))
    assert policy.handle(RestartDecided(1, False, BUDGET_USED_UP, "no more")) == [], "workers are left"
    assert policy.handle(Stopped(1)) == [Leave("no more"), End(BUDGET_USED_UP, "no more")]


def test_loss_stops_the_workers_and_costs_nothing():
    policy = running()
    assert policy.handle(RoundChanged(1, ChangeCause.BROKEN, "lost: b")) == [Stop(1, "lost: b")]
    assert policy.handle(Exited(1, 0, 0, 137)) == []
    assert policy.handle(Stopped(1)) == [Join()]


@pytest.mark.parametrize(
    ("code", "words"), [(1, "exited with 1"), (137, "was killed by signal 9"), (255, "exited with 255")]
)
def test_code_of_a_program_is_not_taken_for_a_signal(code, words):
    assert ended(code) == words


def test_growth_is_agreed_on_before_anything_stops():
    policy = running()
    assert policy.handle(RoundChanged(1, ChangeCause.WAITING, "c waits")) == [
        Propose(1, RoundOutcome.RESTART, "c waits")
    ]
    assert policy.phase is Phase.RUNNING
    assert policy.handle(OutcomeDecided(1, RoundOutcome.RESTART, "c waits")) == [Stop(1, "c waits")]


def test_growth_is_put_off_when_a_node_has_finished():
    policy = running()
    policy.handle(RoundChanged(1, ChangeCause.WAITING, "c waits"))
    assert policy.handle(OutcomeDecided(1, RoundOutcome.FINISH, "b has finished")) == []
    assert policy.phase is Phase.RUNNING


def test_nodes_that_have_finished_close_the_run_together():
    assert finishing().handle(AllFinished(1)) == [
        CloseFinished(),
        Leave("all nodes have finished"),
        End(0, "all nodes have finished"),
    ]


def test_node_that_has_finished_takes_part_again_if_another_fails():
    assert finishing().handle(OutcomeDecided(1, RoundOutcome.RESTART, "b failed")) == [Join()]
    assert finishing().handle(RoundChanged(1, ChangeCause.BROKEN, "lost: b")) == [Join()]
    assert finishing().handle(RoundChanged(1, ChangeCause.WAITING, "c waits")) == []


def test_second_report_that_the_workers_have_stopped_is_ignored():
    policy = running(1)
    policy.handle(Exited(1, 0, 0, 0))
    assert len(policy.handle(Stopped(1))) == 1
    assert policy.handle(Stopped(1)) == []


def test_node_that_has_finished_does_not_wait_forever():
    assert finishing().handle(OthersUnfinished(1, "missing: b")) == [Leave("missing: b"), End(TIMED_OUT, "missing: b")]


def test_signal_leaves_the_run_before_it_stops_the_workers():
    policy = running()
    why = "stopped by SIGTERM"
    assert policy.handle(TERM) == [Leave(why, early=True), Stop(1, why)]
    assert policy.handle(RoundChanged(1, ChangeCause.BROKEN, "this node left")) == []
    assert policy.handle(Stopped(1)) == [Leave(why), End(143, why)]


def test_second_signal_does_not_wait_for_the_grace_period():
    policy = running()
    policy.handle(TERM)
    assert policy.handle(TERM) == [Stop(1, "stopped by SIGTERM", gently=False)]


def test_signal_while_joining_ends_the_launcher_at_once():
    assert Policy().handle(TERM)[-1] == End(143, "stopped by SIGTERM")


def test_node_that_is_asked_to_go_ends_without_failure():
    policy = running()
    asked = policy.handle(RoundChanged(1, ChangeCause.DRAIN, "asked to go"))
    assert asked == [Leave("asked to go", early=True), Stop(1, "asked to go")]
    assert policy.handle(Stopped(1))[-1] == End(0, "asked to go")


def test_run_that_failed_elsewhere_ends_here_with_the_same_code():
    policy = running()
    assert policy.handle(OutcomeDecided(1, RoundOutcome.FAILED, "b: exited with 7", 7)) == [Stop(1, "b: exited with 7")]
    assert policy.handle(Stopped(1))[-1] == End(7, "b: exited with 7")


def test_round_that_ended_before_its_workers_were_started_is_left():
    policy = running()
    assert policy.handle(StartFailed(1, "fenced")) == [Stop(1, "fenced")]
    assert policy.handle(Stopped(1)) == [Join()]


def test_joins_that_end_without_a_place_have_codes_of_their_own():
    def code(reason: JoinEndReason, outcome: int | None = None) -> int:
        last = Policy().handle(JoinEnded(reason, "x", outcome))[-1]
        assert isinstance(last, End)
        return last.code

    failures = (JoinEndReason.CLOSED, JoinEndReason.TIMED_OUT, JoinEndReason.NOT_REACHED, JoinEndReason.REFUSED)
    codes = [code(reason) for reason in failures]
    assert codes == [CLOSED, TIMED_OUT, NOT_REACHED, REFUSED]
    assert code(JoinEndReason.RELEASED) == 0
    assert [code(JoinEndReason.CLOSED, 0), code(JoinEndReason.CLOSED, 80)] == [0, 80]


# --- any order of events ----------------------------------------------------------------------------------------------


class Driver:
    """Carries out the policy's instructions, with answers in any order, and checks each against the invariants."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.round = 0
        self.pending: list[object] = []
        """Instructions without an answer yet."""
        self.alive: set[int] = set()
        self.has_processes = False
        self.spent: set[int] = set()
        self.ended: End | None = None
        self.signals = 0
        self.has_left = False
        self.follow(self.policy.begin())

    def follow(self, instructions: list[object]) -> None:
        for one in instructions:
            assert self.ended is None, "an instruction after the end"
            match one:
                case Join():
                    assert not self.has_processes, "joined while workers are left"
                    self.pending.append(one)
                case Start():
                    assert not self.has_processes, "started twice"
                    assert not self.has_left, "started after leaving"
                    self.has_processes, self.alive = True, {0, 1}
                case Stop():
                    assert self.has_processes, "stopped without workers"
                    self.pending = [other for other in self.pending if not isinstance(other, Stop)] + [one]
                case SpendRestart():
                    assert one.round not in self.spent, "counted twice"
                    self.spent.add(one.round)
                    self.pending.append(one)
                case Propose() | AwaitOthers():
                    self.pending.append(one)
                case CloseFinished():
                    assert not self.has_processes
                case Leave():
                    self.has_left = True
                case End():
                    assert not self.has_processes, "ended while workers are left"
                    self.ended = one

    def answers(self, one: object) -> list[object]:
        """The possible answers to an instruction."""
        match one:
            case Join():
                fresh = Entered(self.round + 1, 2)
                return [fresh, fresh, fresh, *(JoinEnded(reason, "x") for reason in JoinEndReason)]
            case Stop():
                return [Stopped(self.round)]
            case SpendRestart():
                return [RestartDecided(self.round, True, 0, ""), RestartDecided(self.round, False, 80, "no more")]
            case Propose():
                return [OutcomeDecided(self.round, outcome, "x", 7) for outcome in RoundOutcome]
            case AwaitOthers():
                return [AllFinished(self.round), OthersUnfinished(self.round, "b")]
        raise AssertionError(one)

    def spontaneous(self) -> list[object]:
        number = self.round
        found: list[object] = [RoundChanged(number, cause, "x") for cause in ChangeCause]
        found += [OutcomeDecided(number, outcome, "x", 7) for outcome in RoundOutcome]
        found += [Exited(number, rank, rank, code) for rank in self.alive for code in (0, 0, 0, 3)]
        found += [
            Stopped(number - 1),
            Exited(number - 1, 0, 0, 1),
            RoundChanged(number - 1, ChangeCause.BROKEN, "old"),
            TERM,
        ]
        return found

    def take(self, event: object) -> None:
        if isinstance(event, Entered):
            self.round = event.round
        if isinstance(event, Stopped) and event.round == self.round:
            self.has_processes, self.alive = False, set()
        if isinstance(event, Exited) and event.round == self.round:
            self.alive.discard(event.local_rank)
        if isinstance(event, SignalReceived):
            self.signals += 1
        instructions = self.policy.handle(event)
        if isinstance(event, SignalReceived) and self.signals == 1 and instructions:
            assert isinstance(instructions[0], Leave), "the other nodes are told first"
        self.follow(instructions)


def random_events(data, policy: Policy) -> None:
    """Events in random order, then a signal, after which the policy must end."""
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
            assert driver.pending or driver.alive, "no event can follow: the policy would wait forever"
    driver.take(TERM)
    while driver.ended is None:
        stops = [one for one in driver.pending if isinstance(one, Stop)]
        assert stops, "after a signal, the policy may wait only for its workers"
        driver.pending.remove(stops[0])
        driver.take(Stopped(driver.round))


@settings(max_examples=300)
@given(st.data())
def test_policy_keeps_its_invariants_and_ends_whatever_the_order_of_events(data):
    random_events(data, Policy())


class Hurried(Policy):
    """Joins again before its workers have ended."""

    def _go_on(self):
        self._has_processes = False
        return super()._go_on()


class Forgetful(Policy):
    """Does not notice that its workers have stopped."""

    def _stopped(self):
        return []


class Spendthrift(Policy):
    """Counts a restart for every worker that fails."""

    def _exited(self, event):
        found = super()._exited(event)
        return found or ([SpendRestart(self.round, "again", event.code)] if event.code else [])


class LeavesLast(Policy):
    """Stops its workers before it leaves the round."""

    def _signalled(self, event):
        return list(reversed(super()._signalled(event)))


def test_outcome_from_another_node_does_not_end_the_wait_for_processes_that_workers_left_behind():
    policy = running(1)
    policy.handle(Exited(1, 0, 0, 0))
    assert policy.handle(OutcomeDecided(1, RoundOutcome.FINISH, "b has finished")) == []
    assert policy.handle(Stopped(1)) == [Propose(1, RoundOutcome.FINISH, "its workers have finished")]


@pytest.mark.parametrize("broken", [Hurried, Forgetful, Spendthrift, LeavesLast])
def test_policy_that_breaks_an_invariant_is_caught(broken):
    @settings(database=None, max_examples=500, phases=[Phase_.generate], suppress_health_check=list(HealthCheck))
    @given(st.data())
    def tried(data):
        random_events(data, broken())

    with pytest.raises(AssertionError):
        tried()
