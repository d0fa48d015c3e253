"""Read what the kernel counts of a TCP connection: Linux' ``struct tcp_info``. Sans-I/O.

The struct has only ever grown at its end, so its size says what a kernel knows. Everything that is
read here is there since Linux 4.19; of an older kernel, and of other systems, nothing is known.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

# linux/tcp.h, in the machine's byte order: the byte with the bit tcpi_delivery_rate_app_limited;
# snd_mss, rcv_mss; pmtu; rtt; bytes_received; notsent_bytes, min_rtt, data_segs_in; delivery_rate,
# busy_time; delivered; bytes_sent, bytes_retrans, dsack_dups. Times are in microseconds.
_STRUCT: Final = struct.Struct("=7xB8xII36xI4xI56xQ8xIII4xQQ16xI4xQQI")
TCP_INFO_BYTES: Final = _STRUCT.size
APP_LIMITED: Final = 0x01 if struct.pack("=H", 1)[0] else 0x80  # C's first bit, on this machine
_NO_RTT_US: Final = 0xFFFFFFFF  # where nothing has been acknowledged yet
# Bytes on the wire for each byte of a full packet's payload: no headers at all, and those of IPv6
# with all options in the smallest packets that it allows. A kernel that says more is mistaken.
HEADERS_MIN, HEADERS_MAX = 1.0, 1.25


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
