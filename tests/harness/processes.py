"""Real daemons and trainers as child processes, for tests and benchmarks. Ended by process id."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.collectives.errors import AtollError
from atoll.peer.client.ipc_client import ask
from atoll.peer.net.identity import Home

if TYPE_CHECKING:
    from harness.health import Usage
    from harness.netns import Net

T = TypeVar("T")
WAIT_S = 120.0  # these machines are shared: a limit that only a hang exceeds
NET_PORT = 29600  # atoll's own: a host of a Net has all ports to itself
DAEMON = ("-m", "atoll.peer.cli")
ODD_DAEMON = Path(__file__).with_name("odd_daemon.py")
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

    def __init__(
        self,
        home: Path,
        *arguments: str,
        prefix: Sequence[str] = (),
        program: Sequence[str] = DAEMON,
        **environment: str,
    ) -> None:
        """``prefix``: a command that runs another in its place, as ``nsenter`` and ``prlimit``."""
        self.home = home
        self.name = home.name
        command = [*prefix, sys.executable, *program, *arguments]
        logs = home.parent.glob(f"{home.name}.*.log")
        lives = 1 + max((int(path.suffixes[0][1:]) for path in logs), default=-1)
        log = home.parent / f"{home.name}.{lives}.log"
        super().__init__([*command, "--home", str(home)], log, **environment)

    @property
    def invite(self) -> str:
        """What its daemon gives out, whether it has founded the run or joined it."""

        def given() -> str:
            with contextlib.suppress(AtollError):
                return str(ask(self.home, "invite")) if self.text else ""
            return ""

        return until(given, f"{self.name} gives out an invite", self)

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

    @property
    def port(self) -> int:
        return int(self.status()["address"].rpartition(":")[2])

    def said(self, kind: str) -> int:
        """How many events of this kind its log has."""
        return len(re.findall(rf"^[0-9:]{{8}} {re.escape(kind)} ", self.text, re.MULTILINE))

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Fleet:
    """Peers a, b, c, ... of one run and their trainers; with ``net`` each on its own host."""

    def __init__(self, folder: Path, net: Net | None = None) -> None:
        self.folder = folder
        self.net = net
        # Of daemons that start from now on. No router of the network that tests run in is asked.
        self.environment: dict[str, str] = {"ATOLL_UPNP": "off"}
        self.options: Callable[[str], tuple[str, ...]] = lambda name: ()  # of each daemon
        self.odd: dict[str, str] = {}  # daemons that are not quite as they should be: odd_daemon.py
        self.base: dict[str, Usage] = {}  # what daemons held before the first fault
        self.healthy = False  # since the last look of health.assert_healthy
        self.peers: dict[str, Peer] = {}
        self.trainers: dict[str, Process] = {}
        self._ended: list[Process] = []
        self._lines: dict[str, tuple[tuple[str, ...], int | None]] = {}
        self._trained: dict[str, tuple[float, int, float, str, str, str]] = {}
        self._serial = itertools.count()  # of trainers
        self.invite = ""

    def up(self, name: str = "a", *arguments: str) -> Peer:
        peer = self.start(name, "up", "--run", "demo", *arguments)
        self.invite = peer.invite
        return peer

    def join(self, name: str, invite: str = "") -> Peer:
        return self.start(name, "join", invite or self.invite)

    def start(self, name: str, *arguments: str, port: int | None = None) -> Peer:
        if name in self.peers:
            self._ended.append(self.peers[name])
        self._lines[name] = arguments, port
        host, usual_port, prefix = "127.0.0.1", 0, []
        if self.net is not None:
            host, usual_port, prefix = self.net.address(name), NET_PORT, self.net.command(name, ())
        listen = f"{host}:{usual_port if port is None else port}"
        words = (self._in_a_file(name, word) for word in arguments)
        arguments = (*words, "--listen", listen, *self.options(name))
        program = (str(ODD_DAEMON), self.odd[name]) if name in self.odd else DAEMON
        home = self.folder / name
        peer = Peer(home, *arguments, prefix=prefix, program=program, **self.environment)
        self.peers[name] = peer
        return peer

    def _in_a_file(self, name: str, word: str) -> str:
        """Put an invite in a file and return its name: as an argument it costs a second start."""
        if not word.startswith("atoll://"):
            return word
        path = self.folder / f"{name}.invite"
        path.write_text(f"atoll join {word}\n")
        return str(path)

    def restart(self, name: str, port: int | None = None) -> Peer:
        """A daemon that has ended gets another life, and its trainer with it."""
        peer = self.start(name, "up", "--run", "demo", port=port)
        if name in self.trainers:
            self.trainers[name].kill()
            self.trainers[name].ends()
            self.train(name, *self._trained[name])
        return peer

    def again(self, name: str, port: int | None = None) -> Peer:
        """A daemon that has ended is started with its own line again, and so is its trainer.

        Without a net, and without the port that it had, it is somewhere else afterwards.
        """
        arguments, own = self._lines[name]
        peer = self.start(name, *arguments, port=own if port is None else port)
        if name in self.trainers:
            self.trainers[name].kill()
            self.trainers[name].ends()
            self.train(name, *self._trained[name])
        return peer

    def tend(self, names: str) -> None:
        """Start the trainers again that have ended because their daemon was not there in time."""
        for name in names:
            if self.trainers[name].popen.poll() is not None and self.peers[name].try_status():
                self.train(name, *self._trained[name])

    def power_cut(self, names: str) -> dict[str, int]:
        """Every daemon and trainer of these dies at once; the daemons' ports."""
        ports = {name: self.peers[name].port for name in names}
        everyone = [self.peers[name] for name in names]
        everyone += [self.trainers[name] for name in names if name in self.trainers]
        for process in everyone:
            process.kill()
        for process in everyone:
            process.ends()
        return ports

    @property
    def coordinator(self) -> str:
        """Who leads the view of the fleet, once one does."""

        def leads() -> str:
            phases = {name: peer.try_status().get("phase") for name, peer in self.peers.items()}
            return next((name for name, phase in phases.items() if phase == "coordinator"), "")

        return until(leads, "somebody coordinates", *self.peers.values())

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
        codec: str = "int8",
        method: str = "diloco",
    ) -> Process:
        if name in self.trainers:
            self._ended.append(self.trainers[name])
        self._trained[name] = (elements, rounds, inner_s, fault, codec, method)
        command = [sys.executable, str(TRAINER), str(self.peers[name].home)]
        command += [str(elements), str(rounds), str(inner_s), fault, codec, method]
        log = self.folder / f"trainer-{name}.{next(self._serial)}.log"
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
        if self.net is not None:
            self.net.close()

    def forget(self, name: str) -> None:
        """It is no longer of the fleet; its process is ended at the end, if not before."""
        self._ended.append(self.peers.pop(name))

    def tidy(self, log_bytes: int) -> None:
        """For runs of hours: forget processes that have ended, and all but the ends of logs."""
        for process in [*self._ended, *self.peers.values(), *self.trainers.values()]:
            if process.log.stat().st_size > 2 * log_bytes:
                tail = process.log.read_bytes()[-log_bytes:]
                process.log.write_bytes(tail)  # its writer appends
        for process in [p for p in self._ended if p.popen.poll() is not None]:
            self._ended.remove(process)

    def report(self) -> str:
        parts = []
        for process in [*self.peers.values(), *self.trainers.values()]:
            parts.append(f"--- {process.log.name}\n" + process.text[-3000:])
        return "\n".join(parts)


@contextlib.contextmanager
def fleet(folder: Path, net: Net | None = None) -> Iterator[Fleet]:
    """Ends every process on the way out; prints their logs when the test failed."""
    made = Fleet(folder, net)
    try:
        yield made
    except BaseException:
        print(made.report())
        raise
    finally:
        made.close()


def peer_id(home: Path) -> bytes:
    """By which members, and the parts of a round, are ordered. Its daemon has ended."""
    with Home.open(home) as identity:
        return identity.peer_id


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
    states = "\n".join(f"{p.name}: {p.try_status()}" for p in watched if isinstance(p, Peer))
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{logs}\n{states}")
