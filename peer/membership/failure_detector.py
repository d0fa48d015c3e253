"""Suspect members that have fallen silent: where a view's silence becomes a failure.

Theory. A process that has ended and one that is slow look alike from afar, so a failure detector
can only suspect (Chandra and Toueg, 1996); the protocol is safe whatever it says, and goes on as
soon as it is right about a quorum. The coordinator has one for its members (roster.py: it hears
heartbeats) and every member one for its coordinator (election.py: it hears whatever the coordinator
says in the view). Who is in no view is given up by joining.py and admission.py, after the same
limit.

How long a silence is too long follows what is known of the other side's machine::

    limit = max(failure limit, 4 x its usual gap, 2 x the lag that it announces)

but at most LIMIT_MAX_S. The *failure limit* (``Timing.failure_s``) is four heartbeats and two round
trips. *Gaps* are the silences that were none: those that ended with a word. *Lag* is how late the
other side's event loop usually was lately, as it says in its beats. Usual is what has come several
times in a short while (``Peaks``): whoever was stopped twice need not be slow. So on a machine that
others keep busy nobody takes the slow for the dead, and on a quiet one a death shows at once.

A process may be silent while its machine is not: its kernel acknowledges what we send
(``KernelAnswered``). Then it is *slow*: stopped, swapped out, or without a processor for a while.
Slow peers are suspected after ``Timing.slow_s``, where that is longer than their limit: rounds go
on without them soon, and their place is kept for the removal time.

What is certain is not decided here: an address that refuses connections, and a newer incarnation
that has called (``Situation.refused``, ``Roster.refused``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from atoll.peer.membership.timing import Timing

LIMIT_MAX_S = 8.0  # a member that is really gone on a starved machine is out soon after
GAPS_IN_LIMIT = 4
LAGS_IN_LIMIT = 2
LAG_MAX_S = 60.0  # more than this, said by a peer, is no lag
# A process without a processor is late again and again; one that is stopped, by a person or by the
# suspend of its machine, seldom three times in so short a while.
PEAK_WINDOW_S = 16.0
PEAK_MAX_S = 3.0  # what is longer was a stop: a scheduler lets nobody wait for so long
USUAL_PEAKS = 4
PEAKS_KEPT = 100


class Peaks:
    """Keep how long something usually is that is seen with every heartbeat, where it is long.

    Only what is above ``least_s`` is kept, mostly nothing, and not above PEAK_MAX_S.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self.seen: deque[tuple[float, float]] = deque(maxlen=PEAKS_KEPT)  # when, and how long

    def note(self, value_s: float, now_s: float) -> None:
        if self._least_s < value_s <= PEAK_MAX_S:
            self.seen.append((now_s, value_s))

    def usual_s(self, now_s: float) -> float:
        """Return what USUAL_PEAKS of the last PEAK_WINDOW_S have reached; 0 if there are fewer."""
        if not self.seen:
            return 0.0
        while self.seen and now_s - self.seen[0][0] > PEAK_WINDOW_S:
            self.seen.popleft()
        if len(self.seen) < USUAL_PEAKS:
            return 0.0
        return sorted(value_s for _, value_s in self.seen)[-USUAL_PEAKS]


class Machines:
    """Keep what is known of the machines that peers run on, from view to view."""

    def __init__(self) -> None:
        self._lags_s: dict[bytes, float] = {}
        self._answered_s: dict[bytes, float] = {}

    def says_lag(self, peer: bytes, lag_s: float) -> None:
        """Take how late a peer's event loop is, as it says itself."""
        self._lags_s[peer] = lag_s if 0 <= lag_s <= LAG_MAX_S else 0.0

    def answered(self, peer: bytes, at_s: float) -> None:
        """Note when a peer's kernel has acknowledged something last."""
        self._answered_s[peer] = at_s

    def lag_s(self, peer: bytes) -> float:
        return self._lags_s.get(peer, 0.0)

    def answered_s(self, peer: bytes) -> float:
        return self._answered_s.get(peer, float("-inf"))

    def keep(self, peers: Collection[bytes]) -> None:
        """Forget all others: it stays small."""
        self._lags_s = {p: lag_s for p, lag_s in self._lags_s.items() if p in peers}
        self._answered_s = {p: at_s for p, at_s in self._answered_s.items() if p in peers}


