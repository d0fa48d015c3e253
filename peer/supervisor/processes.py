"""Carry out what the supervisor decides: the processes, signals and timers of `atoll run`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.collectives.errors import AtollError, NoDaemonError
from atoll.peer.client.ipc_client import IpcClient, answers
from atoll.peer.client.supervised import SUPERVISOR_VARIABLE
from atoll.peer.daemon.ipc_server import LIFELINE
from atoll.peer.net.identity import socket_path
from atoll.peer.supervisor.machine import (
    DAEMON,
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
    SupervisorEvent,
    TellPeople,
    TellScript,
    TimePassed,
)
from atoll.peer.supervisor.metadata import MetadataService, watch_notices
from atoll.peer.supervisor.notices import SpotNotice

LOOK_S = 0.05  # between two looks for the daemon's socket, or for what a script has left behind
ASK_S = 5.0  # for an answer of the daemon, whose loop may be late on a starved machine
NOTICE_MARGIN_S = 2.0  # of the time of a notice: a cloud's clock is not ours
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DAEMON_MODULE = ("-m", "atoll.peer.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Hold what `atoll run` is to run.

    ``first`` and ``later`` are the words of the daemon's command line, in its first life and after
    it has been ready once; ``stdin`` is what it reads there: an invite, which no command line has.
    """

    home: Path
    command: Sequence[str]
    first: Sequence[str]
    later: Sequence[str]
    stdin: bytes = field(default=b"", repr=False)
    keeps: bool = True  # the home remembers the run's state
    on_term_keeps: bool = False  # the daemon keeps its place when everything is told to end
    grace_s: float
    cloud: str = ""  # whose notices are asked for
    notices_from: MetadataService | None = None


