"""Estimate the link to one peer, and this peer's own two; say when one has changed. No clock.

A rate is the largest of some time, because a link that carried it has it, and all that disturbs a
measurement makes it smaller. What may make it smaller for long, without the link being any slower,
is the sender itself:

    nothing to send     the kernel says so (``app_limited``)
    its other streams   they share the uplink, so one of them says nothing about its own path
    what others send    the other side's downlink is shared, with streams that are not seen here:
                        in a reduction of more than two, or when several serve one peer
    the way back        what arrives meanwhile fills a queue in which acknowledgements wait; TCP's
                        window is not made for that, and half of the rate may be left
    too few streams     a stream carries what its window holds, or what losses leave of that, and a
                        probe has one: where several have carried more, it says nothing
    its own pace        told to keep to a rate (``DataStream.pace``), a stream reaches that and no
                        more; and the pace follows from this estimate

Such samples may raise an estimate and never lower it. Else paces would spiral down: each a little
below the last estimate, each estimate what the last pace allowed. A stream that reaches its pace
shows that the estimate still holds, so it stays as it is; one that falls far short of it is held
back by the network, and counts. Only free samples take the place of those that have grown old, and
those that have grown old stay until there is one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from atoll.collectives.planning.choice import stream_bytes_per_s
from atoll.collectives.units import duration, rate
from atoll.peer.links.tcp_info import TcpInterval
from atoll.peer.membership.view import short

# A rate is the largest of so long before the last free sample. Long enough that probes, which are
# seldom, find one another; a link that has become slower is believed to be so after this.
KEPT_S = 1800.0
# A stream that reaches this share of its pace is held back by it and not by the network.
PACE_REACHED = 0.85
# A sample that reaches this share of an estimate shows that it still holds.
CONFIRMS = 0.9
# Share of what so many streams carry at most on such a way: kernels keep a part of a buffer for
# what is no payload. Who has carried more must have had more streams.
STREAM_SHARE = 0.75
# Before a stream has moved so much, or for so long, since it was idle, the first round trips and
# the buckets of traffic shapers say more about its rate than the link.
START_BYTES, START_S = 512 << 10, 1.0
# A round trip is the least of so long. The kernel's own is that of the last five minutes.
RTT_KEPT_S, RTT_STEP_S = 600.0, 60.0
# A round trip that is so much longer than the least is one through a queue. Who fills it loses
# packets, by the tenth where a stream starts; that says nothing of the path. Nor do losses count
# for so long afterwards, because they are made good only then.
QUEUED_SHARE, QUEUED_S, QUEUE_REST_S = 1.25, 0.002, 1.0
# Losses are counted over windows of so many bytes, of which less would say nothing of losses of a
# thousandth. The last so many count, but for those with more than so many losses, up to a quarter
# of all: a stream that has found its rate too high loses many at once, and the queue has often gone
# when the counters are read next.
LOSS_BYTES_MIN = 1 << 20
LOSS_WINDOWS = 64
BURST_LOSS, BURST_WINDOWS = 0.005, 0.25
# Nobody plans with what has not been seen for so long.
FORGOTTEN_S = 6 * 3600.0
# A counted rate is one of so many round trips, since TCP sends in waves; and of so long, or of so
# many bytes, since machines that are busy stand still for 100 ms and make up for it afterwards: of
# half a second alone that can be a seventh.
WINDOW_TRIPS, WINDOW_S, WINDOW_BYTES = 4.0, 1.0, 4 << 20
# A link that is so many times faster, slower or longer than was known is another one.
FACTOR = 2.0
# Round trips within a machine or a building differ by more than that, and nobody minds.
RTT_MIN_S = 0.005
# A probe has found what the path has once its rate was nearly that for so many round trips, and for
# some readings of it. One that ends before that has found how fast TCP begins.
SETTLED_TRIPS, SETTLED_S = 2.0, 0.15
# So many free windows of rounds show what a path has. One alone may have been disturbed
# (3 of 12.5 MB/s were seen where both ends had dialled at once).
WINDOWS_MIN = 3
# Time between two lines about one pair. In its first so long a pair is only getting known.
PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Hold what is known now of one directed pair; rates in bytes per second of the wire, else 0.

    ``rtt_s``: the least round trip. ``out``: what can be sent. ``loss``: fraction of the bytes that
    had to be sent again while no queue stood on the way, None if too few were sent. ``age_s``: how
    long ago the network last limited what was sent. ``is_bound``: nobody has seen what limits this
    path, which has ``out`` and may have any more.
    """

    rtt_s: float = 0.0
    out: float = 0.0
    loss: float | None = None
    age_s: float = float("inf")
    is_bound: bool = False

    @property
    def complete(self) -> bool:
        return self.rtt_s > 0 and self.out > 0


