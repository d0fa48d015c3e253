"""Which link to probe next, when a probe is enough, and when to tell the coordinator. No clock.

A link that carries rounds is measured by them. What they cannot show, because streams share links
then or are paced, a probe shows: bytes that the other side drops, sent as fast as they go, to one
peer at a time and never in a reduction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from atoll.peer.measuring.messages import LinkRow

__all__ = [
    "PROBE_BYTES_MAX",
    "PROBE_S_MAX",
    "PairBudget",
    "Probe",
    "RowTimes",
    "Survey",
    "has_changed",
    "probing_order",
    "share_bytes",
]

# Fills 100 Mbit/s at 100 ms of round trip: 2 MiB until the window is open, and then half a second.
PROBE_BYTES_MAX = 12 << 20
# With less left of the hour a probe would find a start and little more.
PROBE_BYTES_MIN = 2 << 20
# START_S, and three windows that overlap, of a link of 1 Mbit/s; nobody notices so short a load.
PROBE_S_MAX = 4.0
# Of one pair and one way: 0.06 Mbit/s on the average. Twice the largest probe, so that one that a
# round broke off can be had again.
PAIR_HOUR_BYTES_MAX = 24 << 20
# Of one peer to all the others: 0.6 Mbit/s on the average.
PEER_HOUR_BYTES_MAX = 256 << 20
# Of that, what all pairs share, each the same, so that none has to wait until others are known for
# sure. From ten peers on it is less than a pair may have, and their probes find less: but the more
# there are, the less of a link one pair has in a round. The rest is for those who come later.
SHARED = 0.75
HOUR_S = 3600.0
# A pair that nothing has measured freely for so long is probed. Shorter than estimates.KEPT_S, so
# that a link that has become faster is found before its old rate is forgotten, and slower ones by
# two probes.
DUE_S = 1200.0
# A rate is sure when two probes in a row differ by less than this. Else something may have
# disturbed one of them, and there is another one: after so long, then after twice as long, and so
# on to DUE_S.
AGREE, UNSURE_S = 1.15, 60.0
# The links rest for so long after a reduction: the next may follow at once.
QUIET_S = 0.5
# Before the next probe to anybody, and before one to a peer that could not be probed.
PAUSE_S, REFUSED_S, FAILED_S = 0.25, 1.0, 30.0
# A probe is enough when so many free windows in a row have brought no more than this above the best
# before them, and that is so much of what the kernel has seen for one round trip: else the sender
# was kept from sending, or TCP's window is still opening.
SETTLED_WINDOWS, SETTLED_GAIN, SETTLED_SHARE = 2, 1.05, 0.9

# A row is sent when a value differs by this share from what was said last, and every ROW_S in case
# the coordinator has lost it; never more often than every ROW_PAUSE_S, and in a large view so that
# the coordinator hears ten rows a second.
CHANGED = 0.2
CHANGED_RTT_S, CHANGED_LOSS = 0.002, 0.002  # smaller differences are noise
ROW_S = 300.0
ROW_PAUSE_S = 5.0
ROW_PAUSE_PER_MEMBER_S = 0.1


@dataclass(slots=True)
class PairBudget:
    """The probes to one peer."""

    not_before_s: float = 0.0
    found: float = 0.0  # by the last of them, bytes per second
    again_s: float = float("inf")  # when there is another one because that is not sure ...
    pause_s: float = UNSURE_S  # ... and how long after that the next one
    spent: deque[tuple[float, int]] = field(default_factory=deque)  # (when, bytes)

    def spent_bytes(self, now_s: float) -> int:
        """In the last hour."""
        while self.spent and self.spent[0][0] <= now_s - HOUR_S:
            self.spent.popleft()
        return sum(count for _, count in self.spent)

    def learned(self, rate: float, now_s: float) -> None:
        """What a probe has found, bytes per second."""
        low, high = sorted((self.found, rate))
        sure = high < AGREE * low
        self.found = rate
        self.again_s = float("inf") if sure else now_s + self.pause_s
        self.pause_s = UNSURE_S if sure else min(2 * self.pause_s, DUE_S)


@dataclass(slots=True)
class Probe:
    """One probe under way: how much it may send, and whether it has found what it is for."""

    peer: bytes
    bytes_max: int
    began_s: float
    last_samples: int = 0
    best: float = 0.0
    flat: int = 0  # free windows since the rate has grown

    def enough(self, sent_bytes: int, samples: int, rate: float, hint: float, now_s: float) -> bool:
        """``samples``: free windows of the pair so far; ``rate``: of the last of them; ``hint``:
        the kernel's best."""
        if samples > self.last_samples:
            self.last_samples = samples
            self.flat = 0 if rate > SETTLED_GAIN * self.best else self.flat + 1
            self.best = max(self.best, rate)
        late = now_s - self.began_s >= PROBE_S_MAX
        settled = self.flat >= SETTLED_WINDOWS and self.best >= SETTLED_SHARE * hint
        return late or sent_bytes >= self.bytes_max or settled


