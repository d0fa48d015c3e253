"""Decide which link to probe next, whose turn it is, and when a probe is enough. No clock.

A link that carries rounds is measured by them. What they cannot show, because streams share links
then or are paced, a probe shows: bytes that the other side drops, sent as fast as they go, to one
peer at a time and never in a reduction. Probes are few: in an hour no more than one round sends.

A peer sends or receives one probe at a time. Two probes that meet in one peer disturb each other,
whatever their directions. Two that arrive share its downlink. One that leaves while another arrives
gets its acknowledgements from behind the other's queue: a round trip of 20 ms becomes one of 80,
and TCP, whose window is made for 20, sends half of what the link can carry, and goes on so. So a
peer gives its turn to one other at a time and to nobody while it sends a probe itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

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
# Who has not said by then that its probe is over is gone, or does not know better.
TURN_S = PROBE_S_MAX + 2.0
# The others get their turn before the same peer gets another ...
AGAIN_S = 5.0
# ... but not where a turn has ended so soon: it was given back unused.
UNUSED_S = 0.5


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


# ---------------------------------------------------------------- whose turn it is


class ProbeTurns:
    """Keep the turns of the peer ``me``.

    Call ``asks`` before the question to another one, ``begins`` when that has said yes, and
    ``ends`` in any case; and ``ask`` and ``over`` for what others say.
    """

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._asking = self._sending = False  # this peer itself
        self._peer = b""  # to whom the turn was given ...
        self._until_s = float("-inf")  # ... and how long it lasts
        self._last: dict[bytes, float] = {}  # when the last turn of each began, of the last AGAIN_S

    def given(self, now_s: float) -> bool:
        """Return whether somebody else has the turn."""
        return now_s < self._until_s

    def asks(self) -> None:
        self._asking = True

    def begins(self, now_s: float) -> bool:
        """Note that the other side agrees to a probe.

        Returns False if this peer has given its turn away meanwhile.
        """
        self._asking, self._sending = False, not self.given(now_s)
        return self._sending

    def ends(self) -> None:
        self._asking = self._sending = False

    def ask(self, peer: bytes, now_s: float, *, busy: bool) -> bool:
        """Return whether ``peer`` may begin a probe now; if so it has the turn.

        ``busy``: a reduction, or other data on the way from here or to here.
        """
        self._last = {p: at_s for p, at_s in self._last.items() if now_s - at_s < AGAIN_S}
        taken = self._peer != peer and self.given(now_s)
        # Of those that ask each other, in a pair or in a circle, one must give in, and not all.
        ahead = self._sending or (self._asking and self._me < peer)
        if busy or taken or ahead or peer in self._last:
            return False
        self._peer, self._until_s = peer, now_s + TURN_S
        self._last[peer] = now_s
        return True

    def over(self, peer: bytes, now_s: float) -> None:
        """Note that ``peer`` has ended its probe, or gives its turn back."""
        if peer != self._peer:
            return
        self._until_s = float("-inf")
        if now_s - self._last.get(peer, float("-inf")) < UNUSED_S:
            del self._last[peer]
