"""Define the options of `atoll up`, `join` and `follow` that cap what a daemon may move."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from atoll.collectives.errors import ConfigError

if TYPE_CHECKING:
    from atoll.peer.caps.caps import CapOptions, Direction


# Below this rate a data stream would count as broken, because nothing moves on it for so long.
RELAY_MBIT_MIN, RELAY_MBIT_MAX = 0.1, 1e6


def add_cap_options(verb: argparse.ArgumentParser) -> None:
    """Add the options to a command that starts a daemon."""
    caps = verb.add_argument_group("how much this peer may send and receive")
    for way, does in (("up", "sends"), ("down", "receives")):
        caps.add_argument(
            f"--{way}-mbit",
            metavar="LIMIT",
            help=f"all that this peer {does}, with TCP/IP headers, in Mbit/s: 50, or by local time"
            " 50,22:00-06:00=unlimited",
        )
    for way, does in (("up", "sends"), ("down", "receives")):
        caps.add_argument(
            f"--{way}-gb-per-day",
            metavar="N",
            help=f"what it {does} from midnight to midnight: near the end probes stop first, then"
            " state for others, and rounds are slower last",
        )


def relay_mbit(text: str) -> float:
    """Return what --relay says. Raises argparse's error for what is no rate."""
    try:
        mbit = float(text)
    except ValueError:
        mbit = 0.0
    if not RELAY_MBIT_MIN <= mbit <= RELAY_MBIT_MAX:
        raise argparse.ArgumentTypeError(
            f"{text}: a rate from {RELAY_MBIT_MIN:g} to {RELAY_MBIT_MAX:,.0f} Mbit/s is expected,"
            " such as --relay 20"
        )
    return mbit


def cap_options(parsed: argparse.Namespace) -> CapOptions:
    """Return what these options allow. Raises ConfigError that says where one is wrong."""
    from atoll.peer.caps.caps import CapOptions  # here, so that other commands start fast

    return CapOptions(
        up=_direction("up", parsed.up_mbit, parsed.up_gb_per_day),
        down=_direction("down", parsed.down_mbit, parsed.down_gb_per_day),
    )


def _direction(way: str, mbit: str | None, gb: str | None) -> Direction:
    from atoll.peer.caps.budget import BYTES_PER_GB, GB_MAX, GB_MIN, DayBudget
    from atoll.peer.caps.caps import Direction
    from atoll.peer.caps.schedule import ALWAYS_UNLIMITED, parse_schedule

    option = f"--{way}-gb-per-day"
    schedule = parse_schedule(mbit, f"--{way}-mbit") if mbit is not None else ALWAYS_UNLIMITED
    if gb is None:
        return Direction(schedule)
    try:
        day_gb = float(gb)
    except ValueError:
        day_gb = 0.0
    if not GB_MIN <= day_gb <= GB_MAX:
        raise ConfigError(
            f"{option} {gb}: a number of gigabytes from {GB_MIN:g} to {GB_MAX:,.0f} is expected",
            fix=f"write it like {option} 100; without the option there is no limit",
        )
    return Direction(schedule, DayBudget(round(day_gb * BYTES_PER_GB)))
