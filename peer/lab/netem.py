"""Make a lab's network of the kernel's own parts, where no compiler is there for the forwarder.

Every host has a link (veth) to a hub, which is one more namespace and routes. The host's end of the
link is its uplink: a token bucket (tbf). The hub's end is its downlink: a class of htb for each
sender, with netem (delay, jitter, loss) inside, because htb paces what netem lets go.

It does what the forwarder does but for this: losses cannot be repeated (older kernels take no
seed); a cut lets arrive what is on its way; a sender is held up by its own uplink before anything
is dropped there; and counters do not say why a packet was dropped: all count as lost in a queue.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from atoll.collectives.errors import ConfigError
from atoll.peer.lab import spaces
from atoll.peer.lab.settings import ALL, Counters, PathSettings, address_of

TOOLS = ("ip", "tc", "sysctl")
HUB_ADDRESS = "10.78.0.254"  # no host: they end at .64
UNLIMITED_MBIT = 100_000.0
UNLIMITED_PACKETS = 100_000  # what a delay may hold where there is no rate: 1.2 Gbit at a time
ETHERNET_BYTES = 14  # the kernel counts them; a lab's rates and counters are of IP packets
BURST_S = 0.002  # what a bucket lets through at once: timers of a busy machine are that late
CLASS_BASE = 16  # of the first host, so that it is no other handle
END_TIMEOUT_S = 10.0


def has_netem() -> bool:
    """Return whether this kernel has netem, found out where it changes nothing.

    False too where one of the commands is missing that set it up.
    """
    if any(shutil.which(tool) is None for tool in TOOLS):
        return False
    add = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    done = subprocess.run(["unshare", "--net", *add], capture_output=True)
    return done.returncode == 0


class Netem:
    """Control a network of netem: the same methods as Forwarder's, with the same meaning."""

    def __init__(self, prefix: str, hosts: int, mtu_bytes: int, seed: int) -> None:
        del seed  # see above
        self._prefix, self._hosts, self._mtu = prefix, hosts, mtu_bytes
        self._serial = itertools.count(100)
        self._cuts: dict[tuple[int, int], list[str]] = {}
        self._limits = [UNLIMITED_PACKETS] * hosts
        self._paths = {pair: PathSettings() for pair in itertools.permutations(range(hosts), 2)}
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "atoll.peer.lab.keeper", prefix],
            stdin=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl+C is not for it
        )
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        self._keeper.wait()

    def set_rate(
        self, host: int, rates_mbit: tuple[float, float], queues_bytes: tuple[int, int]
    ) -> None:
        up, down = rates_mbit
        uplink = ["qdisc", "replace", "dev", "eth0", "root"]
        limit = ["limit", str(queues_bytes[0])]
        self._tc(host, *uplink, *(["tbf", *self._bucket(up), *limit] if up else ["pfifo"]))
        down = down or UNLIMITED_MBIT
        link = ["dev", f"to-{host}"]
        self._tc(self._hub, "class", "replace", *link, *self._class("1:", "1:1", down, down))
        for other in self._others(host):
            share = self._class("1:1", f"1:{CLASS_BASE + other:x}", down / self._hosts, down)
            self._tc(self._hub, "class", "replace", *link, *share)
        held = 2 * queues_bytes[1] // self._mtu  # what is on its way, and the queue
        self._limits[host] = held if rates_mbit[1] else UNLIMITED_PACKETS
        for other in self._others(host):
            self._delay(other, host)

    def set_path(self, source: int | str, target: int | str, path: PathSettings) -> None:
        for pair in self._pairs(source, target):
            self._paths[pair] = path
            self._delay(*pair)

    def set_cut(self, source: int | str, target: int | str, cut: bool) -> None:
        for pair in self._pairs(source, target):
            if cut and pair not in self._cuts:
                one, other = map(address_of, pair)
                rule = ["pref", str(next(self._serial)), "from", one, "to", other, "blackhole"]
                self._ip(self._hub, "rule", "add", *rule)
                self._cuts[pair] = rule
            elif not cut and pair in self._cuts:
                self._ip(self._hub, "rule", "del", *self._cuts.pop(pair))

    def counters(self, host: int) -> Counters:
        shown = json.loads(self._ip(host, "-s", "-j", "link", "show", "eth0"))[0]["stats64"]
        found = []
        for way in ("tx", "rx"):
            packets = int(shown[way]["packets"])
            found += [packets, int(shown[way]["bytes"]) - packets * ETHERNET_BYTES]
        drops = sum(int(qdisc["drops"]) for qdisc in self._qdiscs(host, "eth0"))
        mine = f"{CLASS_BASE + host:x}:"
        for other in self._others(host):
            for qdisc in self._qdiscs(self._hub, f"to-{other}"):
                drops += int(qdisc["drops"]) if qdisc["handle"] == mine else 0
        return Counters(found[0], found[1], found[2], found[3], drops, 0, 0)

    def close(self) -> None:
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        try:
            self._keeper.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    # ------------------------------------------------------------ building

    @property
    def _hub(self) -> int:
        return self._hosts

    def _build(self) -> None:
        for number in range(self._hosts + 1):
            _run(["ip", "netns", "add", spaces.space_name(self._prefix, number)])
            self._ip(number, "link", "set", "lo", "up")
        forwarding = ["sysctl", "-qw", "net.ipv4.ip_forward=1"]
        _run(spaces.enter_command(spaces.space_name(self._prefix, self._hub), forwarding))
        for host in range(self._hosts):
            peer = ["peer", "name", "eth0", "netns", spaces.space_name(self._prefix, host)]
            self._ip(self._hub, "link", "add", f"to-{host}", "type", "veth", *peer)
            ends = ((host, "eth0", address_of(host)), (self._hub, f"to-{host}", HUB_ADDRESS))
            for number, device, address in ends:
                # One packet at a time: netem would lose or delay a bundle of them as one.
                settings = ["mtu", str(self._mtu), "gso_max_segs", "1", "up"]
                self._ip(number, "addr", "add", f"{address}/32", "dev", device)
                self._ip(number, "link", "set", device, *settings)
            self._ip(host, "route", "add", HUB_ADDRESS, "dev", "eth0")
            self._ip(host, "route", "add", "default", "via", HUB_ADDRESS, "dev", "eth0")
            self._ip(self._hub, "route", "add", address_of(host), "dev", f"to-{host}")
            self._sort(host)
            self.set_rate(host, (0.0, 0.0), (0, 0))

    def _sort(self, host: int) -> None:
        """Make a class for each sender on the way to this host."""
        link = ["dev", f"to-{host}"]
        self._tc(self._hub, "qdisc", "add", *link, "root", "handle", "1:", "htb")
        for other in self._others(host):
            match = ["match", "ip", "src", f"{address_of(other)}/32"]
            to = ["flowid", f"1:{CLASS_BASE + other:x}"]
            filtered = ["parent", "1:", "protocol", "ip", "u32", *match, *to]
            self._tc(self._hub, "filter", "add", *link, *filtered)

    def _delay(self, source: int, target: int) -> None:
        path, number = self._paths[source, target], f"{CLASS_BASE + source:x}"
        options = ["limit", str(max(self._limits[target], 1)), "delay", f"{path.delay_ms}ms"]
        if path.jitter_ms:
            options += [f"{path.jitter_ms}ms"]  # uniform, as netem has it by itself
            if not path.reorder:  # netem keeps the order where it has a rate, however high
                options += ["rate", f"{UNLIMITED_MBIT:.0f}mbit"]
        if path.loss:
            options += ["loss", f"{path.loss}%"]
        place = ["dev", f"to-{target}", "parent", f"1:{number}", "handle", f"{number}:"]
        self._tc(self._hub, "qdisc", "replace", *place, "netem", *options)

    def _class(self, parent: str, name: str, rate_mbit: float, ceil_mbit: float) -> list[str]:
        rate, ceil = self._bits(rate_mbit), self._bits(ceil_mbit)
        burst = str(self._burst(ceil_mbit))
        limits = ["rate", rate, "ceil", ceil, "burst", burst, "cburst", burst]
        quantum = str(self._mtu + ETHERNET_BYTES)  # senders take turns packet by packet
        return ["parent", parent, "classid", name, "htb", *limits, "quantum", quantum]

    def _bucket(self, rate_mbit: float) -> list[str]:
        return ["rate", self._bits(rate_mbit), "burst", str(self._burst(rate_mbit))]

    def _bits(self, rate_mbit: float) -> str:
        share = (self._mtu + ETHERNET_BYTES) / self._mtu  # of a full packet
        return f"{max(round(rate_mbit * share * 1e6), 8)}bit"

    def _burst(self, rate_mbit: float) -> int:
        return max(2 * (self._mtu + ETHERNET_BYTES), round(rate_mbit * 1e6 / 8 * BURST_S))

    def _others(self, host: int) -> list[int]:
        return [other for other in range(self._hosts) if other != host]

    def _pairs(self, source: int | str, target: int | str) -> list[tuple[int, int]]:
        return [
            (one, other)
            for one, other in self._paths
            if source in (ALL, one) and target in (ALL, other)
        ]

    def _qdiscs(self, number: int, device: str) -> list[dict[str, Any]]:
        space = spaces.space_name(self._prefix, number)
        shown = _run(["tc", "-netns", space, "-s", "-j", "qdisc", "show", "dev", device])
        found: list[dict[str, Any]] = json.loads(shown)
        return found

    def _ip(self, number: int, *arguments: str) -> str:
        return _run(["ip", "-netns", spaces.space_name(self._prefix, number), *arguments])

    def _tc(self, number: int, *arguments: str) -> None:
        _run(["tc", "-netns", spaces.space_name(self._prefix, number), *arguments])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise ConfigError(f"the lab's network: {' '.join(command)}: {reason}")
    return done.stdout
