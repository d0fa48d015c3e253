"""One command on every host: with hosts that are plain processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from atoll.peer.lab import command
from atoll.peer.lab.lab import Lab

INTERRUPT_S = 0.5  # after the start; the commands ignore or obey it by then


class PlainHosts:
    """What run_everywhere needs of a Lab, without a network."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, host: int, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        environment = os.environ | {"ATOLL_LAB_HOST": str(host)}
        process = subprocess.Popen(arguments, env=environment, start_new_session=True, **options)
        self.started.append(process)
        return process


def run(hosts: PlainHosts, script: str) -> int:
    return command.run_everywhere(cast(Lab, hosts), ["sh", "-c", script])


def test_lines_come_whole_with_their_host(capfd: pytest.CaptureFixture[str]) -> None:
    script = "printf 'a'; sleep 0.05; echo b; echo; echo err >&2; printf 'no end'"
    assert run(PlainHosts(3), script) == 0
    shown = capfd.readouterr()
    lines = shown.out.splitlines()
    for host in range(3):
        own = [line for line in lines if line.startswith(f"[{host}]")]
        assert own == [f"[{host}] ab", f"[{host}] ", f"[{host}] no end"]
    assert sorted(shown.err.splitlines()) == [f"[{host}] err" for host in range(3)]


def test_long_lines_and_much_output_arrive_whole(capfd: pytest.CaptureFixture[str]) -> None:
    script = f'{sys.executable} -c \'print("x" * 300_000); print("y\\n" * 30_000)\''
    assert run(PlainHosts(2), script) == 0
    shown = capfd.readouterr().out
    assert shown.count("x") == 2 * 300_000
    assert shown.count("] y\n") == 2 * 30_000


def test_the_exit_code_is_that_of_the_first_failure(tmp_path: Path) -> None:
    """Host 1 fails when host 2 has failed and its process has been waited for."""
    pid = tmp_path / "pid"
    script = f"""
        case $ATOLL_LAB_HOST in
        1)  until test -s {pid}; do sleep 0.02; done
            while kill -0 $(cat {pid}) 2>/dev/null; do sleep 0.02; done
            exit 1 ;;
        2)  echo $$ >{pid}.whole; mv {pid}.whole {pid}; exit 2 ;;
        esac
    """
    assert run(PlainHosts(3), script) == 2
    assert run(PlainHosts(2), "kill -TERM $$") == 128 + signal.SIGTERM


def test_a_process_in_the_background_holds_nothing_up(capfd: pytest.CaptureFixture[str]) -> None:
    hosts = PlainHosts(2)
    begin_s = time.monotonic()
    assert run(hosts, "sleep 60 & echo done") == 0
    assert time.monotonic() - begin_s < 30
    assert capfd.readouterr().out.count("done") == 2
    for process in hosts.started:  # in a lab, closing it does this
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("ignore", ["", "trap '' INT; "])
def test_an_interrupt_ends_all(ignore: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "GRACE_S", 0.2)
    hosts = PlainHosts(2)
    here = threading.get_ident()
    timer = threading.Timer(INTERRUPT_S, lambda: signal.pthread_kill(here, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(hosts, f"{ignore}while :; do sleep 0.05; done")
    timer.join()
    assert len(hosts.started) == 2
    assert all(process.poll() is not None for process in hosts.started)
