"""Make the routers of a lab: namespaces that forward, translate addresses and track connections.

All of it is the kernel's own (nftables, conntrack). A router has its line, ``eth0``, on one side,
and on the other one link (veth) to each host, ``to-hN``, or to the router behind it. The namespaces
are there already, and go with the lab.
"""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
from collections.abc import Sequence

from atoll.collectives.errors import ConfigError
from atoll.peer.lab import spaces
from atoll.peer.lab.nat import NatRouter

TOOLS = {"ip": "iproute2", "nft": "nftables", "sysctl": "procps"}  # a command and its package
NETLINK_NETFILTER = 12
CONNTRACK_DELETE = 1 << 8 | 2  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_DELETE
REQUEST_ACK = 1 | 4
# The kernel never takes up a connection that it has forgotten ("loose"), as most routers at home do
# not; and is no judge of windows: a packet that it finds odd is not lost.
SETTINGS = (
    "net.ipv4.ip_forward=1",
    "net.netfilter.nf_conntrack_tcp_loose=0",
    "net.netfilter.nf_conntrack_tcp_be_liberal=1",
)
# Timeouts of silence: of TCP connections, of UDP with one packet, and with answers.
TIMEOUTS = ("tcp_timeout_established", "udp_timeout", "udp_timeout_stream")

RULES = """
table ip translation {{
    chain inwards {{
        type nat hook prerouting priority dstnat
        {forward}
    }}
    chain outwards {{
        type nat hook postrouting priority srcnat
        oifname "eth0" masquerade {ports}
        iifname "to-*" ct status dnat masquerade
    }}
}}
table ip filtering {{
    chain through {{
        type filter hook forward priority filter; policy drop
        ct state invalid {expired}
        {apart}
        iifname "to-*" accept
        ct state established,related accept
        ct status dnat accept
    }}
    chain here {{
        type filter hook input priority filter; policy drop
        ct state invalid {expired}
        icmp type echo-request accept
    }}
}}
"""
EXPIRED = {"drop": "drop", "reset": "meta l4proto tcp reject with tcp reset"}
APART = 'iifname "to-*" oifname "to-*" ct status & dnat == 0 drop'
PORTS = {"full": "", "restricted": "", "symmetric": "fully-random"}


def check_tools() -> None:
    """Raise ConfigError where a command is missing that sets up routers."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise ConfigError(
                f"routers and IPv6 in a lab need the command {tool}",
                fix=f"apt-get install {package}",
            )


def add_router(prefix: str, router: NatRouter, mtu_bytes: int) -> None:
    """Connect the hosts to their router, and this to the second one, where there are two."""
    behind = {f"h{host}": router.address(host) for host in router.hosts}
    first = router.address(router.hosts[0])
    if router.nat.levels > 1:
        theirs, ours = router.carrier_side
        _connect(prefix, router.outermost, theirs, {router.home: ours}, mtu_bytes)
        _translate(prefix, router.outermost, router, ours)
        _connect(prefix, router.home, router.gateway, behind, mtu_bytes)
        _translate(prefix, router.home, router, first)
    else:
        _connect(prefix, router.home, router.gateway, behind, mtu_bytes)
        _translate(prefix, router.home, router, first)


def add_default_route(prefix: str, name: str) -> None:
    """Let packets to addresses of nobody vanish on the way, as in the internet."""
    _ip(prefix, name, "route", "add", "default", "dev", "eth0")


def use_family(prefix: str, name: str, family: str, address: str, address_v6: str) -> None:
    """Give a line its IPv6 address, and take the IPv4 one away where it has only the other."""
    if "6" in family:
        _ip(prefix, name, "addr", "add", f"{address_v6}/64", "dev", "eth0")
        _ip(prefix, name, "-6", "route", "add", "default", "dev", "eth0")
    if "4" not in family:
        _ip(prefix, name, "addr", "del", f"{address}/16", "dev", "eth0")


def move_router(prefix: str, router: NatRouter, before: str, after: str) -> None:
    """Give a router another public address; it forgets every connection."""
    name = router.outermost
    _ip(prefix, name, "addr", "del", f"{before}/16", "dev", "eth0")
    _ip(prefix, name, "addr", "add", f"{after}/16", "dev", "eth0")
    add_default_route(prefix, name)  # it went with the last address
    _forget_connections(f"{prefix}-{name}")


def _connect(
    prefix: str, router: str, gateway: str, behind: dict[str, str], mtu_bytes: int
) -> None:
    for name, address in behind.items():
        device, mtu = f"to-{name}", ["mtu", str(mtu_bytes)]
        peer = ["peer", "name", "eth0", *mtu, "netns", f"{prefix}-{name}"]
        _ip(prefix, router, "link", "add", device, *mtu, "type", "veth", *peer)
        for here, its_device, own, other in (
            (router, device, gateway, address),
            (name, "eth0", address, gateway),
        ):
            _ip(prefix, here, "addr", "add", f"{own}/32", "dev", its_device)
            _ip(prefix, here, "link", "set", its_device, "up")
            _ip(prefix, here, "route", "add", other, "dev", its_device)
        _ip(prefix, name, "route", "add", "default", "via", gateway, "dev", "eth0")


def _translate(prefix: str, name: str, router: NatRouter, first: str) -> None:
    """Set the rules of one router. ``first``: to whom it forwards what is dialled, if it does."""
    nat = router.nat
    leads = f"meta l4proto {{ tcp, udp }} dnat to {first}"
    forward = [f'iifname "eth0" {leads}'] * (nat.kind == "full")
    forward += [f'iifname "to-*" fib daddr type local ip daddr != {router.gateway} {leads}'] * (
        nat.hairpin
    )
    rules = RULES.format(
        forward="\n        ".join(forward),
        apart=APART * nat.hairpin,
        ports=PORTS[nat.kind],
        expired=EXPIRED[nat.expired],
    )
    inside = f"{prefix}-{name}"
    add_rules(inside, rules)
    settings = [*SETTINGS]
    if nat.expires_s and name == router.outermost:
        settings += [f"net.netfilter.nf_conntrack_{each}={nat.expires_s}" for each in TIMEOUTS]
    _run(spaces.enter_command(inside, ["sysctl", "-qw", *settings]))


def add_rules(space: str, rules: str) -> None:
    """Add rules of nftables to those of a router, which is known by its namespace."""
    _run(spaces.enter_command(space, ["nft", "-f", "-"]), rules)


def _forget_connections(space: str) -> None:
    """Do as ``conntrack -F`` does, which few machines have."""
    family = struct.pack("=BBH", 0, 0, 0)  # of all protocols
    header = struct.pack("=IHHII", 16 + len(family), CONNTRACK_DELETE, REQUEST_ACK, 1, 0)
    with spaces.open_socket(
        space, socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER
    ) as netlink:
        netlink.send(header + family)
        failed = struct.unpack_from("=i", netlink.recv(1 << 12), 16)[0]
        if failed:
            raise OSError(-failed, "the kernel does not forget connections", space)


def _ip(prefix: str, name: str, *arguments: str) -> None:
    _run(["ip", "-netns", f"{prefix}-{name}", *arguments])


def _run(command: Sequence[str], given: str | None = None) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise ConfigError(f"the lab's network: {' '.join(command)}: {reason}")
