"""Elect the next view: when to campaign, whom to vote for, how a decision reaches this peer.

Theory. A member campaigns when its coordinator is lost: silent for the failure time, or its
address, which accepted us before, refuses the connection. Members do so in rank order, a stagger
apart, so that one candidate usually suffices. The *pre-vote* rule protects a coordinator that works
from a candidate that cannot hear it: a voter that heard the coordinator within half the failure
time ignores PREPARE, but probes the coordinator, so that a real death is seen at the next
repetition. It protects none that hears too few voters to commit anything, as it says in its beats:
behind a bridge partition a majority may hear each other while one of them hears the coordinator
as well. A coordinator that hears a quorum ignores PREPARE; if some of its voters are frozen by such
an attempt, it outbids the candidate, which frees them with the next view. A process that was
stopped itself (SIGSTOP, a suspended host) counts nobody as silent for that time.

An election throws nobody out that lives. Voters that answer late stay in the next view, and so does
the lost coordinator: who is really gone is voted out from there, as lazily as always. Left out are
only those who are certainly gone, because their addresses refuse connections or a new incarnation
has called, and those who have been silent for the removal time: the lost coordinator since it was
heard last, others since they were asked first, if their links are down too. (Members say nothing
to each other while they have a coordinator, and one that hears it does not answer a candidate:
where a link is up, silence means nothing. Nor does it where there was none before.) The new
coordinator counts who has been silent as dead from the start, so that no round waits for it.

A candidate promises its own ballot only after another voter has promised it: so long it may be that
it alone does not hear the coordinator, because its links were cut for a moment, or take nothing in.
Then nobody answers it, it has promised nothing, and once it hears the coordinator it is a member as
before. Its own promise, which freezes it, would cost the others a view and the round that is open.
It is not kept back where that gains nothing: from a coordinator that outbids, where the coordinator
is certainly gone, where this peer is enough, and where it may fork.

A candidate without links to a quorum asks nobody for a vote, only for news: whoever has them is to
stand, and a ballot that comes to nothing would keep it waiting. Links stay open for long when a
network is cut, so they do not count where neither the voter nor its kernel has answered a call for
its vote. Without a quorum it waits, unless the policy in force lets whoever is left go on: then
after the fork wait, or at once when the address of everybody missing refuses the connection, the
promisers alone decide a flagged view in a lineage of its own. A *bootstrap view* is the imaginary
view before the first: its voters are those who found or resume a run together, and nobody
coordinates.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, NamedTuple

from atoll.collectives.units import duration, listed
from atoll.peer.membership.bans import forgets
from atoll.peer.membership.bootstrap import Bootstrap
from atoll.peer.membership.consensus import Acceptor, BaseWait, Electorate, Proposer
from atoll.peer.membership.durable_records import Recovered
from atoll.peer.membership.events import Note, Send
from atoll.peer.membership.failure_detector import FailureDetector
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import (
    Accept,
    Accepted,
    Prepare,
    ProbeView,
    Promise,
    Proof,
    Report,
)
from atoll.peer.membership.phase import Trigger
from atoll.peer.membership.probation import graduated, wrong_graduation
from atoll.peer.membership.signing import Signatures
from atoll.peer.membership.situation import Situation
from atoll.peer.membership.view import Ballot, View, changes_rules, is_quorum, short, successors


class _Objection(NamedTuple):
    """Say why a voter does not vote for a proposal; without a text, that is nobody's fault."""

    text: str
    is_ban: bool = False