class PairEstimate:
    """Estimate the link to one peer from what all streams to it did between two readings.

    ``handle`` is fed with that. A rate is counted over windows. What the kernel says of the last
    round trip is noisier, since machines hand over in bursts; it stands for links on which nothing
    ever lasts for a window. ``bbr``: losses do not slow the streams to this peer.
    """

    def __init__(self, *, bbr: bool = True) -> None:
        self._bbr = bbr
        self._counted, self._brief = BestRate(), BestRate()
        self._rtts: deque[tuple[float, float]] = deque()  # (begin of a step, least of it)
        self._sent = self._lost = 0.0  # in the window at hand
        self._losses: deque[tuple[float, float]] = deque(maxlen=LOSS_WINDOWS)  # (share, sent)
        self._queued_s = float("-inf")  # when there was last a queue on the way
        self._began_bytes = self._began_s = 0.0  # since it was idle
        self._window = RateWindow()
        self._free_s = float("-inf")  # the last free window of a round, or end of a probe
        self._probe_rates: list[tuple[float, float]] = []  # (time, rate) of the probe at hand
        # All that is known of the rate is that of a probe that was too short, or of a few windows.
        self._is_bound, self._windows = True, 0

    def handle(self, out: Sequence[TcpInterval], now_s: float, *, alone: bool, full: bool) -> None:
        """Take in what all streams to this peer did between two readings.

        ``alone``: it is certain that nothing else was on this pair's links, neither way. ``full``:
        of a probe, whose sender has bytes ready all the time, whatever the kernel thinks; what it
        finds is believed when ``probed`` is called, because it was not broken off.
        """
        for one in out:
            self.round_trip(one.min_rtt_s, now_s)
        moving = [one for one in out if one.moving]
        if not moving:
            self._rest()
            return
        self._count_lost(moving, now_s)
        delivered = sum(one.delivered for one in moving)
        self._began_bytes += delivered
        self._began_s += max(one.busy_s for one in moving)
        if full:
            self._probe_rates.append((now_s, max(one.rate for one in moving)))
        elif self._began_bytes >= START_BYTES or self._began_s >= START_S:
            starved = any(one.app_limited for one in moving)
            self._sample(moving, delivered, now_s, held_back=starved or not alone)
        if not any(one.whole or one.unsent for one in moving):
            self._rest()

    def round_trip(self, rtt_s: float, now_s: float) -> None:
        """Take in the least round trip that a connection to this peer has seen of late, in seconds.

        0: it has seen none yet.
        """
        if rtt_s <= 0:
            return
        if self._rtts and now_s - self._rtts[-1][0] < RTT_STEP_S:
            began_s, least_s = self._rtts[-1]
            self._rtts[-1] = (began_s, min(rtt_s, least_s))
            return
        self._rtts.append((now_s, rtt_s))
        while self._rtts[0][0] < now_s - RTT_KEPT_S:
            self._rtts.popleft()

    def begin_probe(self) -> None:
        self._probe_rates = []

    def probed(self, now_s: float) -> bool:
        """Believe the probe that has come to its end; return False if it has found nothing.

        It is too short to be counted over a window, and a first guess: rounds raise it.
        """
        best = max((rate for _, rate in self._probe_rates), default=0.0)
        if best:
            few = self._more_streams_carried(1, now_s)
            knew = self._counted.value and not self._is_bound
            self._is_bound = not knew and not self._has_settled(best)
            (self._counted.at_least if few else self._counted.free)(best, now_s)
            self._free_s = now_s
        return best > 0

    def _has_settled(self, best: float) -> bool:
        """Return whether the probe at hand went on for a while after it had found its best rate."""
        first_s = next(at_s for at_s, rate in self._probe_rates if rate >= CONFIRMS * best)
        last_s = self._probe_rates[-1][0]
        return last_s - first_s >= max(SETTLED_S, SETTLED_TRIPS * self._rtt_s())

    def now(self, now_s: float) -> LinkEstimate:
        measured = self._free_s > float("-inf")
        rate = self._counted.known(now_s) or self._brief.known(now_s)
        return LinkEstimate(
            rtt_s=self._rtt_s(),
            out=rate if measured else 0.0,
            loss=self._loss(),
            age_s=now_s - self._free_s,
            is_bound=measured and self._is_bound,
        )

    def _rtt_s(self) -> float:
        return min((rtt_s for _, rtt_s in self._rtts), default=0.0)

    def _loss(self) -> float | None:
        bursts = sum(share > BURST_LOSS for share, _ in self._losses)
        left_out = min(bursts, math.ceil(BURST_WINDOWS * len(self._losses)))
        kept = sorted(self._losses)[: len(self._losses) - left_out]
        sent = sum(sent for _, sent in kept)
        return min(sum(share * sent for share, sent in kept) / sent, 1.0) if sent else None

    def _rest(self) -> None:
        self._began_bytes = self._began_s = 0.0
        self._window.reset()

    def _sample(
        self, moving: list[TcpInterval], delivered: float, now_s: float, *, held_back: bool
    ) -> None:
        one = moving[0]
        if len(moving) == 1 and one.rate > 0 and one.delivered > 0:
            if held_back or _reaches_pace(one, one.rate):
                self._brief.at_least(one.rate, now_s)
            else:
                self._brief.free(one.rate, now_s)
        if not any(one.whole for one in moving):
            self._window.reset()
            return
        paced = any(_reaches_pace(one, one.delivered / one.took_s) for one in moving)
        trip_s, held_back = max(one.rtt_s for one in moving), held_back or paced
        rate = self._window.add(one.took_s, delivered, trip_s, held_back=held_back)
        if rate and self._window.held_back:
            self._counted.at_least(rate, now_s)
        elif rate:
            if self._more_streams_carried(len(moving), now_s):
                self._counted.at_least(rate, now_s)
            else:
                self._counted.free(rate, now_s)
                self._windows += 1
                self._is_bound &= self._windows < WINDOWS_MIN
            self._free_s = now_s

    def _more_streams_carried(self, count: int, now_s: float) -> bool:
        """Return whether so few streams could not show what this pair is known to have."""
        one = stream_bytes_per_s(self._rtt_s(), 0.0 if self._bbr else self._loss() or 0.0)
        return self._counted.known(now_s) > STREAM_SHARE * count * one

    def _count_lost(self, moving: list[TcpInterval], now_s: float) -> None:
        least_s = self._rtt_s()
        if any(one.rtt_s > QUEUED_SHARE * least_s + QUEUED_S for one in moving):
            self._queued_s = now_s
        if now_s - self._queued_s < QUEUE_REST_S:
            return
        self._sent += sum(one.sent for one in moving)
        self._lost += sum(one.lost for one in moving)
        if self._sent >= LOSS_BYTES_MIN:
            self._losses.append((self._lost / self._sent, self._sent))
            self._sent = self._lost = 0.0


