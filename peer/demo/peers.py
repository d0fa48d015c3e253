"""Run the processes of `atoll demo`: daemons and trainers, each in a session of its own.

They are ended by process id, all of them, whatever happens; their output goes to files that vanish
with the demo's folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from atoll.collectives.errors import NoDaemonError
from atoll.peer.client.ipc_client import ask
from atoll.peer.daemon.ipc_server import COMMANDS, EVENTS, LIFELINE
from atoll.peer.demo.figures import PeerFigures
from atoll.peer.net.identity import socket_path, write_atomic

GRACE_S = 2.0  # after an interrupt, for a daemon's leave; then SIGKILL
TAIL_BYTES = 4096  # of a child's output, for an error message
STEP_S = 0.02
KEPT_VARIABLE = "ATOLL_KERNELS"  # says how this machine computes, and not what a daemon does


class Child:
    """Run one process, in the folder of its log.

    Neither the user's ATOLL_* variables nor an atoll.toml in the folder where the user works are
    meant for it. Its own session keeps the terminal's Ctrl+C for the demo alone.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        environment = {
            variable: value
            for variable, value in os.environ.items()
            if not variable.startswith("ATOLL_") or variable == KEPT_VARIABLE
        }
        # Numpy's thread pools would fight over the cores that all children share.
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """Return None while it lives; then its exit code, or the negative number of the signal."""
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def reap(self) -> None:
        """Wait for its end, which a SIGKILL makes certain."""
        self._process.wait()

    def tail(self, lines: int) -> list[str]:
        """Return its last lines of output."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-lines:]


class DemoPeer:
    """Run a peer: its home, its daemon and its trainer, and what is known about them."""

    def __init__(self, number: int, folder: Path, *, newcomer: bool = False) -> None:
        self.number = number
        self.name = f"peer {number}"
        self.home = folder / str(number)
        self.home.mkdir(mode=0o700)  # trainer and daemon start at once, and either uses it first
        self.figures = PeerFigures(self.name, newcomer=newcomer)
        self.leaving = False
        self.status: dict[str, Any] | None = None
        self.daemon: Child | None = None
        self.trainer: Child | None = None

    @property
    def children(self) -> list[Child]:
        return [child for child in (self.daemon, self.trainer) if child is not None]

    def start_daemon(self, *command: str, invite: str = "") -> None:
        """Start the daemon by ``command``: ``up --run NAME``, or ``join`` with an ``invite``."""
        if invite:
            path = self.home.with_suffix(".invite")
            write_atomic(path, invite.encode())
            command = (*command, "--invite-file", str(path))
        arguments = [*command, "--listen", "127.0.0.1:0", "--home", str(self.home)]
        log = self.home.with_suffix(".daemon.log")
        self.daemon = Child(f"daemon of {self.name}", "atoll.peer.cli", arguments, log)

    def start_trainer(self, arguments: Sequence[str]) -> None:
        arguments = [*arguments, "--home", str(self.home), "--seed", str(self.number)]
        log = self.home.with_suffix(".trainer.log")
        self.trainer = Child(f"trainer of {self.name}", "atoll.peer.demo.trainer", arguments, log)

    def ask_status(self) -> dict[str, Any] | None:
        """Return what the daemon says, or None if it is starting, leaving or dead."""
        if self.daemon is None or self.leaving or self.daemon.code is not None:
            return None
        try:
            self.status = ask(self.home, "status")
        except NoDaemonError:
            if self.status is not None or self.daemon.code is not None:
                raise
            return None  # not listening yet
        return self.status

    def remove_sockets(self) -> None:
        """Remove the sockets: with a long TMPDIR they are not below the home, and would stay."""
        for name in (COMMANDS, LIFELINE, EVENTS):
            shutil.rmtree(socket_path(self.home, name).parent, ignore_errors=True)


def end_all(children: Iterable[Child]) -> None:
    """Stop and reap every child: politely, then by SIGKILL."""
    living = [child for child in children if child.code is None]
    for child in living:
        child.terminate()
    deadline_s = time.monotonic() + GRACE_S
    while time.monotonic() < deadline_s and any(child.code is None for child in living):
        time.sleep(STEP_S)
    for child in living:
        if child.code is None:
            child.kill()
            child.reap()
