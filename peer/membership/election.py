"""Elect the next view: when to stand, whom to vote for, and how a decision reaches this peer.

Theory. A member stands when its coordinator is lost: silent for the failure time, or its address,
which accepted us before, refuses the connection. Members stand in rank order, a stagger apart, so
that one candidate usually suffices. The *pre-vote* rule protects a coordinator that works from a
candidate that cannot hear it: a voter that heard the coordinator within half the failure time
ignores PREPARE, but probes the coordinator, so that a real death is seen at the next repetition.
A coordinator that hears a quorum ignores PREPARE too; if some of its voters are frozen by such an
attempt, it outbids the candidate, which frees them with the next view. A process that was stopped
itself (SIGSTOP, a suspended host) counts nobody as silent for that time.

An election throws nobody out that lives. Voters that answer late stay in the next view, and so does
the lost coordinator: who is really gone is voted out from there, as lazily as always. Left out are
only those who are certainly gone, because their addresses refuse connections or a new incarnation
has called, and those who have been silent for the removal time: the lost coordinator since it was
heard last, others since they were asked first, if their links are down too. (Members say nothing
to each other while they have a coordinator, and one that hears it does not answer a candidate:
where a link is up, silence means nothing.) The new coordinator counts who has been silent
as dead from the start, so that no round waits for it.

Without a quorum a candidate waits, unless the policy in force lets whoever is left go on: then
after the fork wait, or at once when the address of everybody missing refuses the connection, the
promisers alone decide a flagged view in a lineage of its own. A *cradle* is the imaginary view
before the first: its voters are those who found or resume a run together, and nobody coordinates.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from atoll.collectives.units import duration, listed
from atoll.peer.membership.bans import forgets
from atoll.peer.membership.consensus import Acceptor, BaseWait, Proposer
from atoll.peer.membership.events import Note
from atoll.peer.membership.messages import Accept, Accepted, Prepare, Promise, Proof, Report
from atoll.peer.membership.phase import Trigger
from atoll.peer.membership.probation import settled, wrong_settling
from atoll.peer.membership.view import Ballot, View, changes_rules, is_quorum, short, successors

if TYPE_CHECKING:
    from atoll.peer.membership.node import Node


class Election:
    """Run one view's election, seen from one peer; it is made anew with every view."""

    def __init__(self, node: Node, view: View, *, bootstrap_view: bool = False) -> None:
        self._node = node
        self.view = view
        self.acceptor = Acceptor(view, node.emit, lambda m: node.signatures.signed(m, node.me.inc))
        self.candidate: Proposer | None = None
        self.heard_coordinator_s = node.now_s
        self.lost_since_s: float | None = node.now_s if bootstrap_view else None
        self._is_bootstrap = bootstrap_view
        self._without_since_s: float | None = None  # no coordinator, whoever stands or has yielded
        self._asked_since_s: float | None = None  # our first PREPARE since there is no coordinator
        self._answered_s: dict[bytes, float] = {}
        self.outlived: set[bytes] = set()  # voters of which a newer incarnation has called
        self._base_wait = BaseWait()
        self._reported: Report | None = None  # in our last promise
        self._stood_s = 0.0
        self._no_quorum_noted = False
        self._highest_ballot = 0
        self._next_probe_s = 0.0
        self._yielded_to = b""
        self._patient_until_s = 0.0
        self._refused: Ballot | None = None

    @property
    def busy(self) -> bool:
        return self.candidate is not None or self.lost_since_s is not None

    def heard_coordinator(self) -> None:
        self._without_since_s = self._asked_since_s = None
        self._no_quorum_noted = False
        self._start_over()

    def _start_over(self) -> None:
        self.heard_coordinator_s = self._node.now_s
        self.lost_since_s = None

    def _lost(self, since_s: float) -> None:
        if self._without_since_s is None:
            self._without_since_s = since_s

    def waiting_for(self) -> tuple[tuple[bytes, ...], float] | None:
        """Return whom the election waits for, and since how many seconds.

        None with a coordinator.
        """
        if self._without_since_s is None:
            return None
        node = self._node
        heard = self.candidate.promises.keys() if self.candidate else node.linked
        missing = tuple(p for p in self.view.peers if p != node.me.peer and p not in heard)
        since_s = node.now_s - self._without_since_s
        return missing or (self._yielded_to or self.view.coordinator,), since_s

    # ------------------------------------------------------------ voting

    def on_prepare(self, source: bytes, prepare: Prepare) -> None:
        node = self._node
        if self.view.member(source) is None:
            return
        self._highest_ballot = max(self._highest_ballot, prepare.ballot.number)
        own = source == node.me.peer
        outbids = source == self.view.coordinator  # it stands only because it has lost voters
        if not own and not outbids and self._has_coordinator():
            node.probe(self.view.coordinator)
            return
        self._promise(source, prepare.ballot)
        if not own and self.acceptor.promised == prepare.ballot:
            self._yield(source)

    def _promise(self, candidate: bytes, ballot: Ballot) -> None:
        self._reported = self._node.follower.report()
        self.acceptor.on_prepare(candidate, ballot, self._reported)

    def _promise_again(self) -> None:
        """Promise once more when our report has changed, as we have caught up meanwhile.

        A base chosen by what we have reported may be one that we hold no longer.
        """
        ballot, before, now = self.acceptor.promised, self._reported, self._node.follower.report()
        if before is None or not self.acceptor.frozen:
            return
        if (before.round, before.chain, before.holds) != (now.round, now.chain, now.holds):
            self._promise(ballot.peer, ballot)

    def _has_coordinator(self) -> bool:
        node = self._node
        if node.coordinator is not None:
            return node.coordinator.hears_quorum(node.now_s)
        gone = (
            self.view.coordinator in node.refused
            or self.candidate is not None
            or self._is_bootstrap
        )
        heard_s = node.now_s - self.heard_coordinator_s
        return not gone and heard_s < node.timing.failure_s / 2

    def _yield(self, candidate: bytes) -> None:
        """Stop competing and give somebody's higher ballot time: it is under way."""
        self._node.go(Trigger.OUTBID)
        self._node.coordinator = self.candidate = None
        self._yielded_to = candidate
        self._patient_until_s = self._node.now_s + self._node.timing.ballot_retry_s
        self._lost(self.heard_coordinator_s)
        self._start_over()

    def on_promise(self, source: bytes, promise: Promise) -> None:
        self._answered_s[source] = self._node.now_s
        if self.candidate is not None:
            self.candidate.on_promise(source, promise)

    def on_accept(self, accept: Accept) -> None:
        first, own = accept.proposal, self._node.follower
        if first.fork and first.rollback and own.report().holds and own.round > first.base_round:
            return  # we have caught up since; a fork binds nobody, so another ballot finds better
        wrong = forgets(self.view, first) or changes_rules(self.view, first)
        wrong = wrong or wrong_settling(self.view, first, own.served, own.terms)
        if wrong:
            self._refuse(accept, wrong, "rejected")
            return
        unheard = own.bans.unheard(self.view, first)
        if unheard:
            self._refuse(accept, unheard, "ban")
            return
        self.acceptor.on_accept(accept)

    def _refuse(self, accept: Accept, wrong: str, kind: str) -> None:
        """Note once of each ballot why we do not vote for it: ACCEPT is repeated."""
        if accept.ballot != self._refused:
            self._refused = accept.ballot
            text = (
                f"no vote for view {accept.proposal.number} of {short(accept.ballot.peer)}: {wrong}"
            )
            self._node.emit(Note(kind, text, accept.ballot.peer))

    def on_accepted(self, source: bytes, vote: Accepted) -> tuple[View, Proof] | None:
        """Return the next view and why it is decided, or None before it is."""
        if self.view.member(source) is None:
            return None
        return self.acceptor.on_accepted(source, vote)

    # ------------------------------------------------------------ standing

    def step(self) -> None:
        """Watch the coordinator as a member, press on with the ballot as a candidate."""
        node = self._node
        self._promise_again()
        if self.candidate is None:
            self._watch_coordinator()
        elif node.now_s >= self.candidate.retry_at_s:
            self.stand()
        else:
            self.candidate.step(node.now_s, self._gone(), self.may_fork())
            self._note_quorum(self.candidate)

    def _note_quorum(self, candidate: Proposer) -> None:
        """Note once per loss that there is no quorum, when all have had time to answer.

        Voters ignore PREPARE for half the failure time after they have heard the coordinator.
        """
        node, count = self._node, len(candidate.promises)
        if is_quorum(self.view, candidate.promises):
            self._no_quorum_noted = False
        elif not self._no_quorum_noted and (
            node.now_s - self._stood_s > node.timing.failure_s / 2 and not self.may_fork()
        ):
            self._no_quorum_noted = True
            missing, silent_s = self.waiting_for() or ((), 0.0)
            names = listed([f"{short(peer)} (silent for {duration(silent_s)})" for peer in missing])
            of = f"{count} of {len(self.view.members)} voters answer, no quorum"
            text = f"{of}: rounds wait for {names}"
            node.emit(Note("no-quorum", text))

    def _watch_coordinator(self) -> None:
        node, coordinator = self._node, self.view.coordinator
        silent_s = node.now_s - self.heard_coordinator_s
        refused = coordinator in node.refused or self._is_bootstrap
        if node.now_s < self._patient_until_s and self._yielded_to not in node.refused:
            return
        if self.lost_since_s is None:
            if not refused and silent_s <= node.timing.failure_s:
                return
            self.lost_since_s = node.now_s
            self._lost(self.heard_coordinator_s)
        order = successors(self.view)
        rank = order.index(node.me.peer) if node.me.peer in order else len(order)
        if node.follower.unsynced:
            rank += len(order)  # it would first have to catch up: after those who need not
        if node.now_s - self.lost_since_s >= rank * node.timing.stagger_s:
            how = "is gone" if refused else f"has been silent for {duration(silent_s)}"
            text = f"coordinator {short(coordinator)} {how}: this peer stands for election"
            if not self._is_bootstrap:
                node.emit(Note("coordinator-lost", text, coordinator))
            self.stand()

    def discount_pause(self, pause_s: float) -> None:
        """Discount a pause in which we were stopped ourselves.

        The coordinator was not silent meanwhile.
        """
        self.heard_coordinator_s += pause_s
        if self._without_since_s is not None:
            self._without_since_s += pause_s
        if self._asked_since_s is not None:
            self._asked_since_s += pause_s
        for peer in self._answered_s:
            self._answered_s[peer] += pause_s
        if self._base_wait.since_s is not None:
            self._base_wait.since_s += pause_s

    def outbid(self, promised: int) -> None:
        """Stand, as coordinator: some voters are frozen by a ballot that went nowhere."""
        self._highest_ballot = max(self._highest_ballot, promised)
        self.stand()

    def stand(self) -> None:
        node = self._node
        node.go(Trigger.LOST)
        node.coordinator = None
        self._lost(node.now_s)
        if self._asked_since_s is None:
            self._asked_since_s = node.now_s
        self._stood_s = node.now_s
        self._highest_ballot = max(self._highest_ballot, self.acceptor.promised.number) + 1
        ballot = Ballot(self._highest_ballot, node.me.peer)
        self.candidate = Proposer(
            self.view,
            node.me.peer,
            ballot,
            node.timing,
            node.emit,
            node.now_s,
            wait=self._base_wait,
            renewed=node.bootstrap.renewed,
            settled=self._settled,
            departed=self._departed,
        )
        self.candidate.step(node.now_s, self._gone(), self.may_fork())
        self.probe_missing(set(self.candidate.promises))

    def _settled(self, following: View) -> View:
        own = self._node.follower
        return settled(self.view, following, own.served, own.terms)

    def _gone(self) -> set[bytes]:
        """Return the voters whose promise is not waited for.

        They are those whose processes have ended, and the coordinator that we have lost, if there
        is a quorum without it. Nobody has led a cradle.
        """
        return self._node.refused | (set() if self._is_bootstrap else {self.view.coordinator})

    def _departed(self) -> set[bytes]:
        """Return the voters that the next view does not keep unless they have promised."""
        node = self._node
        limit_s = node.timing.remove_s
        silent = {p for p, since_s in self.silences_s().items() if node.now_s - since_s > limit_s}
        return node.refused | self.outlived | silent

    def silences_s(self) -> dict[bytes, float]:
        """Return since when those voters have been silent whose silence means something."""
        asked_s, coordinator = self._asked_since_s, self.view.coordinator
        if asked_s is None or self._without_since_s is None:
            return {}
        away = {*self.view.peers} - self._node.linked - {self._node.me.peer, coordinator}
        silent_s = {peer: self._answered_s.get(peer, asked_s) for peer in away}
        if coordinator != self._node.me.peer:
            silent_s[coordinator] = self._without_since_s
        return silent_s

    def probe_missing(self, heard: set[bytes]) -> None:
        """Keep looking, without a quorum, whether the missing voters are gone.

        Their hosts may say so: the first answer may have been silence.
        """
        if self._node.now_s >= self._next_probe_s:
            self._next_probe_s = self._node.now_s + self._node.timing.ballot_retry_s
            for peer in self.view.peers:
                if peer not in heard:
                    self._node.probe(peer)

    def lost_quorum(self) -> None:
        """Remember, as coordinator, since when too few voters are heard.

        Stand if it may help.
        """
        self._lost(self._node.now_s)
        if self.may_fork():
            self.stand()

    def has_quorum(self) -> None:
        self._without_since_s = None

    def may_fork(self) -> bool:
        """Return whether those who promise may go on without a quorum, in a flagged new lineage.

        Where the policy says so: at once when all missing voters' hosts answer that nobody listens
        there any more (no partition looks like that), else after the fork wait.
        """
        node = self._node
        if not self.view.may_fork or self._is_bootstrap or node.follower.unsynced:
            return False
        promised = self.candidate.promises.keys() if self.candidate else set[bytes]()
        present = {node.me.peer, *promised}
        if all(peer in present or peer in node.refused for peer in self.view.peers):
            return True
        timing = node.timing
        mark = hashlib.sha256(node.me.peer + self.view.lineage).digest()[0]
        wait_s = timing.fork_min_s + (timing.fork_max_s - timing.fork_min_s) * mark / 255
        since_s = self._without_since_s
        return since_s is not None and node.now_s - since_s >= wait_s
