"""Add the options about data streams to `atoll up`, `join` and `follow`, and read them."""

from __future__ import annotations

import argparse
from typing import Any

from atoll.peer.streams.congestion import AUTO, BBR, CUBIC, check


def add_stream_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--plain-streams",
        action="store_true",
        help="bulk data neither secret nor protected from changes, with peers that say so too"
        " and in private networks only: for networks that are trusted, and for benchmarks",
    )
    verb.add_argument(
        "--congestion",
        default=AUTO,
        metavar="NAME",
        help=f"the kernel's congestion control for what this peer sends; {AUTO}, the default, is"
        f" {BBR} over a network, if the kernel has it, {CUBIC} within this machine and wherever"
        " a plan keeps a stream to its pace and nothing is lost",
    )
    verb.add_argument(
        "--probes",
        choices=("on", "off"),
        default="on",
        help="off: send no probes to measure links to other machines, and take none; rounds measure"
        " them then. On, the default, costs at most the bytes of one round in an hour",
    )


def stream_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of DaemonOptions that these options set.

    Raises ConfigError for a congestion control that a socket may not have.
    """
    return {
        "plain_streams": parsed.plain_streams,
        "congestion": check(parsed.congestion),
        "probes": parsed.probes == "on",
    }
