"""Real daemons and trainers as child processes, for tests and benchmarks. Ended by process id."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from atoll.collectives.errors import AtollError
from atoll.peer.session import ask

T = TypeVar("T")
WAIT_S = 45.0  # these machines are shared: a limit that only a hang exceeds
TRAINER = Path(__file__).with_name("numpy_trainer.py")
JOIN_LINE = re.compile(r"^\s*(atoll join (atoll://\S+))$", re.MULTILINE)


class Process:
    """A child in its own process session, with its output in a file."""

    def __init__(self, arguments: list[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines so far."""
        found = []
        for line in self.text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.popen.poll() is None:
            os.kill(self.popen.pid, number)

    def ends(self, timeout_s: float = WAIT_S) -> int:
        """The exit code; the test fails if the process does not end."""
        return self.popen.wait(timeout_s)


class Peer(Process):
    """A daemon with its home."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.name = home.name
        command = [sys.executable, "-m", "atoll.peer.cli", *arguments, "--home", str(home)]
        lives = len(list(home.parent.glob(f"{home.name}.*.log")))
        super().__init__(command, home.parent / f"{home.name}.{lives}.log")

    @property
    def invite(self) -> str:
        found = until(
            lambda: JOIN_LINE.search(self.text), f"{self.name} prints its join line", self
        )
        return found.group(2)

    def status(self) -> dict[str, Any]:
        status = ask(self.home, "status")
        assert isinstance(status, dict)
        return status

    def try_status(self) -> dict[str, Any]:
        """{} while the daemon does not answer."""
        try:
            return self.status()
        except AtollError:
            return {}

    def reaches(self, round_number: int) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            status = self.try_status()
            return status if status.get("digest") and status["round"] >= round_number else None

        return until(there, f"{self.name} reaches round {round_number}", self)

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Fleet:
    """Peers a, b, c, ... of one run and their trainers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: dict[str, Peer] = {}
        self.trainers: dict[str, Process] = {}
        self._ended: list[Process] = []
        self.invite = ""

    def up(self, name: str = "a", *arguments: str) -> Peer:
        peer = self.start(name, "up", "--run", "demo", *arguments)
        self.invite = peer.invite
        return peer

    def join(self, name: str, invite: str = "") -> Peer:
        return self.start(name, "join", invite or self.invite)

    def start(self, name: str, *arguments: str) -> Peer:
        if name in self.peers:
            self._ended.append(self.peers[name])
        peer = Peer(self.folder / name, *arguments, "--listen", "127.0.0.1:0")
        self.peers[name] = peer
        return peer

    def form(self, names: str) -> None:
        """All in one view."""
        self.up(names[0])
        for name in names[1:]:
            self.join(name)
        for name in names:
            self.sees(name, len(names))

    def sees(self, name: str, members: int) -> dict[str, Any]:
        peer = self.peers[name]

        def there() -> dict[str, Any] | None:
            status = peer.try_status()
            return status if len(status.get("members", ())) == members else None

        return until(there, f"{name} sees {members} members", *self.peers.values())

    def train(
        self,
        name: str,
        elements: float = 2e5,
        rounds: int = 0,
        inner_s: float = 0.02,
        fault: str = "none",
    ) -> Process:
        if name in self.trainers:
            self._ended.append(self.trainers[name])
        command = [sys.executable, str(TRAINER), str(self.peers[name].home)]
        command += [str(elements), str(rounds), str(inner_s), fault]
        log = self.folder / f"trainer-{name}.{len(self._ended)}.log"
        self.trainers[name] = Process(command, log)
        return self.trainers[name]

    def agree(self, names: str) -> int:
        """Every round that two of the peers remember has one digest; how many rounds that were."""
        seen: dict[str, dict[str, str]] = {}
        for name in names:
            for number, digest in self.peers[name].status()["digests"].items():
                seen.setdefault(number, {})[name] = digest
        shared = {number: found for number, found in seen.items() if len(found) == len(names)}
        for number, found in shared.items():
            assert len(set(found.values())) == 1, f"round {number} differs: {found}"
        return len(shared)

    def close(self) -> None:
        everyone = [*self.trainers.values(), *self.peers.values(), *self._ended]
        for process in everyone:
            process.kill()
        for process in everyone:
            process.popen.wait(10)

    def report(self) -> str:
        parts = []
        for process in [*self.peers.values(), *self.trainers.values()]:
            parts.append(f"--- {process.log.name}\n" + process.text[-3000:])
        return "\n".join(parts)


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """Ends every process on the way out; prints their logs when the test failed."""
    made = Fleet(folder)
    try:
        yield made
    except BaseException:
        print(made.report())
        raise
    finally:
        made.close()


def until(
    condition: Callable[[], T | None], what: str, *watched: Process, timeout_s: float = WAIT_S
) -> T:
    """Poll until the condition gives something true, or fail with what the processes said."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    logs = "\n".join(f"--- {p.log.name}\n{p.text[-3000:]}" for p in watched)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{logs}")
