"""Find, report and resolve forks: what to do when lineages meet.

Theory. A history that went on without a quorum has a lineage of its own, so two of them can never
mix: messages carry their lineage. Every peer keeps looking for those that a change of view has left
behind; a coordinator with a quorum tells peers of other lineages where its own stands (MEET). Of
two that meet the one with the higher (committed round, lineage) wins, and the other's coordinator
ends it: it begins nothing more and tells its members to join the winner as new incarnations
(YIELD). Both cannot give way: each compares a value that the other sent earlier with its own of
now, and rounds only grow; if A gave way, B's value of then was above all that A will ever have, so
no message of A can be above B's. A peer without a quorum has nothing to lose and gives way to any
lineage with a quorum that is as far, or that continues its own. With ``on_fork=halt`` the
coordinators begin no rounds instead, as long as they meet, and leave the choice to people: who
stops one of the two lets the other go on.
"""

from __future__ import annotations

from atoll.collectives.units import duration
from atoll.peer.membership.coordinator import Coordinator
from atoll.peer.membership.events import Connect, Note, Send
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import Meet, Yield
from atoll.peer.membership.situation import Situation
from atoll.peer.membership.view import ANCESTORS_MAX, View, short

STRANGERS_MAX = 64  # peers of former views that are looked for; the latest
RIVAL_S = 30.0  # a lineage that has not been met for so long, 20 times as long as usual, is gone


class Forks:
    """Look for other lineages, and settle with them, for the life of a node."""

    def __init__(self, here: Situation, own: MemberState) -> None:
        self._here = here
        self._own = own
        self._strangers: dict[bytes, str] = {}  # peer -> address
        self._next_s = 0.0
        self._met: dict[bytes, None] = {}  # lineages that have been reported, the latest last
        self._rival = ""  # why ours begins no rounds: the lineage beside it ...
        self._rival_lineage = b""
        self._rival_s = 0.0  # ... and when it was last met

    # ------------------------------------------------------------ finding others

    def on_install(self, before: View | None, view: View, reached: tuple[int, bytes]) -> None:
        """Look for whoever is no member any more: it may live on elsewhere.

        ``reached``: the round that this peer had come to, and the chain of it.
        """
        for member in before.members if before is not None else ():
            self._strangers[member.peer] = member.address
        if view.lineage == self._rival_lineage:
            self._rival, self._rival_lineage = "", b""  # we have joined it
        for peer in view.peers:
            self._strangers.pop(peer, None)
        for peer in list(self._strangers)[:-STRANGERS_MAX]:
            del self._strangers[peer]
        if before is not None and before.number > 0 and before.lineage != view.lineage:
            text = f"lineage {before.lineage.hex()[:16]} goes on as {view.lineage.hex()[:16]}"
            self._here.emit(Note("fork", f"{text}: {view.describe()}{_goes_back(reached, view)}"))
        elif before is not None and view.rollback:
            text = f"rounds after {view.base_round} are lost: nobody alive held them"
            self._here.emit(Note("rollback", f"{text}{_goes_back(reached, view)}"))

    def step(self, lead: Coordinator | None) -> None:
        """Look for strangers; as the coordinator, tell those that are linked where we stand."""
        here, view = self._here, self._here.view
        if view is None or here.now_s < self._next_s:
            return
        self._next_s = here.now_s + here.timing.meet_s
        for peer, address in self._strangers.items():
            if peer not in here.linked:
                here.emit(Connect(peer, address))
        if lead is None or not lead.hears_quorum(here.now_s) or self._own.is_behind:
            return
        ancestors = view.ancestors[-ANCESTORS_MAX:]
        meet = Meet(view.lineage, self._reached(view), here.me, ancestors)
        for peer in sorted(here.linked.difference(view.peers, lead.admission.joiners)):
            here.emit(Send(peer, meet))

    def _reached(self, view: View) -> int:
        """Return a round that is at least as late as all that our lineage has committed."""
        return max(self._own.round, view.base_round)

    def rival(self) -> str:
        """Return why a coordinator may begin no round now; empty if it may.

        Views and coordinators change: only the other lineage's end lets rounds begin again.
        """
        if self._rival and self._here.now_s > self._rival_s + RIVAL_S:
            self._rival = ""
            text = f"no other lineage has been met for {duration(RIVAL_S)}; rounds go on"
            self._here.emit(Note("fork", text))
        return self._rival

    # ------------------------------------------------------------ meeting them

    def on_meet(self, source: bytes, meet: Meet, lead: Coordinator | None, *, led: bool) -> str:
        """Return why to give way to the lineage that is met; "" to go on with ours.

        ``led``: this peer hears a coordinator, which it may be itself.
        """
        here, view = self._here, self._here.view
        if view is None or meet.lineage == view.lineage:
            return ""
        self._report(view, meet)
        if view.rules.on_fork == "halt":  # members too: any of them may have to lead
            both = f"two lineages live, {view.lineage.hex()[:16]} and {_name(meet)}"
            if not self._rival:
                self._rival = f"{both}; no rounds until the peers of one of them are stopped"
                here.emit(Note("fork", self._rival, meet.coordinator.peer))
            self._rival_lineage, self._rival_s = meet.lineage, here.now_s
        if lead is not None and lead.hears_quorum(here.now_s):
            return self._give_way(view, meet)
        if led:
            if source == meet.coordinator.peer:  # the decision is our coordinator's
                here.emit(Send(view.coordinator, meet))
        elif view.lineage in meet.ancestors or meet.round >= self._reached(view):
            return "this peer has no quorum"
        return ""

    def _give_way(self, view: View, meet: Meet) -> str:
        """Return why our lineage ends, as its coordinator, and tell the members so; "" if not."""
        if view.rules.on_fork == "halt":
            return ""  # see ``rival``
        if (meet.round, meet.lineage) <= (self._reached(view), view.lineage):
            return ""
        for peer in view.peers:
            if peer != self._here.me.peer:
                self._here.emit(Send(peer, Yield(view.lineage, view.number, meet)))
        return f"it is at round {meet.round}, ours at {self._reached(view)}"

    def _report(self, view: View, meet: Meet) -> None:
        if meet.lineage in self._met:
            return
        self._met[meet.lineage] = None
        if len(self._met) > STRANGERS_MAX:
            del self._met[next(iter(self._met))]
        ours = f"ours is {view.lineage.hex()[:16]} at round {self._reached(view)}"
        text = f"met lineage {_name(meet)} of {short(meet.coordinator.peer)}; {ours}"
        self._here.emit(Note("fork", text, meet.coordinator.peer))


def _name(meet: Meet) -> str:
    return f"{meet.lineage.hex()[:16]} at round {meet.round}"


def _goes_back(reached: tuple[int, bytes], view: View) -> str:
    """Say from which round and state a peer goes back to which; "" if it does not."""
    number, chain = reached
    if number <= view.base_round:
        return ""
    here = f"round {number} (state {chain.hex()[:16]})"
    base = f"round {view.base_round} (state {view.base_chain.hex()[:16]})"
    return f"; this peer goes back from {here} to {base}"
