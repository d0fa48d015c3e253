"""Read what the kernel counts of a TCP connection, and find what streams did meanwhile. Sans-I/O.

Counters are Linux' ``struct tcp_info``, which has only ever grown at its end, so its size says what
a kernel knows. Everything that is read here is there since Linux 4.19; of an older kernel, and of
other systems, nothing is known.

Between two readings lies an interval (``TcpInterval``). Its bytes and rates are those of the wire,
headers included, because that is what links have a rate of. What all streams did in the same
interval (``Traffic``) says what disturbed what.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# linux/tcp.h, in the machine's byte order: the byte with the bit tcpi_delivery_rate_app_limited;
# snd_mss, rcv_mss; pmtu; rtt; bytes_received; notsent_bytes, min_rtt, data_segs_in; delivery_rate,
# busy_time; delivered; bytes_sent, bytes_retrans, dsack_dups. Times are in microseconds.
_STRUCT: Final = struct.Struct("=7xB8xII36xI4xI56xQ8xIII4xQQ16xI4xQQI")
TCP_INFO_BYTES: Final = _STRUCT.size
APP_LIMITED: Final = 0x01 if struct.pack("=H", 1)[0] else 0x80  # C's first bit, on this machine
# Of the same: retransmissions of what has waited longest, doublings of the timeout, the timeout.
_TIMEOUTS: Final = struct.Struct("=2xBxB3xI")
_LAST_ANSWER: Final = struct.Struct("=56xI")  # tcpi_last_ack_recv, milliseconds ago
# snd_mss; pmtu; segs_out, segs_in; bytes_retrans.
_PACKETS: Final = struct.Struct("=16xI40xI72xII64xQ")
_NO_RTT_US: Final = 0xFFFFFFFF  # where nothing has been acknowledged yet
# Bytes on the wire for each byte of a full packet's payload: no headers at all, and those of IPv6
# with all options in the smallest packets that it allows. A kernel that says more is mistaken.
HEADERS_MIN, HEADERS_MAX = 1.0, 1.25
# Of one packet: IPv4 and TCP without options, IPv6 and TCP with all that there may be.
PACKET_HEADERS_MIN, PACKET_HEADERS_MAX = 40, 100
# How much of an interval a stream must have been busy for what it moved to say how fast it was.
BUSY_SHARE = 0.9
# Less, between two readings, is a question, an answer, or the opening of a stream.
LOAD_BYTES = 4 << 10
# A stream that had something to send for so long, and moved less than this share of its pace, while
# some of it was lost, is held back by losses. On a way that lost a two hundredth, of which no plan
# knew yet, rounds of 3 s took 14 to 18 (docs/log.md). Less time could be one full queue.
HELD_BACK_SHARE, HELD_BACK_S = 0.5, 0.7


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Hold what the kernel counts of one TCP connection.

    Counters are of the whole life of the connection; bytes are TCP's payload.

    ``rtt_s``, ``min_rtt_s``: smoothed, and the least of the last minutes; 0 if there was none yet.
    ``delivery_rate``: bytes per second over about the last round trip, 0 if unknown; it may be what
    the sender had to send and not what the network could carry (``app_limited``). ``busy_s``: how
    long something was on its way. ``unsent_bytes`` wait in the kernel. ``delivered`` and
    ``duplicates`` are packets that have arrived, once or again, modulo 2^32; so is
    ``received_packets``, of packets of ``received_mss`` bytes. ``headers``: bytes on the wire, with
    those of IP and TCP, for each byte of a full packet.
    """

    app_limited: bool
    mss: int
    received_mss: int
    headers: float
    rtt_s: float
    min_rtt_s: float
    received_bytes: int
    unsent_bytes: int
    received_packets: int
    delivery_rate: float
    busy_s: float
    delivered: int
    sent_bytes: int
    retransmitted_bytes: int
    duplicates: int


