"""Carry out ``atoll lab``: hosts on this machine with a wide-area network between them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.collectives.errors import ConfigError
from atoll.peer.lab.nat import Nat, read_hosts, read_nat
from atoll.peer.lab.settings import FAMILIES

if TYPE_CHECKING:
    from atoll.peer.lab.lab import Lab

T = TypeVar("T")
V = TypeVar("V")


def add_lab_verb(verbs: Any) -> None:
    """Add ``lab`` to the sub-commands of ``atoll``."""
    lab = verbs.add_parser(
        "lab",
        help="run a command on hosts of a made-up wide-area network; needs root",
        usage="atoll lab [options] [-- COMMAND ...]",
        epilog="The command finds ATOLL_LAB_HOST (its number), ATOLL_LAB_ADDRESS and"
        " ATOLL_LAB_PEERS (the addresses of all hosts, as it would dial them) in its environment."
        " Without a command the hosts stay until Ctrl+C."
        " Kinds of NAT: full: all ports of the router's address lead to the host; restricted: the"
        " host can only dial out; symmetric: and each connection leaves from a random port."
        " Options of NAT: levels=2 (a router of the provider's behind it, 100.64/10 in between),"
        " expires=SECONDS (of silence, after which a connection is forgotten), expired=drop or"
        " reset (what becomes of its packets then), lan=N (the private network is 192.168.N.0/24),"
        " hairpin=1 (of a full one: the hosts behind it reach each other only by its public"
        " address).",
    )
    lab.add_argument("--hosts", type=int, default=4, metavar="N", help="2 to 64 (default 4)")
    lab.add_argument("--rtt-ms", type=float, default=50.0, metavar="MS", help="default 50")
    lab.add_argument(
        "--jitter-ms", type=float, default=0.0, metavar="MS", help="each way, more or less"
    )
    lab.add_argument(
        "--rate-mbit",
        type=float,
        default=100.0,
        metavar="N",
        help="of each host, up and down (default 100; 0: no limit)",
    )
    lab.add_argument(
        "--host-rate",
        type=host_rate,
        action="append",
        default=[],
        metavar="HOST=UP[/DOWN]",
        help="Mbit/s of one host; may be repeated",
    )
    lab.add_argument(
        "--nat",
        type=_described(host_nat),
        action="append",
        default=[],
        metavar="HOST[+HOST]=KIND[,OPTION=VALUE]",
        help="hosts behind one router, which is full, restricted or symmetric, for example"
        " 2+3=restricted,levels=2,expires=30; may be repeated",
    )
    lab.add_argument(
        "--ip",
        type=_described(host_families),
        action="append",
        default=[],
        metavar="HOST=4|6|46",
        help="a host with IPv6 only, or with both (default: IPv4); may be repeated",
    )
    lab.add_argument("--loss", type=float, default=0.0, metavar="PERCENT", help="of packets")
    lab.add_argument("--seed", type=int, default=0, metavar="N", help="decides which are lost")
    lab.add_argument("line", nargs=argparse.REMAINDER, metavar="COMMAND", help=argparse.SUPPRESS)
    lab.set_defaults(command=_lab)


def host_rate(text: str) -> tuple[int, tuple[float, float]]:
    """Parse ``3=20`` or ``3=20/100`` to (host, (up, down)) in Mbit/s.

    Raises ValueError, which argparse reports.
    """
    host, _, rates = text.partition("=")
    up, slash, down = rates.partition("/")
    return int(host), (float(up), float(down if slash else up))


def host_nat(text: str) -> tuple[tuple[int, ...], Nat]:
    """Parse ``2+3=restricted,expires=30`` to (hosts behind one router, the router).

    Raises ConfigError.
    """
    hosts, equals, described = text.partition("=")
    if not equals:
        raise ConfigError(
            f"{text!r} names no kind of router", fix="for example: --nat 3=restricted"
        )
    return read_hosts(hosts), read_nat(described)


def host_families(text: str) -> tuple[int, str]:
    """Parse ``3=46`` to (host, its IP versions). Raises ConfigError."""
    host, _, families = text.partition("=")
    (number,) = read_hosts(host) if "+" not in host else (-1,)
    if number < 0 or families not in FAMILIES:
        raise ConfigError(
            f"{text!r} is not HOST=4, HOST=6 or HOST=46", fix="for example: --ip 3=46"
        )
    return number, families


def _described(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Let argparse report the sentences of a parser, and not only that it refuses."""

    def parse_or_tell(text: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            fix = f" ({error.fix})" if error.fix else ""
            raise argparse.ArgumentTypeError(f"{error.what}{fix}") from error

    return parse_or_tell


def _lab(parsed: argparse.Namespace) -> int:
    from atoll.peer.lab.command import run_everywhere
    from atoll.peer.lab.lab import Lab

    rates = dict.fromkeys(range(parsed.hosts), parsed.rate_mbit) | dict(parsed.host_rate)
    command = parsed.line[1:] if parsed.line[:1] == ["--"] else parsed.line
    with Lab(
        parsed.hosts,
        rate_mbit=rates,
        rtt_ms=parsed.rtt_ms,
        jitter_ms=parsed.jitter_ms,
        loss=parsed.loss,
        seed=parsed.seed,
        nat=_once(parsed.nat, "behind a router"),
        families=_once(parsed.ip, "given IP versions"),
    ) as lab:
        if command:
            return run_everywhere(lab, command)
        try:
            _print_hosts(lab)
            print("Ctrl+C ends the lab and what runs on its hosts.", flush=True)
            lab.wait()
        except KeyboardInterrupt:
            return 0
    raise ConfigError("the lab has ended: its process `forward` was killed")


def _once(pairs: Sequence[tuple[T, V]], done: str) -> dict[T, V]:
    """Return them as a dictionary. Raises ConfigError for a key that comes twice."""
    found = dict(pairs)
    for key, _ in pairs:
        if sum(key == other for other, _ in pairs) > 1:
            hosts = "+".join(map(str, key)) if isinstance(key, tuple) else key
            raise ConfigError(f"host {hosts} is {done} twice")
    return found


def _print_hosts(lab: Lab) -> None:
    outside = bool(lab.routers)
    print(f"host  address{' ' * 9}{'from outside   ' * outside}a shell on it")
    for host in range(lab.hosts):
        seen = f"{lab.public_address(host):<15}" * outside
        enter = f"ip netns exec {lab.space(host)} bash"
        print(f"{host:<5} {lab.address(host):<16}{seen}{enter}")
