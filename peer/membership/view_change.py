"""Go from one view to the next: enter it, be left out of it, give way to another lineage.

Theory. Views of a lineage are numbered and each is decided once, so a newer one replaces an older
one and never the reverse; a view of another lineage comes only by being decided here (a fork), by a
fork that continues the own lineage while this peer has no quorum, or by giving way when lineages
meet (lineages.py). Whoever is left out of a view comes back as a new incarnation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.peer.membership.coordinator import Coordinator
from atoll.peer.membership.election import Election
from atoll.peer.membership.events import Connect, Installed, Note
from atoll.peer.membership.messages import Install, Meet, Proof
from atoll.peer.membership.phase import Phase, Trigger
from atoll.peer.membership.view import View, follows, genesis_chain, is_quorum

if TYPE_CHECKING:
    from atoll.peer.membership.node import Node


class ViewChange:
    """Carry one node from view to view, for its life."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.proof: Proof | None = None  # why the present view is decided, for whom we tell

    def superseded(self, decided: View) -> bool:
        """Return whether a view names a later life of this peer.

        Numbers are on disk before anybody hears of them, so another process must be using this
        identity.
        """
        me = self._node.me
        mine = decided.member(me.peer)
        if mine is None or mine.inc <= me.inc:
            return False
        text = f"view {decided.number} names incarnation {mine.inc} of this peer, not {me.inc}"
        self._node.emit(Note("conflict", text))
        return True

    def on_install(self, install: Install) -> None:
        """Act on a view of which somebody says that it is decided, and shows why."""
        node, decided = self._node, install.decided
        view = node.view
        if view is not None and not self._leads_on(view, decided):
            return
        if self.superseded(decided):
            return
        if not node.signatures.proven(install, view):
            strange = view is not None and node.signatures.strange(install, view)
            why = "is decided by nobody known here" if strange else "comes without its votes"
            text = f"view {decided.number} {why}; ignored"
            node.emit(Note("unproven" if strange else "forged", text))
            return
        mine = decided.member(node.me.peer)
        named = mine is not None and mine.inc == node.me.inc
        if named and view is not None and self._may_forge_bans(install, view):
            text = f"view {decided.number} names bans, and few of those that we know have voted"
            node.emit(Note("unproven", f"{text}; ignored, so we are voted out and come back"))
            return
        if view is None:
            if named and not node.joining.renewing:  # no way back into a view that we have lost
                self.enter(decided, install.proof)
        elif named:
            self.enter(decided, install.proof)
        else:
            self._excluded(install)

    def _may_forge_bans(self, install: Install, view: View) -> bool:
        """Return whether a view names new bans, and too few whom we know have voted for it.

        We have missed the view that has decided it. Then one genuine vote makes a view believable;
        not so bans, which are for ever: they take a quorum of our own view.
        """
        proof, known = install.proof, install.decided.banned == view.banned
        if proof is None or known or (proof.lineage, proof.view) == (view.lineage, view.number):
            return False
        return not is_quorum(view, [vote.peer for vote in proof.votes])

    def _leads_on(self, view: View, decided: View) -> bool:
        """Return whether a view may replace ours.

        It may if it is a later one of our lineage, or a fork that continues it while we have no
        coordinator. Other lineages are for `yield_to`.
        """
        if follows(decided, view):
            return True
        node = self._node
        accepted = node.election.acceptor.accepted if node.election else None
        ours = accepted is not None and accepted.proposal == decided
        yields = ours or node.phase is Phase.CANDIDATE or view.number == 0
        return yields and view.lineage in decided.ancestors

    def on_decided(self, decided: View, proof: Proof) -> None:
        """Install a view that is decided by votes that we have heard ourselves.

        A fork binds only those who made it: others meet it as another lineage.
        """
        if decided.fork and decided.member(self._node.me.peer) is None:
            return
        self.on_install(Install(decided, proof))

    def enter(self, decided: View, proof: Proof | None = None) -> None:
        """Enter a view; all state of the old one ends here."""
        node = self._node
        old, led = node.view, node.coordinator
        silences_s = node.election.silences_s() if node.election is not None else {}
        node.view, self.proof = decided, proof
        node.coordinator = None
        node.refused &= {m.peer for m in decided.members if old is not None and m in old.members}
        node.pace()
        node.signatures.new_view()
        node.election = Election(node, decided)
        node.heartbeats.soon()
        node.heartbeats.halted = node.heartbeats.held = ""
        leads = decided.coordinator == node.me.peer
        node.go(Trigger.LED if leads else Trigger.FOLLOWED)
        node.emit(Note("view", decided.describe(), fields={"view": decided.number}))
        node.emit(Installed(decided))
        node.follower.on_install(decided)
        node.syncing.aim(decided.base_round, decided.base_chain, decided, anew=True)
        node.lineages.on_install(old, decided)
        if leads:
            self._lead(decided, old, led, silences_s)

    def _lead(
        self,
        decided: View,
        old: View | None,
        led: Coordinator | None,
        silences_s: dict[bytes, float],
    ) -> None:
        node = self._node
        node.coordinator = Coordinator(
            decided,
            node.me.peer,
            node.follower,
            node.timing,
            node.emit,
            node.now_s,
            sign=lambda commit: node.signatures.signed(commit, node.me.inc),
            rounds_in_flight=node.rounds_in_flight,
        )
        if led is not None:
            node.coordinator.admission.take_over(led.admission)
            node.coordinator.eligibility.flaky_peers.take_over(
                led.eligibility.flaky_peers, decided.peers
            )
            node.coordinator.barrier.take_over(led.barrier, decided.peers)
        for peer, since_s in silences_s.items():
            node.coordinator.roster.silent_since(peer, since_s)
        for peer in node.refused:
            node.coordinator.roster.refused(peer)
        for peer in sorted({*decided.peers, *(old.peers if old else ())}):
            node.tell_view(peer)
        if node.leave_by_s is not None:
            node.coordinator.admission.leaving.add(node.me.peer)

    def enter_bootstrap_view(self, bootstrap_view: View) -> None:
        """Enter the imaginary view of the founders: it has an election and nothing else."""
        node = self._node
        node.view, self.proof = bootstrap_view, None
        node.go(Trigger.FOLLOWED)
        if node.follower.round == 0:
            node.follower.chain = genesis_chain(bootstrap_view.lineage)
        for member in bootstrap_view.members:
            if member.peer not in node.linked and member.peer != node.me.peer:
                node.emit(Connect(member.peer, member.address))
        node.election = Election(node, bootstrap_view, bootstrap_view=True)

    def leave_bootstrap_view(self, found: View) -> None:
        """Leave our cradle if others have founded the run meanwhile, from another one."""
        view = self._node.view
        if view is not None and view.number == 0 and found.lineage != view.lineage:
            self._out_of_view("the run has been founded by others; joining them", "genesis")

    def _excluded(self, install: Install) -> None:
        """Come back as a new incarnation, or be gone: the others go on without this one.

        A first view may be lost before we are in, and then its members found the run once more.
        """
        node, decided = self._node, install.decided
        founding = node.view is not None and node.view.number == 0
        text = f"view {decided.number} is without this peer; joining again as a new incarnation"
        if self._out_of_view(text, "excluded"):
            if founding and node.me.peer in decided.peers:
                node.bootstrap.fall_back(decided)
            node.joining.excluded(install)

    def yield_to(self, meet: Meet, why: str) -> None:
        """End our lineage here and join the other one.

        Should that be lost before we are in, our own members go on together from what they hold:
        theirs may be all that is left.
        """
        node, ours = self._node, self._node.view
        text = f"giving way to lineage {meet.lineage.hex()[:16]}: {why}; joining it"
        if self._out_of_view(text, "yield"):
            node.emit(Connect(meet.coordinator.peer, meet.coordinator.address))
            if ours is not None:
                node.bootstrap.fall_back(ours)
            node.joining.renew()

    def _out_of_view(self, text: str, kind: str) -> bool:
        """Leave the view; return False if this peer wanted to leave anyway, and has now."""
        node = self._node
        if node.leave_by_s is not None:
            node.leave()
            return False
        node.emit(Note(kind, text))
        node.bootstrap.stop()  # there is a run: never found it again
        node.heartbeats.halted = node.heartbeats.held = ""
        node.go(Trigger.EXCLUDED)
        node.follower.on_excluded()
        node.syncing.excluded()
        node.view = node.election = node.coordinator = None
        return True
