"""Define what decides: promises, votes, views with their proof, commits. Signed (signing.py).

``lineage`` and ``view`` stand first in every message that acts inside a view: a receiver drops
other lineages, answers older views with INSTALL and asks newer ones by PROBE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from atoll.peer.membership.view import (
    MEMBERS_MAX,
    Attempts,
    Ballot,
    Digest,
    Incarnation,
    Lineage,
    PeerId,
    Rounds,
    View,
    Views,
)
from atoll.peer.net.wire import Within, message
from atoll.peer.rounds.entries import ROUNDS_IN_FLIGHT_MAX, Fragment

Signature = Annotated[bytes, Within(0, 64)]  # Ed25519; empty before it is signed


@dataclass(frozen=True, slots=True)
class InView:
    """Hold the fields with which every message inside a view begins."""

    lineage: Lineage
    view: Views


@message(wire="Run")
@dataclass(frozen=True, slots=True)
class Run:
    """Describe an attempt that a peer knows of.

    It has the root of its result if the peer holds or attests it.
    """

    round: Rounds
    attempt: Attempts
    fragment: Fragment = 0
    root: Digest = b""


Runs = Annotated[tuple[Run, ...], Within(0, ROUNDS_IN_FLIGHT_MAX)]


@message(wire="Prepare")
@dataclass(frozen=True, slots=True)
class Prepare(InView):
    ballot: Ballot


@message(wire="Report")
@dataclass(frozen=True, slots=True)
class Report:
    """Report what a voter holds, so that nothing that may have been committed is lost.

    ``holds``: it has the state after ``round``; witnesses and peers in doubt have not.
    """

    round: Rounds
    chain: Digest
    holds: bool
    runs: Runs = ()  # the results beyond `round` that it is READY for


@message(wire="Promise")
@dataclass(frozen=True, slots=True)
class Promise(InView):
    ballot: Ballot
    report: Report
    accepted_ballot: Ballot | None = None
    accepted_view: View | None = None
    inc: Incarnation = 0
    sig: Signature = b""


@message(wire="Accept")
@dataclass(frozen=True, slots=True)
class Accept(InView):
    ballot: Ballot
    proposal: View


@message(wire="Accepted")
@dataclass(frozen=True, slots=True)
class Accepted(InView):
    """Tell all voters of our vote for a proposal: every acceptor learns the decision itself."""

    ballot: Ballot
    proposal: View
    inc: Incarnation = 0
    sig: Signature = b""


@message(wire="Vote")
@dataclass(frozen=True, slots=True)
class Vote:
    """Say whose ACCEPTED it was, with its signature."""

    peer: PeerId
    inc: Incarnation
    sig: Signature


@message(wire="Proof")
@dataclass(frozen=True, slots=True)
class Proof:
    """Show why a view is decided.

    These voters of the view before it have accepted it at one ballot.
    """

    lineage: Lineage
    view: Views
    ballot: Ballot
    votes: Annotated[tuple[Vote, ...], Within(0, MEMBERS_MAX)]


@message(wire="Install")
@dataclass(frozen=True, slots=True)
class Install:
    """Announce a decided view, with its proof; founding views have none.

    ``leave`` of an older one has ended with it.
    """

    decided: View
    proof: Proof | None = None


@message(wire="Commit")
@dataclass(frozen=True, slots=True)
class Commit(InView):
    """Order members to apply the round; signed by the view's coordinator (signing.py)."""

    round: Rounds
    attempt: Attempts
    chain: Digest
    inc: Incarnation = 0
    sig: Signature = b""
