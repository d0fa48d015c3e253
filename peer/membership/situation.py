"""Hold what one peer is and sees now, as all parts of its membership machine read it.

Each part of the machine (node.py) owns fields of its own and is given this one beside them, so that
none needs to know the node. Only the node writes here; the parts read, and emit effects.
"""

from __future__ import annotations

from collections import deque

from atoll.peer.membership.amnesia import LedgerPositions
from atoll.peer.membership.events import Effect, Persist, ProbePeer, Relayed, Send
from atoll.peer.membership.failure_detector import Machines, Peaks
from atoll.peer.membership.outbox import Outbox
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Member, View


class Situation:
    """Keep what this peer is, where it stands, whom it reaches, and what it has to say."""

    def __init__(self, me: Member, timing: Timing, outbox: Outbox | None = None) -> None:
        self.me = me
        self.life = 0  # the number of this process
        self.outbox = outbox or Outbox()
        self.positions = LedgerPositions()
        self.restarted_s: float | None = None  # when this process found its view in its ledger ...
        self.resigned = False  # ... which an earlier life had coordinated
        self.timing = self._unpaced = timing
        self._pace: tuple[float, int] | None = None  # what the timing follows (Timing.paced)
        self.now_s = 0.0
        self.phase = Phase.OUT
        self.view: View | None = None  # number 0 is the imaginary one of founders (bootstrap.py)
        self.linked: set[bytes] = set()
        self.srtt_s: dict[bytes, float] = {}
        self.addresses: dict[bytes, str] = {}  # that linked peers, and this one, advertise
        self.lives: dict[bytes, int] = {}  # the latest process of each peer that was linked
        self.restarts: dict[bytes, int] = {}  # who came as a later one, and our round then
        self.refused: set[bytes] = set()  # members whose life has certainly ended
        self.outbound = False  # this peer can only dial out
        self.relays = Relayed()  # to whom links lead through a relay
        self.machines = Machines()  # that the members run on
        self.lag = Peaks(timing.heartbeat_s / 2)  # of this peer's own event loop
        self.leave_by_s: float | None = None
        self._unlinked_s: dict[bytes, float] = {}  # members without a link, and since when
        self._effects: list[Effect] = []
        self.to_self: deque[object] = deque()  # messages, the next one first

    def pace(self) -> None:
        """Let the limits follow the slowest round trip to a member of the view."""
        members = self.view.peers if self.view else ()
        self.machines.keep(members)
        known = {*members} | self.linked
        self.lives = {peer: life for peer, life in self.lives.items() if peer in known}
        self.restarts = {peer: at for peer, at in self.restarts.items() if peer in known}
        slowest_s = max((self.srtt_s.get(peer, 0.0) for peer in members), default=0.0)
        if self._pace != (slowest_s, len(members)):
            self._pace = (slowest_s, len(members))
            self.timing = self._unpaced.paced(*self._pace)

    def unlinked(self) -> tuple[int, ...]:
        """Return which members this peer has no link to, as positions in the view, ascending.

        A link that may be under way counts until a dial would have ended. Who cannot be dialled
        does not wait for that: the other end does, unless nobody can dial it either.
        """
        view, now_s = self.view, self.now_s
        if view is None:
            return ()
        linked, me = self.linked, self.me.peer
        if not view.peer_set - linked - {me}:  # as nearly always
            self._unlinked_s.clear()
            return ()
        without = [(n, p) for n, p in enumerate(view.peers) if p not in linked and p != me]
        self._unlinked_s = {peer: self._unlinked_s.get(peer, now_s) for _, peer in without}
        wait_s = 0.0 if self.outbound else self.timing.linking_s
        return tuple(n for n, peer in without if now_s - self._unlinked_s[peer] >= wait_s)

    def unlinked_s(self, peer: bytes) -> float:
        """Return since when this peer has had no link to a member; now if it has one."""
        return self._unlinked_s.get(peer, self.now_s)

    def through_relays(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return to which members this peer's link leads through a relay, as positions in the view.

        First those to whom it carries control alone, then those to whom a relay carries data.
        """
        view, relays = self.view, self.relays
        if view is None or not (relays.control_only or relays.data):  # as nearly always
            return (), ()
        linked = [(n, peer) for n, peer in enumerate(view.peers) if peer in self.linked]
        control_only = tuple(n for n, peer in linked if peer in relays.control_only)
        return control_only, tuple(n for n, peer in linked if peer in relays.data)

    def linked_to(self, peer: bytes, life: int, own_round: int) -> None:
        """Note which process of a peer there is a link to, while this peer stands at a round."""
        if self.lives.get(peer, life) < life:
            self.restarts[peer] = own_round
        self.lives[peer] = max(life, self.lives.get(peer, life))

    def restarted_after(self, view: View) -> tuple[bytes, ...]:
        """Return the members that were started again while this peer was beyond a view's base."""
        return tuple(p for p in view.peers if self.restarts.get(p, -1) > view.base_round)

    def lag_s(self) -> float:
        """Return how late this peer's event loop was lately, as it announces it."""
        return round(self.lag.usual_s(self.now_s), 2) if self.lag.seen else 0.0

    # ------------------------------------------------------------ effects

    def emit(self, effect: Effect) -> None:
        """Keep an effect for the shell; a message to this peer itself waits for the node.

        Records are numbered, and what must not leave before its record is synced is held back.
        """
        if isinstance(effect, Send):
            if not self.outbox.holds_back(effect):
                self.let_go(effect)
        elif isinstance(effect, Persist):
            written = self.outbox.number(effect)
            self._effects += [written] if written is not None else []
        else:
            self._effects.append(effect)

    def let_go(self, effect: Send) -> None:
        """Send a message that need not wait, or does not any more."""
        if effect.peer == self.me.peer:
            self.to_self.append(effect.message)
        else:
            self._effects.append(effect)

    def probe(self, peer: bytes) -> None:
        """Look whether a member's address still answers, unless it is known to be gone."""
        member = self.view.member(peer) if self.view else None
        if member is not None and peer != self.me.peer and peer not in self.refused:
            self.emit(ProbePeer(peer, member.address))

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
