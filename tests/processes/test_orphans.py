"""A daemon whose `atoll run` was killed by force before it could ask for word of that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import Peer

from atoll.peer.client.supervised import SUPERVISOR_VARIABLE

INVITE = "atoll://127.0.0.1:9/demo#" + "0" * 64


@pytest.mark.parametrize("line", [("up", "--run", "demo"), ("join", INVITE), ("follow", INVITE)])
def test_a_daemon_whose_atoll_run_is_gone_already_ends_at_once(
    line: tuple[str, ...], tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    words = (*line, "--listen", "127.0.0.1:0")
    peer = Peer(tmp_path / "a", *words, **{SUPERVISOR_VARIABLE: str(ended.pid)})
    try:
        assert peer.ends(30) == 2
        assert "`atoll run` is gone, and so this daemon does not start" in peer.text
        assert f"unset {SUPERVISOR_VARIABLE}" in peer.text
        assert not (tmp_path / "a").exists()
    finally:
        peer.kill()
        peer.popen.wait()
