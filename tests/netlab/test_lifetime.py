"""A lab goes with its owner, whichever way that ends; ``atoll lab`` from the outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.peer.lab import spaces
from atoll.peer.lab.lab import Lab

PATIENCE_S = 20.0  # only a hang ever takes this long

# It starts a command on a host, and that one another in the background; both print their ids.
OWNER = """
import subprocess, sys
from atoll.peer.lab.lab import Lab
lab = Lab(3, nat={2: kind for kind in sys.argv[1:]})
child = lab.start(1, "sh", "-c", "setsid sleep 1000 & echo $!; exec sleep 1000",
                  stdout=subprocess.PIPE)
print(lab.space(0), lab._network._process.pid, child.pid, child.stdout.readline().decode().strip())
sys.stdout.flush()
sys.stdin.read()
"""
HERE = (sys.executable, "-m", "atoll.peer.cli", "lab")


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.01)


def names_of(pid: int) -> list[str]:
    if not spaces.NAMESPACES.exists():
        return []
    return [path.name for path in spaces.NAMESPACES.iterdir() if f"-lab-{pid}-" in path.name]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start_owner(*router: str) -> tuple[subprocess.Popen[str], list[int]]:
    """The owner of a lab, and the ids of its forwarder and of what runs on a host."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *router],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    space, *pids = owner.stdout.readline().split()
    assert space in names_of(owner.pid)
    return owner, [int(pid) for pid in pids]


def end_owner(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.communicate()


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    owner, pids = start_owner()
    assert len(names_of(owner.pid)) == 3
    assert all(map(is_running, pids))
    end_owner(owner)
    until(lambda: not any(map(is_running, pids)))
    assert not names_of(owner.pid)


@pytest.mark.usefixtures("routers")
def test_no_router_is_left_either() -> None:
    owner, pids = start_owner("restricted,levels=2")
    assert len(names_of(owner.pid)) == 5
    end_owner(owner)
    until(lambda: not any(map(is_running, pids)))
    until(lambda: not names_of(owner.pid))


def test_the_next_lab_removes_what_is_left_when_the_forwarder_is_killed_too() -> None:
    owner, (forwarder, *others) = start_owner()
    os.kill(owner.pid, signal.SIGSTOP)
    os.kill(forwarder, signal.SIGKILL)
    end_owner(owner)
    assert len(names_of(owner.pid)) == 3
    with Lab(2) as lab:
        assert not names_of(owner.pid)
        assert len(names_of(os.getpid())) == lab.hosts
    assert not names_of(os.getpid())
    for pid in others:
        os.kill(pid, signal.SIGKILL)


def test_closing_ends_what_runs_on_the_hosts() -> None:
    with Lab(2) as lab:
        process = lab.start(1, "sleep", "1000")
        answer = lab.run(0, "sh", "-c", "echo $ATOLL_LAB_HOST of $ATOLL_LAB_PEERS; exit 3")
        assert (answer.returncode, answer.stdout) == (3, "0 of 10.78.0.1,10.78.0.2\n")
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert not names_of(os.getpid())
    lab.close()


# ---------------------------------------------------------------- atoll lab


def test_a_command_runs_on_every_host() -> None:
    script = (
        'echo "$ATOLL_LAB_ADDRESS of $ATOLL_LAB_PEERS"; echo "no end" >&2; exit "$ATOLL_LAB_HOST"'
    )
    options = ("--hosts", "2", "--rtt-ms", "2", "--loss", "0.1", "--host-rate", "1=20/30")
    done = subprocess.run(
        [*HERE, *options, "--", "sh", "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [
        "[0] 10.78.0.1 of 10.78.0.1,10.78.0.2",
        "[1] 10.78.0.2 of 10.78.0.1,10.78.0.2",
    ]
    assert sorted(done.stderr.splitlines()) == ["[0] no end", "[1] no end"]


def test_an_interrupt_ends_every_command() -> None:
    command = ["sh", "-c", "echo $$; exec sleep 1000"]
    lab = subprocess.Popen(
        [*HERE, "--hosts", "2", "--", *command], stdout=subprocess.PIPE, text=True
    )
    assert lab.stdout is not None
    pids = [int(lab.stdout.readline().split()[1]) for _ in range(2)]
    lab.send_signal(signal.SIGINT)
    assert lab.wait(PATIENCE_S) == 130
    lab.stdout.close()
    assert not any(map(is_running, pids))
    assert not names_of(lab.pid)


def test_without_a_command_it_says_how_to_enter_a_host() -> None:
    lab = subprocess.Popen([*HERE, "--hosts", "2"], stdout=subprocess.PIPE, text=True)
    assert lab.stdout is not None
    shown = [lab.stdout.readline() for _ in range(4)]
    enter = re.search(r"ip netns exec (\S+) bash", shown[2])
    assert enter is not None
    assert "10.78.0.2" in shown[2]
    inside = spaces.enter_command(enter[1], ["cat", "/proc/net/dev"])
    assert "eth0" in subprocess.run(inside, capture_output=True, text=True, check=True).stdout
    lab.send_signal(signal.SIGINT)
    assert lab.wait(PATIENCE_S) == 0
    lab.stdout.close()
    assert not names_of(lab.pid)
