"""Hosts with real kernels' links between them: network namespaces, for tests and benchmarks.

    with Net("abc", rate_bps=100e6, delay_s=0.075) as net:
        process = subprocess.Popen(net.command("a", [sys.executable, ...]))
        cut = net.cut("a", "b")  # packets from a to b vanish: no reset, no error at the sender
        cut.undo()

Every host has a namespace and one link (``eth0``) to a router, which is a namespace of its own, so
that nothing here touches the machine's own network. Faults are rules of the router: a packet that
matches is dropped without a word, as on a broken path. A rate is a token bucket (tbf) at both ends
of the link. The kernels we run on have no netem, so a delay is made in userspace
(``tests/harness/delay_line.py``): such a link is a pair of TUN devices whose packets a child
process hands over later. All else (TCP, its timers, its windows) is the kernel's own.

Needs root, for namespaces and /dev/net/tun, and Linux's ``ip``, ``tc``, ``ss`` and ``nsenter``.
``Net`` raises NetError with the reason where they are missing: tests fail then, none is skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

__all__ = ["Cut", "Net", "NetError"]

TOOLS = ("ip", "tc", "ss", "nsenter")
DELAY_LINE = Path(__file__).with_name("delay_line.py")
NAMESPACES = Path("/run/netns")
PREFIX = "atoll"  # a namespace is called atoll-<pid of its maker>-<serial>-<host>
# A token bucket must take the largest segment that the kernel hands over at once (64 KiB), and what
# its clock, 250 ticks a second, lets through in one tick.
BURST_BYTES_MIN = 128 << 10
TICKS_PER_S = 250
QUEUE_MS = 100  # what a link of this rate may hold back before it drops: some routers have more
CLONE_NEWNET = 0x40000000
MTU_BYTES = 1500  # as on the internet; the delay line manages a gigabit with it

_serial = itertools.count()


class NetError(RuntimeError):
    """Namespaces or links cannot be made here; the text says what is missing."""


class Cut:
    """A fault of the network, until :meth:`undo`. Several may overlap."""

    def __init__(self, router: str) -> None:
        self._router = router
        self._rules: list[list[str]] = []

    def drop(self, *match: str) -> None:
        rule = ["pref", str(100 + next(_serial)), *match, "blackhole"]
        _run(["ip", "-netns", self._router, "rule", "add", *rule])
        self._rules.append(rule)

    def undo(self) -> None:
        """Harmless when undone already."""
        while self._rules:
            _run(["ip", "-netns", self._router, "rule", "del", *self._rules.pop()])


class Net:
    """``hosts``: names of up to 12 letters. ``rate_bps``: bits per second of each host's link, each
    way; 0 is as fast as the kernel. ``delay_s``: seconds on a link, each way: the round trip of two
    hosts takes four times that, over two links. Both may be mappings from host."""

    def __init__(
        self,
        hosts: Iterable[str],
        *,
        rate_bps: float | Mapping[str, float] = 0.0,
        delay_s: float | Mapping[str, float] = 0.0,
    ) -> None:
        self.hosts = tuple(hosts)
        _check_possible(need_tun=bool(delay_s))
        _sweep()
        self._name = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
        self._cuts: list[Cut] = []
        self._delay_line: subprocess.Popen[bytes] | None = None
        delays_s = {host: _of(delay_s, host) for host in self.hosts}
        try:
            self._build(delays_s)
            for host in self.hosts:
                self.rate(host, _of(rate_bps, host))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ using it

    def address(self, host: str) -> str:
        """The IPv4 address, without port."""
        return f"10.77.0.{self.hosts.index(host) + 2}"

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """The same command inside the host's namespace. It replaces nsenter: the pid is its own."""
        return ["nsenter", f"--net={NAMESPACES / self._space(host)}", "--", *arguments]

    def also(self, host: str, addresses: Iterable[str]) -> None:
        """Give the host more IPv4 addresses, of any network."""
        for address in addresses:
            space = self._space(host)
            _run(["ip", "-netns", space, "addr", "add", f"{address}/32", "dev", "eth0"])
            _run(["ip", "-netns", self._router, "route", "add", address, "dev", f"to-{host}"])

    def rate(self, host: str, bits_per_s: float) -> None:
        """Shape both directions of the host's link from now on; 0 takes the limit away."""
        for space, device in ((self._space(host), "eth0"), (self._router, f"to-{host}")):
            at = ["tc", "-netns", space, "qdisc"]
            _run([*at, "del", "dev", device, "root"], may_fail=True)
            if bits_per_s:
                burst = max(BURST_BYTES_MIN, int(bits_per_s / 8 / TICKS_PER_S))
                shape = ["rate", f"{int(bits_per_s)}bit", "burst", str(burst)]
                shape += ["latency", f"{QUEUE_MS}ms"]
                _run([*at, "add", "dev", device, "root", "tbf", *shape])

    def connect(self, host: str, port: int, timeout_s: float = 2.0) -> socket.socket:
        """A TCP connection to the host from the router: from nobody of the run. OSError."""
        address = self.address(host), port
        return _inside(self._router, lambda: socket.create_connection(address, timeout_s))

    def inside(self, host: str, make: Callable[[], socket.socket]) -> socket.socket:
        """What ``make`` returns on that host; a socket stays where it was made."""
        return _inside(self._space(host), make)

    def moved_bytes(self, host: str) -> tuple[int, int]:
        """(sent, received) by this host since the beginning, with all headers."""
        shown = _run(["ip", "-netns", self._space(host), "-s", "-j", "link", "show", "eth0"])
        stats = json.loads(shown)[0]["stats64"]
        return int(stats["tx"]["bytes"]), int(stats["rx"]["bytes"])

    # ------------------------------------------------------------ faults

    def cut(self, source: str, target: str) -> Cut:
        """One way: what ``source`` sends to ``target`` vanishes from now on."""
        made = self._cut()
        made.drop("from", self.address(source), "to", self.address(target))
        return made

    def split(self, *groups: Iterable[str]) -> Cut:
        """Symmetric: packets pass inside each group only. A host in no group reaches everybody,
        so ``split("ab", "cd")`` of "abcde" is a bridge partition."""
        made = self._cut()
        for one, other in itertools.permutations([tuple(group) for group in groups], 2):
            for source, target in itertools.product(one, other):
                made.drop("from", self.address(source), "to", self.address(target))
        return made

    def silence(self, host: str) -> Cut:
        """As when its power goes: nothing comes from the host or gets there, not even resets."""
        made = self._cut()
        made.drop("from", self.address(host))
        made.drop("to", self.address(host))
        return made

    def closed(self, host: str, port: int) -> Cut:
        """As behind a firewall or a router: what comes to this port of the host vanishes; what the
        host begins itself works both ways."""
        made = self._cut()
        made.drop("to", self.address(host), "ipproto", "tcp", "dport", str(port))
        return made

    def half_open(self, one: str, other: str) -> Cut:
        """The TCP connections that exist between the two stay open at both ends and carry nothing
        any more, as when a firewall forgets them; new ones work."""
        made = self._cut()
        here, there = self.address(one), self.address(other)
        for ours, theirs in self.connections(one, other):
            for source, target, sport, dport in (
                (here, there, ours, theirs),
                (there, here, theirs, ours),
            ):
                ports = ["ipproto", "tcp", "sport", sport, "dport", dport]
                made.drop("from", source, "to", target, *ports)
        return made

    def connections(self, one: str, other: str) -> list[tuple[str, str]]:
        """(port at one, port at other) of the TCP connections between them."""
        shown = _run(["ss", "-N", self._space(one), "-Htn", "dst", self.address(other)])
        return re.findall(r":(\d+)\s+\S+?:(\d+)\s*$", shown, re.MULTILINE)

    def heal(self) -> None:
        """Undo every fault."""
        while self._cuts:
            self._cuts.pop().undo()

    def _cut(self) -> Cut:
        self._cuts.append(Cut(self._router))
        return self._cuts[-1]

    # ------------------------------------------------------------ building and clearing away

    @property
    def _router(self) -> str:
        return f"{self._name}-router"

    def _space(self, host: str) -> str:
        return f"{self._name}-{host}"

    def _build(self, delays_s: Mapping[str, float]) -> None:
        for space in (self._router, *map(self._space, self.hosts)):
            _run(["ip", "netns", "add", space])
            _run(["ip", "-netns", space, "link", "set", "lo", "up"])
        _run(self._in_router("sysctl", "-qw", "net.ipv4.ip_forward=1"))
        lines = [host for host in self.hosts if delays_s[host]]
        for host in self.hosts:
            if host not in lines:
                ends = ["name", f"to-{host}", "type", "veth", "peer", "name", "eth0"]
                link = ["link", "add", *ends, "netns", self._space(host)]
                _run(["ip", "-netns", self._router, *link])
        if lines:
            self._delay_line = self._start_delay_line({host: delays_s[host] for host in lines})
        for host in self.hosts:
            here, there = self._space(host), self._router
            _run(["ip", "-netns", here, "addr", "add", f"{self.address(host)}/32", "dev", "eth0"])
            _run(["ip", "-netns", here, "link", "set", "eth0", "up"])
            _run(["ip", "-netns", there, "addr", "add", "10.77.0.1/32", "dev", f"to-{host}"])
            _run(["ip", "-netns", there, "link", "set", f"to-{host}", "up"])
            _run(["ip", "-netns", here, "route", "add", "10.77.0.1", "dev", "eth0"])
            _run(
                ["ip", "-netns", here, "route", "add", "default", "via", "10.77.0.1", "dev", "eth0"]
            )
            _run(["ip", "-netns", there, "route", "add", self.address(host), "dev", f"to-{host}"])

    def _in_router(self, *arguments: str) -> list[str]:
        return ["nsenter", f"--net={NAMESPACES / self._router}", "--", *arguments]

    def _start_delay_line(self, delays_s: Mapping[str, float]) -> subprocess.Popen[bytes]:
        """It makes the TUN devices; they live as long as it does."""
        arguments = [str(MTU_BYTES)]
        for host, delay_s in delays_s.items():
            host_end = f"{NAMESPACES / self._space(host)}:eth0"
            arguments += [host_end, f"{NAMESPACES / self._router}:to-{host}", str(delay_s)]
        line = subprocess.Popen(
            [sys.executable, str(DELAY_LINE), *arguments],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert line.stdout is not None
        if line.stdout.readline() != b"ready\n":
            raise NetError(f"the delay line ended with {line.wait()}: see its message above")
        return line

    def close(self) -> None:
        if self._delay_line is not None:
            self._delay_line.kill()
            self._delay_line.wait()
            if self._delay_line.stdout is not None:
                self._delay_line.stdout.close()
            self._delay_line = None
        for space in (self._router, *map(self._space, self.hosts)):
            _run(["ip", "netns", "del", space], may_fail=True)


def _inside(space: str, make: Callable[[], socket.socket]) -> socket.socket:
    """By a thread of its own: setns moves the calling thread alone."""

    def enter_and_make() -> socket.socket:
        with (NAMESPACES / space).open() as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {space}")
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter_and_make).result()


def _of(value: float | Mapping[str, float], host: str) -> float:
    return value.get(host, 0.0) if isinstance(value, Mapping) else value


def _run(command: list[str], *, may_fail: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not may_fail:
        raise NetError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _check_possible(*, need_tun: bool) -> None:
    missing = [tool for tool in (*TOOLS, "sysctl") if shutil.which(tool) is None]
    if missing:
        raise NetError(f"not installed: {', '.join(missing)} (iproute2, util-linux, procps)")
    if os.geteuid() != 0:
        raise NetError("network namespaces need root: run these tests as root or in a container")
    if need_tun and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise NetError("delays need /dev/net/tun")


def _sweep() -> None:
    """Remove what test runs left behind that were killed."""
    with contextlib.suppress(FileNotFoundError):
        for entry in NAMESPACES.iterdir():
            match = re.fullmatch(rf"{PREFIX}-(\d+)-\d+-.*", entry.name)
            if match and not Path(f"/proc/{match.group(1)}").exists():
                _run(["ip", "netns", "del", entry.name], may_fail=True)
