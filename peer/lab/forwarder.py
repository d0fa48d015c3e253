"""Build, start and instruct the process that carries a lab's packets.

It is written in C (``forward.c``), because a forwarder in Python manages 50,000 packets a second.
It is compiled at the first use, into a folder that only root can write, and again when its source
is another one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import platform
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from atoll.collectives.errors import ConfigError, LocalProtocolError
from atoll.peer.lab.settings import Counters, PathSettings

SOURCES = tuple(Path(__file__).with_name(name) for name in ("forward.c", "spaces.c", "forward.h"))
CACHE = Path("/var/cache/atoll")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-std=gnu11")
ANSWER_TIMEOUT_S = 30.0  # making 64 namespaces takes a second; anything else is at once
END_TIMEOUT_S = 10.0  # until it has killed what runs in the namespaces and removed them


class Forwarder:
    """Control a running forwarder. Its methods may be called from any thread.

    ``host``, ``source``, ``target``: a number, or ``"*"`` for all. Raises ConfigError where the
    network cannot be made or has ended.

    ``lines``: whose namespace has each host's line (``h0``, ``r1``; ``-`` for none); without it
    that is each host's own. ``inside``: more namespaces, which somebody else connects.
    """

    def __init__(
        self,
        prefix: str,
        hosts: int,
        mtu_bytes: int,
        seed: int,
        lines: Sequence[str] = (),
        inside: Sequence[str] = (),
    ) -> None:
        self._lock = threading.Lock()
        self._control, other_end = socket.socketpair()
        self._control.settimeout(ANSWER_TIMEOUT_S)
        self._answers = self._control.makefile("rb")
        numbers = [hosts, mtu_bytes, seed, other_end.fileno(), os.getpid()]
        lines = lines or [f"h{host}" for host in range(hosts)]
        with other_end:
            self._process = subprocess.Popen(
                [str(build()), prefix, *map(str, numbers), ",".join(lines), ",".join(inside)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
                start_new_session=True,
            )
        try:
            self._take_answer("making the network")
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Return when the forwarder has ended, which it does not do by itself."""
        self._process.wait()

    def set_rate(
        self, host: int, rates_mbit: tuple[float, float], queues_bytes: tuple[int, int]
    ) -> None:
        """Set a host's rates in Mbit/s and its queues in bytes, (up, down) each.

        Packets that wait in the queue leave at the new rate.
        """
        up, down = (rate * 1e6 for rate in rates_mbit)
        self._ask(f"rate {host} {up:.3f} {down:.3f} {queues_bytes[0]} {queues_bytes[1]}")

    def set_path(self, source: int | str, target: int | str, path: PathSettings) -> None:
        """Set the path of packets that leave the uplink of ``source`` from now on."""
        delay_ns, jitter_ns = (round(each * 1e6) for each in (path.delay_ms, path.jitter_ms))
        numbers = f"{delay_ns} {jitter_ns} {path.loss / 100:.12f} {int(path.reorder)}"
        self._ask(f"pair {source} {target} {numbers}")

    def set_cut(self, source: int | str, target: int | str, cut: bool) -> None:
        """Cut ``source`` off from ``target``, or undo that.

        Once cut, nothing of it arrives there, what is on its way included.
        """
        self._ask(f"cut {source} {target} {int(cut)}")

    def set_network(self, host: int, number: int) -> None:
        """Let packets to 10.78.NUMBER.(host + 1) come to this line, and none to the one before."""
        self._ask(f"address {host} {number}")

    def between(self, source: int, target: int) -> tuple[int, int]:
        """Return how many packets and bytes the one has sent to the other."""
        packets, sent_bytes = map(int, self._ask(f"between {source} {target}").split())
        return packets, sent_bytes

    def counters(self, host: int) -> Counters:
        return Counters(*map(int, self._ask(f"count {host}").split()))

    def close(self) -> None:
        """End the forwarder; all that ran in the namespaces is dead then, and they are gone."""
        with contextlib.suppress(OSError):  # closed already, or it has ended
            self._control.shutdown(socket.SHUT_RDWR)  # also where a forked process has a copy
        self._answers.close()
        self._control.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, line: str) -> str:
        with self._lock:
            try:
                self._control.sendall(f"{line}\n".encode())
            except OSError as error:
                raise _ended(line) from error
            return self._take_answer(line)

    def _take_answer(self, what: str) -> str:
        try:
            answer = self._answers.readline().decode()
        except (OSError, ValueError) as error:  # ValueError: closed already
            raise _ended(what) from error
        verdict, _, text = answer.strip().partition(" ")
        if verdict == "ok":
            return text
        if verdict == "error" and what == "making the network":
            raise ConfigError(f"the lab's network cannot be made: {text}")
        if verdict == "error":
            raise LocalProtocolError(f"the lab's forwarder refused {what!r}: {text}")
        raise _ended(what)


def _ended(what: str) -> ConfigError:
    return ConfigError(
        f"the lab's network has ended ({what})",
        fix="was the process `forward` killed, or the lab closed?",
    )


# ---------------------------------------------------------------- building


def can_build() -> bool:
    """Return whether the forwarder is compiled already, or there is a compiler."""
    return _compiler() is not None or _binary().exists()


def build() -> Path:
    """Return the compiled forwarder. Raises ConfigError without a compiler, or where it fails."""
    binary = _binary()
    if not binary.exists():
        _compile(binary)
    return binary


def _binary() -> Path:
    key = "\0".join((platform.machine(), *FLAGS)).encode()
    digest = hashlib.sha256(b"\0".join([key, *(path.read_bytes() for path in SOURCES)]))
    return _folder() / f"forward-{digest.hexdigest()[:16]}"


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _compile(binary: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise ConfigError(
            "a lab needs a C compiler: the process that carries its packets is compiled once",
            fix="apt-get install gcc libc6-dev; or a kernel with netem, which can do without",
        )
    temporary = binary.with_name(f".{binary.name}.{os.getpid()}.{threading.get_ident()}")
    sources = [str(path) for path in SOURCES if path.suffix == ".c"]
    command = [compiler, *FLAGS, "-o", str(temporary), *sources]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        temporary.unlink(missing_ok=True)
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigError(
            f"{compiler} cannot compile the lab's forwarder: {lines[0]}",
            fix="apt-get install gcc libc6-dev linux-libc-dev",
        )
    os.replace(temporary, binary)


def _folder() -> Path:
    """Return the folder for compiled forwarders.

    Nobody else may write there: what lies in it is run as root.
    """
    try:
        CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
        shown = CACHE.lstat()
        if (
            stat.S_ISDIR(shown.st_mode)
            and shown.st_uid == os.geteuid()
            and not shown.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            and os.access(CACHE, os.W_OK)
        ):
            return CACHE
    except OSError:
        return _own_folder()
    return _own_folder()


@functools.cache
def _own_folder() -> Path:
    """Make a folder for this process alone, where there is no such folder for all."""
    folder = tempfile.mkdtemp(prefix="atoll-lab-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
