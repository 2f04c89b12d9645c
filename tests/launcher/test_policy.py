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
    AllAnswered,
    AllFinished,
    Answer,
    AwaitAnswers,
    AwaitOthers,
    CloseFinished,
    End,
    Entered,
    Exited,
    Instruction,
    Join,
    JoinEnded,
    JoinEndReason,
    Leave,
    OthersUnfinished,
    OutcomeDecided,
    Phase,
    Policy,
    Propose,
    Report,
    RoundChanged,
    RoundOutcome,
    SettleSignals,
    SignalReceived,
    SignalsSettled,
    SpendRestart,
    Stalled,
    Start,
    StartFailed,
    Stop,
    Stopped,
    Tell,
)
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.records import LeaveCause, LeaveKind

TERM = SignalReceived(15, "SIGTERM")


FINISHED = LeaveCause(kind=LeaveKind.FINISHED, why="its workers have finished", round=1)
LEFT = LeaveCause(kind=LeaveKind.ROUND_OVER, why="b leaves")
ADMISSION = LeaveCause(kind=LeaveKind.ADMISSION, why="to admit waiting nodes")
FAILURE = LeaveCause(kind=LeaveKind.WORKER_FAILED, why="rank 5 on a exited with 3", rank=5)
OWN = OutcomeDecided(1, RoundOutcome.FAILURE, FAILURE, 3, "rank 5 on a", is_own=True)
OTHER = OutcomeDecided(1, RoundOutcome.FAILURE, FAILURE, 3, "rank 5 on a")


def running(workers: int = 2, number: int = 1) -> Policy:
    """A policy whose workers are running."""
    policy = Policy("a")
    assert policy.begin() == [Join()]
    assert policy.handle(Entered(number, workers)) == [Start(number)]
    return policy


def finishing() -> Policy:
    """A policy whose only worker has finished, and which waits for the other nodes."""
    policy = running(1)
    assert policy.handle(Exited(1, 0, 0, 0)) == [Stop(1, "its workers have finished")]
    assert policy.handle(Stopped(1)) == [Propose(1, RoundOutcome.FINISH, FINISHED)]
    assert policy.handle(OutcomeDecided(1, RoundOutcome.FINISH, FINISHED)) == [AwaitOthers(1)]
    return policy


def attributing() -> Policy:
    """A policy whose worker has failed, with its report in force."""
    policy = running()
    policy.handle(Exited(1, 1, 5, 3))
    assert policy.handle(OWN) == [AwaitAnswers(1)]
    return policy


def joined(instructions: list[Instruction]) -> LeaveCause:
    """The cause of the join that follows at last."""
    last = instructions[-1]
    assert isinstance(last, Join)
    assert last.cause is not None
    return last.cause


def test_failed_worker_is_reported_and_counted_once_all_launchers_have_answered():
    policy = running()
    assert policy.handle(Exited(1, 1, 5, 3)) == [Stop(1, "rank 5 on a exited with 3"), Report(1, Exited(1, 1, 5, 3))]
    assert policy.handle(Exited(1, 0, 4, 143)) == [], "this worker was stopped: one failure costs one restart"
    assert policy.handle(Stopped(1)) == [], "it is not known yet whose failure it is"
    assert policy.handle(OWN) == [AwaitAnswers(1)]
    assert policy.handle(OWN) == [], "the watch shows it, too"
    assert policy.handle(AllAnswered(1)) == [SpendRestart(1)]
    assert policy.handle(AllAnswered(1)) == []
    assert joined(policy.handle(OutcomeDecided(1, RoundOutcome.RESTART, FAILURE))) == FAILURE


def test_launcher_that_learns_of_a_failure_stops_its_workers_and_answers():
    policy = running()
    assert policy.handle(OTHER) == [Stop(1, FAILURE.why), Answer(1)]
    assert policy.handle(OTHER) == []
    assert policy.handle(Stopped(1)) == [], "it waits for the outcome"
    assert joined(policy.handle(OutcomeDecided(1, RoundOutcome.RESTART, FAILURE))) == FAILURE


