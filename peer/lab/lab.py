"""Join hosts on one machine by a wide-area network that is made to measure.

    with Lab(4, rate_mbit=100, rtt_ms=50, loss=0.1) as lab:
        process = lab.start(0, sys.executable, "serve.py")
        lab.run(1, "ping", "-c1", lab.address(0))
        lab.cut(0, 1)  # what host 0 sends to host 1 vanishes: no reset, no error at the sender
        lab.heal()

    with Lab(4, nat={3: "restricted", (1, 2): "symmetric,expires=30"}, families={0: "46"}) as lab:
        lab.run(3, "ping", "-c1", lab.address(0))  # from there it works; the other way it does not
        lab.change_address(3)

Every host is a network namespace with a TUN device, ``eth0``. One process (``forward.c``) carries
the packets between them: through the sender's uplink, the path of the ordered pair, the receiver's
downlink. All else (TCP, its timers, its windows, what routers do) is the kernel's own. Nothing
touches the machine's own network. When the process that made a lab ends, however it ends, the lab
goes with it, and what still runs in its namespaces is killed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from atoll.collectives.errors import ConfigError
from atoll.peer.lab import spaces
from atoll.peer.lab.forwarder import Forwarder, can_build
from atoll.peer.lab.nat import Nat, check_lines, line_names, routers_of
from atoll.peer.lab.netem import Netem, has_netem
from atoll.peer.lab.routers import (
    add_default_route,
    add_router,
    check_tools,
    move_router,
    use_family,
)
from atoll.peer.lab.settings import (
    ALL,
    NETWORKS,
    Counters,
    LabSettings,
    PathSettings,
    Rate,
    address_of,
    address_v6_of,
    check_families,
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
    ``nat``: routers that hide hosts: by host, or by hosts behind one router together, a kind
    ("restricted"), a Nat, or its text (see nat.py). A router has the line of its first host: rates,
    paths, cuts and counters of all hosts behind it are that line's.
    ``families``: by host, "6" for a host without IPv4, "46" for both; the others have IPv4.
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
        nat: Mapping[int | tuple[int, ...], str | Nat] | None = None,
        families: Mapping[int, str] | None = None,
        network: str = "auto",
    ) -> None:
        self.settings = LabSettings(
            hosts, rate_mbit, rtt_ms, jitter_ms, loss, reorder, seed, mtu_bytes
        )
        self.hosts = hosts
        self.routers = routers_of(nat or {}, hosts)
        self._router = {host: router for router in self.routers for host in router.hosts}
        self.families = dict(families or {})
        check_families(self.families, hosts)
        check_lines(self.routers, self.families)
        spaces.check_possible(need_tun=False)
        plain = not self.routers and not self.families
        if not plain:
            check_tools()
        make = _choose(network, plain)
        spaces.check_possible(need_tun=make is Forwarder)
        spaces.sweep()
        self._lock = threading.Lock()  # of the two tables below
        self._rates_mbit = [rate_of(rate_mbit, host) for host in range(hosts)]
        self._paths: dict[tuple[int, int], PathSettings] = {}  # that differ from the others
        self._started: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()
        self._prefix = spaces.new_prefix()
        self._moved = [0] * hosts  # how often the address of a line has changed
        self._network: Forwarder | Netem
        if plain:
            self._network = make(self._prefix, hosts, mtu_bytes, seed)
        else:
            lines = line_names(self.routers, hosts)
            inside = [name for router in self.routers for name in router.inside]
            self._network = Forwarder(self._prefix, hosts, mtu_bytes, seed, lines, inside)
        try:
            if not plain:
                self._connect(lines)
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

    def address(self, host: int, family: str = "") -> str:
        """Return a host's own address, without port: behind a router it is a private one.

        ``family``: "4" or "6"; without it IPv6 only where the host has no other.
        """
        check_host(host, self.hosts)
        has = self.families.get(host, "4")
        family = family or has[0]
        if family not in has:
            raise ConfigError(f"host {host} has no IPv{family} address")
        if family == "6":
            return address_v6_of(host)
        return self._router[host].address(host) if host in self._router else address_of(host)

    def public_address(self, host: int) -> str:
        """Return the address that others see a host's packets come from: its router's, or its own.

        Where it has IPv4 and IPv6, that is the one of IPv4.
        """
        if host in self._router:
            line = self._line(host)
            return address_of(line, self._moved[line])
        return self.address(host)

    def dialled_address(self, source: int, target: int) -> str:
        """Return the address at which one host would try to reach another (or itself).

        Of two behind one router, and of itself, that is the private one.
        """
        shared = source in self._router and self._line(source) == self._line(target)
        if shared or source == target:
            return self.address(target)
        common = set(self.families.get(source, "4")) & set(self.families.get(target, "4"))
        return self.address(target, "6") if common == {"6"} else self.public_address(target)

    def space(self, host: int) -> str:
        """Return the name of a host's namespace: ``ip netns exec NAME COMMAND``."""
        check_host(host, self.hosts)
        return spaces.space_name(self._prefix, host)

    def environment(self, host: int) -> dict[str, str]:
        """Return the variables that commands find in their environment on this host.

        They are the host's number and own address, and all hosts' addresses in order, its own among
        them, as it would dial them.
        """
        peers = (self.dialled_address(host, other) for other in range(self.hosts))
        return {
            "ATOLL_LAB_HOST": str(host),
            "ATOLL_LAB_ADDRESS": self.address(host),
            "ATOLL_LAB_PEERS": ",".join(peers),
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
        """Set the rates of a host's line in Mbit/s from now on, for what waits in the queues too.

        0 takes the limit away; None leaves a rate as it is.
        """
        check_host(host, self.hosts)
        host = self._line(host)
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

    def change_address(self, host: int) -> str:
        """Give the router of a host another public address, and return it.

        The router forgets all connections, and nobody has the address before any more.
        """
        check_host(host, self.hosts)
        if host not in self._router:
            raise ConfigError(
                f"host {host} is behind no router, whose address could change",
                fix=f'put it behind one: Lab(..., nat={{{host}: "restricted"}})',
            )
        assert isinstance(self._network, Forwarder)
        router, line, before = self._router[host], self._line(host), self.public_address(host)
        with self._lock:
            self._moved[line] = (self._moved[line] + 1) % NETWORKS
            after = self.public_address(host)
            self._network.set_network(line, self._moved[line])
            move_router(self._prefix, router, before, after)
        return after

    def counters(self, host: int) -> Counters:
        """Return what a host's line has sent and received, and what was dropped, since the start.

        Hosts behind one router have one line. What they send each other is not on it.
        """
        check_host(host, self.hosts)
        return self._network.counters(self._line(host))

    def sent_bytes(self, source: int, target: int) -> int:
        """Return how many bytes, with IP headers, the line of one host has sent to another's."""
        if not isinstance(self._network, Forwarder):
            raise ConfigError("only the forwarder counts bytes between two hosts")
        (pair,) = self._pairs(source, target, both=False)
        return self._network.between(*pair)[1]

    # ------------------------------------------------------------ inside

    def _pairs(self, source: int, target: int, both: bool) -> Iterator[tuple[int, int]]:
        check_host(source, self.hosts)
        check_host(target, self.hosts)
        if source == target:
            raise ConfigError(f"host {source} reaches itself without the network")
        if self._line(source) == self._line(target):
            raise ConfigError(
                f"hosts {source} and {target} are behind one router:"
                " they reach each other without the wide-area network"
            )
        source, target = self._line(source), self._line(target)
        yield source, target
        if both:
            yield target, source

    def _line(self, host: int) -> int:
        return self._router[host].line if host in self._router else host

    def _connect(self, lines: Sequence[str]) -> None:
        """Make what is not the forwarder's: routers, default routes, IPv6 addresses."""
        for name in lines:
            if name != "-":
                add_default_route(self._prefix, name)
        for router in self.routers:
            add_router(self._prefix, router, self.settings.mtu_bytes)
        for host, family in self.families.items():
            own = address_of(host), address_v6_of(host)
            use_family(self._prefix, lines[host], family, *own)

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


def _choose(network: str, plain: bool = True) -> type[Forwarder] | type[Netem]:
    """Return who makes the network. ``plain``: without routers and IPv6."""
    if network not in ("auto", "forwarder", "netem"):
        raise ConfigError(f"a network is auto, forwarder or netem, not {network}")
    if not plain:
        if network == "netem":
            raise ConfigError("routers and IPv6 need the forwarder, not netem")
        return Forwarder
    if network == "netem" and not has_netem():
        raise ConfigError("this kernel has no netem, or the commands ip, tc, sysctl are missing")
    if network == "netem" or (network == "auto" and not can_build() and has_netem()):
        return Netem
    return Forwarder
