"""Decide which link to probe next, when it is enough, and when to tell the coordinator. No clock.

A link that carries rounds is measured by them. What they cannot show, because streams share links
then or are paced, a probe shows: bytes that the other side drops, sent as fast as they go, to one
peer at a time and never in a reduction. Probes are few: in an hour no more than one round sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from atoll.peer.links.messages import LinkRow

# Limit of one pair in an hour. A first guess is all that a plan needs: the rounds that follow it
# measure for nothing what a link has, and a short probe sees what a round would see in so many
# bytes.
PROBE_BYTES_MAX = 1 << 20
# With less a probe would find how TCP starts and nothing of the link.
PROBE_BYTES_MIN = 256 << 10
# Limit of one probe: some round trips, also of long ways; nobody notices so short a load.
PROBE_S_MAX = 1.0
# Share of a peer's uplink, on average: a probe that took a second is followed by 19 without one.
LINK_SHARE = 0.05
# So many others a peer probes, however many there are, and it is probed by as many: what its own
# link carries shows with a few of them, and the probes of all grow with the number of peers.
PROBED_MAX = 4
HOUR_S = 3600.0
# A pair that nothing has measured freely for so long is probed.
DUE_S = HOUR_S
# The links rest for so long after a reduction: the next may follow at once.
QUIET_S = 0.5
# Pauses before the next probe to anybody, and before one to a peer that could not be probed.
PAUSE_S, REFUSED_S, FAILED_S = 0.25, 1.0, 30.0

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
    """Hold what has been sent to one peer in probes, and when it may be probed again."""

    not_before_s: float = 0.0
    spent: deque[tuple[float, int]] = field(default_factory=deque)  # (when, bytes)

    def spent_bytes(self, now_s: float) -> int:
        """Return the bytes that the probes of the last hour have cost."""
        while self.spent and self.spent[0][0] <= now_s - HOUR_S:
            self.spent.popleft()
        return sum(count for _, count in self.spent)


@dataclass(slots=True)
class RunningProbe:
    """Describe one probe under way, and how much it may send."""

    peer: bytes
    bytes_max: int
    began_s: float

    def enough(self, sent_bytes: int, now_s: float) -> bool:
        return sent_bytes >= self.bytes_max or now_s - self.began_s >= PROBE_S_MAX


class ProbeSchedule:
    """Say whom to probe (``next``) and hear what came of it (``ended``).

    The pair that nothing has measured for longest has its turn; of several that nothing has ever
    measured, the one that was tried longest ago. So what is broken off all the time, or refused,
    does not keep the others waiting.
    """

    def __init__(self) -> None:
        self._pairs: dict[bytes, PairBudget] = {}
        self._not_before_s = 0.0
        self._busy_s = float("-inf")  # when the links were last seen in use

    def keep(self, peers: Collection[bytes], now_s: float) -> None:
        """Forget all peers but these.

        Who left may be back: what was spent on it counts until that is an hour ago.
        """
        for peer, pair in list(self._pairs.items()):
            if peer not in peers and not pair.spent_bytes(now_s):
                del self._pairs[peer]

    def busy(self, now_s: float) -> None:
        """Hear of a reduction under way, or something else that a probe would disturb."""
        self._busy_s = now_s

    def next(
        self, ages_s: Sequence[tuple[bytes, float]], budget_bytes: int, now_s: float
    ) -> RunningProbe | None:
        """Return the next probe, if one is due and allowed.

        ``ages_s``: the peers to probe, each with the time since its pair was last measured freely
        (infinite if never); of those of whom all else is the same, the first has its turn.
        ``budget_bytes``: of all probes in an hour.
        """
        if now_s < self._not_before_s or now_s - self._busy_s < QUIET_S:
            return None
        left = budget_bytes - sum(pair.spent_bytes(now_s) for pair in self._pairs.values())
        share, waiting = share_bytes(budget_bytes, len(ages_s)), []
        for peer, age_s in ages_s:
            pair = self._pairs.setdefault(peer, PairBudget())
            may_send = min(share - pair.spent_bytes(now_s), left)
            if age_s >= DUE_S and now_s >= pair.not_before_s and may_send >= PROBE_BYTES_MIN:
                waiting.append((-age_s, pair.not_before_s, RunningProbe(peer, may_send, now_s)))
        return min(waiting, key=lambda turn: turn[:2])[2] if waiting else None

    def refused(self, peer: bytes, now_s: float, *, for_long: bool = False) -> None:
        """Hear that a peer is busy, or that somebody else probes it.

        ``for_long``: it wants no probes.
        """
        pause_s = HOUR_S if for_long else REFUSED_S
        self._pairs.setdefault(peer, PairBudget()).not_before_s = now_s + pause_s

    def ended(
        self,
        peer: bytes,
        sent_bytes: int,
        now_s: float,
        *,
        took_s: float = 0.0,
        failed: bool = False,
    ) -> None:
        """Hear that a probe has ended after so many bytes and seconds.

        ``failed``: it could not be sent.
        """
        pair = self._pairs.setdefault(peer, PairBudget())
        if sent_bytes:
            pair.spent.append((now_s, sent_bytes))
        pair.not_before_s = now_s + (FAILED_S if failed else REFUSED_S)
        self._not_before_s = now_s + max(PAUSE_S, took_s * (1 / LINK_SHARE - 1))


def share_bytes(budget_bytes: int, pairs: int) -> int:
    """Return how many bytes of an hour's budget each of so many pairs may have."""
    return min(budget_bytes // max(1, pairs), PROBE_BYTES_MAX)


def probed_peers(me: bytes, others: Collection[bytes], budget_bytes: int) -> list[bytes]:
    """Return whom this peer probes: those that follow it in the order of ids.

    They are as many as the budget of an hour is enough for, and PROBED_MAX at most. So everybody is
    probed by as many, and not all begin with the same.
    """
    after = [peer for peer in sorted(others) if peer > me]
    order = after + [peer for peer in sorted(others) if peer < me]
    return order[: min(PROBED_MAX, budget_bytes // PROBE_BYTES_MIN)]


@dataclass(slots=True)
class RowTimes:
    """Keep what this member has told the coordinator of its view, and when."""

    said: LinkRow | None = None
    at_s: float = float("-inf")
    to: tuple[bytes, int] = (b"", 0)  # the coordinator and the number of its view

    def due(self, row: LinkRow, to: tuple[bytes, int], members: int, now_s: float) -> bool:
        """Return whether the coordinator is to be told this row now.

        ``to``: the coordinator and the number of its view; it keeps rows of that view alone.
        """
        age_s = now_s - self.at_s
        if age_s < max(ROW_PAUSE_S, ROW_PAUSE_PER_MEMBER_S * members):
            return False
        return to != self.to or age_s >= ROW_S or has_changed(self.said, row)

    def sent(self, row: LinkRow, to: tuple[bytes, int], now_s: float) -> None:
        self.said, self.to, self.at_s = row, to, now_s


def has_changed(before: LinkRow | None, after: LinkRow) -> bool:
    """Return whether somebody who knows ``before`` should know ``after``."""
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