def test_launcher_that_has_finished_answers_too():
    policy = finishing()
    assert policy.handle(OTHER) == [Answer(1)]
    assert policy.handle(AllFinished(1)) == []


def test_launcher_that_stops_for_another_reason_answers_too():
    policy = running()
    policy.handle(RoundChanged(1, Cause.LOSS, "lost: c"))
    assert policy.handle(OTHER) == [Answer(1)], "otherwise the others would wait for it"
    assert joined(policy.handle(Stopped(1))).kind is LeaveKind.MEMBER_LOST


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (RoundChanged(1, Cause.LOSS, "lost: c"), LeaveKind.MEMBER_LOST),
        (RoundChanged(1, Cause.SESSION_LOST, "silent"), LeaveKind.SESSION_LOST),
        (OutcomeDecided(1, RoundOutcome.RESTART, LEFT), LeaveKind.ROUND_OVER),
        (OutcomeDecided(1, RoundOutcome.RESTART, ADMISSION), LeaveKind.ADMISSION),
    ],
)
def test_failure_that_something_else_explains_costs_nothing(change, kind):
    policy = attributing()
    (tell,) = policy.handle(change)
    assert isinstance(tell, Tell)
    assert "the failure of rank 5 on a is taken for its echo, and no restart is counted" in tell.text
    cause = joined(policy.handle(Stopped(1)))
    assert (cause.kind, cause.why) == (kind, tell.text)
    assert policy.handle(AllAnswered(1)) == []


def test_loss_that_comes_while_the_restart_is_counted_neither_is_waited_for_nor_explains_the_failure():
    policy = attributing()
    policy.handle(Stopped(1))
    policy.handle(AllAnswered(1))
    (join,) = policy.handle(RoundChanged(1, Cause.LOSS, "lost: c"))
    assert joined([join]) == LeaveCause(kind=LeaveKind.MEMBER_LOST, why="lost: c")


def test_stall_is_reported_and_counted_once_as_a_failed_worker_is():
    policy, stall = running(), Stalled(1, 5, "b", "rank 5 on b said nothing for 60 s")
    assert policy.handle(stall) == [Stop(1, stall.why), Report(1, stall)]
    assert policy.handle(stall) == []
    assert policy.handle(Exited(1, 0, 4, 143)) == [], "stopped because of the stall"
    assert policy.handle(OWN) == [AwaitAnswers(1)]
    assert policy.handle(AllAnswered(1)) == [SpendRestart(1)]
    policy.handle(Stopped(1))
    stalled = LeaveCause(kind=LeaveKind.STALLED, why=stall.why, rank=5)
    assert joined(policy.handle(OutcomeDecided(1, RoundOutcome.RESTART, stalled))) == stalled


def test_stall_of_another_round_or_of_workers_that_are_being_stopped_is_ignored():
    policy = running(number=2)
    assert policy.handle(Stalled(1, 5, "b", "why")) == []
    policy.handle(Exited(2, 0, 2, 1))
    assert policy.handle(Stalled(2, 5, "b", "why")) == [], "a failure is being attributed"
    policy.handle(TERM)
    assert policy.handle(Stalled(2, 5, "b", "why")) == []


@pytest.mark.parametrize("code", [129, 130, 143])
def test_worker_that_was_told_to_go_is_not_reported_before_a_signal_would_have_come(code):
    policy = running()
    assert isinstance(policy.handle(Exited(1, 1, 5, code))[-1], SettleSignals)
    assert policy.handle(OTHER) == [], "nor does its launcher answer that all is well"
    assert policy.handle(TERM) == [Leave("stopped by SIGTERM", LeaveKind.STOPPED, early=True)]
    assert policy.handle(SignalsSettled(1)) == []


def test_worker_that_was_ended_alone_by_a_signal_has_failed():
    policy = running()
    policy.handle(Exited(1, 1, 5, 143))
    assert policy.handle(SignalsSettled(1)) == [Report(1, Exited(1, 1, 5, 143))]
    policy = running()
    policy.handle(Exited(1, 1, 5, 143))
    policy.handle(OTHER)
    assert policy.handle(SignalsSettled(1)) == [Answer(1)]


