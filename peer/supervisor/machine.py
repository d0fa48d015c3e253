"""Decide when `atoll run` starts, restarts and ends its two processes: a daemon and a script.

Theory. There are two phases. While the machine *keeps* the two running, either is started again
when it dies, after a pause that doubles as long as its lives are short, and no more often than a
limit within an hour; a script is started once the daemon answers, and goes on while the daemon is
restarted. *Ending* begins when the script is done, when restarts are used up or cannot help, or
when somebody asks for it: a signal, or the notice that the machine is to go. Then the script is
told first and the daemon leaves after it, because a round that the script hands in needs the
daemon. The grace time is divided: what the daemon needs to leave is kept for it, and who has not
ended by then is killed.

A script is its first process and whatever that has started. When the first has ended, the *rest* is
told to end as well, and killed if it does not: the next life needs its GPU, and a shell around a
trainer ends before the trainer that it has started.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from atoll.collectives.errors import (
    AdmissionError,
    ConfigError,
    IncompatibleRunError,
    VersionError,
)
from atoll.collectives.units import count, duration

DAEMON, SCRIPT = "daemon", "script"  # the two processes

# More would not help who is down for good; one a minute for half an hour is a machine that is ill.
RESTARTS_MAX = 30  # of each of the two ...
RESTARTS_WINDOW_S = 3600.0  # ... within so long
PAUSE_MIN_S = 1.0  # before a restart; twice as long each time ...
PAUSE_MAX_S = 30.0  # ... up to here: half of the time is lost at most ...
STEADY_S = PAUSE_MAX_S  # ... where lives are shorter than this, which ends a row of short lives
GRACE_S = 30.0  # what Kubernetes, Slurm and the clouds give at least, between a word and the kill
LEAVE_S = 6.0  # of it for the daemon: it leaves after 4 s at the latest (Timing.leave_s), and ends
REST_S = 10.0  # for what a script leaves behind, between the word to end and the kill

# Starting the daemon again would end the same way: a wrong option, home, secret, version or model.
HOPELESS = frozenset(
    kind.exit_code for kind in (ConfigError, AdmissionError, VersionError, IncompatibleRunError)
)
KILLED = 137  # the exit code of what had to be killed, as shells have it
AT_ONCE = 130  # ... and of who was asked twice


# ---------------------------------------------------------------- what happens


@dataclass(frozen=True, slots=True)
class DaemonAnswers:
    """Say that the daemon's socket is there: a script can find it."""


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """Say that one of the two has ended.

    ``how`` follows its name in a sentence: "was killed by SIGKILL". ``has_rest``: processes that it
    has started are still there.
    """

    which: str
    code: int  # as a shell has it: 128 and the signal's number for what a signal has ended
    how: str
    has_rest: bool = False


@dataclass(frozen=True, slots=True)
class RestGone:
    """Say that nothing is left of what the script had started."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Say that everything is to end within ``grace_s``.

    ``signal``: which one came, and is passed on; 0 for a notice that the machine is to go.
    """

    why: str
    grace_s: float
    signal: int = 0


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Say that it is the time that ``next_deadline_s`` has named, or later."""


SupervisorEvent: TypeAlias = DaemonAnswers | ProcessEnded | RestGone | StopAsked | TimePassed


# ---------------------------------------------------------------- what is to be done


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start one of the two. ``again``: it was ready before, in an earlier life."""

    which: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class TellScript:
    """Tell the script to end: its first process, or the ``rest`` when that has ended.

    ``signal`` 0: with the usual one.
    """

    signal: int
    rest: bool = False


