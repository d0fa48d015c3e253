"""Whether the `atoll run` that looks after a process is still there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from atoll.peer.client.supervised import SUPERVISOR_VARIABLE, is_orphaned


def test_who_was_started_by_none_is_no_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SUPERVISOR_VARIABLE, raising=False)
    assert not is_orphaned()
    monkeypatch.setenv(SUPERVISOR_VARIABLE, "none of them")
    assert not is_orphaned()


def test_an_orphan_is_one_whose_atoll_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(os.getppid()))
    assert not is_orphaned()
    line = [sys.executable, "-c", "input()"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, text=True) as ended:
        monkeypatch.setenv(SUPERVISOR_VARIABLE, str(ended.pid))
        assert not is_orphaned()
        ended.kill()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert is_orphaned()  # though nobody has waited for it
    assert is_orphaned()
