"""Join from outside the view: ask to come in, follow redirections, load the state when told.

A joiner asks twice a second, until a view names it: views and coordinators change under it. It
asks the coordinator, as soon as it knows who that is and has a link to it, and a few others only
where nothing has come of that for the failure time. Members that do not coordinate answer with
their view, so that the joiner connects to all of them; it needs these links anyway. If all asked
all, a hundred that come at once would be told the whole view ten thousand times a second.
"""

from __future__ import annotations

from atoll.peer.membership.events import Connect, Note, Renew, Send
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import Install, Join, JoinRefused, Redirect, SyncTarget
from atoll.peer.membership.situation import Situation
from atoll.peer.membership.view import ARCHIVE, View, follows

# Of the others: always the same, who can tell the coordinator that somebody cannot reach it
# (callers.py), and one after the other, as the former may be of no help.
SAME_ASKED = 2


class Joining:
    """Ask to come in, for the life of a node, and remember which coordinator has answered."""

    def __init__(self, here: Situation, own: MemberState) -> None:
        self._here = here
        self._own = own
        self._next_join_s = 0.0
        self._announced_s = float("-inf")
        self.announcer = b""  # the coordinator whose sync targets we follow
        self.view: View | None = None  # its view, whose members are our donors
        self.tag = (b"", 0)  # its lineage and view, for our heartbeats
        self._coordinator = b""  # as a member has told, or as it has spoken itself
        self._asked_alone_s = float("-inf")  # since when it alone is asked
        self._asked: list[bytes] = []  # the last time
        self._turn = 0
        self._excluded_by: Install | None = None
        self.renewing = False  # no JOIN until the new incarnation number is on disk

    def soon(self) -> None:
        self._next_join_s = self._here.now_s

    def linked(self, peer: bytes) -> None:
        """Ask at once if there was nobody to ask before, or nobody who coordinates."""
        if not self._asked or peer == self._coordinator:
            self.soon()

    def step(self) -> None:
        here, own = self._here, self._own
        if here.now_s < self._next_join_s or self.renewing:
            return
        if here.me.role == ARCHIVE and self.is_followed:
            return  # it follows for days: no need to have everybody answer twice a second
        self._next_join_s = here.now_s + here.timing.join_retry_s
        self._asked = self._whom()
        for peer in self._asked:
            here.emit(Send(peer, Join(here.me, own.round, own.chain, own.spec)))

    def _whom(self) -> list[bytes]:
        """Return whom to ask now."""
        here = self._here
        if self.is_followed:
            return [self.announcer]
        alone_s = here.now_s - self._asked_alone_s
        if self._coordinator in here.linked and alone_s <= here.timing.failure_s:
            return [self._coordinator]
        mine = here.me.peer
        others = sorted(here.linked, key=lambda peer: (peer < mine, peer))  # the next one first
        same, rest = others[:SAME_ASKED], others[SAME_ASKED:]
        self._turn += 1
        asked = same + ([rest[self._turn % len(rest)]] if rest else [])
        if self._coordinator in here.linked and self._coordinator not in asked:
            asked.append(self._coordinator)
        return asked

    def _heard_of(self, coordinator: bytes) -> None:
        if coordinator != self._coordinator:
            self._coordinator, self._asked_alone_s = coordinator, self._here.now_s

    @property
    def is_followed(self) -> bool:
        """Return whether a coordinator tells us where the run stands."""
        silent_s = self._here.now_s - self._announced_s
        return self.announcer in self._here.linked and silent_s <= self._here.timing.failure_s

    def _connect(self, view: View) -> None:
        here = self._here
        for member in view.members:
            if member.peer != here.me.peer and member.peer not in here.linked:
                here.emit(Connect(member.peer, member.address))

    # ------------------------------------------------------------ what members answer

    def on_redirect(self, source: bytes, redirect: Redirect) -> None:
        """Connect to the members of a view, and tell of a later one if we know it."""
        self._connect(redirect.decided)
        self._heard_of(redirect.decided.coordinator)
        known = self._excluded_by
        if known is not None and follows(known.decided, redirect.decided):
            self._here.emit(Send(source, known))

    def on_refused(self, source: bytes, refused: JoinRefused) -> None:
        if self._here.view is None:  # a member has not asked anybody
            self._here.emit(Note("refused", refused.what, source, {"code": refused.code}))

    def on_sync_target(self, source: bytes, target: SyncTarget) -> View | None:
        """Return the view whose members have the state to load, if this target is to be reached.

        The coordinator lets us in when we have reached it.
        """
        known, own = self.view, self._own
        if known is not None and target.decided is not None and follows(known, target.decided):
            return None  # a late word of a former coordinator
        if (
            known is not None
            and target.lineage != known.lineage
            and self.is_followed
            and known.lineage not in (target.decided or known).ancestors
        ):
            return None  # two lineages live: one at a time
        view = target.decided or known
        if view is None or (view.lineage, view.number) != (target.lineage, target.view):
            return None  # it sends the view until our heartbeat shows that we know it
        if target.decided is not None:
            self.view = view
            self._connect(view)
        self.announcer, self.tag = source, (target.lineage, target.view)
        self._heard_of(source)
        if (own.round, own.chain) != (target.round, target.chain):
            own.unsynced = True
        self._announced_s = self._here.now_s
        return view

    # ------------------------------------------------------------ a new life

    def excluded(self, install: Install) -> None:
        """Come back as a new incarnation: the others went on without this one.

        They may not know yet, and those who decided may be gone: what we know must not be lost.
        """
        self._excluded_by = install
        self._connect(install.decided)
        for peer in install.decided.peers:
            self._here.emit(Send(peer, install))
        self.renew()

    def renew(self) -> None:
        """Have a new incarnation stored: this life is over for the others.

        The next one asks to come in.
        """
        self.renewing = True
        self.view = None
        self._here.emit(Renew())

    def incarnated(self) -> None:
        self.renewing = False
        self.soon()