@dataclass(frozen=True, slots=True)
class LeaveRun:
    """Let the daemon leave the run.

    ``returns``: this machine is to come back, so a daemon that is alone in its run keeps it.
    """

    returns: bool


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Kill the daemon, or the script with everything that it has started."""

    which: str


@dataclass(frozen=True, slots=True)
class TellPeople:
    """Print a line."""

    text: str


@dataclass(frozen=True, slots=True)
class ExitWith:
    """End `atoll run`: nothing of it is left."""

    code: int


SupervisorEffect: TypeAlias = (
    StartProcess | TellScript | LeaveRun | KillProcess | TellPeople | ExitWith
)


# ---------------------------------------------------------------- the machine


class Restarts:
    """Decide how long one process pauses before its next life, and when it gets none."""

    def __init__(self, restarts_max: int) -> None:
        self.limit = restarts_max
        self._ends_s: deque[float] = deque()
        self._pause_s = 0.0

    @property
    def used(self) -> int:
        """Return how many restarts there were within the window."""
        return len(self._ends_s)

    def pause_s(self, began_s: float, now_s: float) -> float | None:
        """Return the pause after a life from ``began_s`` to now; None if it was the last."""
        while self._ends_s and now_s - self._ends_s[0] > RESTARTS_WINDOW_S:
            self._ends_s.popleft()
        if len(self._ends_s) >= self.limit:
            return None
        self._ends_s.append(now_s)
        was_short = now_s - began_s < STEADY_S
        doubled_s = min(2 * self._pause_s, PAUSE_MAX_S)
        self._pause_s = max(doubled_s if was_short else 0.0, PAUSE_MIN_S)
        return self._pause_s


@dataclass(slots=True)
class Process:
    """Keep what the machine knows of one of the two."""

    which: str
    restarts: Restarts
    is_there: bool = False
    began_s: float = 0.0
    start_s: float | None = 0.0  # when it is started; None: not any more, or it is there
    was_ready: bool = False  # the daemon, in some life


class Supervisor:
    """Keep a daemon and a script running, and end them in order.

    The shell feeds events to ``handle`` and carries out the effects. ``restarts_max``: of either
    within an hour. Nothing comes after ExitWith.
    """

    def __init__(self, grace_s: float = GRACE_S, restarts_max: int = RESTARTS_MAX) -> None:
        self._grace_s = grace_s
        self._daemon = Process(DAEMON, Restarts(restarts_max))
        self._script = Process(SCRIPT, Restarts(restarts_max))
        self._answers = False  # the daemon does, in this life
        self._rest_by_s: float | None = None  # when the rest of a script that has ended is killed
        self._code: int | None = None  # of `atoll run`; None while the two are kept running
        self._returns = False  # as LeaveRun has it
        self._script_by_s = self._end_by_s = 0.0  # when the script, the daemon is killed
        self._signal = 0  # that the script is told with, and its rest
        self._is_leaving = False  # the daemon was told to
        self._is_killed = False  # the script was, with its rest, as its time was over
        self._signals = 0  # that have come
        self._effects: list[SupervisorEffect] = []

    def start(self, now_s: float) -> list[SupervisorEffect]:
        """Begin: the daemon first."""
        return self.handle(TimePassed(), now_s)

    def handle(self, event: SupervisorEvent, now_s: float) -> list[SupervisorEffect]:
        """Take what has happened, and return what is to be done."""
        match event:
            case DaemonAnswers():
                self._answers = self._daemon.was_ready = True
            case ProcessEnded(which=which) if which == DAEMON:
                self._daemon_ended(event, now_s)
            case ProcessEnded():
                self._script_ended(event, now_s)
            case RestGone():
                self._rest_by_s = None
            case StopAsked():
                self._stop_asked(event, now_s)
            case TimePassed():
                pass
        self._step(now_s)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline_s(self) -> float | None:
        """Return when TimePassed is due."""
        if self._code is None:
            times = [self._daemon.start_s, self._rest_by_s]
            if self._answers and self._rest_by_s is None:
                times.append(self._script.start_s)
        else:
            times = [
                self._script_by_s if self._has_script else None,
                self._end_by_s if self._daemon.is_there else None,
            ]
        return min((at_s for at_s in times if at_s is not None), default=None)

    # ------------------------------------------------------------ what happened

    def _daemon_ended(self, event: ProcessEnded, now_s: float) -> None:
        daemon = self._daemon
        daemon.is_there = self._answers = False
        if self._code is not None:
            return
        if event.code == 0:
            self._end(0, "the daemon has left the run, as somebody has told it to", now_s)
        elif event.code in HOPELESS:
            why = f"the daemon {event.how}, and to start it again would not help"
            self._end(event.code, why, now_s)
        else:
            self._again(daemon, event, now_s)

    def _script_ended(self, event: ProcessEnded, now_s: float) -> None:
        script = self._script
        script.is_there = False
        if event.has_rest and not self._is_killed:  # else the kernel still takes it down
            self._rest_by_s = now_s + REST_S if self._code is None else self._script_by_s
            self._effects.append(TellScript(self._signal, rest=True))
        if self._code is not None:
            return
        if event.code == 0:
            script.start_s = None
            self._end(0, "the script is done", now_s)
        else:
            self._again(script, event, now_s)

    def _again(self, process: Process, event: ProcessEnded, now_s: float) -> None:
        """Start a process again that has died, or give up."""
        pause_s = process.restarts.pause_s(process.began_s, now_s)
        lived = duration(now_s - process.began_s)
        if pause_s is None:
            limit = process.restarts.limit
            of = "and restarts are off"
            if limit:
                of = f"after {count(limit, 'restart')} within {duration(RESTARTS_WINDOW_S)}"
            self._end(event.code, f"the {process.which} {event.how}, {of}: giving up", now_s)
            return
        process.start_s = now_s + pause_s
        used = f"restart {process.restarts.used} of {process.restarts.limit} within an hour"
        goes_on = process.which == DAEMON and self._script.is_there
        others = "; the script goes on meanwhile" if goes_on else ""
        self._say(
            f"the {process.which} {event.how} after {lived}; it is started again in"
            f" {duration(pause_s)} ({used}){others}"
        )

    def _stop_asked(self, event: StopAsked, now_s: float) -> None:
        self._signals += event.signal > 0
        if self._signals > 1:
            self._say(f"{event.why} again: killing the script and the daemon")
            self._effects += [KillProcess(SCRIPT), KillProcess(DAEMON)]
            self._script.is_there = self._daemon.is_there = False
            self._code, self._rest_by_s = AT_ONCE, None
            return
        if self._code is None:
            told = "the script is told first, then the daemon leaves the run"
            why = f"{event.why}: {told}, within {duration(event.grace_s)}"
            self._returns = True
            self._end(0, why, now_s, event.grace_s, event.signal)
        else:  # it ends already, perhaps with more time
            self._set_limits(min(event.grace_s, self._end_by_s - now_s), now_s)

    def _end(
        self, code: int, why: str, now_s: float, grace_s: float | None = None, signal: int = 0
    ) -> None:
        """Begin to end: from now on nothing is started."""
        self._code, self._signal = code, signal
        self._set_limits(self._grace_s if grace_s is None else grace_s, now_s)
        self._daemon.start_s = self._script.start_s = None
        self._say(why)
        if self._script.is_there:
            self._effects.append(TellScript(signal))

    def _set_limits(self, grace_s: float, now_s: float) -> None:
        self._end_by_s = now_s + max(0.0, grace_s)
        self._script_by_s = self._end_by_s - min(LEAVE_S, grace_s / 2)

    # ------------------------------------------------------------ what follows

    @property
    def _has_script(self) -> bool:
        return self._script.is_there or self._rest_by_s is not None

    def _step(self, now_s: float) -> None:
        if self._code is None:
            self._keep(now_s)
        else:
            self._go_on_ending(self._code, now_s)

    def _keep(self, now_s: float) -> None:
        """Start what is due."""
        if self._rest_by_s is not None and now_s >= self._rest_by_s:
            self._say("what the script had started has not ended with it: killing that")
            self._effects.append(KillProcess(SCRIPT))
            self._rest_by_s = None
        is_due = {DAEMON: True, SCRIPT: self._answers and self._rest_by_s is None}
        for process in (self._daemon, self._script):
            if process.start_s is not None and now_s >= process.start_s and is_due[process.which]:
                process.start_s, process.is_there, process.began_s = None, True, now_s
                self._effects.append(StartProcess(process.which, again=process.was_ready))

    def _go_on_ending(self, code: int, now_s: float) -> None:
        """Kill whose time is over; let the daemon leave after the script; end when both have."""
        if self._has_script and now_s >= self._script_by_s:
            if self._script.is_there or self._returns:
                lost = "local steps that it has not handed in are lost"
                self._say(f"the script has not ended in time: killing it; {lost}")
                self._code = code = code or KILLED
            else:
                self._say("what the script had started has not ended with it: killing that")
            self._effects.append(KillProcess(SCRIPT))
            self._script.is_there, self._rest_by_s, self._is_killed = False, None, True
        if self._daemon.is_there and now_s >= self._end_by_s:
            self._say("the daemon has not left in time: killing it; the others go on without it")
            self._effects.append(KillProcess(DAEMON))
            self._daemon.is_there = False
        elif self._daemon.is_there and not self._has_script and not self._is_leaving:
            self._is_leaving = True
            self._effects.append(LeaveRun(self._returns))
        if not self._has_script and not self._daemon.is_there:
            self._effects.append(ExitWith(code))

    def _say(self, text: str) -> None:
        self._effects.append(TellPeople(text))
