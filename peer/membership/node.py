"""Run the membership machine of one peer: who hears which event and which message.

Sans-I/O: ``handle(event, now_s)`` returns effects, ``next_deadline_s()`` says when to send the
next Tick. No clock, socket, thread or random number lives here; the same object runs in the daemon
and in the simulator.

Theory. Views are numbered; whoever acts in a newer one tells whoever speaks in an older one
(INSTALL), and whoever hears of a newer one asks for it (PROBE). Every message to oneself goes
through the same handlers as everyone else's, so the coordinator is an ordinary member that also
coordinates.

The machine is split by who owns which fields. The node alone changes ``view``, ``phase`` and
``coordinator``. Each part owns the fields of its concept, is given the :class:`Situation` to read,
and knows nothing of the node: it emits effects, and returns what the node is to decide. The parts:
phase.py (the table), view_change.py (which view replaces ours), member.py and syncing.py (rounds
and state as a member), coordinator.py, attempt.py and admission.py (rounds and members as the
coordinator), election.py and consensus.py (the next view when the coordinator is lost), forks.py
(other lineages), joining.py and bootstrap.py (outside the view), signing.py (what is signed),
heartbeats.py (what others hear of us meanwhile), link_graph.py, succession.py and callers.py (pairs
without a link), durable_records.py, outbox.py and amnesia.py (what a restart must not forget).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from atoll.collectives.errors import IncompatibleRunError
from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.amnesia import LedgerPositions
from atoll.peer.membership.bans import BansBelieved
from atoll.peer.membership.bootstrap import Bootstrap
from atoll.peer.membership.callers import Callers
from atoll.peer.membership.coordinator import Coordinator
from atoll.peer.membership.durable_records import (
    IncarnationRecord,
    ReadyRecord,
    Recovered,
    ViewRecord,
)
from atoll.peer.membership.election import Election
from atoll.peer.membership.forks import Forks
from atoll.peer.membership.heartbeats import HeardBeats, Heartbeats
from atoll.peer.membership.joining import Joining
from atoll.peer.membership.layout import Advised
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.outbox import Outbox
from atoll.peer.membership.participation import (
    InnerPhases,
    too_few_trainers,
    wrong_kept,
    wrong_owners,
    wrong_weights,
)
from atoll.peer.membership.phase import Phase, Trigger, next_phase
from atoll.peer.membership.signing import Signatures, Signer
from atoll.peer.membership.situation import Situation
from atoll.peer.membership.syncing import StateSync
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Member, View, genesis_chain, short
from atoll.peer.membership.view_change import ViewChange, judge, names_later_life
from atoll.peer.net.wire import name_of

VIEWS_KEPT = 8  # whoever has missed more comes back as a new incarnation


class Node:
    """Run one peer's membership; everything changes through :meth:`handle`.

    Attributes are for reading.
    """

    def __init__(
        self,
        me: Member,
        timing: Timing | None = None,
        signer: Signer | None = None,
        *,
        life: int = 0,
        recovered: Recovered | None = None,
    ) -> None:
        """Begin as the voter that the ledger of this peer's home knows; None: there is no ledger.

        ``life`` is the number of this process.
        """
        outbox = Outbox(recovered.position if recovered is not None else None)
        here = self._here = Situation(me, timing or Timing(), outbox)
        here.life = life
        self._recovered = recovered
        self.proof: ms.Proof | None = None  # why the present view is decided, for whom we tell
        self._entered: deque[ms.Install] = deque(maxlen=VIEWS_KEPT)  # for who has missed some
        self.coordinator: Coordinator | None = None
        self.election: Election | None = None
        self.follower = MemberState(me, here.emit, outbox, life)
        self.signatures = Signatures(me.peer, signer, here.emit)
        here.positions = LedgerPositions(self.signatures.has_signed)
        self.phases = InnerPhases()
        self.syncing = StateSync(here, self.follower)
        self.forks = Forks(here, self.follower)
        self.joining = Joining(here, self.follower)
        self.bootstrap = Bootstrap(here, self.follower, self.joining)
        self.callers = Callers(here)
        self.heartbeats = Heartbeats(
            here, self.follower, self.joining, self.callers, self.signatures
        )
        # Whom which view was told last, and when: of linked peers.
        self._views_told: dict[bytes, tuple[tuple[bytes, int], float]] = {}
        self._beats = HeardBeats()
        self._is_news = True  # what the present event may have changed is to be acted on now
        self._deadline_s = 0.0  # when we want to be called again
        self._refused_begin: tuple[bytes, int, int] | None = None

    # ------------------------------------------------------------ the contract

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        """Take one event at a monotonic time; return what the shell has to do, in order."""
        here = self._here
        if now_s > here.now_s:
            here.now_s = now_s
        if here.phase is not Phase.LEFT:
            self._discount_own_pause()
            if self._recovered is not None:
                self._recover(self._recovered)
            self._is_news = here.now_s >= self._deadline_s or not isinstance(event, ev.Received)
            _EVENTS[type(event)](self, event)
            if self._is_news:
                self._settle()
                self._deadline_s = self._next_deadline_s()
            else:
                self._deadline_s = min(self._deadline_s, here.now_s + here.timing.step_s)
        return here.take_effects()

    def next_deadline_s(self) -> float | None:
        """Return when :class:`Tick` is due at the latest, on the clock of :meth:`handle`.

        None when there is nothing to wait for.
        """
        return None if self._here.phase is Phase.LEFT else self._deadline_s

    def _next_deadline_s(self) -> float:
        here, lead, election = self._here, self.coordinator, self.election
        if (lead is not None and lead.busy) or (election is not None and election.busy):
            return here.now_s + here.timing.step_s
        return min(self.heartbeats.next_s, here.now_s + here.timing.heartbeat_s)

    def advertise(self, address: str) -> None:
        """Let others reach this peer there; to be called before anything else happens."""
        me = self._here.me
        self._here.me = Member(me.peer, me.inc, me.role, address)
        self._here.addresses[me.peer] = address

    @property
    def me(self) -> Member:
        return self._here.me

    @property
    def timing(self) -> Timing:
        return self._here.timing

    @property
    def now_s(self) -> float:
        return self._here.now_s

    @property
    def phase(self) -> Phase:
        return self._here.phase

    @property
    def view(self) -> View | None:
        return self._here.view

    @property
    def known_view(self) -> View | None:
        """Return the view that this peer is in or, outside, that it was told of."""
        return self._here.view or self.joining.view

    @property
    def linked(self) -> set[bytes]:
        return self._here.linked

    @property
    def refused(self) -> set[bytes]:
        return self._here.refused

    @property
    def leave_by_s(self) -> float | None:
        """Return when this peer leaves at the latest, if somebody here wants it to."""
        return self._here.leave_by_s

    @property
    def lag_s(self) -> float:
        """Return how late this peer's event loop was lately."""
        return self._here.lag_s()

    @property
    def frozen(self) -> bool:
        """Return whether this peer has promised a candidate to say no more READY in this view."""
        return self.election is None or self.election.acceptor.frozen

    # ------------------------------------------------------------ the course of an event

    def _discount_own_pause(self) -> None:
        here = self._here
        if not self._deadline_s or here.now_s <= self._deadline_s:
            return
        pause_s = here.now_s - self._deadline_s
        here.lag.note(pause_s, here.now_s)
        if pause_s > here.timing.heartbeat_s:
            if self.election is not None:
                self.election.discount_pause(pause_s)
            if self.coordinator is not None:
                self.coordinator.discount_pause(pause_s)

    def _settle(self) -> None:
        """Act on the facts; what that told ourselves may call for another step."""
        here = self._here
        if here.to_self:
            self._deliver_to_self()
        while here.phase is not Phase.LEFT:
            self._step()
            if not here.to_self:
                return
            self._deliver_to_self()

    def _deliver_to_self(self) -> None:
        """Handle what we have sent to ourselves."""
        here = self._here
        while here.to_self and here.phase is not Phase.LEFT:
            self._on_message(here.me.peer, here.to_self.popleft())

    def _step(self) -> None:
        here = self._here
        if here.leave_by_s is not None and (here.now_s >= here.leave_by_s or self._alone()):
            self._leave()
            return
        if here.view is None or here.view.number == 0:
            found = self.bootstrap.step()
            if found is not None:
                self._enter_bootstrap_view(found)
        if here.view is None:
            if not self.bootstrap.waiting:
                self.joining.step()
        elif self.election is not None:
            if self.coordinator is not None:
                self._step_coordinator(self.coordinator, self.election)
            else:
                if silent := self.election.to_look_at():
                    self._ask_kernels(silent)
                self._follow(self.election.step())
        if self.election is not None and self.election.withheld is not None:
            self._on_accept(self.election.withheld)
        if not self._is_bound():
            self.syncing.step()
        self.forks.step(self.coordinator)
        self.heartbeats.step(self.coordinator, self.election)

    def _step_coordinator(self, lead: Coordinator, election: Election) -> None:
        here, me, own = self._here, self._here.me.peer, self.follower
        lead.roster.heard(me, self.heartbeats.heartbeat(election.acceptor), here.now_s)
        if not lead.roster.has_given(me):
            lead.roster.give(me, own.given)
        if own.offer and own.round == 0:
            lead.on_offer(me, own.offer, here.now_s)
        if (asked := self.heartbeats.asked_trainers()) is not None:
            lead.admission.ask_trainers(asked)
        lead.rival = self.forks.rival()
        if silent := lead.roster.to_look_at(here.now_s):
            self._ask_kernels(silent)
        lead.step(here.now_s)
        alive = lead.roster.alive(here.now_s)
        if not lead.roster.hears_quorum(here.now_s):
            self._follow(election.lost_quorum())
            if self.coordinator is not None:
                election.probe_missing(alive)
            return
        election.has_quorum()
        since_s = lead.without_base_since_s
        frozen = lead.roster.frozen(alive)
        if frozen > 0:
            self._follow(election.outbid(frozen))
        elif since_s is not None and here.now_s - since_s > here.timing.lost_s:
            # Nobody that we hear has the base: let an election find what is left.
            self._follow(election.campaign())

    def _ask_kernels(self, peers: list[bytes]) -> None:
        """Find out of these whether their machines live, while they say nothing."""
        for peer in peers:
            if peer in self._here.linked:
                self._here.emit(ev.AskKernel(peer))

    # ------------------------------------------------------------ what this peer knows of itself

    def _alone(self) -> bool:
        lead = self.coordinator
        return lead is not None and lead.roster.alive(self._here.now_s) == {self._here.me.peer}

    def _hears_quorum(self) -> bool | None:
        """Return whether this peer, as the coordinator, hears a quorum; None if it is none."""
        lead = self.coordinator
        return None if lead is None else lead.hears_quorum(self._here.now_s)

    def _is_bound(self) -> bool:
        """Return whether a view that we have voted for, or will, builds on the state that we hold.

        Its members need it: in a rollback nobody else may have it, whoever is ahead has come back.
        """
        if self.election is None:
            return False
        vote, withheld = self.election.acceptor.accepted, self.election.withheld
        return withheld is not None or (vote is not None and self._builds_on_ours(vote.proposal))

    def _builds_on_ours(self, view: View) -> bool:
        own = self.follower
        return (view.base_round, view.base_chain) == (own.round, own.chain)

    def may_be_behind(self) -> bool:
        """Return whether this process has yet to hear, or to have, what the run has done.

        It was started again, and knows how far the run was when it ended.
        """
        if self._here.restarted_s is None or self.election is None:
            return False
        return self.election.may_be_behind() or self.syncing.rounds_behind > 0

    def _has_coordinator(self) -> bool:
        """Return whether a coordinator is heard, by us as a member."""
        return self.election is not None and self.election.waiting_for() is None

    def _is_coordinator(self, peer: bytes) -> bool:
        return self._here.view is not None and peer == self._here.view.coordinator

    def _gone(self, peer: bytes, how: str) -> None:
        """Note that this life of a member has certainly ended; silence alone never says so."""
        here = self._here
        if peer in here.refused or here.view is None or here.view.member(peer) is None:
            return
        here.refused.add(peer)
        if self.coordinator is not None:
            self.coordinator.roster.refused(peer)
        here.emit(ev.Note("dead", f"{short(peer)} is gone: {how}", peer))

    # ------------------------------------------------------------ from view to view

    def _go(self, trigger: Trigger) -> None:
        self._here.phase = next_phase(self._here.phase, trigger)

    def _follow(self, trigger: Trigger | None) -> None:
        """Do what our election has come to: as a candidate or a voter, nobody coordinates."""
        if trigger is not None:
            self._go(trigger)
            self.coordinator = None

    def _recover(self, recovered: Recovered) -> None:
        """Take our place in the view that the ledger names, as a plain member of it."""
        here, own, view = self._here, self.follower, recovered.view
        self._recovered = None
        if recovered.inc != here.me.inc:
            here.emit(ev.Persist(IncarnationRecord(here.me.inc), synced=True))
        own.recover(recovered)
        if view is None:
            return
        here.view, self.proof = view, recovered.proof
        self._entered.append(ms.Install(view, recovered.proof))
        here.restarted_s = here.now_s
        here.resigned = view.coordinator == here.me.peer and view.number > 0
        self._go(Trigger.FOLLOWED)
        founding = self.bootstrap if view.number == 0 else None
        self.election = Election(here, own, self.signatures, view, founding)
        self.election.recover(recovered, resigned=here.resigned)
        text = f"back in view {view.number} of {len(view.members)}, at round {own.round}"
        here.emit(ev.Note("recovered", text))
        if founding is not None:
            self._call_founders(view)
            return
        here.emit(ev.Installed(view))
        self.syncing.aim(*recovered.known, view, anew=True)

    def _on_durable(self, event: ev.Durable) -> None:
        records, free = self._here.outbox.synced(event.position)
        for effect in free:
            self._here.let_go(effect)
        for record in records:
            if isinstance(record, ReadyRecord):
                self._send_ready(self.follower.on_durable(record))

    def _on_ledger_failed(self, event: ev.LedgerFailed) -> None:
        """Go on without a vote: what we said from now on would be forgotten."""
        self._here.outbox.fail()
        self._forgot(f"the ledger cannot be written any more ({event.why})")

    def _check_memory(self, told: tuple[ms.Remembered, ...]) -> None:
        """Look whether others remember more of us than our ledger does."""
        here = self._here
        if here.view is None:
            return
        here.positions.heard(told, here.view)
        if not here.outbox.is_on:
            return
        if here.positions.shows_loss(here.me.peer, here.me.inc, here.life, here.outbox.began):
            self._forgot("others have heard more of this peer than its ledger remembers")

    def _forgot(self, why: str) -> None:
        """Come back as a new incarnation: a vote of one that forgets is worse than none."""
        if self._here.view is not None and self._out_of_view(f"{why}; joining anew", "amnesia"):
            self.joining.renew()

    def _on_found(self, event: ev.Found) -> None:
        own, me = self.follower, self._here.me
        chain = own.chain or genesis_chain(event.lineage)
        view = View(
            event.lineage,
            1,
            (me,),
            me.peer,
            own.round,
            chain,
            ancestors=event.ancestors,
            rules=event.rules,
            since=own.round,
        )
        self._enter(view)

    def _on_install(self, install: ms.Install) -> None:
        """Act on a view of which somebody says that it is decided, and shows why."""
        vote = self.election.acceptor.accepted if self.election is not None else None
        accepted = vote.proposal if vote is not None else None
        renewing = self.joining.renewing
        change = judge(install, self._here, self.signatures, accepted, renewing=renewing)
        if change is ViewChange.ENTER:
            self._enter(install.decided, install.proof)
        elif change is ViewChange.EXCLUDED:
            self._excluded(install)

    def _on_accepted(self, source: bytes, vote: ms.Accepted) -> None:
        if self.election is None or not self.signatures.genuine(source, vote):
            return
        decision = self.election.on_accepted(source, vote)
        if decision is not None:
            self._on_decision(*decision)

    def _on_decision(self, decided: View, proof: ms.Proof) -> None:
        """Install a view that is decided by votes that we have heard ourselves.

        A fork binds only those who made it: others meet it as another lineage.
        """
        if not decided.fork or decided.member(self._here.me.peer) is not None:
            self._on_install(ms.Install(decided, proof))

    def _enter(self, decided: View, proof: ms.Proof | None = None) -> None:
        """Enter a view; all state of the old one ends here."""
        here = self._here
        old, led, reached = here.view, self.coordinator, (self.follower.round, self.follower.chain)
        silences_s = self.election.silences_s() if self.election is not None else {}
        here.view, self.proof, self.coordinator = decided, proof, None
        here.resigned = False
        here.positions.enter(decided)
        self._entered.append(ms.Install(decided, proof))
        here.refused &= {m.peer for m in decided.members if old is not None and m in old.members}
        self._views_told = {p: told for p, told in self._views_told.items() if p in here.linked}
        here.pace()
        self.signatures.new_view()
        leads = decided.coordinator == here.me.peer
        awaits_word = self.election is not None and self.election.may_be_behind() and not leads
        self.election = Election(
            here, self.follower, self.signatures, decided, awaits_word=awaits_word
        )
        self.heartbeats.soon()
        self.heartbeats.forget_reasons()
        self.phases.interrupt()
        self._go(Trigger.LED if leads else Trigger.FOLLOWED)
        here.emit(ev.Note("view", decided.describe(), fields={"view": decided.number}))
        here.emit(ev.Installed(decided))
        self.follower.on_install(decided, here.restarted_after(decided))
        here.emit(ev.Persist(ViewRecord(decided, proof), synced=leads))
        self.syncing.aim(decided.base_round, decided.base_chain, decided, anew=True)
        self.forks.on_install(old, decided, reached)
        if leads:
            self._lead(decided, old, led, silences_s)

    def _lead(
        self,
        decided: View,
        old: View | None,
        led: Coordinator | None,
        silences_s: dict[bytes, float],
    ) -> None:
        """Coordinate a view, with what we know from the one before: we ``led`` it, or not."""
        here = self._here
        lead = self.coordinator = Coordinator(
            decided,
            here.me.peer,
            self.follower,
            here.timing,
            here.emit,
            here.now_s,
            sign=partial(self.signatures.signed, inc=here.me.inc),
            rounds_in_flight=self.follower.rounds_in_flight,
            life=here.life,
            machines=here.machines,
            phases=self.phases,
        )
        lead.admission.addresses = here.addresses
        if led is not None:
            lead.take_over(led)
        for peer, since_s in silences_s.items():
            lead.roster.silent_since(peer, since_s)
        for peer in here.refused:
            lead.roster.refused(peer)
        for peer in sorted({*decided.peers, *(old.peers if old else ())}):
            self._tell_view(peer)
        if here.leave_by_s is not None:
            lead.admission.leaving.add(here.me.peer)

    def _enter_bootstrap_view(self, bootstrap_view: View) -> None:
        """Enter the imaginary view of the founders: it has an election and nothing else."""
        here, own = self._here, self.follower
        here.view, self.proof = bootstrap_view, None
        here.emit(ev.Persist(ViewRecord(bootstrap_view), synced=False))
        self._go(Trigger.FOLLOWED)
        if own.round == 0:
            own.chain = genesis_chain(bootstrap_view.lineage)
        self._call_founders(bootstrap_view)
        self.election = Election(here, own, self.signatures, bootstrap_view, self.bootstrap)

    def _call_founders(self, bootstrap_view: View) -> None:
        here = self._here
        for member in bootstrap_view.members:
            if member.peer not in here.linked and member.peer != here.me.peer:
                here.emit(ev.Connect(member.peer, member.address))

    def _excluded(self, install: ms.Install) -> None:
        """Come back as a new incarnation, or be gone: the others go on without this one.

        A first view may be lost before we are in, and then its members found the run once more.
        """
        decided, view = install.decided, self._here.view
        founding = view is not None and view.number == 0
        text = f"view {decided.number} is without this peer; joining again as a new incarnation"
        if self._out_of_view(text, "excluded"):
            if founding and self._here.me.peer in decided.peers:
                self.bootstrap.fall_back(decided)
            self.joining.excluded(install)

    def _yield_to(self, meet: ms.Meet, why: str) -> None:
        """End our lineage here and join the other one.

        Should that be lost before we are in, our own members go on together from what they hold:
        theirs may be all that is left.
        """
        ours = self._here.view
        text = f"giving way to lineage {meet.lineage.hex()[:16]}: {why}; joining it"
        if self._out_of_view(text, "yield"):
            self._here.emit(ev.Connect(meet.coordinator.peer, meet.coordinator.address))
            if ours is not None:
                self.bootstrap.fall_back(ours)
            self.joining.renew()

    def _out_of_view(self, text: str, kind: str) -> bool:
        """Leave the view; return False if this peer wanted to leave anyway, and has now."""
        here = self._here
        if here.leave_by_s is not None:
            self._leave()
            return False
        here.emit(ev.Note(kind, text))
        self.bootstrap.stop()  # there is a run: never found it again
        self.heartbeats.forget_reasons()
        self._go(Trigger.EXCLUDED)
        self.follower.on_excluded()
        self.syncing.excluded()
        here.view = self.election = self.coordinator = None
        return True

    def _on_leave_asked(self) -> None:
        here = self._here
        if here.leave_by_s is not None:
            return
        here.leave_by_s = here.now_s + here.timing.leave_s
        self.heartbeats.soon()
        if here.view is None or self._alone():
            self._leave()
        elif self.coordinator is not None:
            self.coordinator.admission.leaving.add(here.me.peer)

    def _leave(self) -> None:
        self._go(Trigger.LEAVE)
        self.coordinator = None
        self._here.emit(ev.Left())

    # ------------------------------------------------------------ links, and what people ask for

    def _on_link_up(self, event: ev.LinkUp) -> None:
        here = self._here
        here.linked.add(event.peer)
        self._views_told.pop(event.peer, None)
        self.heartbeats.forget(event.peer)
        here.refused.discard(event.peer)
        here.srtt_s[event.peer] = event.srtt_s
        here.linked_to(event.peer, event.life, self.follower.round)
        here.addresses[event.peer] = event.address
        self.heartbeats.soon()
        self.joining.linked(event.peer)
        self.bootstrap.soon()

    def _on_link_down(self, event: ev.LinkDown) -> None:
        self._here.linked.discard(event.peer)
        self._views_told.pop(event.peer, None)
        self.heartbeats.forget(event.peer)
        self._beats.forget(event.peer)
        self._here.machines.answered(event.peer, float("-inf"))
        self._here.srtt_s.pop(event.peer, None)
        self._here.addresses.pop(event.peer, None)
        self._here.probe(event.peer)

    def _on_probed(self, event: ev.Probed) -> None:
        if event.answer == "refused" and event.peer not in self._here.linked:
            self._gone(event.peer, "nothing listens at its address any more")

    def _on_kernel_answered(self, event: ev.KernelAnswered) -> None:
        if event.peer in self._here.linked:
            self._here.machines.answered(event.peer, event.at_s)

    def _on_reach(self, event: ev.Reach) -> None:
        self._here.outbound = event.outbound
        self.heartbeats.soon()

    def _on_relayed(self, event: ev.Relayed) -> None:
        self._here.relays = event
        self.heartbeats.soon()

    def _on_incarnated(self, event: ev.Incarnated) -> None:
        me = self._here.me
        self._here.me = Member(me.peer, event.inc, me.role, me.address)
        self._here.emit(ev.Persist(IncarnationRecord(event.inc), synced=True))
        self.joining.incarnated()

    def _on_hand_over(self, event: ev.HandOver) -> None:
        if self.coordinator is not None:
            self.coordinator.admission.successor = event.peer

    def _on_advised(self, event: Advised) -> None:
        if self.coordinator is not None:
            self.coordinator.advice = event

    # ------------------------------------------------------------ the trainer and the data plane

    # Each of these changes a fact about this peer. Where somebody waits for it a heartbeat goes at
    # once, so that the news does not take a quarter of a second.

    def _on_attached(self, event: ev.Attached) -> None:
        self.follower.came(event.waits)
        self.heartbeats.soon()

    def _on_detached(self) -> None:
        self.follower.detached()
        self.heartbeats.soon()

    def _on_offered(self, event: ev.Offered) -> None:
        self.follower.offer = event.blob
        self.heartbeats.soon()

    def _on_submitted(self, event: ev.Submitted) -> None:
        self.follower.submitted(event)
        self.phases.submitted(event.fragment, self._here.now_s)
        self.heartbeats.soon()

    def _on_reduced(self, event: ev.AttemptReduced) -> None:
        self._send_ready(self.follower.on_reduced(event.round, event.attempt, event.root))

    def _on_reduce_failed(self, event: ev.ReduceFailed) -> None:
        miss = self.follower.on_reduce_failed(event)
        if miss is not None:
            self._to_coordinator(miss)
            for peer in event.peers:
                self._here.probe(peer)

    def _on_final_chunks(self, event: ev.FinalChunks) -> None:
        finals = self.follower.on_final_chunks(event)
        if finals is not None:
            self._to_coordinator(finals)

    def _on_applied(self, event: ev.Applied) -> None:
        self.follower.on_applied(event)
        self.heartbeats.soon()

    def _on_progressed(self, event: ev.Progressed) -> None:
        self.heartbeats.progress_bytes = event.total_bytes

    def _on_caught_up(self, event: ev.CaughtUp) -> None:
        self.syncing.on_caught_up(event)
        self.heartbeats.soon()

    def _on_home_read(self, event: ev.HomeRead) -> None:
        self.follower.on_home_read(event)
        self._send_ready(self.follower.ready())
        self.heartbeats.soon()

    def _on_configured(self, event: ev.Configured) -> None:
        self.follower.on_configured(event)
        if self.coordinator is not None:
            self.coordinator.in_flight_max = event.rounds_in_flight

    # ------------------------------------------------------------ messages

    def _on_message(self, source: bytes, message: Any) -> None:
        if isinstance(message, ms.SameBeat):
            message = self._beats.named(source, message) or message
        else:  # a beat that is only named changes nothing but silences: one step is for several
            self._is_news = True
        handler = _MESSAGES.get(type(message))
        if handler is None:
            text = f"{short(source)} sent a {name_of(message)}, which nobody expects"
            self._here.emit(ev.Note("protocol", text, source))
            return
        if type(message) in _IN_VIEW:
            if not self._in_step(source, message) or not self._may_speak(source, message):
                return
            if self._is_life_of_member(source, message):
                self._here.refused.discard(source)
            # Not from ourselves: who has yielded must not take itself for alive. And who asks for a
            # later view, or votes for one, does not coordinate this one.
            heard = self._is_coordinator(source) and source != self._here.me.peer
            heard = heard and type(message) not in (*_OF_JOINERS, *_VOTES)
            if heard and self.election is not None:
                self._heard_coordinator(self.election)
        handler(self, source, message)

    def _heard_coordinator(self, election: Election) -> None:
        trigger = election.heard_coordinator()
        if trigger is not None:
            self._follow(trigger)
            self.heartbeats.soon()

    def _may_speak(self, source: bytes, message: ms.InView) -> bool:
        """Return whether this peer may say such a thing.

        Joiners beat; orders come from the coordinator; all the rest is said among members.
        """
        if type(message) in _ORDERS:
            return self._is_coordinator(source)
        named = self._here.view is not None and self._here.view.member(source) is not None
        return named or type(message) in _OF_JOINERS

    def _is_life_of_member(self, source: bytes, message: ms.InView) -> bool:
        """Return whether it is not the next incarnation of a member that beats, as a joiner."""
        view = self._here.view
        member = view.member(source) if view is not None else None
        return not isinstance(message, ms.Heartbeat) or member is None or message.inc == member.inc

    def _in_step(self, source: bytes, message: ms.InView) -> bool:
        """Return whether a message is of our lineage and view.

        Else tell or ask for the newer view.
        """
        view = self._here.view
        if view is not None and message.lineage in view.ancestors:
            self._tell_view(source)  # it does not know that its lineage has gone on in ours
        if view is None or message.lineage != view.lineage:
            return False
        if message.view < view.number:
            if type(message) is not ms.Accepted:  # it hears that from all voters, as we did
                self._tell_view(source, message.view)
        elif message.view > view.number:
            self._here.emit(ev.Send(source, ms.ProbeView(view.lineage, view.number)))
        return message.view == view.number

    def _tell_view(self, peer: bytes, its_view: int | None = None) -> None:
        """Tell a peer our view, with its proof; ``its_view`` is the number of its own, if known.

        It believes bans only if voters that it knows have decided them, so it is led through the
        views that it has missed.
        """
        view, now_s = self._here.view, self._here.now_s
        if view is None or view.number == 0 or peer == self._here.me.peer:
            return
        told, told_s = self._views_told.get(peer, (None, 0.0))
        if told == (view.lineage, view.number) and now_s - told_s < self._here.timing.heartbeat_s:
            return  # what it says late was said before it had heard
        self._views_told[peer] = (view.lineage, view.number), now_s
        if view.banned and its_view is not None:
            for install in self._entered:
                before = install.decided
                if before.lineage == view.lineage and its_view < before.number < view.number:
                    self._here.emit(ev.Send(peer, install))
        self._here.emit(ev.Send(peer, ms.Install(view, self.proof)))

    def _to_coordinator(self, message: object) -> None:
        if self._here.view is not None:
            self._here.emit(ev.Send(self._here.view.coordinator, message))

    # ------------------------------------------------------------ orders of the coordinator

    def _on_begin(self, source: bytes, begin: ms.Begin) -> None:
        own, view = self.follower, self._here.view
        wrong = ""
        if view is not None:
            wrong = too_few_trainers(begin, view, own.terms)
            wrong = wrong or wrong_weights(begin, view, own.terms) or wrong_kept(begin, own.terms)
            wrong = wrong or wrong_owners(begin, view, own.terms)
        if wrong:
            self._refuse(source, begin, wrong)
            return
        self.phases.begun(begin, self._here.now_s)
        if not self.frozen and (answer := own.on_begin(begin)) is not None:
            self._to_coordinator(answer)

    def _refuse(self, source: bytes, begin: ms.Begin, wrong: str) -> None:
        """Note once of each attempt why we take no part: BEGIN is repeated."""
        attempt = (begin.lineage, begin.view, begin.attempt)
        if attempt != self._refused_begin:
            self._refused_begin = attempt
            text = f"round {begin.round} attempt {begin.attempt} is rejected: {wrong}"
            self._here.emit(ev.Note("rejected", text, source))

    def _on_same_beat(self, source: bytes) -> None:
        """Take a sign of life: the heartbeat that is meant was lost on its way."""
        if self.coordinator is not None:
            self.coordinator.roster.heard(source, None, self._here.now_s)
        elif self._is_coordinator(source) and self.election is not None:
            self._heard_coordinator(self.election)

    def _on_beat(self, source: bytes, beat: ms.CoordinatorBeat) -> None:
        self._beats.note(source, beat)
        self._here.machines.says_lag(source, beat.lag_s)
        self.heartbeats.heard(beat)
        if self.election is not None:
            self.election.coordinator_says(lacks_quorum=beat.lacks_quorum)
        self._check_memory(beat.remembered)
        if beat.commit is not None:
            self._on_commit(source, beat.commit)  # in case it was lost
        self.follower.hears_unchanged(beat.round, beat.chain, beat.unchanged)
        self._aim(beat.round, beat.chain)

    def _on_commit(self, source: bytes, commit: ms.Commit) -> None:
        own = self.follower
        if commit.round > own.round and self.signatures.genuine(source, commit):
            own.committed(commit.round, commit.chain, commit.unchanged)
            self.phases.open(self._here.now_s)
            self._aim(commit.round, commit.chain)
            self._send_ready(own.ready())  # the next round's turn

    def _on_notice(self, notice: ms.Notice) -> None:
        if not self.frozen:
            self._send_ready(self.follower.on_notice(notice))

    def _send_ready(self, ready: ms.Ready | None) -> None:
        if ready is not None and not self.frozen:
            self._to_coordinator(ready)

    def _on_resync(self) -> None:
        if self.follower.on_resync():
            self._aim(self.follower.round, self.follower.chain)

    def _aim(self, round_number: int, chain: bytes) -> None:
        if self._here.view is not None:
            self.syncing.aim(round_number, chain, self._here.view)

    # ------------------------------------------------------------ among members

    def _on_prepare(self, source: bytes, prepare: ms.Prepare) -> None:
        if self.election is not None:
            self._follow(self.election.on_prepare(source, prepare, self._hears_quorum()))

    def _on_promise(self, source: bytes, promise: ms.Promise) -> None:
        view, told = self._here.view, promise.remembered
        if self.signatures.genuine(source, promise) and view is not None and self.election:
            proven = self._here.positions.heard(told, view)
            self.election.on_promise(source, replace(promise, remembered=proven))
            self._check_memory(told)

    def _on_accept(self, accept: ms.Accept) -> None:
        """Vote, and learn what is decided; for a view on our own state once nothing replaces it."""
        election = self.election
        if election is None:
            return
        needs_ours = self._builds_on_ours(accept.proposal) and election.would_vote_for(accept)
        is_kept = not needs_ours or self.syncing.recall()
        election.withheld = None if is_kept else accept
        if is_kept and (decision := election.on_accept(accept)):
            self._on_decision(*decision)

    def _on_leave(self, source: bytes, leave: ms.Leave) -> None:
        lead = self.coordinator
        if lead is not None and leave.life >= lead.roster.life(source):  # else: started again since
            lead.admission.leaving.add(source)

    def _on_heartbeat(self, source: bytes, beat: ms.Heartbeat) -> None:
        self._beats.note(source, beat)
        here, lead = self._here, self.coordinator
        if here.view is not None and here.view.member(source) is not None:
            if here.positions.shows_loss(source, beat.inc, beat.life, beat.began):
                here.positions.remind(source)
                return  # it will hear that from the coordinator
            told = (beat.inc, beat.life, beat.position, beat.position_sig)
            here.positions.note(ms.Remembered(source, *told))
        if beat.resigned and self._is_coordinator(source) and self.election is not None:
            self.election.coordinator_resigned()
        if lead is not None:
            lead.on_heartbeat(source, beat, here.now_s)

    def _on_ready(self, source: bytes, ready: ms.Ready) -> None:
        """Count a READY of the process that a heartbeat has shown; others say theirs in one."""
        lead = self.coordinator
        if lead is not None and ready.life == lead.roster.life(source):
            lead.on_ready(source, ready)

    def _tell_lead(self, act: Callable[[Coordinator], object]) -> None:
        if self.coordinator is not None:
            act(self.coordinator)

    # ------------------------------------------------------------ with those outside the view

    def _on_join(self, source: bytes, join: ms.Join) -> None:
        """Take the joiner in, as a member, or tell it whom to ask."""
        view, spec = self._here.view, self.follower.spec
        if view is None or join.member.peer != source:
            return
        named = view.member(source)
        if named is not None and named.inc >= join.member.inc:
            self._views_told.pop(source, None)
            self._tell_view(source)  # INSTALL was lost, or an older life must hear that it is over
            return
        if named is not None:
            self._note_outlived(source, "it is back as a new incarnation")
        if join.spec and spec and join.spec != spec:
            what = f"run specification differs: yours {join.spec}, run {spec}"
            refused = ms.JoinRefused(IncompatibleRunError.code, what)
            self._here.emit(ev.Send(source, refused))
        elif self.coordinator is not None:
            self.coordinator.admission.on_join(join.member, self._here.now_s)
        else:
            self.callers.asks(source)
            self._redirect(source)

    def _note_outlived(self, peer: bytes, how: str) -> None:
        """Note that a member has begun anew, without what it knew: it votes here no more."""
        self._gone(peer, how)
        assert self.election is not None, "who is in a view has an election"
        self.election.outlived.add(peer)

    def _redirect(self, source: bytes) -> None:
        """Tell a peer our view, but not a bootstrap view.

        There is no run yet, and who believes that there is founds none.
        """
        view = self._here.view
        if view is not None and view.number > 0:
            self._here.emit(ev.Send(source, ms.Redirect(view)))

    def _on_redirect(self, source: bytes, redirect: ms.Redirect) -> None:
        """Join the run that lives, also if we were about to found it.

        Not if we have founded it with them, and have not heard so yet: then INSTALL comes, and
        the first view may need us.
        """
        view, found = self._here.view, redirect.decided
        is_late = view is not None and view.number == 0
        is_of_us = view is not None and view.lineage in found.ancestors
        if is_late and is_of_us and self._here.me in found.members:
            return
        founding = self.bootstrap.expected
        text = "the run has been founded by others; joining them"
        if is_late and self._out_of_view(text, "genesis"):
            self.joining.renew()  # it has voted there, and must not vote there once more
        if self._here.view is None and not names_later_life(found, self._here):
            self.joining.on_redirect(source, redirect)
            self.bootstrap.put_off(founding)

    def _on_sync_target(self, source: bytes, target: ms.SyncTarget) -> None:
        if self._here.view is not None:
            return
        donors = self.joining.on_sync_target(source, target)
        if donors is not None:
            self._go(Trigger.LEARN)
            position = (target.round, target.chain)
            self.syncing.aim(*position, donors, anew=True, archives=target.archives)
            self.follower.compare(*position, target.digest)
        self.heartbeats.soon()

    def _on_bootstrap_hello(self, source: bytes, hello: ms.BootstrapHello) -> None:
        if self._here.view is not None and self._here.view.number > 0:
            self._redirect(source)  # there is a run already: come in
        else:
            self.bootstrap.on_bootstrap_hello(source, hello)

    def _on_meet(self, source: bytes, meet: ms.Meet) -> None:
        view, met = self._here.view, meet.coordinator
        named = view.member(source) if view is not None and met.peer == source else None
        if named is not None and met.inc > named.inc:
            self._note_outlived(source, f"it has begun anew, in lineage {meet.lineage.hex()[:16]}")
        why = self.forks.on_meet(source, meet, self.coordinator, led=self._has_coordinator())
        if why:
            self._yield_to(meet, why)


