"""Decide whether this peer can be dialled, and remember which others cannot. Sans-I/O.

Theory. Nobody sees from inside whether a router or a firewall lets others in. So this peer asks a
member as soon as it has a link, and members dial it back (net/reach.py). What came back moves a
small machine:

    UNKNOWN --asked--> ASKED --somebody elsewhere got through--> REACHABLE
                         |  \\--nobody did--> OUTBOUND
                         +--no answer yet, or the asked member alone got through--> UNCONFIRMED

What one asked member says is taken at once, and another one is asked at once as well, because the
first may have had trouble of its own, or lie: it is settled when two have said the same. It asks
again now and then, other members each time, because firewalls are opened and addresses change; a
peer that was reachable is outbound only after two such answers. A member that has dialled us by
itself, from another network, is proof too, as long as nothing speaks against it.

At which address others get through is told to everybody, who will dial it: two asked members must
have named it, or one could have the whole run dial any machine. One is enough where nobody else
answers: else a forwarded port would be of no use in a run that has one peer with an open port.

An *outbound* peer is a full trainer: others ask it to dial where they would have dialled it. What
others say of themselves is kept for each peer (:class:`OthersReach`), because who dials whom, who
coordinates and what is planned depends on it. It is in no view: each change would be a new view.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from atoll.collectives.errors import LocalProtocolError
from atoll.peer.membership.view import MEMBERS_MAX
from atoll.peer.net.address_kind import LOOPBACK, NAME, PUBLIC, address_kind
from atoll.peer.net.connection_limits import origin_of
from atoll.peer.net.reach_messages import OK, ReachAnswer, ReachAt, ReachTold

# Without an answer so soon after the first question "not confirmed yet" is said: with the time that
# a daemon takes to start and to make its first link that is within 3 s.
LATE_S = 0.5
# While nothing is settled, the next member is asked so soon after the last one.
NEXT_S = 1.0
# A member dials for the same asker once a minute (net/reach.py); where nothing is certain yet it is
# asked again after that time.
UNCONFIRMED_AGAIN_S = 65.0
# Who is outbound may open a port at any time, and wants to see that it helped.
OUTBOUND_AGAIN_S = 120.0
# Firewalls that close are rare, and who is dialled by others notices by their silence.
REACHABLE_AGAIN_S = 900.0
# After links were lost something may have changed: a new address, another router. Not at once,
# because whoever was lost is dialled again first.
AFTER_LOSS_S = 5.0
SETTLED_BY = 2  # asked members that have said the same, one after the other
ASKED_MAX = 64  # members whose turn is remembered
PEERS_MAX = 4 * MEMBERS_MAX  # peers of whom it is remembered whether they are outbound


class ReachState(Enum):
    UNKNOWN = "unknown"
    ASKED = "asked"
    UNCONFIRMED = "unconfirmed"
    REACHABLE = "reachable"
    OUTBOUND = "outbound"


class ReachTrigger(Enum):
    ASKED = "a member was asked"
    LATE = "no answer yet"
    CONFIRMED = "a member elsewhere got through"
    NEIGHBOUR = "only the asked member got through"
    BLOCKED = "nobody got through"
    UNANSWERED = "nobody could tell"
    DIALLED = "a member of another network has dialled this peer"
    CHANGED = "this peer's own address has changed"


_UNKNOWN, _ASKED, _UNCONFIRMED = ReachState.UNKNOWN, ReachState.ASKED, ReachState.UNCONFIRMED
_REACHABLE, _OUTBOUND = ReachState.REACHABLE, ReachState.OUTBOUND

REACH_TRANSITIONS: dict[tuple[ReachState, ReachTrigger], ReachState] = {
    (_UNKNOWN, ReachTrigger.ASKED): _ASKED,
    (_UNKNOWN, ReachTrigger.DIALLED): _REACHABLE,
    (_UNKNOWN, ReachTrigger.CHANGED): _UNKNOWN,
    (_ASKED, ReachTrigger.LATE): _UNCONFIRMED,
    (_ASKED, ReachTrigger.CONFIRMED): _REACHABLE,
    (_ASKED, ReachTrigger.NEIGHBOUR): _UNCONFIRMED,
    (_ASKED, ReachTrigger.BLOCKED): _OUTBOUND,
    (_ASKED, ReachTrigger.UNANSWERED): _UNCONFIRMED,
    (_ASKED, ReachTrigger.DIALLED): _REACHABLE,
    (_ASKED, ReachTrigger.CHANGED): _ASKED,
    (_UNCONFIRMED, ReachTrigger.ASKED): _UNCONFIRMED,
    (_UNCONFIRMED, ReachTrigger.CONFIRMED): _REACHABLE,
    (_UNCONFIRMED, ReachTrigger.NEIGHBOUR): _UNCONFIRMED,
    (_UNCONFIRMED, ReachTrigger.BLOCKED): _OUTBOUND,
    (_UNCONFIRMED, ReachTrigger.UNANSWERED): _UNCONFIRMED,
    (_UNCONFIRMED, ReachTrigger.DIALLED): _REACHABLE,
    (_UNCONFIRMED, ReachTrigger.CHANGED): _UNCONFIRMED,
    (_REACHABLE, ReachTrigger.ASKED): _REACHABLE,
    (_REACHABLE, ReachTrigger.CONFIRMED): _REACHABLE,
    (_REACHABLE, ReachTrigger.NEIGHBOUR): _REACHABLE,
    (_REACHABLE, ReachTrigger.BLOCKED): _UNCONFIRMED,  # the next answer decides
    (_REACHABLE, ReachTrigger.UNANSWERED): _REACHABLE,
    (_REACHABLE, ReachTrigger.DIALLED): _REACHABLE,
    (_REACHABLE, ReachTrigger.CHANGED): _UNCONFIRMED,
    (_OUTBOUND, ReachTrigger.ASKED): _OUTBOUND,
    (_OUTBOUND, ReachTrigger.CONFIRMED): _REACHABLE,
    (_OUTBOUND, ReachTrigger.NEIGHBOUR): _OUTBOUND,
    (_OUTBOUND, ReachTrigger.BLOCKED): _OUTBOUND,
    (_OUTBOUND, ReachTrigger.UNANSWERED): _OUTBOUND,
    # Whoever dialled may be behind the same router: only a dial-back from elsewhere counts now.
    (_OUTBOUND, ReachTrigger.DIALLED): _OUTBOUND,
    (_OUTBOUND, ReachTrigger.CHANGED): _OUTBOUND,  # until an answer says otherwise
}


def next_reach_state(state: ReachState, trigger: ReachTrigger) -> ReachState:
    """Return the state that follows, or raise LocalProtocolError if the table has none."""
    following = REACH_TRANSITIONS.get((state, trigger))
    if following is None:
        raise LocalProtocolError(f"reachability {state.value} does not know '{trigger.value}'")
    return following


class DialledBy(NamedTuple):
    """Hold what came of an asking: who was asked, our address as seen there, who got what."""

    asked: bytes
    observed: str
    answers: tuple[ReachAnswer, ...]


def judge_answers(found: DialledBy, *, leads_here: bool) -> ReachTrigger:
    """Return what the answers of one asking mean.

    ``leads_here``: whether the address that this peer advertises is the one that was dialled, or
    one that is private and of no use to whoever is elsewhere. A failure proves nothing otherwise,
    because nobody has dialled what we advertise.
    """
    is_here = address_kind(found.observed) == LOOPBACK  # all are on one machine
    elsewhere = [one for one in found.answers if one.by != found.asked or is_here]
    if any(one.outcome == OK for one in elsewhere):
        return ReachTrigger.CONFIRMED
    if not elsewhere and any(one.outcome == OK for one in found.answers):
        return ReachTrigger.NEIGHBOUR
    if not found.answers or not leads_here:
        return ReachTrigger.UNANSWERED
    return ReachTrigger.BLOCKED


class AskableMember(NamedTuple):
    """Name a member that this peer could ask: linked, and to be dialled at ``address``."""

    peer: bytes
    address: str
    ip: str


class OwnReach:
    """Know whether this peer can be dialled, and say when whom to ask.

    ``found``: the answers that count at present; ``why``: why there is none; ``at``: the IP address
    at which somebody has got through, "" if nobody has, or too few have named it.
    """

    def __init__(self) -> None:
        self.state = ReachState.UNKNOWN
        self.found: DialledBy | None = None
        self.why = ""
        self.at = ""
        self.dialled_by: tuple[bytes, str] | None = None  # who has dialled us unasked, from where
        self.neighbour: tuple[bytes, str] | None = None  # the same, of one in the same network
        self._asked_s: OrderedDict[bytes, float] = OrderedDict()
        self._last_s = float("-inf")
        self._asking: bytes | None = None
        self._verdict: tuple[ReachTrigger, frozenset[bytes]] | None = None  # the last, said by whom
        self._named: tuple[str, frozenset[bytes]] = "", frozenset()  # where it was dialled, by whom
        self._askable: frozenset[bytes] = frozenset()  # who could be asked ...
        self._mute: set[bytes] = set()  # ... and had nothing to say of it
        self._has_moved = False  # the address has changed since the question: its answer is stale
        self._ip = ""
        self._soon_s = float("inf")  # something has changed: ask then, whatever the state

    @property
    def outbound(self) -> bool:
        """Return whether nobody can dial this peer, as far as is known."""
        return self.state is ReachState.OUTBOUND

    @property
    def asking(self) -> bytes | None:
        """Return who is being asked now."""
        return self._asking

    def next_asked(
        self, members: Sequence[AskableMember], own_ip: str, now_s: float
    ) -> AskableMember | None:
        """Return whom to ask now, if anybody; ``asked`` is to follow.

        It is whoever was asked longest ago, of those that were never asked one of another network.
        """
        self._askable = frozenset(one.peer for one in members)
        if self._asking is not None or not members:
            return None
        network = origin_of(own_ip).network if own_ip else ""

        def turn(one: AskableMember) -> tuple[float, bool]:
            return self._asked_s.get(one.peer, float("-inf")), origin_of(one.ip).network == network

        first = min(members, key=turn)
        is_new = first.peer not in self._asked_s
        pause_s = NEXT_S if is_new and not self._is_settled() else self._pause_s()
        due_s = min(self._last_s + pause_s, self._soon_s)
        return first if now_s >= due_s else None

    def _is_settled(self) -> bool:
        """Return whether enough asked members have said what this peer is."""
        is_decided = self.state in (ReachState.REACHABLE, ReachState.OUTBOUND)
        return is_decided and self._verdict is not None and len(self._verdict[1]) >= SETTLED_BY

    def _pause_s(self) -> float:
        pauses_s = {
            ReachState.OUTBOUND: OUTBOUND_AGAIN_S,
            ReachState.REACHABLE: REACHABLE_AGAIN_S,
        }
        return pauses_s.get(self.state, UNCONFIRMED_AGAIN_S)

    def asked(self, peer: bytes, now_s: float) -> None:
        self._asking, self._last_s, self._soon_s = peer, now_s, float("inf")
        self._has_moved = False
        self._asked_s[peer] = now_s
        self._asked_s.move_to_end(peer)
        if len(self._asked_s) > ASKED_MAX:
            self._asked_s.popitem(last=False)
            self._mute &= self._asked_s.keys()
        self._go(ReachTrigger.ASKED)

    def tick(self, now_s: float) -> None:
        if self.state is ReachState.ASKED and now_s >= self._last_s + LATE_S:
            self._go(ReachTrigger.LATE)

    def heard(self, found: DialledBy, *, leads_here: bool) -> None:
        """Take what the asked member and its helpers have answered."""
        if self._has_moved:
            self.unanswered("the address of this peer has changed meanwhile")
            return
        self._asking = None
        self._mute.discard(found.asked)
        trigger = judge_answers(found, leads_here=leads_here)
        if trigger is ReachTrigger.UNANSWERED:
            self.why = "nobody could try the address that is advertised"
            self._note_mute(found.asked)
        else:
            self.found, self.why = found, ""
            self._note_name(found)
            self._note_verdict(trigger, found.asked)
        self._go(trigger)

    def _note_verdict(self, trigger: ReachTrigger, by: bytes) -> None:
        before, said_by = self._verdict or (trigger, frozenset[bytes]())
        self._verdict = trigger, (said_by if before is trigger else frozenset()) | {by}

    def _note_name(self, found: DialledBy) -> None:
        if not any(one.outcome == OK for one in found.answers):
            self._named, self.at = ("", frozenset()), ""
            return
        before, named_by = self._named
        named_by = named_by if before == found.observed else frozenset()
        self._named = found.observed, named_by | {found.asked}
        self.at = self._agreed()
        if not self.at:
            self._ask_soon(self._last_s)

    def _note_mute(self, peer: bytes) -> None:
        self._mute.add(peer)
        self.at = self.at or self._agreed()  # perhaps nobody else is left to name it

    def _agreed(self) -> str:
        """Return the address that the last answers have named if they are enough, else ""."""
        named, named_by = self._named
        others = self._askable - self._mute - named_by
        return named if len(named_by) >= SETTLED_BY or not others else ""

    def unanswered(self, why: str) -> None:
        """Note that an asking came to nothing."""
        if self._asking is not None:
            self._note_mute(self._asking)
        self._asking = None
        if self.found is None or self._has_moved:  # else what was found before still counts
            self.why = why
        self._go(ReachTrigger.UNANSWERED)

    def dialled(self, by: bytes, ip: str, own_ip: str, now_s: float) -> None:
        """Note that a member has dialled us by itself; neighbours prove nothing."""
        if not own_ip or origin_of(ip).network == origin_of(own_ip).network:
            self.neighbour = by, ip
            return
        self.dialled_by = by, ip
        if self.outbound:
            self._ask_soon(now_s)
        self._go(ReachTrigger.DIALLED)

    def came_from(self, own_ip: str, now_s: float) -> None:
        """Note the address that this machine has on a link that it has dialled."""
        if self._ip and own_ip and own_ip != self._ip:
            self._has_moved = True
            self._verdict, self._named = None, ("", frozenset())
            self._go(ReachTrigger.CHANGED)
            self._ask_soon(now_s)
        self._ip = own_ip or self._ip

    def mapping_changed(self, now_s: float) -> None:
        """Note that the router forwards another port, or none any more."""
        self._verdict = None
        self._ask_soon(now_s)

    def link_lost(self, now_s: float) -> None:
        self._ask_soon(now_s + AFTER_LOSS_S)

    def _ask_soon(self, at_s: float) -> None:
        """Ask at this time, but not the same members again within the time that they mind."""
        self._soon_s = min(self._soon_s, max(at_s, self._last_s + UNCONFIRMED_AGAIN_S))

    def _go(self, trigger: ReachTrigger) -> None:
        self.state = next_reach_state(self.state, trigger)


class OthersReach:
    """Remember which peers are outbound, and where others can be dialled.

    It is what each says of itself, and what the coordinator hands on: nobody else is heard about
    third peers, and a peer's own word counts for more.
    """

    def __init__(self) -> None:
        self._own_word: OrderedDict[bytes, ReachTold] = OrderedDict()
        self._handed_on: dict[bytes, ReachTold] = {}  # by whom, of linked peers
        self.coordinator = b""

    def told(self, peer: bytes, message: ReachTold) -> None:
        self._own_word[peer] = replace(message, others=(), addresses=())
        self._own_word.move_to_end(peer)
        if len(self._own_word) > PEERS_MAX:
            self._own_word.popitem(last=False)
        self._handed_on.pop(peer, None)
        if message.others or message.addresses:
            self._handed_on[peer] = message

    def unlinked(self, peer: bytes) -> None:
        """Forget what ``peer`` has said of others, unless it coordinates: nobody else says it.

        What it said of itself may be true still.
        """
        if peer != self.coordinator:
            self._handed_on.pop(peer, None)

    def is_outbound(self, peer: bytes) -> bool:
        own = self._own_word.get(peer)
        if own is not None:
            return own.outbound
        told = self._handed_on.get(self.coordinator)
        return told is not None and peer in told.others

    def is_mapped(self, peer: bytes) -> bool:
        """Return whether a router forwards the port of ``peer`` for a while, by its own word."""
        own = self._own_word.get(peer)
        return own is not None and own.mapped

    def relay_bytes_per_s(self, peer: bytes) -> int:
        """Return what ``peer`` has said that it carries of others' data; 0: nothing."""
        own = self._own_word.get(peer)
        return own.relay if own is not None else 0

    def address_of(self, peer: bytes) -> str:
        """Return where ``peer`` can be dialled, if that is not what it advertises; else ""."""
        own = self._own_word.get(peer)
        if own is not None:
            return own.address
        told = self._handed_on.get(self.coordinator)
        addresses = told.addresses if told is not None else ()
        return next((at.address for at in addresses if at.peer == peer), "")

    def hand_on(self, peers: Collection[bytes]) -> tuple[tuple[bytes, ...], tuple[ReachAt, ...]]:
        """Return which of these have said that they are outbound, and where others can be dialled.

        Nothing is handed on that was handed on.
        """
        said = [(p, self._own_word[p]) for p in sorted(peers) if p in self._own_word]
        said = said[:MEMBERS_MAX]
        outbound = tuple(peer for peer, told in said if told.outbound)
        return outbound, tuple(ReachAt(peer, told.address) for peer, told in said if told.address)


def leads_here(advertised: Collection[str], observed: str, own_ip: str) -> bool:
    """Return whether a dial of ``observed`` says something about the advertised addresses.

    ``advertised``: the IP addresses of the host that this peer advertises, or its name where that
    cannot be resolved here. ``own_ip``: what this machine has itself. If that is what others see,
    there is no router between, and another address that is advertised is a proxy of some kind.
    Otherwise a private one is of no use to whoever is elsewhere. See :func:`judge_answers`.
    """
    if observed in advertised:
        return True
    if observed == own_ip:
        return False
    return not any(address_kind(host) in (PUBLIC, NAME) for host in advertised)
