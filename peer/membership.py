"""The membership machine of one peer: views, and who hears which message.

Sans-I/O: ``handle(event, now_s)`` returns effects, ``next_deadline_s()`` says when to send the
next Tick. No clock, socket, thread or random number lives here; the same object runs in the daemon
and in the simulator.

Theory. Views are numbered; whoever acts in a newer one tells whoever speaks in an older one
(INSTALL), and whoever hears of a newer one asks for it (PROBE). Every message to oneself goes
through the same handlers as everyone else's, so the coordinator is an ordinary member that also
coordinates. The parts: phases.py (the table), follower.py (rounds as a member), reports.py (what
trainer and data plane say), coordinator.py, attempts.py and admission.py (rounds and members as
the coordinator), succession.py and election.py (the next view when the coordinator is lost),
joining.py (outside the view).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from atoll.peer import events as ev
from atoll.peer import messages as ms
from atoll.peer.attempts import Attempt
from atoll.peer.beats import Beats
from atoll.peer.coordinator import Coordinator
from atoll.peer.follower import Follower
from atoll.peer.joining import Joining
from atoll.peer.phases import Phase, Trigger, next_phase
from atoll.peer.reports import Reports
from atoll.peer.succession import Succession
from atoll.peer.timing import Timing
from atoll.peer.views import Member, View, follows, genesis_chain, short

__all__ = ["Node"]


class Node:
    """One peer. Attributes are for reading; everything changes through :meth:`handle`."""

    def __init__(self, me: Member, timing: Timing | None = None) -> None:
        self.me = me
        self.timing = timing or Timing()
        self.phase = Phase.OUT
        self.view: View | None = None
        self.spec = ""  # the run specification this peer holds state for, shown when a JOIN differs
        self.follower = Follower(me.peer, self.emit)
        self.coordinator: Coordinator | None = None
        self.succession: Succession | None = None
        self.linked: set[bytes] = set()
        self.refused: set[bytes] = set()
        self.leave_by_s: float | None = None
        self.now_s = 0.0
        self._due_s = 0.0  # when we wanted to be called again
        self._out: list[ev.Effect] = []
        self._local: deque[object] = deque()  # messages to ourselves
        self.joining = Joining(self)
        self.beats = Beats(self)
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
            self._with_election(lambda election: election.forgive(pause_s))
            if self.coordinator is not None:
                self.coordinator.forgive(pause_s)

    def next_deadline_s(self) -> float | None:
        """When :class:`Tick` is due at the latest; None when there is nothing to wait for."""
        if self.phase is Phase.LEFT:
            return None
        if self._busy():
            return self.now_s + self.timing.step_s
        return min(self.beats.next_s, self.now_s + self.timing.heartbeat_s)

    def _busy(self) -> bool:
        lead = self.coordinator
        electing = self.succession is not None and self.succession.busy
        return electing or (lead is not None and (lead.attempt or lead.proposer) is not None)

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

    # ------------------------------------------------------------ events

    def _event_handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            **Reports(self).handlers,
            ev.Tick: lambda _: None,
            ev.Found: self._on_found,
            ev.Received: lambda e: self._on_message(e.source, e.message),
            ev.LinkUp: self._on_link_up,
            ev.LinkDown: self._on_link_down,
            ev.Probed: self._on_probed,
            ev.Incarnated: self._on_incarnated,
            ev.LeaveAsked: self._on_leave_asked,
        }

    def _on_found(self, event: ev.Found) -> None:
        chain = genesis_chain(event.lineage)
        self._install(View(event.lineage, 1, (self.me,), self.me.peer, 0, chain))

    def _on_link_up(self, event: ev.LinkUp) -> None:
        self.linked.add(event.peer)
        self.refused.discard(event.peer)
        self.beats.soon()
        self.joining.soon()

    def _on_link_down(self, event: ev.LinkDown) -> None:
        self.linked.discard(event.peer)
        self.probe(event.peer)

    def probe(self, peer: bytes) -> None:
        member = self.view.member(peer) if self.view else None
        if member is not None and peer != self.me.peer and peer not in self.refused:
            self.emit(ev.Probe(peer, member.address))

    def _on_probed(self, event: ev.Probed) -> None:
        if event.answer == "refused" and event.peer not in self.linked:
            self.gone(event.peer, "its address refuses the connection")

    def gone(self, peer: bytes, how: str) -> None:
        """That life of a member has certainly ended; silence alone never says so."""
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
        self.beats.soon()
        if self.view is None or self._alone():
            self._leave()
        elif self.coordinator is not None:
            self.coordinator.admission.leaving.add(self.me.peer)

    def _alone(self) -> bool:
        lead = self.coordinator
        return lead is not None and lead.roster.alive(self.now_s) == {self.me.peer}

    def _leave(self) -> None:
        self.go(Trigger.LEAVE)
        self.coordinator = None
        self.emit(ev.Left())

    # ------------------------------------------------------------ messages

    def _message_handlers(self) -> dict[type, Callable[[bytes, Any], None]]:
        follower = self.follower
        return {
            ms.Heartbeat: lambda s, m: self._lead(lambda c: c.on_heartbeat(s, m, self.now_s)),
            ms.CoordinatorBeat: lambda s, m: self.beats.on_coordinator(m),
            ms.Offer: lambda s, m: self._lead(lambda c: c.on_offer(s, m.blob, self.now_s)),
            ms.Miss: lambda s, m: self._with_attempt(lambda a: a.on_miss(s, m)),
            ms.Ready: lambda s, m: self._with_attempt(lambda a: a.on_ready(s, m)),
            ms.Begin: self._on_begin,
            ms.Repair: lambda s, m: follower.on_repair(m),
            ms.Commit: lambda s, m: follower.on_commit(m),
            ms.Resync: lambda s, m: follower.resync("this peer's state digest is in the minority"),
            ms.Prepare: lambda s, m: self._with_election(lambda e: e.on_prepare(s, m)),
            ms.Promise: lambda s, m: self._with_election(lambda e: e.on_promise(s, m)),
            ms.Accept: lambda s, m: self._with_election(lambda e: e.on_accept(m)),
            ms.Accepted: self._on_accepted,
            ms.Install: lambda s, m: self.on_install(m.decided),
            ms.ProbeView: lambda s, m: self.tell_view(s),
            ms.Join: self.joining.answer,
            ms.Redirect: self.joining.on_redirect,
            ms.JoinRefused: self.joining.on_refused,
            ms.Learn: self._on_learn,
            ms.Leave: self._on_leave,
        }

    def _on_message(self, source: bytes, message: object) -> None:
        handler = self._messages.get(type(message))
        if handler is None:
            text = f"{short(source)} sent a {type(message).__name__}, which nobody expects"
            self.emit(ev.Note("protocol", text, source))
            return
        if isinstance(message, ms.InView) and not isinstance(message, ms.Learn):
            if not self._in_step(source, message) or not self._may_speak(source, message):
                return
            self.refused.discard(source)
            if self._is_coordinator(source) and source != self.me.peer:
                # Not ourselves: who has yielded must not take itself for alive.
                self._with_election(lambda e: e.heard_coordinator())
        handler(source, message)

    def _may_speak(self, source: bytes, message: ms.InView) -> bool:
        """Learners beat; orders come from the coordinator; all the rest is said among members."""
        if isinstance(message, _FROM_COORDINATOR):
            return self._is_coordinator(source)
        named = self.view is not None and self.view.member(source) is not None
        return named or isinstance(message, ms.Heartbeat | ms.ProbeView)

    def _in_step(self, source: bytes, message: ms.InView) -> bool:
        """Same lineage and view; else tell or ask for the newer view."""
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
        if self.view is not None and peer != self.me.peer:
            self.emit(ev.Send(peer, ms.Install(self.view)))

    def _is_coordinator(self, peer: bytes) -> bool:
        return self.view is not None and peer == self.view.coordinator

    def _with_election(self, act: Callable[[Succession], None]) -> None:
        if self.succession is not None:
            act(self.succession)

    def _with_attempt(self, act: Callable[[Attempt], None]) -> None:
        if self.coordinator is not None and self.coordinator.attempt is not None:
            act(self.coordinator.attempt)

    def _lead(self, act: Callable[[Coordinator], None]) -> None:
        if self.coordinator is not None:
            act(self.coordinator)

    def _on_begin(self, source: bytes, begin: ms.Begin) -> None:
        if not self.frozen():
            self.follower.on_begin(begin)

    def frozen(self) -> bool:
        return self.succession is None or self.succession.acceptor.frozen

    def _on_learn(self, source: bytes, learn: ms.Learn) -> None:
        view = self.view
        if view is None:
            self.joining.on_learn(source, learn)
        elif (learn.lineage, learn.view) == (view.lineage, view.number) and (
            source == view.coordinator
        ):
            self.follower.on_learn(learn, in_view=True)
        self.beats.soon()

    def _on_leave(self, source: bytes, leave: ms.Leave) -> None:
        member = self.view.member(source) if self.view else None
        if self.coordinator is not None and member is not None and member.inc == leave.inc:
            self.coordinator.admission.leaving.add(source)

    # ------------------------------------------------------------ views

    def _on_accepted(self, source: bytes, vote: ms.Accepted) -> None:
        decided = self.succession.on_accepted(source, vote) if self.succession else None
        if decided is not None:
            self.on_install(decided)

    def superseded(self, decided: View) -> bool:
        """Whether a view names a later life of this peer: numbers are on disk before anybody
        hears of them, so another process must be using this identity."""
        mine = decided.member(self.me.peer)
        if mine is None or mine.inc <= self.me.inc:
            return False
        text = f"view {decided.number} names incarnation {mine.inc} of this peer, not {self.me.inc}"
        self.emit(ev.Note("conflict", text))
        return True

    def on_install(self, decided: View) -> None:
        if self.superseded(decided):
            return
        view = self.view
        mine = decided.member(self.me.peer)
        named = mine is not None and mine.inc == self.me.inc
        if view is None:
            if named and not self.joining.renewing:  # no way back into a view that we have lost
                self._install(decided)
            return
        # Who lacks a quorum gives way to a lone survivor's fork of its own lineage, however far.
        gives_way = self.phase is Phase.CANDIDATE and view.lineage in decided.ancestors
        if not follows(decided, view) and not gives_way:
            return
        if named:
            self._install(decided)
        else:
            self._excluded(decided)

    def _install(self, decided: View) -> None:
        """Enter a decided view: all state of the old one ends here."""
        old, led = self.view, self.coordinator
        self.view = decided
        self.coordinator = None
        self.refused &= {m.peer for m in decided.members if old is not None and m in old.members}
        self.succession = Succession(self, decided)
        self.beats.soon()
        leads = decided.coordinator == self.me.peer
        self.go(Trigger.LED if leads else Trigger.FOLLOWED)
        self.emit(ev.Note("view", decided.describe(), fields={"view": decided.number}))
        self.emit(ev.Installed(decided))
        self.follower.on_install(decided)
        if leads:
            self.coordinator = Coordinator(
                decided, self.me.peer, self.follower, self.timing, self.emit, self.now_s
            )
            if led is not None:
                self.coordinator.admission.take_over(led.admission)
            for peer in self.refused:
                self.coordinator.roster.refused(peer)
            for peer in set(decided.peers) | set(old.peers if old else ()):
                self.tell_view(peer)
            if self.leave_by_s is not None:
                self.coordinator.admission.leaving.add(self.me.peer)

    def _excluded(self, decided: View) -> None:
        """The others go on without this incarnation: come back as a new one, or be gone."""
        if self.leave_by_s is not None:
            self._leave()
            return
        text = f"view {decided.number} is without this peer; joining again as a new incarnation"
        self.emit(ev.Note("excluded", text))
        self.go(Trigger.EXCLUDED)
        self.follower.on_excluded()
        self.view = self.succession = self.coordinator = None
        self.joining.excluded(decided)

    # ------------------------------------------------------------ time

    def _step(self) -> None:
        now_s = self.now_s
        if self.leave_by_s is not None and (now_s >= self.leave_by_s or self._alone()):
            self._leave()
            return
        if self.view is None:
            self.joining.step()
        elif self.coordinator is not None:
            self._step_coordinator(self.coordinator)
        else:
            self._with_election(lambda election: election.step())
        self.beats.step()

    def _step_coordinator(self, lead: Coordinator) -> None:
        lead.roster.heard(self.me.peer, self.beats.heartbeat(), self.now_s)
        if self.follower.offer and self.follower.round == 0:
            lead.on_offer(self.me.peer, self.follower.offer, self.now_s)
        lead.step(self.now_s)
        election = self.succession
        if election is None:
            return
        if lead.hears_quorum(self.now_s):
            if lead.roster.frozen() > 0:
                election.outbid(lead.roster.frozen())
        elif election.may_fork():
            election.stand()
        else:
            election.probe_missing(lead.roster.alive(self.now_s))


_FROM_COORDINATOR = (ms.Begin, ms.Commit, ms.CoordinatorBeat, ms.Repair, ms.Resync)