# ---------------------------------------------------------------- who hears what

_EVENTS: dict[type, Callable[[Node, Any], None]] = {
    ev.Tick: lambda node, event: None,
    ev.Received: lambda node, event: node._on_message(event.source, event.message),
    ev.LinkUp: Node._on_link_up,
    ev.LinkDown: Node._on_link_down,
    ev.Reach: Node._on_reach,
    ev.Relayed: Node._on_relayed,
    ev.Probed: Node._on_probed,
    ev.KernelAnswered: Node._on_kernel_answered,
    # what people ask for
    ev.Found: Node._on_found,
    ms.BootstrapConfig: lambda node, event: node.bootstrap.start(event),
    ev.Incarnated: Node._on_incarnated,
    ev.Durable: Node._on_durable,
    ev.LedgerFailed: Node._on_ledger_failed,
    ev.RoundsKept: lambda node, event: node.follower.on_rounds_kept(event.keeps),
    ev.LeaveAsked: lambda node, event: node._on_leave_asked(),
    ev.HandOver: Node._on_hand_over,
    ev.TrainersAsked: lambda node, event: node.heartbeats.ask_trainers(event.min_trainers),
    Advised: Node._on_advised,
    BansBelieved: lambda node, event: node.follower.bans.set(event.bans),
    # the trainer
    ev.Attached: Node._on_attached,
    ev.Detached: lambda node, event: node._on_detached(),
    ev.Offered: Node._on_offered,
    ev.Submitted: Node._on_submitted,
    # the data plane
    ev.AttemptReduced: Node._on_reduced,
    ev.ReduceFailed: Node._on_reduce_failed,
    ev.FinalChunks: Node._on_final_chunks,
    ev.Applied: Node._on_applied,
    ev.Progressed: Node._on_progressed,
    ev.CaughtUp: Node._on_caught_up,
    ev.CatchUpFailed: lambda node, event: node.syncing.on_failed(event.why),
    ev.Restored: lambda node, event: node.follower.on_restored(event),
    ev.HomeRead: Node._on_home_read,
    ev.Configured: Node._on_configured,
}

