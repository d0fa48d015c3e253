"""Remember with whom punching works, and when to try it again where it does not. Sans-I/O.

UNTRIED --made--> WORKS <--made-- PAUSED        each failure doubles the pause
   |                |               ^
   +----failed------+----failed-----+           HOPELESS: a router that draws ports by chance
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Final, NamedTuple

from atoll.collectives.errors import LocalProtocolError
from atoll.peer.membership.view import MEMBERS_MAX

# After a failure: it may have been a lost packet; and then twice as long each time.
PAUSE_S: Final = 10.0
PAUSE_S_MAX: Final = 1800.0
# Nothing is known of the pair then; a control link may be about to be replaced.
UNMET_S: Final = 2.0
# Routers are replaced, and machines move, but not often.
HOPELESS_S: Final = 1800.0
PAIRS_MAX: Final = 4 * MEMBERS_MAX


class PairState(enum.Enum):
    UNTRIED = "untried"
    WORKS = "works"
    PAUSED = "paused"
    HOPELESS = "hopeless"


class PairTrigger(enum.Enum):
    MADE = "a connection was made"
    FAILED = "none was"
    HOPELESS = "a router of the two gives each connection another port"
    UNMET = "it has not come to a meeting: an observer or the other end has not answered"


_UNTRIED, _WORKS, _PAUSED, _HOPELESS = PairState
PAIR_TRANSITIONS: Final = {
    (_UNTRIED, PairTrigger.MADE): _WORKS,
    (_UNTRIED, PairTrigger.FAILED): _PAUSED,
    (_UNTRIED, PairTrigger.HOPELESS): _HOPELESS,
    (_UNTRIED, PairTrigger.UNMET): _UNTRIED,
    (_WORKS, PairTrigger.MADE): _WORKS,
    (_WORKS, PairTrigger.FAILED): _PAUSED,
    (_WORKS, PairTrigger.HOPELESS): _HOPELESS,
    (_WORKS, PairTrigger.UNMET): _WORKS,
    (_PAUSED, PairTrigger.MADE): _WORKS,
    (_PAUSED, PairTrigger.FAILED): _PAUSED,
    (_PAUSED, PairTrigger.HOPELESS): _HOPELESS,
    (_PAUSED, PairTrigger.UNMET): _PAUSED,
    (_HOPELESS, PairTrigger.MADE): _WORKS,
    (_HOPELESS, PairTrigger.FAILED): _PAUSED,
    (_HOPELESS, PairTrigger.HOPELESS): _HOPELESS,
    (_HOPELESS, PairTrigger.UNMET): _HOPELESS,
}


class _Pair(NamedTuple):
    state: PairState = PairState.UNTRIED
    until_s: float = float("-inf")  # not to be tried before
    pause_s: float = 0.0


def next_pair_state(state: PairState, trigger: PairTrigger) -> PairState:
    """Return the state that follows, or raise LocalProtocolError if the table has none."""
    following = PAIR_TRANSITIONS.get((state, trigger))
    if following is None:
        raise LocalProtocolError(f"a pair that is {state.value}: '{trigger.value}'")
    return following


class PunchPairs:
    """Know of each peer whether punching works."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[bytes, _Pair] = OrderedDict()

    def state(self, peer: bytes) -> PairState:
        return self._pairs.get(peer, _Pair()).state

    def may_try(self, peer: bytes, now_s: float) -> bool:
        """Return whether a punch is worth trying now."""
        return now_s >= self._pairs.get(peer, _Pair()).until_s

    def pause_s(self, peer: bytes, now_s: float) -> float:
        """Return for how long ``peer`` is not to be tried."""
        return max(0.0, self._pairs.get(peer, _Pair()).until_s - now_s)

    def take(self, peer: bytes, trigger: PairTrigger, now_s: float) -> bool:
        """Remember what has come of a punch; return whether that is news."""
        before = self._pairs.get(peer, _Pair())
        # Streams of a round are opened together: what fails together is one failure.
        failed = trigger in (PairTrigger.FAILED, PairTrigger.UNMET)
        is_repeated = failed and now_s < before.until_s
        state = next_pair_state(before.state, trigger)
        pause_s = 0.0
        if trigger is PairTrigger.UNMET or is_repeated:
            pause_s = before.pause_s
        elif state is PairState.PAUSED:
            pause_s = min(max(PAUSE_S, 2 * before.pause_s), PAUSE_S_MAX)
        elif state is PairState.HOPELESS:
            pause_s = HOPELESS_S
        wait_s = UNMET_S if trigger is PairTrigger.UNMET else pause_s
        until_s = before.until_s if is_repeated else now_s + wait_s
        self._pairs[peer] = _Pair(before.state if is_repeated else state, until_s, pause_s)
        self._pairs.move_to_end(peer)
        if len(self._pairs) > PAIRS_MAX:
            self._pairs.popitem(last=False)
        return self._pairs[peer].state is not before.state
