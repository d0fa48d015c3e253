"""Judge a view of which somebody says that it is decided: enter it, or come back without a place.

Theory. Views of a lineage are numbered and each is decided once, so a newer one replaces an older
one and never the reverse; a view of another lineage comes only by being decided here (a fork), by a
fork that continues the own lineage while this peer has no quorum, or by giving way when lineages
meet (forks.py). Whoever is left out of a view comes back as a new incarnation.
"""

from __future__ import annotations

from enum import Enum

from atoll.peer.membership.events import Note
from atoll.peer.membership.messages import Install
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.signing import Signatures
from atoll.peer.membership.situation import Situation
from atoll.peer.membership.view import View, follows, is_quorum


class ViewChange(Enum):
    ENTER = "the view names this incarnation"
    EXCLUDED = "our view has been replaced by one that does not"
    NONE = "there is nothing to do, or nothing that is proven"


def judge(
    install: Install,
    here: Situation,
    signatures: Signatures,
    accepted: View | None,
    *,
    renewing: bool,
) -> ViewChange:
    """Return what a view means to this peer; note what is wrong with it.

    ``accepted`` is the view that we have voted for. ``renewing``: our new life is not stored yet.
    """
    decided, view = install.decided, here.view
    if view is not None and not _leads_on(view, decided, here, accepted):
        return ViewChange.NONE
    if names_later_life(decided, here):
        return ViewChange.NONE
    if not signatures.proven(install, view):
        strange = view is not None and signatures.strange(install, view)
        why = "is decided by nobody known here" if strange else "comes without its votes"
        text = f"view {decided.number} {why}; ignored"
        here.emit(Note("unproven" if strange else "forged", text))
        return ViewChange.NONE
    mine = decided.member(here.me.peer)
    named = mine is not None and mine.inc == here.me.inc
    if view is None:  # no way back into a view that we have lost
        return ViewChange.ENTER if named and not renewing else ViewChange.NONE
    if not named:
        return ViewChange.EXCLUDED
    if _may_forge_bans(install, view):
        text = f"view {decided.number} names bans, and few of those that we know have voted"
        here.emit(Note("unproven", f"{text}; ignored, so we are voted out and come back"))
        return ViewChange.NONE
    return ViewChange.ENTER


def names_later_life(decided: View, here: Situation) -> bool:
    """Return whether a view names a later life of this peer.

    Numbers are on disk before anybody hears of them, so another process must be using this
    identity.
    """
    mine = decided.member(here.me.peer)
    if mine is None or mine.inc <= here.me.inc:
        return False
    text = f"view {decided.number} names incarnation {mine.inc} of this peer, not {here.me.inc}"
    here.emit(Note("conflict", text))
    return True


def _leads_on(view: View, decided: View, here: Situation, accepted: View | None) -> bool:
    """Return whether a view may replace ours.

    It may if it is a later one of our lineage, or a fork that continues it while we have no
    coordinator. Other lineages are for giving way.
    """
    if follows(decided, view):
        return True
    yields = accepted == decided or here.phase is Phase.CANDIDATE or view.number == 0
    return yields and view.lineage in decided.ancestors


def _may_forge_bans(install: Install, view: View) -> bool:
    """Return whether a view names new bans, and too few whom we know have voted for it.

    We have missed the view that has decided it. Then one genuine vote makes a view believable;
    not so bans, which are for ever: they take a quorum of our own view.
    """
    proof, known = install.proof, install.decided.banned == view.banned
    if proof is None or known or (proof.lineage, proof.view) == (view.lineage, view.number):
        return False
    return not is_quorum(view, [vote.peer for vote in proof.votes])