class Survey:
    """``next`` says whom to probe; ``ended`` hears what came of it.

    The pair that nothing has measured for longest has its turn; of several that nothing has ever
    measured, the one that was tried longest ago. So first probes come before second ones, and what
    is broken off all the time, or refused, does not keep the others waiting. Up to 128 others all
    have their turn within an hour, 1,023 within eight.
    """

    def __init__(self) -> None:
        self._pairs: dict[bytes, PairBudget] = {}
        self._not_before_s = 0.0
        self._busy_s = float("-inf")  # when the links were last seen in use

    def keep(self, peers: Collection[bytes], now_s: float) -> None:
        """Who left may be back: what was spent on it counts until that is an hour ago."""
        for peer, pair in list(self._pairs.items()):
            if peer not in peers and not pair.spent_bytes(now_s):
                del self._pairs[peer]

    def busy(self, now_s: float) -> None:
        """A reduction is under way, or something else that a probe would disturb."""
        self._busy_s = now_s

    def next(self, ages_s: Sequence[tuple[bytes, float]], now_s: float) -> Probe | None:
        """``ages_s``: peers, each with the time since its pair was last measured freely (infinite
        if never); of those of whom all else is the same, the first has its turn."""
        if now_s < self._not_before_s or now_s - self._busy_s < QUIET_S:
            return None
        left = PEER_HOUR_BYTES_MAX - sum(pair.spent_bytes(now_s) for pair in self._pairs.values())
        share, waiting = share_bytes(len(ages_s)), []
        for peer, age_s in ages_s:
            pair = self._pairs.setdefault(peer, PairBudget())
            may_send = min(share - pair.spent_bytes(now_s), left, PROBE_BYTES_MAX)
            due = age_s >= DUE_S or now_s >= pair.again_s
            if due and now_s >= pair.not_before_s and may_send >= PROBE_BYTES_MIN:
                waiting.append((-age_s, pair.not_before_s, Probe(peer, may_send, now_s)))
        return min(waiting, key=lambda turn: turn[:2])[2] if waiting else None

    def refused(self, peer: bytes, now_s: float) -> None:
        """It is busy, or somebody else probes it."""
        self._pairs.setdefault(peer, PairBudget()).not_before_s = now_s + REFUSED_S

    def ended(
        self,
        peer: bytes,
        sent_bytes: int,
        now_s: float,
        *,
        rate: float = 0.0,
        failed: bool = False,
    ) -> None:
        """A probe has ended after so many bytes. ``rate``: what it has found, bytes per second, 0
        if it was broken off; ``failed``: it could not be sent."""
        pair = self._pairs.setdefault(peer, PairBudget())
        if sent_bytes:
            pair.spent.append((now_s, sent_bytes))
        if rate:
            pair.learned(rate, now_s)
        pair.not_before_s = now_s + (FAILED_S if failed else REFUSED_S)
        self._not_before_s = now_s + PAUSE_S


def share_bytes(pairs: int) -> int:
    """What each of so many pairs of a peer may send in an hour. Even of a thousand, each has what a
    probe needs, although not all of them in the same hour."""
    share = int(SHARED * PEER_HOUR_BYTES_MAX) // max(1, pairs)
    return min(max(share, PROBE_BYTES_MIN), PAIR_HOUR_BYTES_MAX)


def probing_order(me: bytes, peers: Sequence[bytes]) -> list[bytes]:
    """The others, beginning with the one after this peer: so not everybody asks the same first."""
    after = [peer for peer in sorted(peers) if peer > me]
    return after + [peer for peer in sorted(peers) if peer < me]


@dataclass(slots=True)
class RowTimes:
    """When this member tells the coordinator of its view what it has measured."""

    said: LinkRow | None = None
    at_s: float = float("-inf")
    to: tuple[bytes, int] = (b"", 0)  # the coordinator and the number of its view

    def due(self, row: LinkRow, to: tuple[bytes, int], members: int, now_s: float) -> bool:
        """``to``: the coordinator and the number of its view; it keeps rows of that view alone."""
        age_s = now_s - self.at_s
        if age_s < max(ROW_PAUSE_S, ROW_PAUSE_PER_MEMBER_S * members):
            return False
        return to != self.to or age_s >= ROW_S or has_changed(self.said, row)

    def sent(self, row: LinkRow, to: tuple[bytes, int], now_s: float) -> None:
        self.said, self.to, self.at_s = row, to, now_s


def has_changed(before: LinkRow | None, after: LinkRow) -> bool:
    """Whether somebody who knows ``before`` should know ``after``."""
    if before is None or set(before.peers) != set(after.peers):
        return True
    if _differs(before.up, after.up) or _differs(before.down, after.down):
        return True
    old = {peer: n for n, peer in enumerate(before.peers)}
    for n, peer in enumerate(after.peers):
        m = old[peer]
        if (
            _differs(before.out[m], after.out[n])
            or _differs(before.rtt_s[m], after.rtt_s[n], CHANGED_RTT_S)
            or _differs(before.loss[m], after.loss[n], CHANGED_LOSS)
        ):
            return True
    return False


def _differs(before: float | None, after: float | None, at_least: float = 0.0) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(after - before) > max(at_least, CHANGED * before)
