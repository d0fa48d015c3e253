"""Carry out ``atoll lab``: hosts on this machine with a wide-area network between them."""

from __future__ import annotations

import argparse
from typing import Any

from atoll.collectives.errors import ConfigError


def add_lab_verb(verbs: Any) -> None:
    """Add ``lab`` to the sub-commands of ``atoll``."""
    lab = verbs.add_parser(
        "lab",
        help="run a command on hosts of a made-up wide-area network; needs root",
        usage="atoll lab [options] [-- COMMAND ...]",
        epilog="The command finds ATOLL_LAB_HOST (its number), ATOLL_LAB_ADDRESS and"
        " ATOLL_LAB_PEERS (the addresses of all hosts) in its environment. Without a command"
        " the hosts stay until Ctrl+C.",
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
    ) as lab:
        if command:
            return run_everywhere(lab, command)
        print("host  address     a shell on it")
        for host in range(lab.hosts):
            print(f"{host:<5} {lab.address(host):<11} ip netns exec {lab.space(host)} bash")
        print("Ctrl+C ends the lab and what runs on its hosts.", flush=True)
        try:
            lab.wait()
        except KeyboardInterrupt:
            return 0
    raise ConfigError("the lab has ended: its process `forward` was killed")
