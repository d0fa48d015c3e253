"""Check what a lab's network is asked for, and size its queues. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.collectives.errors import ConfigError

HOSTS_MIN = 2
HOSTS_MAX = 64  # the forwarder's tables are that large; beyond it one core would not keep up
MTU_BYTES_MIN = 576  # what every IPv4 host must take (RFC 791)
MTU_BYTES_MAX = 65_000  # just below the largest IPv4 packet
RATE_MBIT_MAX = 100_000.0  # no link of one machine is faster; catches bit/s given as Mbit/s
DELAY_MS_MAX = 10_000.0  # beyond it TCP gives up connecting
# What a router holds back before it drops: one bandwidth-delay product, so that a single TCP stream
# fills the link (Appenzeller et al. 2004), and never less than one burst of the kernel (64 KiB).
QUEUE_BYTES_MIN = 64 << 10

ALL = "*"  # every host

NETWORKS = 256  # 10.78.0 to 10.78.255, which a line's address goes through: then again the first
FAMILIES = ("4", "6", "46")  # what a host has an address of: IPv4, IPv6, both

Rate = float | tuple[float, float]  # Mbit/s both ways, or (up, down); 0: no limit


@dataclass(frozen=True)
class PathSettings:
    """Describe one way between two hosts.

    ``delay_ms``: milliseconds of every packet. ``jitter_ms``: each packet's delay differs from that
    by up to so much, uniformly; packets keep their order, so one that would overtake leaves
    together with the one before it, unless ``reorder``. ``loss``: percent of the packets, each
    drawn by itself.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    reorder: bool = False


@dataclass(frozen=True)
class LabSettings:
    """Describe a lab as it begins; see Lab for the meaning.

    Raises ConfigError for what cannot be.
    """

    hosts: int
    rate_mbit: float | Mapping[int, Rate] = 0.0
    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    reorder: bool = False
    seed: int = 0
    mtu_bytes: int = 1500

    def __post_init__(self) -> None:
        if not HOSTS_MIN <= self.hosts <= HOSTS_MAX:
            raise ConfigError(f"a lab has {HOSTS_MIN} to {HOSTS_MAX} hosts, not {self.hosts}")
        if isinstance(self.rate_mbit, Mapping):
            for host in self.rate_mbit:
                check_host(host, self.hosts)
        for host in range(self.hosts):
            check_rate(*rate_of(self.rate_mbit, host))
        check_path(self.path)
        if not MTU_BYTES_MIN <= self.mtu_bytes <= MTU_BYTES_MAX:
            limits = f"{MTU_BYTES_MIN} to {MTU_BYTES_MAX}"
            raise ConfigError(f"an MTU is {limits} bytes, not {self.mtu_bytes}")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"a seed is a number of 64 bits, not {self.seed}")

    @property
    def path(self) -> PathSettings:
        """Return the path of every ordered pair at first: half of the round trip each way."""
        return PathSettings(self.rtt_ms / 2, self.jitter_ms, self.loss, self.reorder)


@dataclass(frozen=True)
class Counters:
    """Count one host's IP packets to and from other hosts since the lab began.

    Bytes are with IP headers. Sent is what entered the host's uplink queue or was refused there.
    ``dropped_queue``: packets refused by the full queue of its uplink or its downlink.
    ``dropped_loss`` and ``dropped_cut``: packets that it sent and that paths lost or cuts
    swallowed.
    """

    sent_packets: int
    sent_bytes: int
    received_packets: int
    received_bytes: int
    dropped_queue: int
    dropped_loss: int
    dropped_cut: int

    @property
    def dropped_packets(self) -> int:
        """Return how many packets were dropped, for all reasons together."""
        return self.dropped_queue + self.dropped_loss + self.dropped_cut


def address_of(host: int, network: int = 0) -> str:
    """Return a host's IPv4 address, without port. The forwarder knows hosts by its last byte.

    ``network`` counts how often that of its router has changed.
    """
    return f"10.78.{network}.{host + 1}"


def address_v6_of(host: int) -> str:
    """Return a host's IPv6 address, without port or brackets."""
    return f"fd78::{host + 1:x}"


def rate_of(rate_mbit: float | Mapping[int, Rate], host: int) -> tuple[float, float]:
    """Return (up, down) of a host in Mbit/s; 0, no limit, for one that a mapping does not name."""
    rate = rate_mbit.get(host, 0.0) if isinstance(rate_mbit, Mapping) else rate_mbit
    return rate if isinstance(rate, tuple) else (rate, rate)


def queue_bytes(rate_mbit: float, rtt_ms: float) -> int:
    """Return how many bytes a link of this rate holds back before it drops.

    That is one bandwidth-delay product, and QUEUE_BYTES_MIN at least.
    """
    return max(QUEUE_BYTES_MIN, math.ceil(rate_mbit * 1e6 / 8 * rtt_ms / 1e3))


def check_host(host: int, hosts: int) -> None:
    """Raise ConfigError unless ``host`` is the number of one of ``hosts`` hosts."""
    if not 0 <= host < hosts:
        raise ConfigError(f"there is no host {host}: they are 0 to {hosts - 1}")


def check_families(families: Mapping[int, str], hosts: int) -> None:
    """Raise ConfigError unless these are hosts of a lab with what they can have."""
    for host, family in families.items():
        check_host(host, hosts)
        if family not in FAMILIES:
            raise ConfigError(
                f"host {host} has IP versions {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]} (both),"
                f" not {family!r}"
            )


def check_rate(*rates_mbit: float) -> None:
    """Raise ConfigError for a rate in Mbit/s that no link has."""
    for rate in rates_mbit:
        if not 0 <= rate <= RATE_MBIT_MAX:
            limits = f"0 (no limit) to {RATE_MBIT_MAX:g}"
            raise ConfigError(f"a rate is {limits} Mbit/s, not {rate:g}")


def check_path(path: PathSettings) -> None:
    """Raise ConfigError for a path that cannot be."""
    if not 0 <= path.delay_ms <= DELAY_MS_MAX:
        raise ConfigError(
            f"a delay is 0 to {DELAY_MS_MAX:g} ms one way, not {path.delay_ms:g}",
            fix="a round trip is twice that",
        )
    if not 0 <= path.jitter_ms <= path.delay_ms:
        raise ConfigError(
            f"a jitter of {path.jitter_ms:g} ms does not fit a delay of {path.delay_ms:g} ms",
            fix="jitter goes both ways around the delay, which is half of the round trip",
        )
    if not 0 <= path.loss <= 100:
        raise ConfigError(f"loss is 0 to 100 percent, not {path.loss:g}")
