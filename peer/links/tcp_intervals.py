"""Find what one connection has done between two readings of its counters. Sans-I/O.

Bytes and rates are those of the wire, headers included, because that is what links have a rate of.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.peer.links.tcp_info import TcpInfo

# How much of a slice a stream must have been busy for what it moved to say how fast it was.
BUSY_SHARE = 0.9
# Less, between two readings, is a question, an answer, or the opening of a stream.
LOAD_BYTES = 4 << 10
# A counted rate is one of so many round trips, since TCP sends in waves; and of so long, or of so
# many bytes, since machines that are busy stand still for 100 ms and make up for it afterwards: of
# half a second alone that can be a seventh.
WINDOW_TRIPS, WINDOW_S, WINDOW_BYTES = 4.0, 1.0, 4 << 20


@dataclass(frozen=True, slots=True)
class Slice:
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


def between(before: TcpInfo | None, after: TcpInfo, took_s: float, pace: float = 0.0) -> Slice:
    """Return what a connection has done between two readings, ``took_s`` seconds apart.

    ``before`` is None for the first reading of a connection, of which only its round trip is taken:
    when it moved what it has moved is not known. ``pace``: what it was told to keep to.
    """
    if before is None or took_s <= 0:
        return Slice(max(took_s, 0.0), rtt_s=after.rtt_s, min_rtt_s=after.min_rtt_s, pace=pace)
    wire = after.headers
    again = max(0, after.retransmitted_bytes - before.retransmitted_bytes)
    needless = _since(before.duplicates, after.duplicates) * after.mss
    packets = _since(before.received_packets, after.received_packets)
    # A hole that is filled makes much arrive at once that was here before: then packets are right.
    arrived = min(after.received_bytes - before.received_bytes, packets * after.received_mss)
    return Slice(
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


class Window:
    """Count over consecutive slices until they are long enough for a rate.

    Each window begins in the middle of the one before. ``held_back``: something but the network
    limited the last one.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.held_back = False
        self._before: tuple[float, float, bool] | None = None  # the first half: as below
        self._begin_half()

    def _begin_half(self) -> None:
        self._bytes = self._took_s = self._rtt_s = 0.0
        self._held_back = False

    def add(
        self, took_s: float, nbytes: float, rtt_s: float = 0.0, *, held_back: bool = False
    ) -> float:
        """Count a slice; return the rate of a window that it completes, in bytes per second.

        0 as long as the window is too short. ``held_back``: what was counted says only that the
        link can carry so much.
        """
        self._bytes += nbytes
        self._took_s += took_s
        self._rtt_s = max(self._rtt_s, rtt_s)
        self._held_back = self._held_back or held_back
        brief = self._took_s < WINDOW_S / 2 and self._bytes < WINDOW_BYTES / 2
        if brief or self._took_s < WINDOW_TRIPS / 2 * self._rtt_s:
            return 0.0
        before, now = self._before, (self._bytes, self._took_s, self._held_back)
        self._before = now
        self._begin_half()
        if before is None:
            return 0.0
        self.held_back = before[2] or now[2]
        return (before[0] + now[0]) / (before[1] + now[1])


def _since(before: int, after: int) -> int:
    """Return how far a counter that starts again at 2^32 has moved."""
    return (after - before) % (1 << 32)
