"""What `atoll run` decides: starts, restarts, and the order in which everything ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.peer.supervisor.machine import (
    AT_ONCE,
    DAEMON,
    KILLED,
    LEAVE_S,
    PAUSE_MAX_S,
    REST_S,
    RESTARTS_WINDOW_S,
    SCRIPT,
    DaemonAnswers,
    ExitWith,
    KillProcess,
    LeaveRun,
    ProcessEnded,
    RestGone,
    StartProcess,
    StopAsked,
    Supervisor,
    SupervisorEffect,
    SupervisorEvent,
    TellPeople,
    TellScript,
    TimePassed,
)

GRACE_S = 30.0
TERM = 15
KILLED_BY = "was killed by SIGKILL"


class Pair:
    """A supervisor, the time, and what it has said."""

    def __init__(self, restarts_max: int = 3) -> None:
        self.machine = Supervisor(GRACE_S, restarts_max)
        self.now_s = 100.0
        self.said: list[str] = []
        self.acts = self._without_words(self.machine.start(self.now_s))

    def feed(self, event: SupervisorEvent, after_s: float = 0.0) -> list[SupervisorEffect]:
        self.now_s += after_s
        self.acts = self._without_words(self.machine.handle(event, self.now_s))
        return self.acts

    def wait(self) -> list[SupervisorEffect]:
        """What it does when the time comes that it has named."""
        deadline_s = self.machine.next_deadline_s()
        assert deadline_s is not None
        return self.feed(TimePassed(), max(0.0, deadline_s - self.now_s))

    def _without_words(self, effects: list[SupervisorEffect]) -> list[SupervisorEffect]:
        self.said += [effect.text for effect in effects if isinstance(effect, TellPeople)]
        return [effect for effect in effects if not isinstance(effect, TellPeople)]


def running(restarts_max: int = 3) -> Pair:
    pair = Pair(restarts_max)
    assert pair.acts == [StartProcess(DAEMON)]
    assert pair.machine.next_deadline_s() is None
    assert pair.feed(DaemonAnswers()) == [StartProcess(SCRIPT)]
    return pair


def script_died(code: int = 137) -> ProcessEnded:
    return ProcessEnded(SCRIPT, code, KILLED_BY)


def test_a_script_that_is_done_ends_the_run_in_order() -> None:
    pair = running()
    assert pair.feed(ProcessEnded(SCRIPT, 0, "ended with exit code 0")) == [LeaveRun(False)]
    assert pair.feed(ProcessEnded(DAEMON, 0, "ended with exit code 0")) == [ExitWith(0)]
    assert pair.said == ["the script is done"]


def test_a_script_that_dies_is_started_again_after_pauses_that_double() -> None:
    pair = running()
    for pause_s in (1.0, 2.0, 4.0):
        died_s = pair.now_s
        assert pair.feed(script_died()) == []
        assert pair.wait() == [StartProcess(SCRIPT)]
        assert pair.now_s - died_s == pause_s
    assert pair.said[1] == (
        "the script was killed by SIGKILL after 0 ms; it is started again in 2 s"
        " (restart 2 of 3 within an hour)"
    )
    assert pair.feed(script_died()) == [LeaveRun(False)]
    assert pair.feed(ProcessEnded(DAEMON, 0, "left")) == [ExitWith(137)]
    assert "after 3 restarts within 60 min: giving up" in pair.said[-1]


def test_long_lives_cost_a_short_pause_and_are_forgotten_after_an_hour() -> None:
    pair = running()
    for _ in range(20):
        assert pair.feed(script_died(), after_s=RESTARTS_WINDOW_S / 3 + 1) == []
        began_s = pair.now_s
        assert pair.wait() == [StartProcess(SCRIPT)]
        assert pair.now_s - began_s == 1.0


def test_a_pause_has_an_upper_limit() -> None:
    pair = running(restarts_max=10)
    for _ in range(10):
        pair.feed(script_died())
        before_s = pair.now_s
        pair.wait()
    assert pair.now_s - before_s == PAUSE_MAX_S


def test_a_daemon_that_dies_comes_back_and_the_script_goes_on() -> None:
    pair = running()
    assert pair.feed(ProcessEnded(DAEMON, 137, KILLED_BY)) == []
    assert pair.said[-1].endswith("; the script goes on meanwhile")
    assert pair.wait() == [StartProcess(DAEMON, again=True)]
    assert pair.feed(DaemonAnswers()) == []  # the script is there


def test_a_script_that_ends_for_want_of_a_daemon_waits_for_it() -> None:
    pair = running()
    pair.feed(ProcessEnded(DAEMON, 137, KILLED_BY))
    pair.feed(script_died(15))
    assert pair.wait() == [StartProcess(DAEMON, again=True)]
    assert pair.feed(TimePassed(), after_s=5.0) == []
    assert pair.feed(DaemonAnswers()) == [StartProcess(SCRIPT)]


def test_a_daemon_that_was_never_ready_is_started_as_the_first_time() -> None:
    pair = Pair()
    pair.feed(ProcessEnded(DAEMON, 10, "ended with exit code 10"))
    assert pair.wait() == [StartProcess(DAEMON, again=False)]


def test_a_daemon_that_cannot_be_helped_ends_everything() -> None:
    pair = Pair()
    assert pair.feed(ProcessEnded(DAEMON, 11, "ended with exit code 11")) == [ExitWith(11)]
    assert "would not help" in pair.said[-1]


def test_a_daemon_that_was_told_to_leave_takes_the_script_with_it() -> None:
    pair = running()
    assert pair.feed(ProcessEnded(DAEMON, 0, "left")) == [TellScript(0)]
    assert pair.feed(script_died(1)) == [ExitWith(0)]


def test_a_signal_ends_the_script_first_and_then_the_daemon() -> None:
    pair = running()
    assert pair.feed(StopAsked("SIGTERM", GRACE_S, TERM)) == [TellScript(TERM)]
    assert pair.feed(TimePassed(), after_s=3.0) == []
    assert pair.feed(script_died(0)) == [LeaveRun(True)]
    assert pair.feed(ProcessEnded(DAEMON, 0, "left")) == [ExitWith(0)]


def test_nothing_is_started_after_a_signal() -> None:
    pair = running()
    pair.feed(ProcessEnded(DAEMON, 137, KILLED_BY))
    pair.feed(script_died())
    assert pair.feed(StopAsked("SIGTERM", GRACE_S, TERM)) == [ExitWith(0)]


def test_who_does_not_end_in_time_is_killed_and_the_daemon_has_its_share() -> None:
    pair = running()
    began_s = pair.now_s
    pair.feed(StopAsked("SIGTERM", GRACE_S, TERM))
    assert pair.wait() == [KillProcess(SCRIPT), LeaveRun(True)]
    assert pair.now_s - began_s == GRACE_S - LEAVE_S
    assert "local steps that it has not handed in are lost" in pair.said[-1]
    assert pair.wait() == [KillProcess(DAEMON), ExitWith(KILLED)]
    assert pair.now_s - began_s == GRACE_S


def test_that_the_script_is_killed_is_said_once() -> None:
    """End its first process before the kernel has taken down all of its group."""
    pair = running()
    pair.feed(StopAsked("SIGTERM", GRACE_S, TERM))
    pair.wait()
    said = len(pair.said)
    died = ProcessEnded(SCRIPT, KILLED, KILLED_BY, has_rest=True)
    assert pair.feed(died, after_s=0.01) == []
    assert pair.feed(TimePassed(), after_s=0.01) == []
    assert pair.feed(RestGone(), after_s=0.05) == []
    assert pair.feed(ProcessEnded(DAEMON, 0, "left")) == [ExitWith(KILLED)]
    assert len(pair.said) == said


def test_a_short_grace_time_is_shared_by_halves() -> None:
    pair = running()
    began_s = pair.now_s
    pair.feed(StopAsked("GCP preempts this machine", 4.0))
    pair.wait()
    assert pair.now_s - began_s == 2.0


def test_asked_twice_it_kills_at_once() -> None:
    pair = running()
    pair.feed(StopAsked("SIGINT", GRACE_S, 2))
    both = [KillProcess(SCRIPT), KillProcess(DAEMON), ExitWith(AT_ONCE)]
    assert pair.feed(StopAsked("SIGINT", GRACE_S, 2)) == both


def test_a_notice_and_then_a_signal_are_not_asked_twice() -> None:
    pair = running()
    pair.feed(StopAsked("AWS is to terminate this machine", 118.0))
    began_s = pair.now_s
    assert pair.feed(StopAsked("SIGTERM", GRACE_S, TERM)) == []
    pair.wait()
    assert pair.now_s - began_s == GRACE_S - LEAVE_S  # and not the 118 s


def test_what_a_script_leaves_behind_ends_before_its_next_life() -> None:
    pair = running()
    died = ProcessEnded(SCRIPT, 1, "ended with exit code 1", has_rest=True)
    assert pair.feed(died) == [TellScript(0, rest=True)]
    assert pair.feed(TimePassed(), after_s=5.0) == []
    assert pair.feed(RestGone()) == [StartProcess(SCRIPT)]


def test_what_does_not_end_with_the_script_is_killed() -> None:
    pair = running()
    pair.feed(ProcessEnded(SCRIPT, 1, "ended with exit code 1", has_rest=True))
    assert pair.feed(TimePassed(), after_s=REST_S) == [KillProcess(SCRIPT), StartProcess(SCRIPT)]


def test_a_trainer_that_its_shell_has_left_behind_has_the_time_to_hand_in() -> None:
    pair = running()
    pair.feed(StopAsked("SIGTERM", GRACE_S, TERM))
    died = ProcessEnded(SCRIPT, 143, "was killed by SIGTERM", has_rest=True)
    assert pair.feed(died, after_s=0.1) == [TellScript(TERM, rest=True)]
    assert pair.feed(TimePassed(), after_s=REST_S + 5.0) == []
    assert pair.feed(RestGone()) == [LeaveRun(True)]


happenings = st.lists(
    st.tuples(
        st.floats(0.0, 40.0),
        st.one_of(
            st.just(TimePassed()),
            st.just(DaemonAnswers()),
            st.builds(
                ProcessEnded,
                st.sampled_from([DAEMON, SCRIPT]),
                st.sampled_from([0, 1, 2, 10, 137]),
                st.just("ended"),
                st.booleans(),
            ),
            st.just(RestGone()),
            st.builds(
                StopAsked, st.just("SIGTERM"), st.floats(0.0, 60.0), st.sampled_from([0, 15])
            ),
        ),
    ),
    max_size=60,
)


@given(happenings)
@settings(deadline=None, max_examples=300)
def test_whatever_happens_it_ends_in_time_and_starts_nothing_twice(
    events: list[tuple[float, SupervisorEvent]],
) -> None:
    pair = Pair()
    living, starts, by_s, was_asked = {DAEMON}, 0, float("inf"), False
    exits: list[ExitWith] = []
    for after_s, event in events:
        deadline_s = pair.machine.next_deadline_s()
        until_s = pair.now_s + after_s
        while deadline_s is not None and deadline_s <= until_s and not exits:
            apply(pair.wait(), living, exits)
            deadline_s = pair.machine.next_deadline_s()
        if exits:
            assert not was_asked or pair.now_s <= by_s + 1e-6
            return
        pair.now_s = until_s
        if isinstance(event, ProcessEnded):
            if event.which not in living:
                continue
            living.discard(event.which)
        if isinstance(event, DaemonAnswers) and DAEMON not in living:
            continue
        if isinstance(event, StopAsked):
            was_asked, by_s = True, min(by_s, pair.now_s + event.grace_s)
        acts = pair.feed(event)
        starts += sum(isinstance(act, StartProcess) for act in acts)
        assert not (was_asked and any(isinstance(act, StartProcess) for act in acts))
        apply(acts, living, exits)
        if exits:
            return
    if was_asked:
        while not exits:
            apply(pair.wait(), living, exits)
        assert pair.now_s <= by_s + 1e-6


def apply(acts: list[SupervisorEffect], living: set[str], exits: list[ExitWith]) -> None:
    for act in acts:
        assert not exits, "nothing comes after ExitWith"
        if isinstance(act, StartProcess):
            assert act.which not in living, f"{act.which} is started while it is there"
            assert act.which == DAEMON or DAEMON in living, "a script is started for nobody"
            living.add(act.which)
        elif isinstance(act, KillProcess):
            living.discard(act.which)
        elif isinstance(act, ExitWith):
            assert not living, f"{living} outlive `atoll run`"
            exits.append(act)
