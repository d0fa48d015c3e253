"""How the voters of a view decide the next one: an acceptor on every member, a proposer on one.

Theory. Each view decides its successor by one single-decree Paxos among its own voters. Ballot
(0, coordinator) belongs to the live coordinator, which proposes at most one value and begins no
round afterwards, so it may skip phase 1. Higher ballots belong to candidates. A promise *freezes*
the voter: it sends no READY in this view any more. A commit needs READY from a quorum, quorums
intersect, so every round that may have been committed stands in some report, and the highest
(round, attempt) among the reports is the only one that can be: the coordinator begins attempt
a+1 only after it has decided not to commit attempt a. That is the Viewstamped Replication
argument with rounds as operations.

Every acceptor sends ACCEPTED to all voters, so that each learns the decision by itself: a view
known only to a dead proposer would strand the living.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from atoll.peer.events import Effect, Note, Send
from atoll.peer.messages import Accept, Accepted, Prepare, Promise, Report
from atoll.peer.timing import Timing
from atoll.peer.views import Ballot, View, forked, is_quorum

__all__ = ["Acceptor", "Proposer"]

_COMMITTED = 1 << 62  # stands for the infinite attempt number of a round known to be committed


class Acceptor:
    """One voter's memory of the ballots of one view."""

    def __init__(self, view: View, emit: Callable[[Effect], None]) -> None:
        self.view = view
        self._emit = emit
        self.promised = Ballot()
        self.accepted: Accepted | None = None
        self.frozen = False
        self._votes: dict[bytes, tuple[Ballot, View]] = {}  # each voter's, at its highest ballot

    def on_prepare(self, source: bytes, ballot: Ballot, report: Report) -> None:
        """Promise, freeze and report. The caller has applied the pre-vote rule."""
        if ballot < self.promised:
            return
        self.promised = ballot
        self.frozen = True
        accepted = self.accepted
        self._emit(
            Send(
                source,
                Promise(
                    self.view.lineage,
                    self.view.number,
                    ballot,
                    report,
                    accepted.ballot if accepted else None,
                    accepted.proposal if accepted else None,
                ),
            )
        )

    def on_accept(self, accept: Accept) -> None:
        if accept.ballot < self.promised:
            return
        self.promised = accept.ballot
        vote = Accepted(self.view.lineage, self.view.number, accept.ballot, accept.proposal)
        self.accepted = vote
        for peer in self.view.peers:
            self._emit(Send(peer, vote))

    def on_accepted(self, source: bytes, vote: Accepted) -> View | None:
        """The decided view once a quorum has accepted it at one ballot."""
        cast = (vote.ballot, vote.proposal)
        cast = next((known for known in self._votes.values() if known == cast), cast)  # kept once
        if self._votes.get(source, cast)[0] > vote.ballot:
            return None
        self._votes[source] = cast
        votes = {peer for peer, theirs in self._votes.items() if theirs == cast}
        lone = vote.proposal.fork and set(vote.proposal.peers) <= votes
        return vote.proposal if lone or is_quorum(self.view, votes) else None


class Proposer:
    """Drives one ballot of ``view``: phase 1 unless it is the coordinator's own ballot 0."""

    def __init__(
        self,
        view: View,
        me: bytes,
        ballot: Ballot,
        timing: Timing,
        emit: Callable[[Effect], None],
        now_s: float,
        proposal: View | None = None,
    ) -> None:
        self.view = view
        self.me = me
        self.ballot = ballot
        self.timing = timing
        self.emit = emit
        self.started_s = now_s
        self.proposal = proposal
        self.promises: dict[bytes, Promise] = {}
        self._quorum_at_s: float | None = None
        self._sent_s = float("-inf")
        # Competing candidates that retry in step would compete for ever: spread by a hash.
        mark = hashlib.sha256(me + ballot.number.to_bytes(8, "big")).digest()[0]
        self.retry_at_s = now_s + timing.ballot_retry_s * (0.7 + 0.6 * mark / 255)
        self.base_lost_noted = False

    def on_promise(self, source: bytes, promise: Promise) -> None:
        if promise.ballot == self.ballot and source in self.view.peers:
            self.promises[source] = promise

    def step(self, now_s: float, gone: set[bytes], lone_ok: bool) -> None:
        """Choose a value when enough is known; repeat what may have been lost or ignored.

        ``gone`` are voters that need not be waited for. ``lone_ok`` allows a fork without a
        quorum: every missing voter's address, which accepted us earlier, refuses the connection.
        """
        if self.proposal is None:
            self._choose_if_ready(now_s, gone, lone_ok)
        if now_s - self._sent_s < self.timing.repeat_s:
            return
        self._sent_s = now_s
        lineage, number = self.view.lineage, self.view.number
        for peer in self.view.peers:
            if self.proposal is not None:
                self.emit(Send(peer, Accept(lineage, number, self.ballot, self.proposal)))
            elif peer not in self.promises:
                self.emit(Send(peer, Prepare(lineage, number, self.ballot)))

    def _choose_if_ready(self, now_s: float, gone: set[bytes], lone_ok: bool) -> None:
        quorum = is_quorum(self.view, self.promises)
        if not quorum and not lone_ok:
            return
        if self._quorum_at_s is None:
            self._quorum_at_s = now_s
        everyone = set(self.view.peers) <= self.promises.keys() | gone
        if not everyone and now_s - self._quorum_at_s < self.timing.gather_s:
            return
        chosen = self._choose(fork=not quorum)
        if chosen is None:
            if not self.base_lost_noted and now_s - self.started_s > self.timing.lost_s:
                self.base_lost_noted = True
                text = f"no living member holds round {self.view.base_round}; the run halts"
                self.emit(Note("base-lost", text))
            return
        self.proposal = chosen
        self._sent_s = float("-inf")

    def _choose(self, fork: bool) -> View | None:
        """The accepted value of the highest ballot, else the promisers on the highest base."""
        promises = self.promises
        voted = [p for p in promises.values() if p.accepted_ballot and p.accepted_view]
        if voted and not fork:  # a fork is another history: nothing binds it
            best = max(voted, key=lambda p: p.accepted_ballot or Ballot())
            return best.accepted_view
        bases: list[tuple[int, int, bytes]] = []
        for promise in promises.values():
            report = promise.report
            bases.append((report.round, _COMMITTED, report.chain))
            if report.ready_chain:
                bases.append((report.ready_round, report.ready_attempt, report.ready_chain))
        base_round, _, base_chain = max(bases)
        if base_round < self.view.base_round:
            return None
        proposal = replace(
            self.view,
            number=self.view.number + 1,
            members=tuple(m for m in self.view.members if m.peer in promises),
            coordinator=self.me,
            base_round=base_round,
            base_chain=base_chain,
            fork=False,
        )
        return forked(proposal, self.ballot) if fork else proposal
