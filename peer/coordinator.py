"""The coordinator: who is alive, when a round begins, who comes in and goes out.

Theory. Between rounds there is a *boundary*. At a boundary the coordinator first settles
membership (leavers, the dead, members back under a new incarnation, learners that have the state),
then holds it while learners and laggards load the state (peer/admission.py), and only then opens
the next round at the *barrier*, when all attached trainers have arrived or the stragglers' time is
up. After it has proposed a view it begins nothing more in the old one (the acceptors' safety
argument, peer/election.py).

Everything here is level-triggered: events update facts, ``step`` acts on the facts.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from atoll.peer.admission import Admission
from atoll.peer.attempts import ATTEMPTS_MAX, DISPUTES_MAX, Attempt
from atoll.peer.election import Proposer
from atoll.peer.events import Effect, Note, Send
from atoll.peer.follower import Follower
from atoll.peer.messages import INIT, STEP, Begin, Commit, CoordinatorBeat, Heartbeat, Resync
from atoll.peer.roster import Roster
from atoll.peer.timing import Timing
from atoll.peer.views import Ballot, View, is_quorum, short

__all__ = ["OFFERS_MAX", "Coordinator"]

OFFERS_MAX = 8  # the next ones' turn comes when these have failed: offers are repeated
_PHASES_KEPT = 9  # inner phases whose median sets the stragglers' time


class Coordinator:
    """Exists on one member while the view names it coordinator."""

    def __init__(
        self,
        view: View,
        me: bytes,
        follower: Follower,
        timing: Timing,
        emit: Callable[[Effect], None],
        now_s: float,
    ) -> None:
        self.view = view
        self.me = me
        self.timing = timing
        self._emit = emit
        self._own = follower
        self.roster = Roster(view, me, timing, now_s)
        self.admission = Admission(view, me, follower, self.roster, timing, emit)
        self.offers: dict[bytes, bytes] = {}
        self.attempt: Attempt | None = None
        self.proposer: Proposer | None = None
        self.halted = ""
        self._attempts = 0  # numbers rise within the view
        self._tries = 0  # of the round at hand
        self._disputes = 0  # ... that ended in different results and will be tried with the same
        self._distrusted: set[bytes] = set()  # ... whose copy of the result was another
        self._first_arrival_s: float | None = None
        self._boundary_s = now_s
        self._phases_s: list[float] = []
        self._quorum_lost_noted = False
        self._base_lost_noted = False

    # ------------------------------------------------------------ facts

    def on_heartbeat(self, source: bytes, beat: Heartbeat, now_s: float) -> None:
        if self.admission.on_beat(source, beat, now_s):
            return
        if not self.roster.heard(source, beat, now_s):
            return
        attempt = self.attempt
        if beat.round < self._own.round and not beat.unsynced:
            last = CoordinatorBeat(*self._tag(), self._own.round, self._own.chain)
            self._emit(Send(source, last))  # a lost COMMIT
        elif attempt is not None and not beat.unsynced:
            known = (beat.run_round, beat.run_attempt)
            if known < (attempt.begin.round, attempt.begin.attempt):
                self._emit(Send(source, attempt.begin))  # a lost BEGIN
            elif beat.ready_chain and known == (attempt.begin.round, attempt.begin.attempt):
                attempt.ready[source] = beat.ready_chain  # a lost READY

    def on_offer(self, source: bytes, blob: bytes, now_s: float) -> None:
        """The first that is heard initialises the run, unless it dies or fails."""
        alive = self.roster.alive(now_s)
        self.offers = {peer: known for peer, known in self.offers.items() if peer in alive}
        if self._own.round == 0 and len(self.offers) < OFFERS_MAX:
            self.offers.setdefault(source, blob)

    def _tag(self) -> tuple[bytes, int]:
        return self.view.lineage, self.view.number

    def hears_quorum(self, now_s: float) -> bool:
        return is_quorum(self.view, self.roster.alive(now_s))

    def forgive(self, pause_s: float) -> None:
        self.roster.forgive(pause_s)
        self.admission.forgive(pause_s)
        if self.attempt is not None:
            self.attempt.forgive(pause_s)

    # ------------------------------------------------------------ acting on them

    def step(self, now_s: float) -> None:
        if self.proposer is not None:
            self.proposer.step(now_s, self.roster.dead(now_s), lone_ok=False)
            return
        alive = self.roster.alive(now_s)
        if not is_quorum(self.view, alive):
            self._without_quorum(alive, now_s)
            return
        self._quorum_lost_noted = False
        if not self.halted:
            self._compare_digests(alive)
        if self.halted or self.me in self.admission.leaving:
            self.attempt = None  # our leave aborts the attempt; the next coordinator begins anew
        if self.attempt is not None:
            self._step_attempt(self.attempt, alive, now_s)
        else:
            self._step_boundary(alive, now_s)

    def _without_quorum(self, alive: set[bytes], now_s: float) -> None:
        if self._quorum_lost_noted:
            return
        self._quorum_lost_noted = True
        gone = ", ".join(
            f"{short(p)} (silent {self.roster.silent_s(p, now_s):.1f} s)"
            for p in self.view.peers
            if p not in alive
        )
        text = f"{len(alive)} of {len(self.view.members)} voters alive, no quorum; waiting: {gone}"
        self._emit(Note("no-quorum", text))

    def _compare_digests(self, alive: set[bytes]) -> None:
        """Equal rounds must mean equal bytes (invariant 3): the minority loads the state again.

        A majority of everyone who has a say, so that the first reports do not pass for all.
        """
        own = self._own
        digests = self.roster.digests(own.round)
        doubted = own.unsynced or self.roster.is_doubted(self.me, own.digest)
        if own.digest_round == own.round and not doubted:
            digests[self.me] = own.digest
        groups: dict[bytes, list[bytes]] = {}
        for peer, digest in digests.items():
            groups.setdefault(digest, []).append(peer)
        if len(groups) < 2:
            return
        shown = "; ".join(
            f"{digest.hex()[:16]} on {', '.join(short(p) for p in peers)}"
            for digest, peers in sorted(groups.items())
        )
        majority = max(groups, key=lambda digest: len(groups[digest]))
        silent = self.roster.undigested(alive, own.round) - {self.me}
        if 2 * len(groups[majority]) <= len(digests) + len(silent):
            if not silent:
                self._halt(f"state after round {own.round} differs without a majority: {shown}")
            return
        for peer, digest in digests.items():
            if digest != majority:
                text = f"state after round {own.round} differs: {shown}; minority resyncs"
                self._emit(Note("diverged", text, peer))
                self.roster.doubt(peer, digest)
                self._emit(Send(peer, Resync(*self._tag(), own.round, majority)))

    def _halt(self, why: str) -> None:
        """No more rounds in this view; whoever leaves or is removed brings the next one."""
        self.halted = f"{why}; no more rounds until one of them leaves"
        self._emit(Note("diverged", self.halted))

    # ------------------------------------------------------------ a round

    def _step_attempt(self, attempt: Attempt, alive: set[bytes], now_s: float) -> None:
        alive = alive - self.admission.leaving
        self.admission.help_laggards(alive, now_s)
        given_up = self.roster.unsynced() | attempt.unrepairable(now_s)
        if is_quorum(self.view, alive - given_up - self._distrusted):
            given_up |= self._distrusted
        commit = attempt.committed(alive - given_up, given_up)
        if commit is not None:
            self._commit(commit, now_s)
            return
        progress_bytes = self.roster.progress_bytes()
        participants = attempt.step(now_s, alive - given_up, given_up, progress_bytes)
        if participants is None:
            return
        if attempt.dispute:
            self._settle_dispute(attempt, participants)
        if self.halted:
            return
        if participants and self._tries < ATTEMPTS_MAX:
            self._begin(attempt.begin.kind, participants, attempt.begin, now_s)
        else:
            text = f"round {attempt.begin.round} given up after {self._tries} attempts"
            self._emit(Note("give-up", f"{text}; back to the barrier"))
            self.attempt = None
            if attempt.begin.kind == INIT:
                self.offers.pop(attempt.begin.participants[0], None)  # the next one's turn
            self._open_boundary(now_s)

    def _settle_dispute(self, attempt: Attempt, participants: tuple[bytes, ...]) -> None:
        """Different results of one attempt: the next one has to differ from it, or to end soon.

        An outsider that copied wrongly is left behind, while the quorum can do without it.
        """
        outsiders = attempt.minority.difference(attempt.begin.participants, {self.me})
        if outsiders - self._distrusted:
            self._distrusted |= outsiders
        elif set(participants) == set(attempt.begin.participants):
            self._disputes += 1
        if self._disputes > DISPUTES_MAX:
            text = f"the result of round {attempt.begin.round} differs, {self._disputes} times"
            self._halt(f"{text}: {attempt.dispute}")

    def _commit(self, commit: Commit, now_s: float) -> None:
        self.attempt = None
        self.offers.clear()
        for peer in self.view.peers:
            self._emit(Send(peer, commit))
        self._open_boundary(now_s)

    def _open_boundary(self, now_s: float) -> None:
        self._boundary_s = now_s
        self._first_arrival_s = None
        self._tries = self._disputes = 0
        self._distrusted.clear()

    def _begin(
        self, kind: str, participants: tuple[bytes, ...], last: Begin | None, now_s: float
    ) -> None:
        self._attempts += 1
        self._tries += 1
        chosen = tuple(sorted(participants))
        weights = tuple(1.0 if kind == INIT else self.roster.weight(p) for p in chosen)
        if last is not None:
            known = dict(zip(last.participants, last.weights, strict=True))
            weights = tuple(known[peer] for peer in chosen)
        if not any(weights):
            weights = (1.0,) * len(chosen)  # nobody counted anything: all alike
        blob = self.offers.get(chosen[0], b"") if kind == INIT else b""
        begin = Begin(
            *self._tag(), self._own.round + 1, self._attempts, kind, chosen, weights, blob
        )
        self.attempt = Attempt(self.view, self.me, begin, self.timing, self._emit, now_s)

    # ------------------------------------------------------------ a boundary

    def _step_boundary(self, alive: set[bytes], now_s: float) -> None:
        if self._own.unsynced:
            if not self.admission.hold(alive, now_s):
                self._without_base(now_s)
            return
        proposal = self.admission.next_view(alive, now_s, admit=not self.halted)
        if proposal is not None:
            self.propose(proposal, now_s)
            return
        if self.halted or self.admission.hold(alive, now_s):
            return
        if self._own.round == 0:
            offering = [peer for peer in self.offers if peer in alive]
            if offering:
                self._begin(INIT, (offering[0],), None, now_s)
            return
        self._step_barrier(alive, now_s)

    def _without_base(self, now_s: float) -> None:
        if not self._base_lost_noted and now_s - self._boundary_s > self.timing.lost_s:
            self._base_lost_noted = True
            text = f"no living member holds round {self.view.base_round}; the run halts"
            self._emit(Note("base-lost", text))

    def _step_barrier(self, alive: set[bytes], now_s: float) -> None:
        if self.roster.unheard(alive):
            return  # in a new view: who has arrived is in their first heartbeats
        attached = self.roster.attached(alive) - self.admission.leaving
        arrived = {
            peer
            for peer in attached | self.roster.arrived_detached(alive)
            if self.roster.has_arrived(peer, self._own.round, self._own.chain)
        }
        if not arrived:
            return
        if self._first_arrival_s is None:
            self._first_arrival_s = now_s
        late = attached - arrived
        if late and now_s - self._first_arrival_s < self.straggle_s:
            return
        if late:
            names = ", ".join(short(peer) for peer in sorted(late))
            text = f"round {self._own.round + 1} begins without {names}: {self.straggle_s:.0f} s"
            self._emit(Note("stragglers", f"{text} have passed since the first arrival"))
        self._phases_s = [*self._phases_s, now_s - self._boundary_s][-_PHASES_KEPT:]
        self._begin(STEP, tuple(arrived), None, now_s)

    @property
    def straggle_s(self) -> float:
        """max(30 s, half the median inner phase) after the first arrival."""
        phase_s = median(self._phases_s) if self._phases_s else 0.0
        return max(self.timing.straggle_min_s, phase_s / 2)

    def waiting_for(self, now_s: float) -> tuple[tuple[bytes, ...], float]:
        """Whom the next commit waits for, and since how many seconds; for people who ask."""
        own, attempt = self._own, self.attempt
        alive = self.roster.alive(now_s)
        if not is_quorum(self.view, alive):
            dead = self.roster.dead(now_s)
            return tuple(sorted(dead)), min(self.roster.silent_s(p, now_s) for p in dead)
        if attempt is not None:
            late = {p for p in attempt.begin.participants if p not in attempt.ready}
            return tuple(sorted(late)), now_s - attempt.began_s
        if own.round == 0:
            return (), now_s - self._boundary_s
        attached = self.roster.attached(alive)
        late = {p for p in attached if not self.roster.has_arrived(p, own.round, own.chain)}
        return tuple(sorted(late)), now_s - self._boundary_s

    def propose(self, proposal: View, now_s: float) -> None:
        ballot = Ballot(0, self.me)
        self.proposer = Proposer(
            self.view, self.me, ballot, self.timing, self._emit, now_s, proposal
        )