def parse(data: bytes) -> TcpInfo | None:
    """Read what the kernel has filled in; return None if that is less than what is read here."""
    if len(data) < TCP_INFO_BYTES:
        return None
    flags, mss, received_mss, pmtu, rtt_us, received, unsent, min_rtt_us, packets, *rest = (
        _STRUCT.unpack_from(data)
    )
    rate, busy_us, delivered, sent, retransmitted, duplicates = rest
    headers = pmtu / mss if mss else HEADERS_MIN
    return TcpInfo(
        app_limited=bool(flags & APP_LIMITED),
        mss=mss,
        received_mss=received_mss,
        headers=min(max(headers, HEADERS_MIN), HEADERS_MAX),
        rtt_s=rtt_us * 1e-6,
        min_rtt_s=0.0 if min_rtt_us == _NO_RTT_US else min_rtt_us * 1e-6,
        received_bytes=received,
        unsent_bytes=unsent,
        received_packets=packets,
        delivery_rate=float(rate),
        busy_s=busy_us * 1e-6,
        delivered=delivered,
        sent_bytes=sent,
        retransmitted_bytes=retransmitted,
        duplicates=duplicates,
    )


def silence_s(data: bytes) -> float:
    """Return for how long, at least, something has waited in vain to be acknowledged, in seconds.

    0 while everything is acknowledged in time. ``data``: what the kernel has filled in. A timeout
    of b seconds that has been doubled n times began b (2^n - 1) seconds ago (RFC 6298). The time of
    the last acknowledgement would not do: it is long ago when a silent connection is used again.
    """
    if len(data) < _TIMEOUTS.size:
        return 0.0
    retransmitted, doubled, timeout_us = _TIMEOUTS.unpack_from(data)
    return timeout_us * 1e-6 * (1 - 0.5**doubled) if retransmitted else 0.0


def since_answer_s(data: bytes) -> float | None:
    """Return how long ago the other side's kernel has acknowledged something last, in seconds.

    None where this kernel does not tell. ``data``: what it has filled in. Any segment counts, also
    one that repeats an acknowledgement: it shows that the other machine runs, whatever its process
    does. Of a connection on which nothing is sent it is long ago.
    """
    if len(data) < _LAST_ANSWER.size:
        return None
    (ago_ms,) = _LAST_ANSWER.unpack_from(data)
    return float(ago_ms) * 1e-3


def wire_overhead(data: bytes) -> tuple[int, int] | None:
    """Return what a connection has put on the wire, and taken from it, beside its payload.

    In bytes since it began: the headers of IP and TCP of all packets, acknowledgements among them,
    and what was sent again. None where this kernel does not tell. ``data``: what it has filled in.
    """
    if len(data) < TCP_INFO_BYTES:
        return None
    mss, pmtu, sent_packets, received_packets, sent_again = _PACKETS.unpack_from(data)
    header = min(max(pmtu - mss, PACKET_HEADERS_MIN), PACKET_HEADERS_MAX)
    return sent_packets * header + sent_again, received_packets * header


@dataclass(frozen=True, slots=True)
class TcpInterval:
    """Describe what one connection has done between two readings.

    ``took_s``: seconds between the two readings; ``busy_s``: of those something was on its way.
    ``delivered``: bytes that the other side has, in whatever order; ``sent``, ``lost``: bytes sent,
    and of those the ones that had to be sent again. ``rate``: bytes per second over the last round
    trip as the kernel says, 0 if it says nothing new; ``app_limited``: that was all there was to
    send. ``unsent``: bytes that wait in the kernel. ``pace``: bytes per second that it was told to
    keep to, 0 if to none. ``arrived``: bytes from the other side. ``rtt_s``, ``min_rtt_s``: see
    TcpInfo.
    """

    took_s: float
    busy_s: float = 0.0
    delivered: float = 0.0
    sent: float = 0.0
    lost: float = 0.0
    rate: float = 0.0
    app_limited: bool = False
    unsent: int = 0
    pace: float = 0.0
    arrived: float = 0.0
    rtt_s: float = 0.0
    min_rtt_s: float = 0.0

    @property
    def moving(self) -> bool:
        return self.delivered > 0 or self.sent > 0

    @property
    def is_load(self) -> bool:
        """Return whether it sent enough to be in the way of others."""
        return self.sent >= LOAD_BYTES

    @property
    def whole(self) -> bool:
        """Return whether it was busy from one reading to the next."""
        return self.busy_s >= BUSY_SHARE * self.took_s