class OwnLinks:
    """Estimate this peer's own uplink and downlink, from below.

    What counts is what left this peer, and what came, while it exchanged with several at a time.
    The slower side of each pair is another's then.
    """

    def __init__(self) -> None:
        self._up, self._down = BestRate(), BestRate()
        self._leaving, self._coming = RateWindow(), RateWindow()

    def handle(
        self,
        out: Sequence[Sequence[TcpInterval]],
        into: Sequence[Sequence[TcpInterval]],
        now_s: float,
    ) -> None:
        """Take in what all streams did between two readings, by peer."""
        leaving = [[one for one in pair if one.moving] for pair in out]
        streams = [one for pair in leaving for one in pair]
        if sum(any(one.whole for one in pair) for pair in leaving) < 2:
            self._leaving.reset()
        else:
            held = any(
                one.app_limited or _reaches_pace(one, one.delivered / one.took_s) for one in streams
            )
            total, trip_s = sum(o.delivered for o in streams), max(o.rtt_s for o in streams)
            if rate := self._leaving.add(streams[0].took_s, total, trip_s, held_back=held):
                # Held back or not, nobody else can say what this link has: the first is taken.
                if self._leaving.held_back and self._up.value:
                    self._up.at_least(rate, now_s)
                else:
                    self._up.free(rate, now_s)
        coming = [one for pair in into for one in pair if one.arrived > 0]
        if sum(any(one.arrived > 0 for one in pair) for pair in into) < 2:
            self._coming.reset()
        elif rate := self._coming.add(coming[0].took_s, sum(one.arrived for one in coming)):
            _seen(self._down, rate, now_s)

    def up(self, now_s: float) -> float:
        """Return the rate of the uplink in bytes per second; 0 if unknown."""
        return self._up.known(now_s)

    def down(self, now_s: float) -> float:
        return self._down.known(now_s)


