"""Let those who come into a run that is under way count only after they have worked for a while.

Theory. An open run lets in peers that nobody knows. A *newcomer* trains, submits and receives like
everybody, but its submissions weigh nothing until it has been a participant of K committed rounds
(``probation`` in the run's specification). The view says who is one and for how many rounds yet. A
view is decided by a quorum, so nobody can say otherwise of itself, nor its coordinator of others,
and who joins learns it with the view. Within a view each member counts for itself in which commits
a newcomer took part; the next view carries what is left, and voters refuse one that takes off more
than that (:func:`wrong_graduation`). What a member has not seen, because it was behind, it
believes.

Founders are no newcomers: members of views in which nothing was trained yet, because the run has
just been founded, or resumed from a checkpoint. Who goes and comes back with its identity counts
again, unless more than K rounds were committed without it: then it begins anew. So does a newcomer
that goes. While no round is committed nobody is forgotten: a run whose founders are all being
restarted waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from atoll.collectives.chunks import ChunkGrid
from atoll.optim.run_spec import CARRIED, MEAN, RunSpec
from atoll.peer.membership.messages import Begin, Terms
from atoll.peer.membership.view import ABSENT_MAX, Absent, Newcomer, View, short
from atoll.peer.membership.witness_owners import Work
from atoll.peer.rounds.entries import STEP

FIRST_STATE = 1  # the round of INIT, before which there is nothing, and in which nothing is trained


def terms_of(spec: RunSpec, grids: Sequence[ChunkGrid] = ()) -> Terms:
    """Return the terms of a run; ``grids``: of its fragments, where there is a state."""
    rule = spec.aggregate if spec.rule is not None and not spec.rule.is_mean else ""
    asynchronous = spec.is_asynchronous
    work = None
    if grids and spec.aggregate == MEAN and spec.method not in CARRIED:
        elements = tuple(grid.total for grid in grids)
        work = Work(elements, grids[0].chunk_elements, spec.codec)
    return Terms(
        spec.probation, spec.least_peers, rule, spec.audit, spec.min_trainers, asynchronous, work
    )


class CompletedRounds:
    """Count the commits of one view that this peer has seen, and each newcomer's part in them."""

    def __init__(self, view: View | None = None) -> None:
        self._newcomers = {newcomer.peer for newcomer in view.newcomers} if view else set[bytes]()
        self.seen = 0
        self.rounds: Counter[bytes] = Counter()  # of newcomers only

    def count(self, begin: Begin | None) -> None:
        """Count a commit of this attempt; None if it was not seen.

        Only a step is work.
        """
        if begin is not None:
            self.seen += 1
            participants = begin.participants if begin.kind == STEP else ()
            self.rounds.update(self._newcomers.intersection(participants))


def rounds_left(view: View, completed: CompletedRounds) -> dict[bytes, int]:
    """Return for how many rounds each newcomer is on probation yet.

    With 0, it counts with the next view.
    """
    return {x.peer: max(0, x.rounds - completed.rounds[x.peer]) for x in view.newcomers}


def graduated(before: View, after: View, completed: CompletedRounds, terms: Terms | None) -> View:
    """Return ``after`` with its newcomers and absent peers, by the proposer's knowledge.

    It is to follow ``before``. ``terms``: None where the specification is not known, as on some
    witnesses.
    """
    probation = terms.probation if terms is not None else None
    if probation == 0:
        return replace(after, newcomers=(), absent=())
    left = _left(before, CompletedRounds() if after.rollback else completed)
    base = after.base_round
    newcomers = []
    for peer in after.peers:
        rounds = left[peer] if peer in left else _of_joiner(before, peer, base, probation or 0)
        newcomers += [Newcomer(peer, rounds)] if rounds else []
    out = {*after.peers, *(ban.peer for ban in after.banned)}
    absent = [x for x in before.absent if x.peer not in out]
    if probation is not None:
        absent = [x for x in absent if base - x.since <= probation]
    gone = [peer for peer in before.peers if peer not in out and not left[peer]]
    absent += [Absent(peer, base) for peer in gone]
    return replace(after, newcomers=tuple(newcomers), absent=tuple(absent[-ABSENT_MAX:]))


def wrong_graduation(
    before: View, after: View, completed: CompletedRounds, terms: Terms | None
) -> str:
    """Return what in the view that is to follow contradicts what this voter knows.

    "" for nothing.
    """
    unseen = max(0, after.base_round - before.base_round - completed.seen)
    at_most = _left(before, CompletedRounds())
    at_least = {
        peer: max(0, most - completed.rounds[peer] - unseen) for peer, most in at_most.items()
    }
    said = {x.peer: x.rounds for x in after.newcomers}
    if before.number > 0 and after.since != before.since:
        return f"the run is said to begin in round {after.since}, not {before.since}"
    for peer in after.peers:
        rounds = said.get(peer, 0)
        if peer in at_most:
            wrong = not at_least[peer] <= rounds <= at_most[peer]
        else:
            probation = terms.probation if terms is not None else rounds
            wrong = rounds != _of_joiner(before, peer, after.base_round, probation)
        if wrong:
            return f"{short(peer)} is to be on probation for {rounds} rounds, which is not so"
    for gone in after.absent:
        went = gone.since == after.base_round and at_least.get(gone.peer) == 0
        if not went and gone not in before.absent:
            return f"{short(gone.peer)} has not gone in round {gone.since} as one that counts"
    return ""


def _left(view: View, completed: CompletedRounds) -> dict[bytes, int]:
    return dict.fromkeys(view.peers, 0) | rounds_left(view, completed)


def _of_joiner(before: View, peer: bytes, base: int, probation: int) -> int:
    """Return for how many rounds one is on probation that was not in the view before."""
    founds = base <= max(before.since, FIRST_STATE)
    is_back = any(x.peer == peer and base - x.since <= probation for x in before.absent)
    return 0 if founds or is_back else probation
