"""Follow one punch from its mapped address to a connection, and judge what observers saw. Sans-I/O.

Both ends go the same way, the one that asks and the one that answers::

    LEARNING --its own mapped address--> AGREEING --the moment has come--> MEETING --a proof--> MADE
        |                                   |                                 |
        +------------------- anything else --+---------------------------------+---> FAILED

For the asker the moment is the arrival of the answer, for the other one half a round trip after it
has sent that. A SYN that is too early is dropped by most routers, which costs nothing but time: the
end that waits with a SYN of its own underway takes the other's whenever it comes.

Every punch has a port of its own, never the one that the peer listens on. From one pair of ports
there is one connection, and a control link and data streams need several. And a connection from the
listening port would let others in through it for a while, so that who is outbound looked as if it
could be dialled.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

from atoll.collectives.errors import LocalProtocolError
from atoll.peer.net.reach import may_dial

# Both ends dial for so long, or for so many round trips: three tries, should packets be lost.
MEET_S, MEET_TRIPS = 2.0, 9.0
# A try that has brought nothing is begun anew after so long, or after so many round trips: sooner
# than TCP repeats a SYN.
TRY_S, TRY_TRIPS = 0.6, 3.0
# After a refusal: the other end's router refuses what comes before its own host has dialled.
REFUSED_S: Final = 0.1
OBSERVERS_MAX: Final = 2  # two that see the same show that a third will


class PunchState(enum.Enum):
    LEARNING = "learning"  # where its own router lets the port appear
    AGREEING = "agreeing"  # with the other end
    MEETING = "meeting"  # both dial
    MADE = "made"
    FAILED = "failed"


class PunchTrigger(enum.Enum):
    LEARNT = "observers have told the mapped address"
    AGREED = "the moment to dial has come"
    MET = "the other end has proved itself"
    FAILED = "it has come to nothing"


_LEARNING, _AGREEING, _MEETING, _MADE, _FAILED = PunchState
PUNCH_TRANSITIONS: Final = {
    (_LEARNING, PunchTrigger.LEARNT): _AGREEING,
    (_LEARNING, PunchTrigger.FAILED): _FAILED,
    (_AGREEING, PunchTrigger.AGREED): _MEETING,
    (_AGREEING, PunchTrigger.FAILED): _FAILED,
    (_MEETING, PunchTrigger.MET): _MADE,
    (_MEETING, PunchTrigger.FAILED): _FAILED,
}


class PunchCourse:
    """Know how far one punch has come."""

    def __init__(self) -> None:
        self.state = PunchState.LEARNING

    def go(self, trigger: PunchTrigger) -> None:
        following = PUNCH_TRANSITIONS.get((self.state, trigger))
        if following is None:
            raise LocalProtocolError(f"a punch that is {self.state.value}: '{trigger.value}'")
        self.state = following


class Mapped(NamedTuple):
    """Name where a router lets a port of this peer appear."""

    ip: str
    port: int


def judge_mappings(seen: Sequence[Mapped]) -> Mapped | None:
    """Return where this peer's port appears to whoever it is sent to.

    None if observers have seen different ports: whoever comes next would see another one again, and
    nobody can tell which (a symmetric NAT).
    """
    return seen[0] if len(set(seen)) == 1 else None


def why_not_meet(mapped: Mapped, stated_ip: str, requester_ip: str) -> str:
    """Return why this peer does not dial an address that another one has named; "" if it does.

    ``stated_ip``: where that peer's control link comes from, as this peer or a relay sees it;
    ``requester_ip``: where this or that relay is. Of a peer that has been met so already both are
    the address where. No other address is dialled, and no machine near
    this one for somebody outside, or anybody could have members knock at doors of third parties.
    """
    if mapped.ip != stated_ip:
        return f"it is at {stated_ip} for the relay, and at {mapped.ip} for whoever observed it"
    if not may_dial(mapped.ip, requester_ip):
        return f"{mapped.ip} is no address to dial for {requester_ip}"
    return ""


def meet_s(round_trip_s: float) -> float:
    """Return for how long both ends dial."""
    return max(MEET_S, MEET_TRIPS * round_trip_s)


def try_s(round_trip_s: float) -> float:
    """Return for how long to wait for one dial before it is begun anew."""
    return max(TRY_S, TRY_TRIPS * round_trip_s)