def _seen(best: BestRate, rate: float, now_s: float) -> None:
    """Take a sample of a receiver, who does not know what held its senders back.

    What comes near shows that the estimate holds, and what does not replaces it only when it has
    grown old.
    """
    if best.value and rate >= CONFIRMS * best.value:
        best.at_least(rate, now_s)
    else:
        best.free(rate, now_s)


def _reaches_pace(one: TcpInterval, rate: float) -> bool:
    return one.pace > 0 and rate >= PACE_REACHED * one.pace


# ---------------------------------------------------------------- rates


class BestRate:
    """Keep the largest of the last samples, in bytes per second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()  # (time, rate), rates descending

    @property
    def value(self) -> float:
        """Return the largest rate; 0 as long as nothing is known."""
        return self._samples[0][1] if self._samples else 0.0

    def known(self, now_s: float) -> float:
        """Return the largest rate; 0 too when nothing has borne it out for FORGOTTEN_S."""
        is_fresh = bool(self._samples) and now_s - self._samples[-1][0] < FORGOTTEN_S
        return self.value if is_fresh else 0.0

    def free(self, rate: float, now_s: float) -> None:
        """Take a free sample: what the link could carry just then."""
        while self._samples and self._samples[0][0] < now_s - KEPT_S:
            self._samples.popleft()
        while self._samples and self._samples[-1][1] <= rate:
            self._samples.pop()
        self._samples.append((now_s, rate))

    def at_least(self, rate: float, now_s: float) -> None:
        """Take a sample of what the link carried when it might have carried more.

        It counts for nothing as long as no free sample is known. What comes near to the estimate
        shows that it still holds as it is.
        """
        value = self.value
        if value and rate > value:
            self.free(rate, now_s)
        elif value and rate >= CONFIRMS * value:
            self._samples.clear()
            self._samples.append((now_s, value))


class RateWindow:
    """Count over consecutive intervals until they are long enough for a rate.

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
        """Count an interval; return the rate of a window that it completes, in bytes per second.

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


# ---------------------------------------------------------------- changes


class LinkChanges:
    """Decide which changes of the links are worth a line in the log."""

    def __init__(self) -> None:
        self._first_s: dict[bytes, float] = {}  # when a pair was first known
        self._known: dict[bytes, tuple[LinkEstimate, float]] = {}  # as said last, and when

    def keep(self, peers: Collection[bytes]) -> None:
        for peer in self._first_s.keys() - set(peers):
            del self._first_s[peer], self._known[peer]

    def about(self, peer: bytes, link: LinkEstimate, now_s: float) -> str:
        """Return a line if the link to ``peer`` has changed much since the last one, or ""."""
        if not link.complete:
            return ""
        if now_s - self._first_s.setdefault(peer, now_s) < PAUSE_S:
            self._known[peer] = (link, float("-inf"))
            return ""
        before, at_s = self._known[peer]
        changes = []
        if _factor(before.out, link.out) > FACTOR:
            changes.append(f"rate from {rate(before.out)} to {rate(link.out)}")
        if _factor(before.rtt_s, link.rtt_s) > FACTOR and max(before.rtt_s, link.rtt_s) > RTT_MIN_S:
            trips = f"{duration(before.rtt_s)} to {duration(link.rtt_s)}"
            changes.append(f"round trip from {trips}")
        if not changes or now_s - at_s < PAUSE_S:
            return ""
        self._known[peer] = (link, now_s)
        return f"the link to {short(peer)} has changed: {', '.join(changes)}"


def _factor(before: float, after: float) -> float:
    return max(before, after) / min(before, after)
