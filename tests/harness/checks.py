"""What must hold in every run, checked while it happens (invariants of design/membership.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.peer.events import Apply
from atoll.peer.membership import Node
from atoll.peer.views import View, is_quorum

__all__ = ["Checker", "can_recover"]


class Checker:
    """I1 one view per number, I2 and I3 one chain per round, I5 commits survive; per lineage."""

    def __init__(self) -> None:
        self.views: dict[tuple[bytes, int], View] = {}
        self.commits: dict[tuple[bytes, int], tuple[int, bytes]] = {}  # -> first view, chain
        self.digests: dict[tuple[int, bytes], bytes] = {}

    @property
    def latest(self) -> View:
        return max(self.views.values(), key=lambda view: view.number)

    def installed(self, view: View) -> None:
        known = self.views.setdefault((view.lineage, view.number), view)
        assert known == view, f"invariant 1: two views {view.number}: {known} and {view}"
        for (lineage, number), (decided_in, chain) in self.commits.items():
            if lineage == view.lineage and decided_in < view.number:
                self._survives(view, number, chain)

    def committed(self, apply: Apply) -> None:
        begin = apply.begin
        key = (begin.lineage, begin.round)
        decided_in, chain = self.commits.setdefault(key, (begin.view, apply.chain))
        assert chain == apply.chain, f"invariant 2: two histories of round {begin.round}"
        assert decided_in == begin.view, f"round {begin.round} in two views"
        for (lineage, number), view in self.views.items():
            if lineage == begin.lineage and number > begin.view:
                self._survives(view, begin.round, chain)

    def _survives(self, view: View, number: int, chain: bytes) -> None:
        lost = view.base_round < number
        assert not lost, f"invariant 5: view {view.number} forgets committed round {number}"
        if view.base_round == number:
            assert view.base_chain == chain, f"invariant 5: view {view.number} rewrites {number}"

    def state(self, number: int, chain: bytes, digest: bytes) -> None:
        known = self.digests.setdefault((number, chain), digest)
        assert known == digest, f"invariant 3: two states after round {number}"


def can_recover(latest: View, nodes: Mapping[bytes, Node]) -> bool:
    """Whether the latest view has a living quorum and a held base, or a lone survivor of two.

    A view that a living voter has accepted may have been decided, so it binds the next decision
    and needs a living quorum too.
    """
    voters = _living_voters(latest, nodes)
    if not any(node.view == latest for node in voters.values()):
        return False  # those who decided it have taken it to their graves
    if not _holds_base(latest, voters.values()):
        return False
    if len(latest.members) == 2 and len(voters) == 1:
        return True  # the other one's address refuses, or is back with a new incarnation
    elections = [n.succession for n in voters.values() if n.succession and n.view == latest]
    bound = {e.acceptor.accepted.proposal for e in elections if e.acceptor.accepted}
    return all(is_quorum(view, _living_voters(view, nodes)) for view in {latest, *bound})


def _living_voters(view: View, nodes: Mapping[bytes, Node]) -> dict[bytes, Node]:
    return {
        member.peer: nodes[member.peer]
        for member in view.members
        if member.peer in nodes and nodes[member.peer].me.inc == member.inc
    }


def _holds_base(view: View, voters: Iterable[Node]) -> bool:
    """Somebody has to hold everything that may have been committed."""
    held = [view.base_round - 1]
    goal = view.base_round
    for node in voters:
        own = node.follower
        goal = max(goal, own.round)
        if not own.unsynced:
            held.append(own.round if own.ready is None else own.ready.begin.round)
    return max(held) >= goal
