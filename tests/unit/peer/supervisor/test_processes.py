"""How `atoll run` carries out what its supervisor has decided, with real processes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll.peer.supervisor.machine import SCRIPT, ExitWith, StartProcess, TellScript
from atoll.peer.supervisor.processes import ProcessPair, RunPlan


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