def test_run_whose_budget_is_used_up_ends_with_that_code():
    policy = attributing()
    policy.handle(AllAnswered(1))
    failed = OutcomeDecided(1, RoundOutcome.FAILED, FAILURE, BUDGET_USED_UP)
    assert policy.handle(failed) == [], "workers are left"
    assert policy.handle(Stopped(1)) == [
        Leave(FAILURE.why, LeaveKind.WORKER_FAILED),
        End(BUDGET_USED_UP, FAILURE.why),
    ]


def test_loss_stops_the_workers_and_costs_nothing():
    policy = running()
    assert policy.handle(RoundChanged(1, Cause.LOSS, "lost: b")) == [Stop(1, "lost: b")]
    assert policy.handle(Exited(1, 0, 0, 137)) == []
    assert joined(policy.handle(Stopped(1))) == LeaveCause(kind=LeaveKind.MEMBER_LOST, why="lost: b")


def test_growth_is_agreed_on_before_anything_stops():
    policy = running()
    assert policy.handle(RoundChanged(1, Cause.WAITING, "c waits")) == [Propose(1, RoundOutcome.RESTART, ADMISSION)]
    assert policy.phase is Phase.RUNNING
    assert policy.handle(OutcomeDecided(1, RoundOutcome.RESTART, ADMISSION)) == [Stop(1, ADMISSION.why)]
    assert joined(policy.handle(Stopped(1))) == ADMISSION


def test_growth_is_put_off_when_a_node_has_finished():
    policy = running()
    policy.handle(RoundChanged(1, Cause.WAITING, "c waits"))
    assert policy.handle(OutcomeDecided(1, RoundOutcome.FINISH, FINISHED)) == []
    assert policy.phase is Phase.RUNNING


def test_nodes_that_have_finished_close_the_run_together():
    assert finishing().handle(AllFinished(1)) == [
        CloseFinished(),
        Leave("all nodes have finished", LeaveKind.FINISHED),
        End(0, "all nodes have finished"),
    ]


def test_node_that_has_finished_takes_part_again_if_another_fails():
    assert joined(finishing().handle(OutcomeDecided(1, RoundOutcome.RESTART, FAILURE))) == FAILURE
    assert joined(finishing().handle(RoundChanged(1, Cause.LOSS, "lost: b"))).kind is LeaveKind.MEMBER_LOST
    assert finishing().handle(RoundChanged(1, Cause.WAITING, "c waits")) == []


def test_second_report_that_the_workers_have_stopped_is_ignored():
    policy = running(1)
    policy.handle(Exited(1, 0, 0, 0))
    assert len(policy.handle(Stopped(1))) == 1
    assert policy.handle(Stopped(1)) == []


def test_node_that_has_finished_does_not_wait_forever():
    assert finishing().handle(OthersUnfinished(1, "missing: b")) == [
        Leave("missing: b", LeaveKind.FINISHED),
        End(TIMED_OUT, "missing: b"),
    ]


def test_signal_leaves_the_run_before_it_stops_the_workers():
    policy = running()
    why = "stopped by SIGTERM"
    assert policy.handle(TERM) == [Leave(why, LeaveKind.STOPPED, early=True), Stop(1, why)]
    assert policy.handle(RoundChanged(1, Cause.SESSION_LOST, "this node left")) == []
    assert policy.handle(Stopped(1)) == [Leave(why, LeaveKind.STOPPED), End(143, why)]


def test_second_signal_does_not_wait_for_the_grace_period():
    policy = running()
    policy.handle(TERM)
    assert policy.handle(TERM) == [Stop(1, "stopped by SIGTERM", gently=False)]


def test_signal_while_joining_ends_the_launcher_at_once():
    assert Policy().handle(TERM)[-1] == End(143, "stopped by SIGTERM")