class Election(Electorate):
    """Run one view's election, seen from one peer; it is made anew with every view.

    It does not change this peer's phase. What it asks of the node is a trigger of the phase table:
    LOST where this peer becomes a candidate, OUTBID where it yields to another one.
    """

    def __init__(
        self,
        here: Situation,
        own: MemberState,
        signatures: Signatures,
        view: View,
        bootstrap: Bootstrap | None = None,
        *,
        awaits_word: bool = False,
    ) -> None:
        """Watch the coordinator of ``view``; with ``bootstrap``, elect its founders' first view.

        ``awaits_word``: this process is yet to hear how far the run is (``may_be_behind``).
        """
        self._here = here
        self._own = own
        self._signatures = signatures
        self._bootstrap = bootstrap
        self.view = view
        self.acceptor = Acceptor(view, here.emit, self._signed)
        self.withheld: Accept | None = None  # until no order replaces the state that it builds on
        self.candidate: Proposer | None = None
        self._detector = FailureDetector(
            here.timing, (view.coordinator,), here.now_s, here.machines
        )
        self.lost_since_s: float | None = here.now_s if bootstrap is not None else None
        self._without_since_s: float | None = None  # no coordinator, whoever campaigns or yields
        self._asked_since_s: float | None = None  # our first PREPARE since there is no coordinator
        self._answered_s: dict[bytes, float] = {}
        self._looked_s = float("-inf")  # when a candidate has asked kernels last
        self.outlived: set[bytes] = set()  # voters of which a newer incarnation has called
        self._base_wait = BaseWait()
        self._reported: Report | None = None  # in our last promise
        self._campaigned_s = 0.0  # when this peer has stood for election last ...
        self._called_s = float("inf")  # ... and has called for everybody's vote
        self._no_quorum_noted = False
        self._looking_noted = False
        self._highest_ballot = 0
        self._next_probe_s = 0.0
        self._yielded_to = b""
        self._yielded_s = float("-inf")
        self.resigned = False  # the coordinator was started again, and coordinates no more
        self._awaits_word = awaits_word
        self._lacks_since_s: float | None = None  # it lives, and hears too few of us since then
        self._refused: Ballot | None = None
        # Those who may go on without a quorum do not do so at once.
        self._fork_mark = hashlib.sha256(here.me.peer + view.lineage).digest()[0]

    def _signed(self, message: Promise | Accepted) -> Any:
        here = self._here
        if isinstance(message, Promise):
            began, told = here.outbox.began, here.positions.told()
            message = replace(message, life=here.life, began=began, remembered=told)
        return self._signatures.signed(message, here.me.inc)

    def recover(self, recovered: Recovered, *, resigned: bool) -> None:
        """Go on as the voter that this peer was before its process was started again.

        ``resigned``: it was the coordinator.
        """
        acceptor = self.acceptor
        acceptor.promised, acceptor.frozen = recovered.promised, recovered.frozen
        acceptor.accepted = recovered.accepted
        self._highest_ballot = recovered.promised.number
        self.resigned, self._awaits_word = resigned, True

    def may_be_behind(self) -> bool:
        """Return whether this process has yet to hear how far the run is that its ledger names.

        Without a coordinator it is not waited for longer than one would be trusted, and as long
        again for an election: who is asked for its vote knows of a later view.
        """
        here = self._here
        since_s = here.restarted_s
        is_recent = since_s is not None and here.now_s - since_s < 2 * here.timing.failure_s
        return self._awaits_word and is_recent

    def coordinator_resigned(self) -> None:
        """Look for another coordinator: this one was started again and says so, so it lives."""
        self.resigned = True
        self._answered_s[self.view.coordinator] = self._here.now_s

    def coordinator_says(self, *, lacks_quorum: bool) -> None:
        """Note whether the coordinator hears enough voters: else it is no reason to elect none."""
        if not lacks_quorum:
            self._lacks_since_s = None
        elif self._lacks_since_s is None:
            self._lacks_since_s = self._here.now_s

    def _could_do_better(self) -> bool:
        """Return whether the coordinator lives but commits nothing, while we reach enough voters.

        Only after a moment: it may hear them again, and links stay open when a network is cut. Not
        longer, as it costs nothing to stand in vain: it takes another voter to freeze us.
        """
        since_s, here = self._lacks_since_s, self._here
        waited = since_s is not None and here.now_s - since_s >= here.timing.failure_s / 2
        return waited and is_quorum(self.view, self._reached())

    @property
    def busy(self) -> bool:
        return self.candidate is not None or self.lost_since_s is not None

    def heard_coordinator(self) -> Trigger | None:
        """Note that the coordinator lives; HEARD where this peer stood for election in vain."""
        if self.resigned:
            return None  # what is heard of it is a member's word, or of its earlier life
        self._without_since_s = self._asked_since_s = None
        self._no_quorum_noted = self._awaits_word = False
        self._detector.heard(self.view.coordinator, self._here.now_s)
        if self._could_do_better():
            return None
        self.lost_since_s = None
        if self.candidate is None or self.acceptor.frozen:
            return None
        self.candidate = None
        return Trigger.HEARD

    def _lost(self, since_s: float) -> None:
        if self._without_since_s is None:
            self._without_since_s = since_s

    def waiting_for(self) -> tuple[tuple[bytes, ...], float] | None:
        """Return whom the election waits for, and since how many seconds.

        None with a coordinator.
        """
        if self._without_since_s is None:
            return None
        here = self._here
        heard = self._heard()
        missing = tuple(p for p in self.view.peers if p != here.me.peer and p not in heard)
        since_s = here.now_s - self._without_since_s
        return missing or (self._yielded_to or self.view.coordinator,), since_s

    def _heard(self) -> set[bytes]:
        """Return the voters that need not be waited for; who asks nobody waits for links."""
        if self.candidate is None or self.is_hopeless():
            return self._reached()
        return {*self.candidate.promises}

    # ------------------------------------------------------------ voting

    def on_prepare(
        self, source: bytes, prepare: Prepare, hears_quorum: bool | None
    ) -> Trigger | None:
        """Promise, unless there is a coordinator; OUTBID where the ballot is another's.

        ``hears_quorum``: whether this peer, as the coordinator, hears one; None if it is none.
        """
        here = self._here
        if self.view.member(source) is None:
            return None
        self._highest_ballot = max(self._highest_ballot, prepare.ballot.number)
        own = source == here.me.peer
        ours = self.candidate.ballot if self.candidate is not None else prepare.ballot
        if prepare.ballot < ours and not self.is_hopeless():  # which calls for nobody's vote
            return None  # as if we had promised ours already: else two might yield to each other
        outbids = source == self.view.coordinator  # a candidate only because it has lost voters
        if not own and not outbids and self._has_coordinator(hears_quorum):
            here.probe(self.view.coordinator)
            return None
        self._promise(source, prepare.ballot)
        if own or self.acceptor.promised != prepare.ballot:
            return None
        return self._yield(source)

    def _promise(self, candidate: bytes, ballot: Ballot) -> None:
        self._reported = self._own.report()
        self.acceptor.on_prepare(candidate, ballot, self._reported)

    def _promise_again(self) -> None:
        """Promise once more when our report has changed, as we have caught up meanwhile.

        A base chosen by what we have reported may be one that we hold no longer.
        """
        ballot, before = self.acceptor.promised, self._reported
        if before is None or not self.acceptor.frozen:
            return
        if (before.round, before.chain, before.holds) != self._own.standing():
            self._promise(ballot.peer, ballot)

    def _has_coordinator(self, hears_quorum: bool | None) -> bool:
        here = self._here
        if hears_quorum is not None:
            return hears_quorum
        gone = (
            self.view.coordinator in here.refused
            or self.resigned
            or self._lacks_since_s is not None
            or self.candidate is not None
            or self._bootstrap is not None
        )
        return not gone and self._detector.trusts(self.view.coordinator, here.now_s)

    def _yield(self, candidate: bytes) -> Trigger:
        """Stop competing and give somebody's higher ballot time: it is under way."""
        self.candidate = None
        self._yielded_to = candidate
        self._yielded_s = self._here.now_s
        self._lost(self._detector.last_heard_s(self.view.coordinator))
        self._detector.forgive(self.view.coordinator, self._here.now_s)
        self.lost_since_s = None
        return Trigger.OUTBID

    def on_promise(self, source: bytes, promise: Promise) -> None:
        self._answered_s[source] = self._here.now_s
        if self.candidate is not None:
            self.candidate.on_promise(source, promise)

    def on_accept(self, accept: Accept) -> tuple[View, Proof] | None:
        """Vote for a proposal, unless something is wrong with it.

        Return it with its proof if the others have decided it before we have heard of it.
        """
        decision = self.acceptor.learn(accept)
        if decision is None:
            self._vote_for(accept)
        return decision

    def would_vote_for(self, accept: Accept) -> bool:
        """Return whether nothing speaks against a vote for this proposal at its ballot."""
        is_late = accept.ballot < self.acceptor.promised
        return not is_late and self._objection(accept.proposal) is None

    def _vote_for(self, accept: Accept) -> None:
        objection = self._objection(accept.proposal)
        if objection is None:
            self.acceptor.on_accept(accept)
        elif objection.text:
            self._refuse(accept, objection)

    def _objection(self, proposal: View) -> _Objection | None:
        own = self._own
        goes_back_alone = proposal.fork and proposal.rollback
        if goes_back_alone and own.report().holds and own.round > proposal.base_round:
            return _Objection("")  # caught up since: it binds nobody, another ballot finds better
        wrong = forgets(self.view, proposal) or changes_rules(self.view, proposal)
        wrong = wrong or wrong_graduation(self.view, proposal, own.completed, own.terms)
        if wrong:
            return _Objection(wrong)
        unheard = own.bans.unheard(self.view, proposal)
        return _Objection(unheard, is_ban=True) if unheard else None

    def _refuse(self, accept: Accept, objection: _Objection) -> None:
        """Note once of each ballot why we do not vote for it: ACCEPT is repeated."""
        if accept.ballot != self._refused:
            self._refused = accept.ballot
            text = (
                f"no vote for view {accept.proposal.number} of {short(accept.ballot.peer)}: "
                f"{objection.text}"
            )
            kind = "ban" if objection.is_ban else "rejected"
            self._here.emit(Note(kind, text, accept.ballot.peer))

    def on_accepted(self, source: bytes, vote: Accepted) -> tuple[View, Proof] | None:
        """Return the next view and why it is decided, or None before it is."""
        if self.view.member(source) is None:
            return None
        return self.acceptor.on_accepted(source, vote)

    # ------------------------------------------------------------ campaigning

    def step(self) -> Trigger | None:
        """Watch the coordinator as a member, press on with the ballot as a candidate."""
        now_s = self._here.now_s
        self._promise_again()
        if self.candidate is None:
            return self._watch_coordinator()
        if now_s >= self.candidate.retry_at_s:
            if not self.is_hopeless():
                return self.campaign()
            self._ask_for_news(self.candidate)
        self.candidate.step(now_s, self._gone(), self.may_fork())
        self._note_quorum(self.candidate)
        return None

    def _ask_for_news(self, candidate: Proposer) -> None:
        """Ask whoever is linked for a later view, as a candidate that asks nobody for its vote.

        The others may have gone on. A higher ballot would gain nothing, and refuse those of others.
        """
        here = self._here
        candidate.retry_at_s = here.now_s + here.timing.ballot_retry_s
        for peer in sorted(here.linked):
            here.emit(Send(peer, ProbeView(self.view.lineage, self.view.number)))

    def _note_quorum(self, candidate: Proposer) -> None:
        """Note once per loss that there is no quorum, when all have had time to answer.

        Voters ignore PREPARE for half the failure time after they have heard the coordinator.
        """
        here = self._here
        if is_quorum(self.view, candidate.promises):
            self._no_quorum_noted = False
        elif not self._no_quorum_noted and (
            here.now_s - self._campaigned_s > here.timing.failure_s / 2 and not self.may_fork()
        ):
            waiting = self.waiting_for()
            if waiting is None:
                return  # its coordinator is heard again
            self._no_quorum_noted = True
            missing, silent_s = waiting
            silence = f"silent for {duration(silent_s)}"
            anew = "has begun anew, and has no vote here any more"
            silent = [
                f"{short(p)} ({anew if p in self.outlived else silence})" for p in missing if p
            ]
            names = listed(silent or ["their votes"])  # a bootstrap view has no coordinator
            count = len(self._heard())
            of = f"{count} of {len(self.view.members)} voters answer, no quorum"
            text = f"{of}: rounds wait for {names}"
            here.emit(Note("no-quorum", text))

    def to_look_at(self) -> list[bytes]:
        """Return whose kernels are to be asked, because they say nothing.

        It is the coordinator; while we stand for election, or may have to, also whoever has not
        promised us a vote, and whoever seemed cut off when we called for it.
        """
        now_s = self._here.now_s
        silent = set(self._detector.to_look_at(now_s))
        pause_s = self._here.timing.heartbeat_s / 2
        calls = self.candidate is not None or self._without_since_s is not None
        may_call = calls or self._lacks_since_s is not None
        if may_call and now_s - self._looked_s >= pause_s:
            self._looked_s = now_s
            silent |= self._cut_off()
            if self.candidate is not None:
                silent |= self.view.peer_set - self.candidate.promises.keys()
        return sorted(silent)

    def _watch_coordinator(self) -> Trigger | None:
        here, me, coordinator = self._here, self._here.me.peer, self.view.coordinator
        refused = coordinator in here.refused or self.resigned or self._bootstrap is not None
        lame = self._could_do_better()
        refused |= lame
        # Who hears a coordinator that lacks voters may be the only one that all hear: it gives the
        # others, who take turns in vain, half as much time.
        patience_s = here.timing.ballot_retry_s / (2 if lame else 1)
        if here.now_s - self._yielded_s < patience_s and self._yielded_to not in here.refused:
            return None
        if self.lost_since_s is None:
            if not refused and not self._detector.suspects(coordinator, here.now_s):
                return None
            self.lost_since_s = here.now_s
            self._lost(self._detector.last_heard_s(coordinator))
        order = successors(self.view)
        rank = order.index(me) if me in order else len(order)
        if self._own.is_behind:
            rank += len(order)  # it would first have to catch up: after those who need not
        if here.outbound:
            rank += len(order)  # some may have no link to it: after those who can be dialled
        if here.now_s - self.lost_since_s < rank * here.timing.stagger_s:
            return None
        silent_s = self._detector.silent_s(coordinator, here.now_s)
        how = "is gone" if refused else f"has been silent for {duration(silent_s)}"
        how = "hears too few members to commit anything" if lame else how
        how = "was restarted" if self.resigned else how
        text = f"coordinator {short(coordinator)} {how}: this peer stands for election"
        if self._bootstrap is None:
            here.emit(Note("coordinator-lost", text, coordinator))
        return self.campaign()

    def discount_pause(self, pause_s: float) -> None:
        """Discount a pause in which we were stopped ourselves.

        The coordinator was not silent meanwhile.
        """
        self._detector.discount_pause(pause_s)
        if self._without_since_s is not None:
            self._without_since_s += pause_s
        if self._asked_since_s is not None:
            self._asked_since_s += pause_s
        for peer in self._answered_s:
            self._answered_s[peer] += pause_s
        if self._base_wait.since_s is not None:
            self._base_wait.since_s += pause_s

    def outbid(self, promised: int) -> Trigger:
        """Campaign, as coordinator: some voters are frozen by a ballot that went nowhere."""
        self._highest_ballot = max(self._highest_ballot, promised)
        return self.campaign()

    def campaign(self) -> Trigger:
        """Become a candidate, or one with a higher ballot."""
        here = self._here
        self._lost(here.now_s)
        if self._asked_since_s is None:
            self._asked_since_s = here.now_s
        self._campaigned_s = here.now_s
        if not self.is_hopeless():  # else nobody is asked, and what is known of links holds
            self._called_s = here.now_s
        self._highest_ballot = max(self._highest_ballot, self.acceptor.promised.number) + 1
        ballot = Ballot(self._highest_ballot, here.me.peer, here.life)
        self.candidate = Proposer(
            self.view,
            ballot,
            here.timing,
            here.emit,
            here.now_s,
            electorate=self,
            wait=self._base_wait,
        )
        self.candidate.step(here.now_s, self._gone(), self.may_fork())
        self.probe_missing(set(self.candidate.promises))
        return Trigger.LOST

    def renewed(self, bootstrap_view: View) -> View:
        """Return a bootstrap view with the incarnations that its voters have called from last."""
        return self._bootstrap.renewed(bootstrap_view) if self._bootstrap else bootstrap_view

    def graduated(self, following: View) -> View:
        """Return the next view with who of it is on probation, as far as this peer knows."""
        return graduated(self.view, following, self._own.completed, self._own.terms)

    def _gone(self) -> set[bytes]:
        """Return the voters whose promise is not waited for.

        They are those whose processes have ended, and the coordinator that we have lost, if there
        is a quorum without it. Nobody has led a bootstrap view.
        """
        return self._here.refused | (set() if self._bootstrap else {self.view.coordinator})

    def departed(self) -> set[bytes]:
        """Return the voters that the next view does not keep unless they have promised."""
        here = self._here
        limit_s = here.timing.remove_s
        silent = {p for p, since_s in self.silences_s().items() if here.now_s - since_s > limit_s}
        # Whose process has ended may be back as the same voter, if it has a ledger as we do.
        ended = set[bytes]() if here.outbox.is_on else here.refused
        return ended | self.outlived | silent

    def is_hopeless(self) -> bool:
        """Return whether this candidate has links to fewer than a quorum, and may not fork.

        Such a ballot comes to nothing, and who hears of it would wait for that each time.
        """
        if self._bootstrap or self.may_fork():
            return False
        return not is_quorum(self.view, self._reached())

    def _cut_off(self) -> set[bytes]:
        """Return the voters to whom there may be a link, and nothing comes back through it.

        We have asked them for their votes, and for a while neither they nor their kernels have
        answered. Where no kernel says when it was answered last, as over a relay, nobody knows.
        """
        here, called_s = self._here, self._called_s
        if here.now_s - called_s < here.timing.failure_s / 2:
            return set()
        return {
            peer
            for peer in self.view.peer_set - {here.me.peer}
            if float("-inf") < here.machines.answered_s(peer) < called_s
            and self._answered_s.get(peer, float("-inf")) < called_s
        }

    def waits_for_second(self) -> bool:
        """Return whether this candidate alone may have lost the coordinator, and can wait."""
        here, coordinator = self._here, self.view.coordinator
        sure = coordinator in here.refused or coordinator == here.me.peer or self.resigned
        enough = self._bootstrap is not None or is_quorum(self.view, {here.me.peer})
        return not (sure or enough or self.acceptor.frozen or self.may_fork())

    def looks_for_others(self) -> bool:
        """Return whether others may have gone on without this peer while it was down.

        Half of a view is a quorum where it has the tie-breaker, and the policy may have let the
        other half go on as well, as a fork. Whoever was down cannot know; so it looks for them
        first, or it would do rounds again that they have done. Whose host refuses is not waited
        for.
        """
        here, since_s = self._here, self._here.restarted_s
        if since_s is None or not self.view.may_fork or self.candidate is None:
            return False
        is_majority = 2 * len(self.candidate.promises) > len(self.view.members)
        limit_s = here.timing.fork_max_s
        if is_majority or here.now_s - since_s >= limit_s:
            return False
        if not self._looking_noted:
            self._looking_noted = True
            there = self.candidate.promises
            missing = listed([short(peer) for peer in self.view.peers if peer not in there])
            text = f"{missing} may have gone on without this peer: it looks for them for"
            here.emit(Note("restarted", f"{text} {duration(limit_s)} before it goes on alone"))
        return True

    def _reached(self) -> set[bytes]:
        """Return the voters that a message of this peer may get to, itself included."""
        here = self._here
        known = ({*here.linked} | {here.me.peer}).intersection(self.view.peers)
        return known - here.refused - self.outlived - self._cut_off()

    def silences_s(self) -> dict[bytes, float]:
        """Return since when those voters have been silent whose silence means something."""
        here, coordinator = self._here, self.view.coordinator
        asked_s, lost_s = self._asked_since_s, self._without_since_s
        if asked_s is None or lost_s is None:
            return {}
        away = {*self.view.peers} - here.linked - {here.me.peer, coordinator}
        # Whoever had no link here before all that may have lost nothing (link_graph.py).
        before_s = lost_s - here.timing.linking_s
        away = {peer for peer in away if here.unlinked_s(peer) > before_s}
        silent_s = {peer: self._answered_s.get(peer, asked_s) for peer in away}
        if coordinator != here.me.peer:
            silent_s[coordinator] = self._answered_s.get(coordinator, lost_s)
        return silent_s

    def probe_missing(self, heard: set[bytes]) -> None:
        """Keep looking, without a quorum, whether the missing voters are gone.

        Their hosts may say so: the first answer may have been silence.
        """
        here = self._here
        if here.now_s >= self._next_probe_s:
            self._next_probe_s = here.now_s + here.timing.ballot_retry_s
            for peer in self.view.peers:
                if peer not in heard:
                    here.probe(peer)

    def lost_quorum(self) -> Trigger | None:
        """Remember, as coordinator, since when too few are heard; campaign if it may help."""
        self._lost(self._here.now_s)
        return self.campaign() if self.may_fork() else None

    def has_quorum(self) -> None:
        self._without_since_s = None

    def may_fork(self) -> bool:
        """Return whether those who promise may go on without a quorum, in a flagged new lineage.

        Where the policy says so: at once when all missing voters' hosts answer that nobody listens
        there any more (no partition looks like that), else after the fork wait.
        """
        here, timing = self._here, self._here.timing
        if not self.view.may_fork or self._bootstrap is not None or self._own.is_behind:
            return False
        if self._is_left_alone():
            return True
        restarted_s = here.restarted_s
        if restarted_s is not None and here.now_s - restarted_s < timing.fork_restarted_s:
            return False  # the others may be on their way, too, with all that they hold
        promised = self.candidate.promises.keys() if self.candidate else set[bytes]()
        if self.view.peer_set <= {here.me.peer, *promised, *here.refused}:
            return True
        spread_s = (timing.fork_max_s - timing.fork_min_s) * self._fork_mark / 255
        since_s = self._without_since_s
        return since_s is not None and here.now_s - since_s >= timing.fork_min_s + spread_s

    def _is_left_alone(self) -> bool:
        """Return whether whoever has not promised has begun anew, and will never vote here."""
        promised = self.candidate.promises.keys() if self.candidate else set[bytes]()
        others = self.view.peer_set - {self._here.me.peer, *promised}
        alone = bool(others) and others <= self.outlived
        return alone and not is_quorum(self.view, self.view.peer_set - others)
