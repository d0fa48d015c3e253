"""Founding a run together, or resuming one of which only checkpoints are left.

Theory. Founders call each other (HAIL) until enough are there: so many as the user expects, or a
majority of the voters of the last view that a checkpoint names. They then share a *cradle*, an
imaginary view numbered 0 with these voters, and elect the first view of the run as they would elect
any other: by one single-decree Paxos, on the highest position that somebody holds. A peer votes in
one cradle in its life. Two sets that found the same run without knowing of each other make two
lineages, which are reported and resolved when they meet. A run that is resumed gets a new lineage
that names the old one as its ancestor: should members of the old one live on somewhere, the two
meet as forks do, instead of mixing.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from atoll.peer.events import Cradle, Note, Send
from atoll.peer.messages import Hail
from atoll.peer.views import ANCESTORS_MAX, Member, View, genesis_chain, new_lineage

if TYPE_CHECKING:
    from atoll.peer.membership import Node

__all__ = ["Genesis"]

HAILS_MAX = 1024  # as many as a view may have members


class Genesis:
    """Until this peer is in a view; then it has no part any more."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._wanted: Cradle | None = None
        self._mark = b""
        self._next_s = 0.0
        self._enough_since_s: float | None = None
        self.hails: dict[bytes, Hail] = {}

    def start(self, cradle: Cradle) -> None:
        self._wanted = cradle
        voters = b"".join(sorted(cradle.voters))
        count = cradle.count.to_bytes(4, "big")
        self._mark = hashlib.sha256(b"atoll-cradle" + count + cradle.lineage + voters).digest()

    def stop(self) -> None:
        """Others have founded it: join them."""
        self._wanted = None

    @property
    def waiting(self) -> bool:
        return self._wanted is not None

    def on_hail(self, source: bytes, hail: Hail) -> None:
        node = self._node
        if node.view is not None:
            node.joining.answer_hail(source)  # there is a run already: come in
        elif hail.cradle == self._mark and hail.member.peer == source:
            self.hails[source] = hail
            if len(self.hails) > HAILS_MAX:
                del self.hails[source]

    def step(self) -> None:
        node, wanted = self._node, self._wanted
        if wanted is None or node.view is not None:
            return
        own = node.follower
        if node.now_s >= self._next_s:
            self._next_s = node.now_s + node.timing.hail_s
            mine = Hail(node.me, self._mark, own.round, own.chain)
            self.hails[node.me.peer] = mine
            for peer in sorted(node.linked):
                node.emit(Send(peer, mine))
        present = [p for p in self.hails if p in node.linked or p == node.me.peer]
        if not self._enough(wanted, present):
            self._enough_since_s = None
            return
        if self._enough_since_s is None:
            self._enough_since_s = node.now_s
        everyone = set(wanted.voters) <= set(present) if wanted.voters else True
        if everyone or node.now_s - self._enough_since_s >= node.timing.hail_gather_s:
            self._found(wanted, present)

    def _enough(self, wanted: Cradle, present: list[bytes]) -> bool:
        if wanted.voters:
            return 2 * len(set(present) & set(wanted.voters)) > len(wanted.voters)
        return len(present) >= wanted.count

    def _found(self, wanted: Cradle, present: list[bytes]) -> None:
        """Enter the cradle; the election that follows makes the first view."""
        node = self._node
        voters = sorted(wanted.voters or present)
        members = tuple(
            self.hails[peer].member if peer in present else Member(peer, 0) for peer in voters
        )
        lineage = new_lineage(wanted.lineage, self._mark + b"".join(voters))
        ancestors = (*wanted.ancestors, wanted.lineage)[-ANCESTORS_MAX:] if wanted.lineage else ()
        cradle = View(
            lineage,
            0,
            members,
            voters[-1],  # nobody coordinates; the last stands last
            0,
            genesis_chain(lineage),
            ancestors=ancestors,
            rules=wanted.rules,
        )
        text = f"{len(present)} of {len(voters)} founders are here; electing the first view"
        node.emit(Note("genesis", text))
        self._wanted = None
        node.enter_cradle(cradle)