def between(
    before: TcpInfo | None, after: TcpInfo, took_s: float, pace: float = 0.0
) -> TcpInterval:
    """Return what a connection has done between two readings, ``took_s`` seconds apart.

    ``before`` is None for the first reading of a connection, of which only its round trip is taken:
    when it moved what it has moved is not known. ``pace``: what it was told to keep to.
    """
    if before is None or took_s <= 0:
        return TcpInterval(
            max(took_s, 0.0), rtt_s=after.rtt_s, min_rtt_s=after.min_rtt_s, pace=pace
        )
    wire = after.headers
    again = max(0, after.retransmitted_bytes - before.retransmitted_bytes)
    needless = _since(before.duplicates, after.duplicates) * after.mss
    packets = _since(before.received_packets, after.received_packets)
    # A hole that is filled makes much arrive at once that was here before: then packets are right.
    arrived = min(after.received_bytes - before.received_bytes, packets * after.received_mss)
    return TcpInterval(
        took_s,
        busy_s=max(0.0, after.busy_s - before.busy_s),
        delivered=wire * _since(before.delivered, after.delivered) * after.mss,
        sent=wire * max(0, after.sent_bytes - before.sent_bytes),
        lost=wire * max(0, again - needless),
        # The kernel keeps the last rate that was not limited by the sender: only a new one counts.
        rate=wire * after.delivery_rate if after.delivery_rate != before.delivery_rate else 0.0,
        app_limited=after.app_limited,
        unsent=after.unsent_bytes,
        pace=pace,
        arrived=wire * max(0, arrived),
        rtt_s=after.rtt_s,
        min_rtt_s=after.min_rtt_s,
    )


def _since(before: int, after: int) -> int:
    """Return how far a counter that starts again at 2^32 has moved."""
    return (after - before) % (1 << 32)


class LossWatch:
    """Say when a stream that keeps to a pace is held back by losses of its way."""

    def __init__(self) -> None:
        self._held_s = self._lost = 0.0

    def is_held_back(self, did: TcpInterval) -> bool:
        """Take in what the stream did since the last reading; return whether it was for long."""
        if (
            not did.whole
            or not did.unsent
            or did.delivered >= HELD_BACK_SHARE * did.pace * did.took_s
        ):
            self._held_s, self._lost = 0.0, did.lost  # what is lost now is what slows it next
            return False
        self._held_s += did.took_s
        self._lost += did.lost
        return self._held_s >= HELD_BACK_S and self._lost > 0


StreamIntervals = Mapping[bytes, Sequence[TcpInterval]]  # of all streams to, or from, each peer


class Traffic:
    """Hold what all streams to, and from, each peer did between two readings.

    ``sending``, ``arriving``: the peers to which, and from which, there was load.
    """

    def __init__(self, out: StreamIntervals, into: StreamIntervals) -> None:
        self.out, self.into = out, into
        self.sending = frozenset(
            peer for peer, intervals in out.items() if any(one.is_load for one in intervals)
        )
        self.arriving = frozenset(
            peer
            for peer, intervals in into.items()
            if sum(one.arrived for one in intervals) > LOAD_BYTES
        )

    def is_alone(self, peer: bytes) -> bool:
        """Return whether nothing shared this peer's links with what went to ``peer``.

        What goes to others takes its part of the uplink. What arrives, from whomever, fills the
        queue of the downlink, and in it wait the acknowledgements of what goes to ``peer``: TCP
        takes that for a longer way than its window is made for, and sends less than it could.
        """
        return not self.arriving and self.sending <= {peer}
