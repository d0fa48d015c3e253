"""How `atoll run` carries out what its supervisor has decided, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.peer.supervisor import processes
from atoll.peer.supervisor.machine import (
    DAEMON,
    SCRIPT,
    ExitWith,
    StartProcess,
    Supervisor,
    TellPeople,
    TellScript,
)
from atoll.peer.supervisor.processes import ProcessPair, RunPlan

SLEEPS = (sys.executable, "-c", "import time; time.sleep(60)")
GRACE_S = 3.0


def test_a_script_that_is_being_started_is_told_to_end_as_soon_as_it_is_there(
    tmp_path: Path,
) -> None:
    machine: Any = SimpleNamespace(
        start=lambda now_s: [StartProcess(SCRIPT), TellScript(signal.SIGTERM)],
        handle=lambda event, now_s: [ExitWith(event.code)],
        next_deadline_s=lambda: None,
    )

    async def run() -> int:
        plan = RunPlan(home=tmp_path, command=("sleep", "60"), first=(), later=(), grace_s=30.0)
        return await ProcessPair(plan, machine, print).run()

    assert asyncio.run(run()) == 128 + signal.SIGTERM


# ---------------------------------------------------------------- a script of another user


class OfAnotherUser:
    """Stand between a pair and the kernel, which lets it send its script no signal."""

    def __init__(self) -> None:
        self.pair: ProcessPair | None = None
        self.asked: list[str] = []
        self.said: list[str] = []
        self.scripts: set[int] = set()
        self._kill, self._killpg = os.kill, os.killpg

    def kill(self, pid: int, number: int) -> None:
        self._refuse(pid)
        self._kill(pid, number)

    def killpg(self, pid: int, number: int) -> None:
        self._refuse(pid)
        self._killpg(pid, number)

    def ask(self, _: Path, command: str) -> dict[str, Any]:
        """Answer as a daemon does, which ends when it has left."""
        self.asked.append(command)
        if command == "leave":
            assert self.pair is not None
            self._killpg(self.pair._pids[DAEMON], signal.SIGKILL)
        return {}

    def end_scripts(self) -> None:
        for pid in self.scripts:
            with contextlib.suppress(ProcessLookupError):
                self._killpg(pid, signal.SIGKILL)

    def _refuse(self, pid: int) -> None:
        if self.pair is not None and pid == self.pair._pids[SCRIPT]:
            self.scripts.add(pid)
            raise PermissionError(1, "Operation not permitted")


@pytest.fixture
def sudo(monkeypatch: pytest.MonkeyPatch) -> Iterator[OfAnotherUser]:
    made = OfAnotherUser()
    with monkeypatch.context() as patched:
        patched.setattr(processes, "os", SimpleNamespace(**vars(os) | calls(made)))
        patched.setattr(processes, "DAEMON_MODULE", SLEEPS[1:])
        patched.setattr(processes, "answers", lambda path: True)
        patched.setattr(processes, "_ask", made.ask)
        yield made
    made.end_scripts()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise TimeoutError


def calls(made: OfAnotherUser) -> dict[str, Any]:
    return {"kill": made.kill, "killpg": made.killpg}


@pytest.mark.parametrize("signals", [1, 2])
def test_a_script_that_runs_as_another_user_does_not_keep_atoll_run_from_ending(
    sudo: OfAnotherUser, tmp_path: Path, signals: int
) -> None:
    async def run() -> int:
        plan = RunPlan(home=tmp_path, command=SLEEPS, first=(), later=(), grace_s=GRACE_S)
        sudo.pair = ProcessPair(plan, Supervisor(GRACE_S, 3), sudo.said.append)
        running = asyncio.create_task(sudo.pair.run())
        await until(lambda: bool(sudo.pair and sudo.pair._pids[SCRIPT]))
        pids = list(sudo.pair._pids.values())
        for _ in range(signals):
            sudo.pair._on_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(GRACE_S + 10):
                return await running
        finally:
            sudo.end_scripts()
            await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
            await asyncio.sleep(0.1)  # for the event loop to hear of it

    began_s = time.monotonic()
    code = asyncio.run(run())
    told = [line for line in sudo.said if "runs as another user and cannot be told" in line]
    assert len(told) == 1
    assert "sudo kill" in told[0]
    if signals == 1:
        assert code == 137
        assert sudo.asked == ["status", "leave"]
    else:
        assert code == 130
        assert time.monotonic() - began_s < GRACE_S + 5


def test_what_a_script_has_started_as_another_user_is_seen(
    sudo: OfAnotherUser, tmp_path: Path
) -> None:
    async def run() -> None:
        plan = RunPlan(home=tmp_path, command=SLEEPS, first=(), later=(), grace_s=GRACE_S)
        pair = sudo.pair = ProcessPair(plan, Supervisor(GRACE_S, 3), sudo.said.append)
        other = await asyncio.create_subprocess_exec(*SLEEPS, start_new_session=True)
        pair._pids[SCRIPT] = other.pid
        try:
            assert pair._has_rest()
        finally:
            other.kill()
            await other.wait()

    asyncio.run(run())


def test_a_defect_in_one_effect_does_not_stop_the_clock(tmp_path: Path) -> None:
    """End everything at the time that was set before, as where no effect fails."""

    def fails(line: str) -> None:
        raise RuntimeError(line)

    machine: Any = SimpleNamespace(
        start=lambda now_s: [],
        handle=lambda event, now_s: [ExitWith(3)],
        next_deadline_s=lambda: None,
    )

    async def run() -> int:
        plan = RunPlan(home=tmp_path, command=SLEEPS, first=(), later=(), grace_s=GRACE_S)
        pair = ProcessPair(plan, machine, fails)
        running = asyncio.create_task(pair.run())
        await asyncio.sleep(0)
        machine.next_deadline_s = lambda: 0.0
        with pytest.raises(RuntimeError):
            pair._carry_out([TellPeople("a line")])
        async with asyncio.timeout(10):
            return await running

    assert asyncio.run(run()) == 3