def test_node_that_is_asked_to_go_ends_without_failure():
    policy = running()
    asked = policy.handle(RoundChanged(1, Cause.DRAIN, "asked to go"))
    assert asked == [Leave("asked to go", LeaveKind.DRAIN, early=True), Stop(1, "asked to go")]
    assert policy.handle(Stopped(1))[-1] == End(0, "asked to go")


def test_run_that_failed_elsewhere_ends_here_with_the_same_code():
    policy = running()
    assert policy.handle(OutcomeDecided(1, RoundOutcome.FAILED, FAILURE, 7)) == [Stop(1, FAILURE.why)]
    assert policy.handle(Stopped(1))[-1] == End(7, FAILURE.why)


def test_round_that_ended_before_its_workers_were_started_is_left():
    policy = running()
    assert policy.handle(StartFailed(1, "fenced")) == [Stop(1, "fenced")]
    assert joined(policy.handle(Stopped(1))).why == "fenced"


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
        self.answered: set[int] = set()
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
                case Propose() | AwaitOthers() | SettleSignals() | Report() | AwaitAnswers():
                    self.pending.append(one)
                case Answer():
                    assert one.round not in self.answered, "answered twice"
                    self.answered.add(one.round)
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
            case SettleSignals():
                return [SignalsSettled(self.round)]
            case Report():
                return [OutcomeDecided(self.round, RoundOutcome.FAILURE, FAILURE, 3, is_own=True), *self.outcomes()]
            case AwaitAnswers():
                return [AllAnswered(self.round)]
            case SpendRestart():
                decided = (RoundOutcome.RESTART, RoundOutcome.FAILED)
                return [OutcomeDecided(self.round, outcome, FAILURE, 80) for outcome in decided]
            case Propose():
                return self.outcomes()
            case AwaitOthers():
                return [AllFinished(self.round), OthersUnfinished(self.round, "b")]
        raise AssertionError(one)

    def outcomes(self) -> list[object]:
        """Those that may be in force because of other launchers."""
        return [OutcomeDecided(self.round, outcome, LEFT, 7) for outcome in RoundOutcome]

    def spontaneous(self) -> list[object]:
        number = self.round
        found: list[object] = [RoundChanged(number, cause, "x") for cause in Cause]
        found += self.outcomes()
        found += [Exited(number, rank, rank, code) for rank in self.alive for code in (0, 0, 0, 3, 143)]
        found += [
            Stopped(number - 1),
            Exited(number - 1, 0, 0, 1),
            RoundChanged(number - 1, Cause.ROUND_OVER, "old"),
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
            is_asked = driver.policy.phase is Phase.ATTRIBUTING  # another launcher decides, or is lost
            assert driver.pending or driver.alive or is_asked, "no event can follow: the policy would wait forever"
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

    def _stop(self, then, why):
        found = super()._stop(then, why)
        self._has_processes = False
        return [*found, *self._go_on()]


class Forgetful(Policy):
    """Does not notice that its workers have stopped."""

    def _stopped(self):
        return []


class Spendthrift(Policy):
    """Counts a restart for every worker that fails."""

    def _exited(self, event):
        found = super()._exited(event)
        return found or ([SpendRestart(self.round)] if event.code else [])


class LeavesLast(Policy):
    """Stops its workers before it leaves the round."""

    def _signalled(self, event):
        return list(reversed(super()._signalled(event)))


def test_outcome_from_another_node_does_not_end_the_wait_for_processes_that_workers_left_behind():
    policy = running(1)
    policy.handle(Exited(1, 0, 0, 0))
    assert policy.handle(OutcomeDecided(1, RoundOutcome.FINISH, FINISHED)) == []
    assert policy.handle(Stopped(1)) == [Propose(1, RoundOutcome.FINISH, FINISHED)]


@pytest.mark.parametrize("broken", [Hurried, Forgetful, Spendthrift, LeavesLast])
def test_policy_that_breaks_an_invariant_is_caught(broken):
    @settings(database=None, max_examples=500, phases=[Phase_.generate], suppress_health_check=list(HealthCheck))
    @given(st.data())
    def tried(data):
        random_events(data, broken())

    with pytest.raises(AssertionError):
        tried()