# What those outside the view say as well.
_OF_JOINERS = (ms.ProbeView, ms.Heartbeat)

# What somebody says to a candidate for the next view.
_VOTES = (ms.Promise, ms.Accepted)

# What only the coordinator may say.
_ORDERS: dict[type, Callable[[Node, bytes, Any], None]] = {
    ms.AskFinals: lambda node, source, ask: node.follower.on_ask_finals(ask),
    ms.Begin: Node._on_begin,
    ms.Commit: Node._on_commit,
    ms.CoordinatorBeat: Node._on_beat,
    ms.Notice: lambda node, source, notice: node._on_notice(notice),
    ms.Repair: lambda node, source, repair: node.follower.on_repair(repair),
    ms.Resync: lambda node, source, resync: node._on_resync(),
    ms.Yield: lambda node, source, order: node._yield_to(order.winner, "our coordinator says so"),
}

_MESSAGES: dict[type, Callable[[Node, bytes, Any], None]] = {
    **_ORDERS,
    # what members tell the coordinator
    ms.Heartbeat: Node._on_heartbeat,
    ms.SameBeat: lambda node, source, same: node._on_same_beat(source),
    ms.Offer: lambda node, s, m: node._tell_lead(lambda c: c.on_offer(s, m.blob, node.now_s)),
    ms.ObjectIs: lambda node, s, m: node._tell_lead(lambda c: c.roster.give(s, m.data)),
    ms.Miss: lambda node, s, m: node._tell_lead(lambda c: c.on_miss(s, m)),
    ms.Ready: Node._on_ready,
    ms.Finals: lambda node, s, m: node._tell_lead(lambda c: c.on_finals(s, m)),
    ms.AskTrainers: lambda node, s, m: node._tell_lead(
        lambda c: c.admission.ask_trainers(m.min_trainers)
    ),
    ms.Leave: Node._on_leave,
    # elections and views
    ms.Prepare: Node._on_prepare,
    ms.Promise: Node._on_promise,
    ms.Accept: lambda node, source, accept: node._on_accept(accept),
    ms.Accepted: Node._on_accepted,
    ms.Install: lambda node, source, install: node._on_install(install),
    ms.ProbeView: lambda node, source, probe: node._tell_view(source, probe.view),
    ms.Packed: lambda node, source, packed: None,  # of a view that we are not in, or just enter
    # those outside the view
    ms.Meet: Node._on_meet,
    ms.BootstrapHello: Node._on_bootstrap_hello,
    ms.Join: Node._on_join,
    ms.Redirect: Node._on_redirect,
    ms.JoinRefused: lambda node, source, refused: node.joining.on_refused(source, refused),
    ms.SyncTarget: Node._on_sync_target,
}

# What is of one view, and heard by who is in it.
_IN_VIEW = {kind for kind in _MESSAGES if issubclass(kind, ms.InView)} - {ms.SyncTarget}
