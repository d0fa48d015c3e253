"""Views, votes and constants of tests of elections."""

from __future__ import annotations

from dataclasses import replace

from atoll.peer.membership.events import Effect, Send
from atoll.peer.membership.messages import Accepted
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Ballot, Member, View

__all__ = [
    "CHAIN",
    "LINEAGE",
    "NEXT",
    "OTHER",
    "TIMING",
    "VIEW",
    "A",
    "B",
    "C",
    "D",
    "E",
    "Q",
    "R",
    "sent",
    "view_of",
    "vote",
]

A, B, C, D, E = (name.encode() * 32 for name in "abcde")
LINEAGE = b"L" * 32
CHAIN, OTHER = b"1" * 32, b"2" * 32
R, Q = b"R" * 32, b"Q" * 32  # roots of results
TIMING = Timing()


def view_of(*peers: bytes, base: int = 4, number: int = 3) -> View:
    return View(LINEAGE, number, tuple(Member(p, 1) for p in peers), peers[0], base, CHAIN)


VIEW = view_of(A, B, C)
NEXT = replace(VIEW, number=4, members=VIEW.members[1:], coordinator=B)


def sent(effects: list[Effect], kind: type) -> list[tuple[bytes, object]]:
    sends = [e for e in effects if isinstance(e, Send)]
    return [(s.peer, s.message) for s in sends if isinstance(s.message, kind)]


def vote(proposal: View, ballot: Ballot) -> Accepted:
    return Accepted(LINEAGE, 3, ballot, proposal.digest)
