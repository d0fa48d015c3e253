"""Join hosts on one machine by a wide-area network that is made to measure.

    with Lab(4, rate_mbit=100, rtt_ms=50, loss=0.1) as lab:
        process = lab.start(0, sys.executable, "serve.py")
        lab.run(1, "ping", "-c1", lab.address(0))
        lab.cut(0, 1)  # what host 0 sends to host 1 vanishes: no reset, no error at the sender
        lab.heal()

Every host is a network namespace with a TUN device, ``eth0``. One process (``forward.c``) carries
the packets between them: through the sender's uplink, the path of the ordered pair, the receiver's
downlink. All else (TCP, its timers, its windows) is the kernel's own. Nothing touches the machine's
own network. When the process that made a lab ends, however it ends, the lab goes with it, and what
still runs in its namespaces is killed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

from atoll.collectives.errors import ConfigError
from atoll.peer.lab import spaces
from atoll.peer.lab.forwarder import Forwarder, can_build
from atoll.peer.lab.netem import Netem, has_netem
from atoll.peer.lab.settings import (
    ALL,
    Counters,
    LabSettings,
    PathSettings,
    Rate,
    address_of,
    check_host,
    check_path,
    check_rate,
    queue_bytes,
    rate_of,
)

RUN_TIMEOUT_S = 60.0


class Lab:
    """Make a lab and keep it until it is closed.

    ``hosts``: 2 to 64, numbered from 0. ``rate_mbit``: megabits per second of each host's link,
    both ways; or by host, also as (up, down); 0 is no limit. Bytes count with IP headers. A link's
    queue holds one bandwidth-delay product, at least 64 KiB, and then drops what arrives.
    ``rtt_ms``: the round trip of any two hosts, without the time that packets take to be sent.
    ``jitter_ms``, ``loss`` (percent, one way), ``reorder``: see PathSettings. ``seed``: the n-th
    packet of an ordered pair is lost or not, whatever the others do. ``mtu_bytes``: of all devices.
    ``network``: "forwarder", "netem" (see netem.py for what it does not do) or "auto", which is the
    forwarder but where it cannot be compiled and the kernel has netem.

    Raises ConfigError: without root, TUN devices, a C compiler; for settings that cannot be.
    """

    def __init__(
        self,
        hosts: int,
        *,
        rate_mbit: float | Mapping[int, Rate] = 0.0,
        rtt_ms: float = 0.0,
        jitter_ms: float = 0.0,
        loss: float = 0.0,
        reorder: bool = False,
        seed: int = 0,
        mtu_bytes: int = 1500,
        network: str = "auto",
    ) -> None:
        self.settings = LabSettings(
            hosts, rate_mbit, rtt_ms, jitter_ms, loss, reorder, seed, mtu_bytes
        )
        self.hosts = hosts
        spaces.check_possible(need_tun=False)
        make = _choose(network)
        spaces.check_possible(need_tun=make is Forwarder)
        spaces.sweep()
        self._lock = threading.Lock()  # of the two tables below
        self._rates_mbit = [rate_of(rate_mbit, host) for host in range(hosts)]
        self._paths: dict[tuple[int, int], PathSettings] = {}  # that differ from the others
        self._started: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()
        self._prefix = spaces.new_prefix()
        self._network: Forwarder | Netem = make(self._prefix, hosts, mtu_bytes, seed)
        try:
            self._network.set_path(ALL, ALL, self.settings.path)
            for host in range(hosts):
                self._shape(host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs on the hosts and remove them. Harmless when done already."""
        for process in self._started:
            process.kill()  # also one that is only about to enter its namespace
        self._network.close()
        spaces.remove(self._prefix)  # only where the forwarder was killed

    def wait(self) -> None:
        """Return when the network has ended, which it does only when its process is killed."""
        self._network.wait()

    # ------------------------------------------------------------ hosts

    def address(self, host: int) -> str:
        """Return a host's IPv4 address, without port."""
        check_host(host, self.hosts)
        return address_of(host)

    def space(self, host: int) -> str:
        """Return the name of a host's namespace: ``ip netns exec NAME COMMAND``."""
        check_host(host, self.hosts)
        return spaces.space_name(self._prefix, host)

    def environment(self, host: int) -> dict[str, str]:
        """Return the variables that commands find in their environment on this host.

        They are the host's number and address, and all hosts' addresses in order, its own among
        them.
        """
        return {
            "ATOLL_LAB_HOST": str(host),
            "ATOLL_LAB_ADDRESS": self.address(host),
            "ATOLL_LAB_PEERS": ",".join(map(address_of, range(self.hosts))),
        }

    def command(self, host: int, *arguments: str) -> list[str]:
        """Return a command that runs the given one inside the host's namespace."""
        return spaces.enter_command(self.space(host), list(arguments))

    def run(
        self, host: int, *arguments: str, timeout_s: float = RUN_TIMEOUT_S, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end.

        ``options`` are those of subprocess.run; the output is captured as text unless they say
        otherwise. Raises subprocess.TimeoutExpired.
        """
        options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL} | options
        options["env"] = (options.get("env") or os.environ) | self.environment(host)
        return subprocess.run(self.command(host, *arguments), timeout=timeout_s, **options)

    def start(self, host: int, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, in a session of its own.

        ``options`` are those of subprocess.Popen.
        """
        options = {"start_new_session": True} | options
        options["env"] = (options.get("env") or os.environ) | self.environment(host)
        process = subprocess.Popen(self.command(host, *arguments), **options)
        self._started.add(process)
        return process

    def socket(
        self,
        host: int,
        kind: int = socket.SOCK_STREAM,
        family: int = socket.AF_INET,
        protocol: int = 0,
    ) -> socket.socket:
        """Return a socket of this process that lives on that host. Raises OSError."""
        return spaces.open_socket(self.space(host), family, kind, protocol)

    # ------------------------------------------------------------ the network

    def set_rate(self, host: int, *, up: float | None = None, down: float | None = None) -> None:
        """Set a host's rates in Mbit/s from now on, for what waits in the queues too.

        0 takes the limit away; None leaves a rate as it is.
        """
        check_host(host, self.hosts)
        with self._lock:
            before = self._rates_mbit[host]
            rates = (before[0] if up is None else up, before[1] if down is None else down)
            check_rate(*rates)
            self._rates_mbit[host] = rates
            self._shape(host)

    def set_path(self, source: int, target: int, **changes: Any) -> None:
        """Change some of the PathSettings of what ``source`` sends to ``target``.

        Packets on their way keep what they have. Queues are sized anew to the longest round trip.
        """
        with self._lock:
            for one, other in self._pairs(source, target, both=False):
                path = replace(self._path(one, other), **changes)
                check_path(path)
                self._network.set_path(one, other, path)
                self._paths[one, other] = path
                self._shape(one)
                self._shape(other)

    def cut(self, source: int, target: int, *, both: bool = False) -> None:
        """Let what ``source`` sends to ``target`` vanish from now on, what is on its way included.

        ``both``: the other direction too.
        """
        for one, other in self._pairs(source, target, both):
            self._network.set_cut(one, other, True)

    def heal(self, source: int | None = None, target: int | None = None) -> None:
        """Undo the cuts of both directions between two hosts; without arguments, all of them."""
        if source is None or target is None:
            self._network.set_cut(ALL, ALL, False)
            return
        for one, other in self._pairs(source, target, both=True):
            self._network.set_cut(one, other, False)

    def counters(self, host: int) -> Counters:
        """Return what a host has sent and received, and what was dropped, since the beginning."""
        check_host(host, self.hosts)
        return self._network.counters(host)

    # ------------------------------------------------------------ inside

    def _pairs(self, source: int, target: int, both: bool) -> Iterator[tuple[int, int]]:
        check_host(source, self.hosts)
        check_host(target, self.hosts)
        if source == target:
            raise ConfigError(f"host {source} reaches itself without the network")
        yield source, target
        if both:
            yield target, source

    def _path(self, source: int, target: int) -> PathSettings:
        return self._paths.get((source, target), self.settings.path)

    def _shape(self, host: int) -> None:
        rates = self._rates_mbit[host]
        others = [other for other in range(self.hosts) if other != host]
        rtt_ms = max(
            self._path(host, other).delay_ms + self._path(other, host).delay_ms for other in others
        )
        up, down = (queue_bytes(rate, rtt_ms) for rate in rates)
        self._network.set_rate(host, rates, (up, down))


def _choose(network: str) -> type[Forwarder] | type[Netem]:
    if network not in ("auto", "forwarder", "netem"):
        raise ConfigError(f"a network is auto, forwarder or netem, not {network}")
    if network == "netem" and not has_netem():
        raise ConfigError("this kernel has no netem, or the commands ip, tc, sysctl are missing")
    if network == "netem" or (network == "auto" and not can_build() and has_netem()):
        return Netem
    return Forwarder
