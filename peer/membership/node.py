"""Run the membership machine of one peer: who hears which event and which message.

Sans-I/O: ``handle(event, now_s)`` returns effects, ``next_deadline_s()`` says when to send the
next Tick. No clock, socket, thread or random number lives here; the same object runs in the daemon
and in the simulator.

Theory. Views are numbered; whoever acts in a newer one tells whoever speaks in an older one
(INSTALL), and whoever hears of a newer one asks for it (PROBE). Every message to oneself goes
through the same handlers as everyone else's, so the coordinator is an ordinary member that also
coordinates. The parts: phase.py (the table), view_change.py (from view to view), member.py and
syncing.py (rounds and state as a member), orders.py (what the
coordinator says), reports.py (what trainer and data plane say),
coordinator.py, attempt.py, attempt_cleanup.py and admission.py (rounds and members as the
coordinator), election.py and consensus.py (the next view when the coordinator is lost),
lineages.py (forks), joining.py and bootstrap.py (outside the view), signing.py (what is signed).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.bootstrap import Genesis
from atoll.peer.membership.coordinator import Coordinator
from atoll.peer.membership.election import Election
from atoll.peer.membership.heartbeats import Heartbeats
from atoll.peer.membership.joining import Joining
from atoll.peer.membership.lineages import Lineages
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.orders import Orders
from atoll.peer.membership.phase import Phase, Trigger, next_phase
from atoll.peer.membership.reports import Reports
from atoll.peer.membership.signing import Signatures, Signer
from atoll.peer.membership.syncing import StateSync
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Member, View, genesis_chain, short
from atoll.peer.membership.view_change import ViewChange
from atoll.peer.net.wire import name_of


class Node:
    """Run one peer's membership; everything changes through :meth:`handle`.

    Attributes are for reading.
    """

    def __init__(
        self, me: Member, timing: Timing | None = None, signer: Signer | None = None
    ) -> None:
        self.me = me
        self.timing = self._unpaced = timing or Timing()
        self.phase = Phase.OUT
        self.view: View | None = None
        self.spec = ""  # the run specification this peer holds state for, shown when a JOIN differs
        self.rounds_in_flight = 1
        self.signatures = Signatures(me.peer, signer, self.emit)
        self.follower = MemberState(me, self.emit)
        self.coordinator: Coordinator | None = None
        self.election: Election | None = None
        self.linked: set[bytes] = set()
        self.srtt_s: dict[bytes, float] = {}
        self.refused: set[bytes] = set()
        self.leave_by_s: float | None = None
        self._asked_trainers = (0, 0.0)  # what rounds are to need, until when that is repeated
        self.now_s = 0.0
        self._due_s = 0.0  # when we wanted to be called again
        self._out: list[ev.Effect] = []
        self._local: deque[object] = deque()  # messages to ourselves
        self.syncing = StateSync(self)
        self.lineages = Lineages(self)
        self.joining = Joining(self)
        self.bootstrap = Genesis(self)
        self.changes = ViewChange(self)
        self.heartbeats = Heartbeats(self)
        self.enter_bootstrap_view = self.changes.enter_bootstrap_view
        self.yield_to = self.changes.yield_to
        self._orders = Orders(self)
        self._handlers = self._event_handlers()
        self._messages = self._message_handlers()

    # ------------------------------------------------------------ the contract

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        """Take one event at a monotonic time; return what the shell has to do, in order."""
        self.now_s = max(self.now_s, now_s)
        if self.phase is not Phase.LEFT:
            self._forgive_own_pause()
            self._handlers[type(event)](event)
            self._settle()
            self._due_s = self.next_deadline_s() or self.now_s
        out, self._out = self._out, []
        return out

    def _settle(self) -> None:
        """Act on the facts; what that told ourselves may call for another step."""
        self._deliver_local()
        while self.phase is not Phase.LEFT:
            self._step()
            if not self._local:
                return
            self._deliver_local()

    def _forgive_own_pause(self) -> None:
        pause_s = self.now_s - self._due_s
        if self._due_s and pause_s > self.timing.heartbeat_s:
            self._with_election(lambda election: election.discount_pause(pause_s))
            self._lead(lambda lead: lead.discount_pause(pause_s))

    def next_deadline_s(self) -> float | None:
        """Return when :class:`Tick` is due at the latest, on the clock of :meth:`handle`.

        None when there is nothing to wait for.
        """
        if self.phase is Phase.LEFT:
            return None
        if self._busy():
            return self.now_s + self.timing.step_s
        return min(self.heartbeats.next_s, self.now_s + self.timing.heartbeat_s)

    def _busy(self) -> bool:
        lead = self.coordinator
        electing = self.election is not None and self.election.busy
        return electing or (lead is not None and lead.busy)

    @property
    def known_view(self) -> View | None:
        """Return the view that this peer is in or, outside, that it was told of."""
        return self.view or self.joining.taught

    def emit(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Send) and effect.peer == self.me.peer:
            self._local.append(effect.message)
        else:
            self._out.append(effect)

    def _deliver_local(self) -> None:
        while self._local and self.phase is not Phase.LEFT:
            self._on_message(self.me.peer, self._local.popleft())

    def go(self, trigger: Trigger) -> None:
        self.phase = next_phase(self.phase, trigger)

    def pace(self) -> None:
        """Let the limits follow the slowest round trip to a member of the view."""
        members = self.view.peers if self.view else ()
        slowest_s = max((self.srtt_s.get(peer, 0.0) for peer in members), default=0.0)
        self.timing = self._unpaced.paced(slowest_s, len(members))

    # ------------------------------------------------------------ events

    def _event_handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            **Reports(self).handlers,
            ev.Tick: lambda _: None,
            ev.Found: self._on_found,
            ev.Cradle: self.bootstrap.start,
            ev.Received: lambda e: self._on_message(e.source, e.message),
            ev.LinkUp: self._on_link_up,
            ev.LinkDown: self._on_link_down,
            ev.Probed: self._on_probed,
            ev.Incarnated: self._on_incarnated,
            ev.LeaveAsked: self._on_leave_asked,
            ev.HandOver: self._on_hand_over,
            ev.TrainersAsked: self._on_trainers_asked,
            ev.Advised: self._on_advised,
            ev.BansBelieved: lambda e: self.follower.bans.set(e.bans),
        }

    def _on_found(self, event: ev.Found) -> None:
        own = self.follower
        chain = own.chain or genesis_chain(event.lineage)
        view = View(
            event.lineage,
            1,
            (self.me,),
            self.me.peer,
            own.round,
            chain,
            ancestors=event.ancestors,
            rules=event.rules,
            since=own.round,
        )
        self.changes.enter(view)

    def _on_link_up(self, event: ev.LinkUp) -> None:
        self.linked.add(event.peer)
        self.refused.discard(event.peer)
        self.srtt_s[event.peer] = event.srtt_s
        self.heartbeats.soon()
        self.joining.soon()
        self.bootstrap.soon()

    def _on_link_down(self, event: ev.LinkDown) -> None:
        self.linked.discard(event.peer)
        self.srtt_s.pop(event.peer, None)
        self.probe(event.peer)

    def probe(self, peer: bytes) -> None:
        member = self.view.member(peer) if self.view else None
        if member is not None and peer != self.me.peer and peer not in self.refused:
            self.emit(ev.ProbePeer(peer, member.address))

    def _on_probed(self, event: ev.Probed) -> None:
        if event.answer == "refused" and event.peer not in self.linked:
            self.gone(event.peer, "nothing listens at its address any more")

    def gone(self, peer: bytes, how: str) -> None:
        """Note that this life of a member has certainly ended; silence alone never says so."""
        if peer in self.refused or self.view is None or self.view.member(peer) is None:
            return
        self.refused.add(peer)
        self._lead(lambda c: c.roster.refused(peer))
        self.emit(ev.Note("dead", f"{short(peer)} is gone: {how}", peer))

    def _on_incarnated(self, event: ev.Incarnated) -> None:
        self.me = Member(self.me.peer, event.inc, self.me.role, self.me.address)
        self.joining.incarnated()

    def _on_leave_asked(self, _: ev.LeaveAsked) -> None:
        if self.leave_by_s is not None:
            return
        self.leave_by_s = self.now_s + self.timing.leave_s
        self.heartbeats.soon()
        if self.view is None or self._alone():
            self.leave()
        elif self.coordinator is not None:
            self.coordinator.admission.leaving.add(self.me.peer)

    def _alone(self) -> bool:
        lead = self.coordinator
        return lead is not None and lead.roster.alive(self.now_s) == {self.me.peer}

    def leave(self) -> None:
        self.go(Trigger.LEAVE)
        self.coordinator = None
        self.emit(ev.Left())

    def _on_hand_over(self, event: ev.HandOver) -> None:
        if self.coordinator is not None:
            self.coordinator.admission.successor = event.peer

    def _on_trainers_asked(self, event: ev.TrainersAsked) -> None:
        self._asked_trainers = (event.min_trainers, self.now_s + self.timing.ask_s)
        self.heartbeats.soon()

    def asked_trainers(self) -> int | None:
        """Return the number of trainers that is asked for here and not in the view's rules yet."""
        count, until_s = self._asked_trainers
        return count if self.view is not None and self.now_s < until_s else None

    def _forget_fulfilled(self) -> None:
        """Forget a number of trainers that was asked for, once the view's rules have it.

        It is asked for once: who asks for another number after that is not to be asked back.
        """
        if self.view is not None and self.view.rules.min_trainers == self._asked_trainers[0]:
            self._asked_trainers = (0, 0.0)

    def _on_ask_trainers(self, source: bytes, ask: ms.AskTrainers) -> None:
        self._lead(lambda c: c.admission.ask_trainers(ask.min_trainers))

    def _on_advised(self, event: ev.Advised) -> None:
        if self.coordinator is not None:
            self.coordinator.advice = event

    # ------------------------------------------------------------ messages

    def _message_handlers(self) -> dict[type, Callable[[bytes, Any], None]]:
        return {
            **self._orders.handlers,
            ms.Heartbeat: lambda s, m: self._lead(lambda c: c.on_heartbeat(s, m, self.now_s)),
            ms.Offer: lambda s, m: self._lead(lambda c: c.on_offer(s, m.blob, self.now_s)),
            ms.ObjectIs: lambda s, m: self._lead(lambda c: c.roster.give(s, m.data)),
            ms.Miss: lambda s, m: self._lead(lambda c: c.on_miss(s, m)),
            ms.Ready: lambda s, m: self._lead(lambda c: c.on_ready(s, m)),
            ms.Finals: lambda s, m: self._lead(lambda c: c.on_finals(s, m)),
            ms.Prepare: lambda s, m: self._with_election(lambda e: e.on_prepare(s, m)),
            ms.Promise: self._on_promise,
            ms.Accept: lambda s, m: self._with_election(lambda e: e.on_accept(m)),
            ms.Accepted: self._on_accepted,
            ms.Install: lambda s, m: self.changes.on_install(m),
            ms.ProbeView: lambda s, m: self.tell_view(s),
            ms.Meet: self.lineages.on_meet,
            ms.BootstrapHello: self.bootstrap.on_bootstrap_hello,
            ms.Join: self.joining.answer,
            ms.Redirect: self.joining.on_redirect,
            ms.JoinRefused: self.joining.on_refused,
            ms.SyncTarget: self._on_sync_target,
            ms.Leave: self._on_leave,
            ms.AskTrainers: self._on_ask_trainers,
        }

    def _on_message(self, source: bytes, message: object) -> None:
        handler = self._messages.get(type(message))
        if handler is None:
            text = f"{short(source)} sent a {name_of(message)}, which nobody expects"
            self.emit(ev.Note("protocol", text, source))
            return
        if isinstance(message, ms.InView) and not isinstance(message, ms.SyncTarget):
            if not self._in_step(source, message) or not self._may_speak(source, message):
                return
            self.refused.discard(source)
            if self._is_coordinator(source) and source != self.me.peer:
                # Not ourselves: who has yielded must not take itself for alive.
                self._with_election(lambda e: e.heard_coordinator())
        handler(source, message)

    def _may_speak(self, source: bytes, message: ms.InView) -> bool:
        """Return whether this peer may say such a thing.

        Learners beat; orders come from the coordinator; all the rest is said among members.
        """
        if type(message) in self._orders.handlers:
            return self._is_coordinator(source)
        named = self.view is not None and self.view.member(source) is not None
        return named or isinstance(message, ms.Heartbeat | ms.ProbeView)

    def _in_step(self, source: bytes, message: ms.InView) -> bool:
        """Return whether a message is of our lineage and view.

        Else tell or ask for the newer view.
        """
        view = self.view
        if view is not None and message.lineage in view.ancestors:
            self.tell_view(source)  # it does not know that its lineage has gone on in ours
        if view is None or message.lineage != view.lineage:
            return False
        if message.view < view.number:
            self.tell_view(source)
        elif message.view > view.number:
            self.emit(ev.Send(source, ms.ProbeView(view.lineage, view.number)))
        return message.view == view.number

    def tell_view(self, peer: bytes) -> None:
        if self.view is not None and self.view.number > 0 and peer != self.me.peer:
            self.emit(ev.Send(peer, ms.Install(self.view, self.changes.proof)))

    def _is_coordinator(self, peer: bytes) -> bool:
        return self.view is not None and peer == self.view.coordinator

    def has_coordinator(self) -> bool:
        """Return whether a coordinator is heard, by us as a member."""
        election = self.election
        return election is not None and election.waiting_for() is None

    def _with_election(self, act: Callable[[Election], None]) -> None:
        if self.election is not None:
            act(self.election)

    def _lead(self, act: Callable[[Coordinator], None]) -> None:
        if self.coordinator is not None:
            act(self.coordinator)

    def frozen(self) -> bool:
        return self.election is None or self.election.acceptor.frozen

    def _on_promise(self, source: bytes, promise: ms.Promise) -> None:
        if self.signatures.genuine(source, promise):
            self._with_election(lambda e: e.on_promise(source, promise))

    def _on_accepted(self, source: bytes, vote: ms.Accepted) -> None:
        if self.election is None or not self.signatures.genuine(source, vote):
            return
        decided = self.election.on_accepted(source, vote)
        if decided is not None:
            self.changes.on_decided(*decided)

    def _on_sync_target(self, source: bytes, learn: ms.SyncTarget) -> None:
        if self.view is None:
            self.joining.on_sync_target(source, learn)
            self.heartbeats.soon()

    def _on_leave(self, source: bytes, leave: ms.Leave) -> None:
        member = self.view.member(source) if self.view else None
        if self.coordinator is not None and member is not None and member.inc == leave.inc:
            self.coordinator.admission.leaving.add(source)

    # ------------------------------------------------------------ time

    def _step(self) -> None:
        now_s = self.now_s
        if self.leave_by_s is not None and (now_s >= self.leave_by_s or self._alone()):
            self.leave()
            return
        if self.view is None or self.view.number == 0:
            self.bootstrap.step()
        if self.view is None:
            self.joining.step()
        elif self.coordinator is not None:
            self._step_coordinator(self.coordinator)
        else:
            self._with_election(lambda election: election.step())
        self.syncing.step()
        self.lineages.step()
        self._forget_fulfilled()
        self.heartbeats.step()

    def _step_coordinator(self, lead: Coordinator) -> None:
        lead.roster.heard(self.me.peer, self.heartbeats.heartbeat(), self.now_s)
        if not lead.roster.has_given(self.me.peer):
            lead.roster.give(self.me.peer, self.follower.given)
        if self.follower.offer and self.follower.round == 0:
            lead.on_offer(self.me.peer, self.follower.offer, self.now_s)
        if (asked := self.asked_trainers()) is not None:
            lead.admission.ask_trainers(asked)
        lead.rival = self.lineages.rival()
        lead.step(self.now_s)
        election = self.election
        if election is None:
            return
        if not lead.hears_quorum(self.now_s):
            election.lost_quorum()
            if self.coordinator is not None:
                election.probe_missing(lead.roster.alive(self.now_s))
            return
        election.has_quorum()
        since_s = lead.without_base_since_s
        frozen = lead.roster.frozen(lead.roster.alive(self.now_s))
        if frozen > 0:
            election.outbid(frozen)
        elif since_s is not None and self.now_s - since_s > self.timing.lost_s:
            election.stand()  # nobody that we hear has the base: let an election find what is left