class ProcessPair:
    """Run a daemon and a script until both have ended; ``await run()`` returns the exit code."""

    def __init__(self, plan: RunPlan, machine: Supervisor, say: Callable[[str], None]) -> None:
        self._plan, self._machine, self._say = plan, machine, say
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._pids = {DAEMON: 0, SCRIPT: 0}  # of the last lives; each leads a group of processes
        self._untold = 0  # the signal for a script that is just being started
        self._is_refused = False  # the kernel lets us send the script no signal

    async def run(self) -> int:
        plan = self._plan
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                self._loop.add_signal_handler(number, self._on_signal, number)
        if plan.notices_from is not None:
            watching = watch_notices(plan.cloud, plan.notices_from, self._on_notice, self._say)
            self._spawn(watching)
        try:
            self._carry_out(self._machine.start(self._loop.time()))
            return await self._exit
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in self._tasks:
                task.cancel()
            for which in self._pids:  # nothing outlives this process, whatever has gone wrong here
                self._kill(which)

    # ------------------------------------------------------------ events

    def _on_signal(self, number: signal.Signals) -> None:
        # A terminal that has gone is no word that scripts know.
        told = signal.SIGTERM if number == signal.SIGHUP else number
        self._feed(StopAsked(number.name, self._plan.grace_s, told))

    def _on_notice(self, notice: SpotNotice) -> None:
        self._feed(StopAsked(notice.what, max(0.0, notice.left_s - NOTICE_MARGIN_S)))

    def _feed(self, event: SupervisorEvent) -> None:
        if not self._exit.done():
            self._carry_out(self._machine.handle(event, self._loop.time()))

    def _carry_out(self, effects: Sequence[object]) -> None:
        try:
            for effect in effects:
                self._carry_out_one(effect)
        finally:  # whatever has gone wrong: what is due by then is still done
            if self._timer is not None:
                self._timer.cancel()
            deadline_s = self._machine.next_deadline_s()
            if deadline_s is not None and not self._exit.done():
                self._timer = self._loop.call_at(deadline_s, self._feed, TimePassed())

    def _carry_out_one(self, effect: object) -> None:
        match effect:
            case TellPeople(text=text):
                self._say(text)
            case StartProcess(which=which, again=again):
                self._spawn(self._life(which, again=again))
            case TellScript(signal=number, rest=rest):
                self._tell_script(number or signal.SIGTERM, rest=rest)
            case LeaveRun(returns=returns):
                self._spawn(self._leave(returns=returns))
            case KillProcess(which=which):
                self._kill(which)
            case ExitWith(code=code) if not self._exit.done():
                self._exit.set_result(code)

    # ------------------------------------------------------------ lives

    async def _life(self, which: str, *, again: bool) -> None:
        """Run one life of the daemon or the script, from its start to its end."""
        plan, is_daemon = self._plan, which == DAEMON
        words = plan.later if again else plan.first
        line = [sys.executable, *DAEMON_MODULE, *words] if is_daemon else plan.command
        environment = {"ATOLL_HOME": str(plan.home), SUPERVISOR_VARIABLE: str(os.getpid())}
        try:
            process = await asyncio.create_subprocess_exec(
                *line,
                stdin=asyncio.subprocess.PIPE if is_daemon else None,
                env=os.environ | environment,
                start_new_session=True,  # the terminal's Ctrl+C is for this process alone
            )
        except OSError as error:  # out of processes or memory, or the file has gone
            how = f"could not be started ({error.strerror})"
            self._feed(ProcessEnded(which, 1, how))
            return
        self._pids[which] = process.pid
        if process.stdin is not None:
            process.stdin.write(plan.stdin)
            process.stdin.close()
            self._spawn(self._wait_for_answer(process))
        if not is_daemon and self._untold:
            self._tell_script(self._untold, rest=False)
        code = await process.wait()
        has_rest = not is_daemon and self._has_rest()
        if not has_rest:
            self._pids[which] = 0
        self._feed(ProcessEnded(which, code if code >= 0 else 128 - code, _how(code), has_rest))
        if has_rest:
            await self._wait_for_rest(process.pid)

    async def _wait_for_answer(self, process: asyncio.subprocess.Process) -> None:
        while process.returncode is None:
            if answers(socket_path(self._plan.home, LIFELINE)):
                self._feed(DaemonAnswers())
                return
            await asyncio.sleep(LOOK_S)

    async def _wait_for_rest(self, pid: int) -> None:
        while self._pids[SCRIPT] == pid:
            if not self._has_rest():
                self._pids[SCRIPT] = 0
                self._feed(RestGone())
                return
            await asyncio.sleep(LOOK_S)

    def _has_rest(self) -> bool:
        """Return whether processes that the script has started live, where it has ended itself."""
        group = self._pids[SCRIPT]
        with contextlib.suppress(ChildProcessError):  # orphans are ours where this is process 1
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # they run as another user
            return True
        return True

    # ------------------------------------------------------------ endings

    def _tell_script(self, number: int, *, rest: bool) -> None:
        # Its first process alone: a DataLoader whose workers are told too raises in its trainer,
        # and torchrun tells its workers by itself.
        pid = self._pids[SCRIPT]
        with self._signalling(pid):
            if rest and pid:  # 0 would be the group of this process
                os.killpg(pid, number)
            elif pid:
                os.kill(pid, number)
            elif not rest:
                self._untold = number

    def _kill(self, which: str) -> None:
        with self._signalling(self._pids[which]):
            if self._pids[which]:
                os.killpg(self._pids[which], signal.SIGKILL)

    @contextlib.contextmanager
    def _signalling(self, pid: int) -> Iterator[None]:
        """Pass over a process that has ended, and one that takes no signal of this user's."""
        try:
            yield
        except ProcessLookupError:
            pass
        except PermissionError:  # only a script can have become somebody else: by sudo or the like
            if not self._is_refused:
                self._is_refused = True
                self._say(
                    f"the script runs as another user and cannot be told: end it yourself (sudo"
                    f" kill -- -{pid}), and start `atoll run` as that user next time"
                )

    async def _leave(self, *, returns: bool) -> None:
        """Let the daemon leave; one that is alone in a run to which it returns just ends."""
        home = self._plan.home
        if returns and self._plan.on_term_keeps:
            self._say("the daemon ends and keeps its place in the run (--on-term keep)")
            self._kill(DAEMON)
            return
        try:
            status = await asyncio.to_thread(_ask, home, "status") if returns else {}
            if self._plan.keeps and len(status.get("members", ())) == 1 and status["round"]:
                self._say(
                    f"this machine is the only one in its run: it ends without leaving, so that the"
                    f" same line goes on from round {status['round']}"
                )
                self._kill(DAEMON)
            else:
                await asyncio.to_thread(_ask, home, "leave")
        except NoDaemonError:
            if not answers(socket_path(home, LIFELINE)):
                self._kill(DAEMON)  # it has not come so far as to be in a run, or ends already
        except AtollError as error:
            self._say(f"the daemon cannot be told to leave: {error.what}")

    # ------------------------------------------------------------ tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or self._exit.done():
            return
        if (error := task.exception()) is not None:  # a defect: half a supervisor would only hang
            self._exit.set_exception(error)


def _how(code: int) -> str:
    """Describe the end of a process in the words that follow its name."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _ask(home: Path, command: str) -> dict[str, Any]:
    with contextlib.closing(IpcClient(home)) as dealer:
        return dealer.ask(command, {}, patience_s=ASK_S) or {}
