"""Join from outside the view: ask to come in, follow redirections, load the state when told.

A joiner asks everyone it has a link to, twice a second, until a view names it: views and
coordinators change under it. Members that do not coordinate answer with their view, so that the
joiner connects to all of them; it needs these links anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.collectives.errors import IncompatibleRunError
from atoll.peer.membership.events import Connect, Note, Renew, Send
from atoll.peer.membership.messages import Install, Join, JoinRefused, Redirect, SyncTarget
from atoll.peer.membership.phase import Phase, Trigger
from atoll.peer.membership.view import ARCHIVE, View, follows

if TYPE_CHECKING:
    from atoll.peer.membership.node import Node


class Joining:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._next_join_s = 0.0
        self._taught_s = float("-inf")
        self.teacher = b""  # the coordinator whose LEARN we follow
        self.taught: View | None = None  # its view, whose members are our donors
        self.tag = (b"", 0)  # its lineage and view, for our heartbeats
        self._excluded_by: Install | None = None
        self.renewing = False  # no JOIN until the new incarnation number is on disk

    def soon(self) -> None:
        self._next_join_s = self._node.now_s

    def step(self) -> None:
        node = self._node
        if node.now_s < self._next_join_s or self.renewing or node.bootstrap.waiting:
            return
        if node.me.role == ARCHIVE and self.is_taught:
            return  # it follows for days: no need to have everybody answer twice a second
        self._next_join_s = node.now_s + node.timing.join_retry_s
        own = node.follower
        for peer in sorted(node.linked):
            node.emit(Send(peer, Join(node.me, own.round, own.chain, node.spec)))

    @property
    def is_taught(self) -> bool:
        """Return whether a coordinator tells us where the run stands."""
        silent_s = self._node.now_s - self._taught_s
        return self.teacher in self._node.linked and silent_s <= self._node.timing.failure_s

    def beat(self) -> None:
        """Send a learner's heartbeat, which shows its coordinator how far it is."""
        node = self._node
        if node.phase is Phase.LEARNER and self.teacher in node.linked:
            node.emit(Send(self.teacher, node.heartbeats.heartbeat()))

    def on_redirect(self, source: bytes, redirect: Redirect) -> None:
        self._node.changes.leave_bootstrap_view(redirect.decided)
        if self._node.view is None and not self._node.changes.superseded(redirect.decided):
            self._connect(redirect.decided)
            known = self._excluded_by
            if known is not None and follows(known.decided, redirect.decided):
                self._node.emit(Send(source, known))
            self._node.bootstrap.put_off()

    def on_refused(self, source: bytes, refused: JoinRefused) -> None:
        if self._node.view is None:  # a member has not asked anybody
            self._node.emit(Note("refused", refused.what, source, {"code": refused.code}))

    def _connect(self, view: View) -> None:
        node = self._node
        for member in view.members:
            if member.peer != node.me.peer and member.peer not in node.linked:
                node.emit(Connect(member.peer, member.address))

    def on_sync_target(self, source: bytes, learn: SyncTarget) -> None:
        """Catch up with the run; its coordinator lets us in when we have."""
        node, own = self._node, self._node.follower
        known = self.taught
        if known is not None and learn.decided is not None and follows(known, learn.decided):
            return  # a late word of a former coordinator
        other = known is not None and learn.lineage != known.lineage
        if other and self.is_taught and self.tag[0] != learn.lineage:
            decided = learn.decided
            if decided is None or (known is not None and known.lineage not in decided.ancestors):
                return  # two lineages live: one at a time
        if learn.decided is not None:
            self.taught = learn.decided
            self._connect(learn.decided)
        view = self.taught
        if view is None or (view.lineage, view.number) != (learn.lineage, learn.view):
            return  # it sends the view until our heartbeat shows that we know it
        node.go(Trigger.LEARN)
        self.teacher, self.tag = source, (learn.lineage, learn.view)
        goal = (learn.round, learn.chain)
        if (own.round, own.chain) != goal and not own.unsynced:
            own.unsynced = True
        self._taught_s = node.now_s
        node.syncing.aim(*goal, view, anew=True, archives=learn.archives)

    def excluded(self, install: Install) -> None:
        """Come back as a new incarnation: the others went on without this one.

        They may not know yet, and those who decided may be gone: what we know must not be lost.
        """
        self._excluded_by = install
        self._connect(install.decided)
        for peer in install.decided.peers:
            self._node.emit(Send(peer, install))
        self.renew()

    def renew(self) -> None:
        """Have a new incarnation stored: this life is over for the others.

        The next one asks to come in.
        """
        self.renewing = True
        self.taught = None
        self._node.emit(Renew())

    def incarnated(self) -> None:
        self.renewing = False
        self.soon()

    def answer(self, source: bytes, join: Join) -> None:
        """Take the joiner in, as a member, or tell it whom to ask."""
        node = self._node
        if node.view is None or join.member.peer != source:
            return
        named = node.view.member(source)
        if named is not None and named.inc >= join.member.inc:
            node.tell_view(source)  # INSTALL was lost, or an older life must hear that it is over
            return
        if named is not None and named.inc < join.member.inc:
            node.gone(source, "it is back as a new incarnation")
            if node.election is not None:
                node.election.outlived.add(source)
        if join.spec and node.spec and join.spec != node.spec:
            what = f"run specification differs: yours {join.spec}, run {node.spec}"
            node.emit(Send(source, JoinRefused(IncompatibleRunError.code, what)))
        elif node.coordinator is not None:
            node.coordinator.admission.on_join(join.member, node.now_s)
        else:
            self._redirect(source)

    def answer_hail(self, source: bytes) -> None:
        """Tell one that wants to found the run that we are in to ask to come in instead."""
        self._redirect(source)

    def _redirect(self, source: bytes) -> None:
        """Tell a peer our view, but not from a cradle.

        There is no run yet, and who believes that there is founds none.
        """
        if self._node.view is not None and self._node.view.number > 0:
            self._node.emit(Send(source, Redirect(self._node.view)))
