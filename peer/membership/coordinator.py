"""Coordinate a view: who is alive, when a round begins, who comes in and goes out.

Theory. Between rounds there is a *boundary*. At a boundary the coordinator first settles
membership (leavers, the dead, members back under a new incarnation, joiners that have caught up;
admission.py), and only then opens the next round at the *barrier*, when all attached trainers
have arrived or the stragglers' time is up. Where the method keeps rounds of different fragments in
flight, the next one may open before the last is committed; they commit in order, and a change of
membership waits until none is open. After it has proposed a view it begins nothing more in the old
one (the acceptors' safety argument, consensus.py).

Everything here is level-triggered: events update facts, ``step`` acts on the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

from atoll.collectives.units import count, duration, listed
from atoll.peer.membership.admission import Admission
from atoll.peer.membership.attempt import (
    ATTEMPTS_MAX,
    DISPUTES_MAX,
    Attempt,
    AttemptCleanup,
    RetryBudget,
)
from atoll.peer.membership.consensus import Proposer
from atoll.peer.membership.events import Effect, Note, Send
from atoll.peer.membership.failure_detector import Machines
from atoll.peer.membership.layout import (
    Advised,
    Layout,
    handed_on,
    layout_for,
    pair_for,
    reserved,
)
from atoll.peer.membership.link_graph import LinkGraph, broken_paths, shown_apart, shown_relayed
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import (
    HALTED_CHARS_MAX,
    AskFinals,
    Begin,
    Commit,
    CoordinatorBeat,
    Finals,
    Heartbeat,
    Miss,
    Ready,
    Resync,
)
from atoll.peer.membership.participation import Barrier, Eligibility, InnerPhases, opening
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.succession import Succession
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Ballot, View, chain_after, is_quorum, short
from atoll.peer.membership.witness_owners import Owners
from atoll.peer.rounds.entries import INIT, INIT_ROUND, REDUCE, STEP, EntryOrigin, fragment_of

OFFERS_MAX = 8  # the next ones' turn comes when these have failed: offers are repeated


class Coordinator:
    """Coordinate rounds and membership, on one member while the view names it coordinator."""

    def __init__(
        self,
        view: View,
        me: bytes,
        follower: MemberState,
        timing: Timing,
        emit: Callable[[Effect], None],
        now_s: float,
        *,
        sign: Callable[[Commit], Commit] = lambda commit: commit,
        rounds_in_flight: int = 1,
        life: int = 0,
        machines: Machines | None = None,
        phases: InnerPhases | None = None,
    ) -> None:
        self.view = view
        self.me = me
        self.life = life
        self.timing = timing
        self._emit = emit
        self._sign = sign
        self._own = follower
        self.in_flight_max = rounds_in_flight
        self.roster = Roster(view, me, timing, now_s, machines)
        self.eligibility = Eligibility(view, follower, self.roster, emit)
        self.admission = Admission(view, me, follower, self.roster, timing, emit)
        self.succession = Succession(view, self.roster, self.admission, timing, emit)
        self.offers: dict[bytes, bytes] = {}
        self.advice: Advised | None = None  # how rounds would go fastest
        self.attempts: dict[int, Attempt] = {}  # by round
        self.cleanups: dict[int, AttemptCleanup] = {}
        self.proposer: Proposer | None = None
        self.last_commit: Commit | None = None
        self._comparison = Comparison(view, me, emit)
        self.disputed = self.rival = ""  # why no round begins: in this view, beside a lineage
        self.without_base_since_s: float | None = None
        self._attempts = 0  # numbers rise within the view
        self._budgets: dict[int, RetryBudget] = {}
        self.barrier = Barrier(follower, self.roster, timing, emit, now_s, phases or InnerPhases())
        self._noted_links = self.roster.links
        self._noted_owners = ""
        self._apart = ""  # who has no link to whom, as the log says
        self._quorum_lost_noted = self._loading_noted = False

    def take_over(self, before: Coordinator) -> None:
        """Go on with what this peer knew as the coordinator of the view before."""
        peers = self.view.peers
        self.admission.take_over(before.admission)
        self.succession.take_over(before.succession)
        self.eligibility.flaky_peers.take_over(before.eligibility.flaky_peers, peers)
        self.barrier.take_over(before.barrier, peers)
        self.roster.broken.take_over(before.roster.broken, peers)
        self._apart, self._noted_owners = before._apart, before._noted_owners

    # ------------------------------------------------------------ facts

    @property
    def halted(self) -> str:
        return self._comparison.halted or self.disputed or self.rival

    def on_heartbeat(self, source: bytes, beat: Heartbeat, now_s: float) -> None:
        if self.admission.on_beat(source, beat, now_s):
            return
        life = self.roster.life(source)
        if not self.roster.heard(source, beat, now_s):
            return
        if beat.life > life > 0:
            self._was_restarted(source)
        if beat.unsynced:
            return
        if not self._own.is_replica:  # a witness has no specification: the replicas tell it
            self._own.fragments = max(self._own.fragments, beat.fragments)
            self.in_flight_max = max(self.in_flight_max, beat.in_flight)
        if beat.terms != self._own.terms:
            self.eligibility.learn()
        if beat.round < self._own.round:
            self._emit(Send(source, self.beat(now_s)))  # a lost COMMIT
            return
        known = {run.round: run for run in beat.runs}
        for run in beat.runs:
            if run.round > self._own.round and run.round not in {*self.attempts, *self.cleanups}:
                self._emit(Send(source, AskFinals(*self._tag(), run.round, run.attempt)))  # over
        for number, attempt in self.attempts.items():
            heard = known.get(number)
            if heard is None or heard.attempt < attempt.begin.attempt:
                attempt.repeat(source, now_s)  # a lost BEGIN
            # A lost READY.
            elif heard.root and heard.attempt == attempt.begin.attempt and not beat.frozen:
                kept = beat.keeps_rounds
                attempt.heard_ready(source, heard.root, durable=not beat.pending, kept=kept)

    def _was_restarted(self, source: bytes) -> None:
        """Let a member go on as one that was never away; what its trainer wanted is forgotten."""
        self.admission.leaving.discard(source)
        for attempt in self.attempts.values():
            attempt.lost_memory(source)
        text = f"{short(source)} was restarted and is the same member as before"
        self._emit(Note("restarted", text, source))

    def on_ready(self, source: bytes, ready: Ready) -> None:
        attempt = self.attempts.get(ready.round)
        if attempt is not None and ready.round == self._own.round + 1:
            attempt.on_ready(source, ready)

    def on_miss(self, source: bytes, miss: Miss) -> None:
        attempt = self.attempts.get(miss.round)
        if attempt is not None:
            attempt.on_miss(source, miss)

    def on_finals(self, source: bytes, finals: Finals) -> None:
        cleanup = self.cleanups.get(finals.round)
        if cleanup is not None:
            cleanup.on_finals(source, finals)

    def on_offer(self, source: bytes, blob: bytes, now_s: float) -> None:
        """Keep an offer to initialise the run, behind those that were heard before it.

        The first that is heard initialises the run, unless it dies or fails.
        """
        alive = self.roster.alive(now_s)
        self.offers = {peer: known for peer, known in self.offers.items() if peer in alive}
        if self._own.round == 0 and len(self.offers) < OFFERS_MAX:
            self.offers.setdefault(source, blob)

    def _tag(self) -> tuple[bytes, int]:
        return self.view.lineage, self.view.number

    def beat(self, now_s: float, lag_s: float = 0.0) -> CoordinatorBeat:
        own, halted = self._own, self.halted[:HALTED_CHARS_MAX]
        position = (*self._tag(), *own.position, self.last_commit)
        (waiting, waiting_s), rounds = self.waiting_for(now_s), self.eligibility
        return CoordinatorBeat(
            *position,
            waiting,
            float(int(waiting_s)) if waiting else 0.0,  # a beat that differs is sent whole
            halted=halted,
            held=rounds.held,
            left_out=rounds.left_out,
            lag_s=lag_s,
            lacks_quorum=not self.hears_quorum(now_s),
            unchanged=own.unchanged if own.known == (own.round, own.chain) else 0,
        )

    def hears_quorum(self, now_s: float) -> bool:
        return self.roster.hears_quorum(now_s)

    @property
    def busy(self) -> bool:
        return bool(self.attempts or self.cleanups) or self.proposer is not None

    def discount_pause(self, pause_s: float) -> None:
        self.roster.discount_pause(pause_s)
        self.admission.discount_pause(pause_s)
        for attempt in self.attempts.values():
            attempt.discount_pause(pause_s)

    # ------------------------------------------------------------ acting on them

    def step(self, now_s: float) -> None:
        if self.proposer is not None:
            self.proposer.step(now_s, self.roster.dead(now_s), lone_ok=False)
            return
        alive = self.roster.alive(now_s)
        if not self.roster.hears_quorum(now_s):
            self._without_quorum(alive, now_s)
            return
        self._quorum_lost_noted = False
        staying = alive - self.admission.leaving
        self.eligibility.witnesses = tuple(p for p in self.view.witnesses if p in staying)
        self.roster.mend_paths(now_s)
        self._note_links(alive)
        self._comparison.step(self._own, self.roster, alive)
        if self.halted or self._own.is_behind or not self.admission.can_finish(staying):
            ended = [cleanup.attempt for cleanup in self.cleanups.values()]
            for attempt in [*self.attempts.values(), *ended]:
                self._tell_over(attempt.begin)
            self.attempts.clear()
            self.cleanups.clear()
        for number in sorted({*self.attempts, *self.cleanups}):
            if self._step_round(number, alive, staying, now_s):
                return  # a commit reaches ourselves first: then we are called again
        self._step_boundary(alive, now_s)

    def _without_quorum(self, alive: set[bytes], now_s: float) -> None:
        if self._quorum_lost_noted:
            return
        self._quorum_lost_noted = True
        gone = [
            f"{short(p)} (silent for {duration(self.roster.silent_s(p, now_s))})"
            for p in self.view.peers
            if p not in alive
        ]
        of = f"{len(alive)} of {len(self.view.members)} voters answer, no quorum"
        self._emit(Note("no-quorum", f"{of}: rounds wait for {listed(gone)}"))

    def _note_links(self, alive: set[bytes]) -> None:
        """Say once, of each change, which members have no link to each other."""
        links = self.roster.links
        if links is self._noted_links or self.roster.unheard(alive):
            return
        self._noted_links, before = links, self._apart
        self._apart = "" if links.is_complete else shown_apart(links, self.view.peers)
        if self._apart and self._apart != before:
            self._emit(Note("links", f"{self._apart}: rounds are planned around that"))
        elif before and not self._apart:
            self._emit(Note("links", "all members have links to each other"))

    # ------------------------------------------------------------ a round

    def _step_round(
        self, number: int, alive: set[bytes], staying: set[bytes], now_s: float
    ) -> bool:
        """Move one open round on; return whether it was committed.

        Who is leaving does its part of an attempt to the end, and is in no other one; what it holds
        goes with it, so it is no copy.
        """
        cleanup = self.cleanups.get(number)
        if cleanup is not None:
            if cleanup.is_done(now_s, alive):
                self._begin_again(cleanup, staying, now_s)
            return False
        attempt = self.attempts.get(number)
        if attempt is None:
            return False  # given up with one before it
        budget = self._budget(number)
        given_up = self.roster.unsynced() | attempt.unrepairable(now_s)
        given_up |= attempt.out_of_reach(alive, self.roster.links)
        attempt.restarted = self.roster.restarted(attempt.begin)
        if budget.distrusted and is_quorum(self.view, alive - given_up - budget.distrusted):
            given_up |= budget.distrusted
        if number != self._own.round + 1:
            attempt.wait_turn(now_s)
        elif attempt.ready:  # in order
            is_init = attempt.begin.kind == INIT  # everybody needs the first state at once
            training = alive if is_init else self.roster.attached(alive)
            attempt.keepers = self.roster.keepers()
            root = attempt.committable(now_s, staying, given_up, training)
            if root:
                self._commit(attempt, root, now_s)
                return True
        usable = alive - given_up
        # Others move bytes for an attempt only when somebody holds its result, and they copy it.
        moving = self.view.peers if attempt.ready else attempt.begin.exchange
        moved_bytes, links = self.roster.progress_bytes(moving), self.roster.links
        if attempt.misses and not attempt.audited:
            attempt.able = self._able(attempt.begin, usable)
        attempt.silence = self.roster.silence(attempt.begin.exchange, now_s)
        participants = attempt.step(now_s, usable, moved_bytes, links)
        if participants is not None:
            self._end_attempt(attempt, participants, usable, now_s)
        return False

    def _give_up(self, number: int, now_s: float, kind: str, why: str) -> None:
        """Send a round back to the barrier, with the rounds after it, and say why in a note.

        They would have to wait for it, and a view that may be needed for it would wait for them.
        """
        for later in sorted(n for n in {*self.attempts, *self.cleanups} if n >= number):
            cleanup = self.cleanups.pop(later, None)
            attempt = cleanup.attempt if cleanup is not None else self.attempts.pop(later)
            self._tell_over(attempt.begin)
        pause_s = self.barrier.given_up(now_s)
        pause = f"; in {duration(pause_s)} at the earliest" if pause_s else ""
        self._emit(Note(kind, f"{why}{pause}"))

    def _tell_over(self, begin: Begin) -> None:
        """Tell everyone, ourselves too, that an attempt is over.

        The next submission is not late for this attempt any more.
        """
        for peer in self.view.peers:
            self._emit(Send(peer, AskFinals(*self._tag(), begin.round, begin.attempt)))

    def _budget(self, number: int) -> RetryBudget:
        return self._budgets.setdefault(number, RetryBudget())

    def _end_attempt(
        self, attempt: Attempt, participants: tuple[bytes, ...], alive: set[bytes], now_s: float
    ) -> None:
        begin = attempt.begin
        if attempt.dispute:
            self._settle_dispute(attempt, participants)
        if self.halted:
            return
        tries = self._budget(begin.round).tries
        lost = begin.kind == INIT and begin.counted[0] not in participants
        if not participants or lost or tries >= ATTEMPTS_MAX:
            if begin.kind == INIT:
                self.offers.pop(begin.counted[0], None)  # the next one's turn
            self._budgets.pop(begin.round)
            text = f"round {begin.round} has failed {count(tries, 'time')}: it waits for all anew"
            self._give_up(begin.round, now_s, "give-up", text)
            return
        del self.attempts[begin.round]
        dropped = {*begin.participants} & alive - {*participants} - attempt.restarted
        self.eligibility.flaky_peers.blame(begin.round, dropped, now_s)
        # Of a disputed attempt nothing is kept: nobody knows whose chunks are right.
        owners = self.eligibility.owners(
            begin.participants, begin.kind
        )  # others' word is not taken
        asked = {*compress(begin.participants, owners), *begin.helpers} & alive
        asked = asked if not attempt.dispute else set()
        self.cleanups[begin.round] = AttemptCleanup(
            attempt, participants, asked, self.timing, self._emit, now_s
        )

    def _begin_again(self, cleanup: AttemptCleanup, alive: set[bytes], now_s: float) -> None:
        begin = cleanup.attempt.begin
        budget = self._budget(begin.round)
        budget.stalls += cleanup.is_stall
        is_clear = cleanup.is_stall and cleanup.is_clear(alive)
        again = cleanup.is_stall and budget.stalls > 1
        number = begin.round
        if self._plans_around(cleanup, alive, now_s):
            again = is_clear = False
        elif cleanup.is_stall and cleanup.is_between(self.me, alive):
            text = f"round {number}: no data reaches or leaves this peer: another one is to lead"
            self.admission.successor = b""
            self._give_up(number, now_s, "hand-over", text)
            return
        excluding = again or is_clear
        participants = self._next_participants(cleanup, alive, excluding=excluding)
        if not participants and is_clear and not again:
            # It may have come back: without it the round would begin anew from the barrier.
            excluding = False
            participants = self._next_participants(cleanup, alive, excluding=False)
        if excluding:  # only whom the stall has left out, also where the others are too few
            going_on = {*cleanup.participants(alive, excluding=True)}
            out = {*begin.participants} & alive - going_on - cleanup.attempt.restarted
            self.eligibility.flaky_peers.blame(number, out, now_s)
        if participants:
            del self.cleanups[number]
            self._begin(number, begin.kind, participants, cleanup, alive, now_s)
        else:  # the others have died meanwhile
            text = f"round {number} has too few participants left: it waits for all anew"
            self._give_up(number, now_s, "give-up", text)

    def _next_participants(
        self, cleanup: AttemptCleanup, alive: set[bytes], *, excluding: bool
    ) -> tuple[bytes, ...]:
        """Return the participants of the next attempt, or none if they are too few."""
        begin = cleanup.attempt.begin
        participants = cleanup.participants(alive, excluding=excluding)
        participants = self.eligibility.linked(begin.kind, participants)
        kind, number = begin.kind, begin.round
        enough = self.eligibility.may_go_on(number, kind, participants, begin, alive)
        return participants if enough else ()

    def _plans_around(self, cleanup: AttemptCleanup, alive: set[bytes], now_s: float) -> bool:
        """Return whether the next attempt avoids paths on which the last one has failed."""
        begin, pairs = cleanup.attempt.begin, cleanup.attempt.broken
        if cleanup.is_stall:
            pairs = broken_paths(cleanup.waits_for(alive), self._able(begin, alive))
            pairs = {pair for pair in pairs if self.me not in pair} or pairs
        pairs = pairs - self.roster.broken.pairs
        if not pairs:
            return False
        pause_s = self.roster.break_paths(pairs, now_s, is_stall=cleanup.is_stall)
        peers = {peer for pair in pairs for peer in pair}
        text = (
            f"round {begin.round}: {shown_apart(LinkGraph(pairs), peers)} that carries data: no"
            f" round uses it for {duration(pause_s)}"
        )
        self._emit(Note("links", text))
        return True

    def _able(self, begin: Begin, alive: set[bytes]) -> set[bytes]:
        """Return the living that may own parts where some paths are not used: witnesses too."""
        if begin.kind not in (STEP, REDUCE):
            return set()
        owners = self.eligibility.owners(begin.participants, begin.kind)
        return {*compress(begin.participants, owners), *begin.helpers} & alive

    def _settle_dispute(self, attempt: Attempt, participants: tuple[bytes, ...]) -> None:
        """Act on different results of one attempt: it must not be repeated for ever.

        The next attempt has to differ from it; after more than DISPUTES_MAX that do not, no more
        rounds begin.
        """
        budget = self._budget(attempt.begin.round)
        budget.dispute(attempt, participants)
        if budget.disputes > DISPUTES_MAX:
            text = f"the result of round {attempt.begin.round} differs, {budget.disputes} times"
            self.disputed = f"{text}: {attempt.dispute}; no more rounds until one of them leaves"
            self._emit(Note("diverged", self.disputed))

    def _commit(self, attempt: Attempt, root: bytes, now_s: float) -> None:
        begin = attempt.begin
        del self.attempts[begin.round]
        self._budgets.pop(begin.round, None)
        if begin.kind == STEP and not begin.kept:  # of one that keeps chunks it was a part
            self.admission.exchanged(now_s - attempt.began_s)
        self.eligibility.flaky_peers.completed(begin.participants)
        self.offers.clear()
        chain = chain_after(self._own.chain, begin.round, begin.fragment, root)
        unchanged = 0 if begin.operation is None else self._own.unchanged + 1
        tag = (*self._tag(), begin.round, begin.attempt, chain)
        commit = self._sign(Commit(*tag, unchanged=unchanged))
        self.last_commit = commit
        for peer in self.view.peers:
            self._emit(Send(peer, commit))
        self.barrier.committed(now_s)

    def _begin(
        self,
        number: int,
        kind: str,
        participants: tuple[bytes, ...],
        last: AttemptCleanup | None,
        alive: set[bytes],
        now_s: float,
        first: bytes = b"",
    ) -> None:
        """Begin an attempt; ``first``: whose parameters a first attempt at INIT gives to all."""
        self._attempts += 1
        self._budget(number).tries += 1
        fragment = fragment_of(number, self._own.fragments)
        chosen = tuple(sorted(participants))
        tried = last.attempt.begin if last is not None else None
        weights = tuple(float(peer == first) for peer in chosen)
        if not first:
            weights = self.eligibility.weights(chosen, kind, fragment, tried)
        past: tuple[EntryOrigin, ...] = ()
        kept = b""
        if last is not None and self.eligibility.may_keep(kind):
            past, kept = last.kept(alive, chosen, self.roster.links)
        call = opening(kind, chosen, tried, self.roster, self.barrier.left_out)
        blob = self.offers.get(first, b"") if first else call.blob
        owners = self.eligibility.helper(kind, chosen, fragment)
        self._note_owners(owners)
        layout = None
        if owners is None:
            elements = call.operation.elements if call.operation is not None else 0
            layout = self._layout(chosen, weights, kind, elements, again=last is not None)
        tag = (*self._tag(), number, self._attempts, kind, chosen, weights, blob)
        called = (call.operation, call.without, call.aside)
        lives = tuple(self.roster.life(peer) for peer in chosen)
        begin = Begin(*tag, fragment, past, kept, layout, *called, lives, owners)
        links = self.roster.links
        attempt = Attempt(self.view, self.me, begin, self.timing, self._emit, now_s, links)
        if kind == INIT and owners is None:
            attempt.detours = self.eligibility.witnesses
        attempt.audited = kind == STEP and self.eligibility.terms.audited
        attempt.tries = self._budget(number).tries
        self.attempts[number] = attempt

    def _note_owners(self, owners: Owners | None) -> None:
        """Say once, of each change, that a witness owns the results of rounds, and why."""
        why = owners.why if owners is not None else ""
        if why and why != self._noted_owners:
            self._emit(Note("links", why))
        self._noted_owners = why

    def _layout(
        self,
        chosen: tuple[bytes, ...],
        weights: tuple[float, ...],
        kind: str,
        elements: int,
        *,
        again: bool,
    ) -> Layout | None:
        """Return the layout of an attempt, in which data go between linked participants only.

        ``elements``: of a REDUCE.
        """
        links = self.roster.links
        if kind == INIT:
            return handed_on(weights, [links.reaches(peer, chosen) for peer in chosen])
        layout = layout_for(self.advice, chosen, kind, again=again)
        may_own = self.eligibility.owners(chosen, kind)
        apart = links.apart(chosen) if kind in (STEP, REDUCE) else ()
        relayed = links.relayed(chosen) if kind in (STEP, REDUCE) else ()
        if not apart and not relayed:
            pair = pair_for(chosen, elements) if all(may_own) and not again else None
            return pair or reserved(layout, may_own)
        if all(may_own) and layout is not None and not layout.crosses(apart):
            return layout
        owners = _owners(links, chosen, may_own)
        if self.roster.broken.stalls > 1 and self._owns_in(layout, chosen, owners):
            owners = tuple(peer == self.me for peer in chosen)
        own = listed([short(peer) for peer in compress(chosen, owners)])
        why = shown_apart(links, chosen) if apart else shown_relayed(links, chosen)
        return reserved(layout, owners, f"butterfly; {why}: {own} own it")

    def _owns_in(
        self, layout: Layout | None, chosen: tuple[bytes, ...], owners: tuple[bool, ...]
    ) -> bool:
        """Return whether this peer may own all: the plan gives it something, or all to one peer."""
        place = chosen.index(self.me) if self.me in chosen else -1
        if place < 0 or not owners[place]:
            return False
        shares = layout.shares if layout is not None else owners
        return shares[place] > 0 or sum(share > 0 for share in shares) == 1

    # ------------------------------------------------------------ a boundary

    def _step_boundary(self, alive: set[bytes], now_s: float) -> None:
        self.eligibility.held = ""
        if self.admission.lacks_base(alive):
            if self.without_base_since_s is None or self._is_on_a_disk(alive):
                self.without_base_since_s = now_s
            proposal = self.admission.to_synced(alive)
            if proposal is not None:
                self.propose(proposal, now_s)
            return
        self.without_base_since_s = None
        position = (self._own.round, self._own.chain)
        if (better := self.succession.successor(alive, position, now_s)) is not None:
            self.admission.successor = better
        spared = self.succession.spared(alive, now_s)
        in_flight = len(self.attempts) + len(self.cleanups)
        if in_flight >= self.in_flight_max:
            return  # members change when no round is open
        proposal = self.admission.next_view(alive, now_s, admit=not self.halted, spared=spared)
        if proposal is not None:
            if not self.busy:
                self.propose(proposal, now_s)
            return  # and if rounds are open, no further one is begun
        if self.me in self.admission.leaving:
            return  # nobody can take over yet
        if self.halted or self.admission.hold(alive, now_s):
            return
        if self._own.round == 0:
            offering = [peer for peer in self.offers if peer in alive]
            if offering and not in_flight and not self.roster.unheard(alive):
                # All have it from there: the first of those with most links.
                links, peers = self.roster.links, self.view.peers
                first = min(offering, key=lambda peer: len(links.apart_from(peer, peers)))
                self._begin(INIT_ROUND, INIT, self._near(first, alive), None, alive, now_s, first)
            return
        number = self._next_round
        present = alive - self.admission.leaving
        may_begin = partial(self.eligibility.may_begin, present)
        if not self.eligibility.are_attached(number, present):
            self.barrier.hold()
            return
        participants = self.barrier.participants(number, present, now_s, may_begin)
        if participants:
            fragment = fragment_of(number, self._own.fragments)
            kind, chosen = self.eligibility.choose(participants, fragment)
            chosen = self.eligibility.select_participants(number, kind, chosen, now_s)
            self.barrier.left_out |= {*participants} - {*chosen}
            self._begin(number, kind, chosen, None, alive, now_s)

    def _is_on_a_disk(self, alive: set[bytes]) -> bool:
        """Return whether the last commit is on a disk that is being read: it is not lost."""
        loading = self.roster.loading(alive) | ({self.me} if self._own.loading else set())
        if loading and not self._loading_noted:
            self._loading_noted = True
            names = listed([short(peer) for peer in sorted(loading)])
            text = (
                f"round {self._own.round} is on the disk of {names}: rounds go on when it is read"
            )
            self._emit(Note("loading", text))
        return bool(loading)

    def _near(self, first: bytes, alive: set[bytes]) -> tuple[bytes, ...]:
        """Return a peer and the replicas that can have its parameters from it or hand them on."""
        links = self.roster.links
        replicas = tuple(peer for peer in self.view.replicas if peer in alive)
        near = tuple(peer for peer in replicas if links.have_path(first, peer))
        for witness in self.eligibility.witnesses:
            through = tuple(peer for peer in replicas if links.have_path(witness, peer))
            if first in through and len(through) > len(near):
                near = through
        return near

    @property
    def _next_round(self) -> int:
        """Return the first round that is not open.

        One that was given up comes before those after it.
        """
        number = self._own.round + 1
        while number in self.attempts or number in self.cleanups:
            number += 1
        return number

    def waiting_for(self, now_s: float) -> tuple[tuple[bytes, ...], float]:
        """Return whom the next commit waits for, and since how many seconds.

        It is for people who ask.
        """
        own = self._own
        alive = self.roster.alive(now_s)
        if not self.roster.hears_quorum(now_s):
            dead = self.roster.dead(now_s)
            return tuple(sorted(dead)), min(self.roster.silent_s(p, now_s) for p in dead)
        attempt = self.attempts.get(own.round + 1)
        if attempt is not None:
            late = {p for p in attempt.begin.participants if p not in attempt.ready}
            return tuple(sorted(late)), now_s - attempt.began_s
        if own.round == 0:
            return (), self.barrier.waited_s(now_s)
        return tuple(sorted(self.barrier.late(alive))), self.barrier.waited_s(now_s)

    def propose(self, proposal: View, now_s: float) -> None:
        ballot = Ballot(0, self.me, self.life)
        self.proposer = Proposer(self.view, ballot, self.timing, self._emit, now_s, proposal)


def _owners(links: LinkGraph, chosen: Sequence[bytes], may_own: Sequence[bool]) -> tuple[bool, ...]:
    """Return who owns a part where no plan says it: those whose data have a way to all.

    Without a relay, if anybody has such: relays are slow, and somebody else pays for them.
    """
    for directly in (True, False):
        owners = tuple(
            may and links.reaches(peer, chosen, directly=directly)
            for peer, may in zip(chosen, may_own, strict=True)
        )
        if any(owners):
            return owners
    return owners


# ---------------------------------------------------------------- equal rounds, equal bytes


class Comparison:
    """Compare state digests: equal rounds must mean equal bytes (invariant 3).

    Every heartbeat carries the digest of the state after the last commit. A replica in the minority
    is told to take the state again (RESYNC) and says so; without a majority the run halts with the
    values shown, because nobody can say which one is right. A majority of everyone who has a say,
    so that the first reports do not pass for all.

    ``halted`` says why no round may begin, or nothing. Who was catching up meanwhile may bring a
    majority about; then the run goes on.
    """

    def __init__(self, view: View, me: bytes, emit: Callable[[Effect], None]) -> None:
        self._view, self._me, self._emit = view, me, emit
        self.halted = ""

    def step(self, own: MemberState, roster: Roster, alive: set[bytes]) -> None:
        """Halt, go on, or send RESYNC to a minority."""
        digests = roster.digests(own.round)
        doubted = own.is_behind or roster.is_doubted(self._me, own.digest)
        if own.digest_round == own.round and own.holds and not doubted:
            digests[self._me] = own.digest
        if not self.halted and len({*digests.values()}) <= 1:
            return  # as nearly always: nobody differs
        groups: dict[bytes, list[bytes]] = {}
        for peer, digest in digests.items():
            groups.setdefault(digest, []).append(peer)
        largest = max(map(len, groups.values()), default=0)
        silent = roster.undigested(alive, own.round) - {self._me}
        if 2 * largest <= len(digests) + len(silent):
            if not silent and not self.halted:
                self._halt(_shown(own.round, groups, " without a majority"))
            return
        if self.halted:
            self.halted = ""
            text = f"state after round {own.round}: a majority agrees now, the run goes on"
            self._emit(Note("agreed", text))
        self._resync(own.round, groups, roster)

    def _halt(self, why: str) -> None:
        self.halted = f"{why}; no more rounds until one of them leaves or a majority agrees"
        self._emit(Note("diverged", self.halted))

    def _resync(self, number: int, groups: dict[bytes, list[bytes]], roster: Roster) -> None:
        majority = max(groups, key=lambda digest: len(groups[digest]))
        text = f"{_shown(number, groups)}; the minority downloads the others' state"
        view = self._view
        for digest, peers in groups.items():
            for peer in peers if digest != majority else ():
                self._emit(Note("diverged", text, peer))
                roster.doubt(peer, digest)
                self._emit(Send(peer, Resync(view.lineage, view.number, number, majority)))


def _shown(number: int, groups: dict[bytes, list[bytes]], how: str = "") -> str:
    shown = "; ".join(
        f"{digest.hex()[:16]} on {', '.join(short(p) for p in peers)}"
        for digest, peers in sorted(groups.items())
    )
    return f"state after round {number} differs{how}: {shown}"