@dataclass(frozen=True, slots=True)
class Silence:
    """Describe what the silence of an attempt's participants means for its limits.

    ``late_s``: by how much the limit of one is longer than the shortest. ``is_open``: one says
    nothing for longer than that, and it is not known yet why. ``slow``: whose kernels answer.
    """

    late_s: float = 0.0
    is_open: bool = False
    slow: frozenset[bytes] = frozenset()


class FailureDetector:
    """Know when each peer was heard last, within one view: that gives everyone a fresh start."""

    def __init__(
        self, timing: Timing, peers: Iterable[bytes], now_s: float, machines: Machines | None = None
    ) -> None:
        self._timing = timing
        self._machines = machines or Machines()
        self._heard_s = dict.fromkeys(peers, now_s)
        self._gaps = {p: Peaks(timing.failure_s / GAPS_IN_LIMIT) for p in self._heard_s}
        self._asked_s: dict[bytes, float] = {}  # when its kernel was looked at last

    def heard(self, peer: bytes, now_s: float) -> None:
        self._gaps[peer].note(now_s - self._heard_s[peer], now_s)
        self._heard_s[peer] = now_s

    def forgive(self, peer: bytes, now_s: float) -> None:
        """Give a peer a fresh start, though it has said nothing."""
        self._heard_s[peer] = now_s

    def silent_since(self, peer: bytes, since_s: float) -> None:
        """Count a peer as silent from before this view on."""
        self._heard_s[peer] = min(self._heard_s[peer], since_s)

    def last_heard_s(self, peer: bytes) -> float:
        return self._heard_s[peer]

    def silent_s(self, peer: bytes, now_s: float) -> float:
        """Return for how long nothing has been heard of a peer."""
        return now_s - self._heard_s[peer]

    def hears_all(self, now_s: float) -> bool:
        """Return whether nobody has been silent for half of the failure limit.

        Then nobody is suspected, and no kernel is looked at.
        """
        earliest_s = min(self._heard_s.values(), default=now_s)
        return now_s - earliest_s <= self._timing.failure_s / 2

    # ------------------------------------------------------------ limits

    def usual_limit_s(self, peer: bytes, now_s: float) -> float:
        """Return how long a silence of a peer may be, whatever its kernel says."""
        gaps_s = GAPS_IN_LIMIT * self._gaps[peer].usual_s(now_s)
        lag_s = LAGS_IN_LIMIT * self._machines.lag_s(peer)
        return min(max(self._timing.failure_s, gaps_s, lag_s), LIMIT_MAX_S)

    def suspected(self, now_s: float) -> list[bytes]:
        """Return all peers that :meth:`suspects` suspects."""
        if self.hears_all(now_s):
            return []  # as nearly always
        return [peer for peer in self._heard_s if self.suspects(peer, now_s)]

    def is_answered(self, peer: bytes, now_s: float) -> bool:
        """Return whether a peer's kernel has acknowledged lately what we send."""
        return now_s - self._machines.answered_s(peer) <= self._timing.failure_s

    def _limit_s(self, peer: bytes, now_s: float) -> float:
        limit_s = self.usual_limit_s(peer, now_s)
        return max(limit_s, self._timing.slow_s) if self.is_answered(peer, now_s) else limit_s

    def suspects(self, peer: bytes, now_s: float) -> bool:
        """Return whether a peer has been silent for so long that nothing waits for it."""
        silent_s = now_s - self._heard_s[peer]
        return silent_s > self._timing.failure_s and silent_s > self._limit_s(peer, now_s)

    def trusts(self, peer: bytes, now_s: float) -> bool:
        """Return whether a peer was heard so lately that nobody else's suspicion counts."""
        silent_s = self.silent_s(peer, now_s)
        half_s = self._timing.failure_s / 2
        return silent_s < half_s or silent_s < self._limit_s(peer, now_s) / 2

    def to_look_at(self, now_s: float) -> list[bytes]:
        """Return the peers whose kernels are to be looked at now, because they are silent."""
        found: list[bytes] = []
        if self.hears_all(now_s):
            return found
        for peer, heard_s in self._heard_s.items():
            if now_s - heard_s <= self._timing.failure_s / 2:
                continue
            if now_s - self._asked_s.get(peer, float("-inf")) >= self._timing.heartbeat_s / 2:
                self._asked_s[peer] = now_s
                found.append(peer)
        return found

    def discount_pause(self, pause_s: float) -> None:
        """Discount a pause in which we were stopped ourselves: nobody was silent meanwhile."""
        for peer in self._heard_s:
            self._heard_s[peer] += pause_s
