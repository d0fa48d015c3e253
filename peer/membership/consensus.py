"""Decide the next view: an acceptor on every member of this one, a proposer on one.

Theory. Each view decides its successor by one single-decree Paxos among its own voters. Ballot
(0, coordinator) belongs to the live coordinator, which proposes at most one value and begins no
round afterwards, so it may skip phase 1. Higher ballots belong to candidates. A promise *freezes*
the voter: it sends no READY in this view any more. A commit needs READY from a quorum, quorums
intersect, so every round that may have been committed stands in some report, and the highest
(round, attempt) among the reports is the only one that can be: the coordinator begins attempt
a+1 only after it has decided not to commit attempt a. Rounds commit in order, so with several in
flight the base is the last round up to which every round stands in some report, with the highest
attempt of each. That is the Viewstamped Replication argument with rounds as operations.

One attempt has one result, unless somebody's memory is bad. Of several, the one that may have been
committed is the one whose holders, with all voters that have not promised, are a quorum. If that is
so of two, the base is *disputed*: more promises are waited for, and then it counts as lost.

Every acceptor sends ACCEPTED to all voters, so that each learns the decision by itself: a view
known only to a dead proposer would strand the living. These are n * n messages, so they name the
proposal by its digest. A voter whom its ACCEPT has not reached counts the votes and knows nothing;
it enters the view when a member of it has told it (``Node._tell_view``), at the latest when it
calls for an election in the view before.

Promises and votes are on a voter's disk before they leave (durable_records.py), so a voter that was
started again is the same voter. A second proposal at one ballot is refused: a ballot names the life
of its proposer, which has one value for it.

The next view keeps the voters that have not promised in time as well, unless they are known to be
gone: a slow answer is no death. That costs neither safety nor progress. Each voter of the next view
is one of this view, and those who have promised are a quorum of this view: more than half of it, so
more than half of any part of it that contains them, or half with its first voter, which then stays
the first. So the promisers alone are a quorum of the next view, and all that it needs to commit; a
voter that has not promised says READY in this view for nothing, since no quorum can follow, and
enters the next one when it hears of it, as after a planned change. In a *bootstrap view* the others
may have no incarnation yet, a fork takes the vote of each of its members, and a voter that has not
promised may hold what a rollback gives up, so that it would be ahead of the next view: all three
are of promisers only.

If no promiser *holds* the base, a committed round may be lost with the dead. After a wait the run
halts, or, if its founder chose so, goes back to the last round that somebody holds, in a view that
is flagged as a rollback and names what was lost.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from atoll.peer.membership.amnesia import forgetful
from atoll.peer.membership.durable_records import AcceptedRecord, PromiseRecord
from atoll.peer.membership.events import Effect, Note, Persist, Send
from atoll.peer.membership.messages import (
    Accept,
    Accepted,
    Prepare,
    Promise,
    Proof,
    Report,
    Run,
    Vote,
)
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import (
    Ballot,
    Member,
    View,
    chain_after,
    forked,
    founded,
    is_quorum,
    outbound_of,
)

# Proposals of one view that are kept, the latest: each candidate has one, and repeats it.
PROPOSALS_MAX = 8


class Acceptor:
    """Remember, as one voter, the ballots of one view."""

    def __init__(
        self, view: View, emit: Callable[[Effect], None], sign: Callable[[Any], Any] = lambda m: m
    ) -> None:
        self.view = view
        self._emit = emit
        self._sign = sign
        self.promised = Ballot()
        self.accepted: AcceptedRecord | None = None  # our last vote, and what it was for
        self.frozen = False
        self._votes: dict[bytes, Accepted] = {}  # each voter's, at its highest ballot
        self._proposals: dict[bytes, View] = {}  # those that we have been asked about, by digest

    def on_prepare(self, source: bytes, ballot: Ballot, report: Report) -> None:
        """Promise this ballot, freeze and report, unless a higher one is promised.

        The caller has applied the pre-vote rule.
        """
        if ballot < self.promised:
            return
        if ballot != self.promised or not self.frozen:
            promise_record = PromiseRecord(self.view.lineage, self.view.number, ballot)
            self._emit(Persist(promise_record, synced=True))
        self.promised = ballot
        self.frozen = True
        accepted = self.accepted
        promise = Promise(
            self.view.lineage,
            self.view.number,
            ballot,
            report,
            accepted.vote.ballot if accepted else None,
            accepted.proposal if accepted else None,
        )
        self._emit(Send(source, self._sign(promise)))

    def learn(self, accept: Accept) -> tuple[View, Proof] | None:
        """Note what a proposal is; return it with its proof if votes have decided it already."""
        digest = accept.proposal.digest
        self._proposals.pop(digest, None)
        self._proposals[digest] = accept.proposal
        if len(self._proposals) > PROPOSALS_MAX:
            del self._proposals[next(iter(self._proposals))]
        return self._decision(accept.ballot, digest)

    def on_accept(self, accept: Accept) -> None:
        """Vote for a proposal and tell all voters, unless a higher ballot is promised."""
        if accept.ballot < self.promised:
            return
        known, digest = self.accepted, accept.proposal.digest
        if known is not None and (known.vote.ballot, known.vote.digest) == (accept.ballot, digest):
            # Repeated: only the proposer may lack it.
            self._emit(Send(accept.ballot.peer, known.vote))
            return
        if known is not None and known.vote.ballot == accept.ballot:
            return  # a proposer has one value for a ballot: this is no other one
        self.promised = accept.ballot
        vote = Accepted(self.view.lineage, self.view.number, accept.ballot, digest)
        signed: Accepted = self._sign(vote)
        self.accepted = AcceptedRecord(signed, accept.proposal)
        self._emit(Persist(self.accepted, synced=True))
        for peer in self.view.peers:
            self._emit(Send(peer, signed))

    def on_accepted(self, source: bytes, vote: Accepted) -> tuple[View, Proof] | None:
        """Return the decided view and its proof, or None before it is decided.

        It is once a quorum has accepted it at one ballot; a fork, where the policy allows it, once
        all its own members have.
        """
        known = self._votes.get(source)
        if known is not None and known.ballot > vote.ballot:
            return None
        self._votes[source] = vote
        return self._decision(vote.ballot, vote.digest)

    def _proposal(self, digest: bytes) -> View | None:
        own = self.accepted  # perhaps by the process before, which was asked for it
        if own is not None and own.vote.digest == digest:
            return own.proposal
        return self._proposals.get(digest)

    def _decision(self, ballot: Ballot, digest: bytes) -> tuple[View, Proof] | None:
        """Return a view and its proof if these votes decide it, and we know what it is."""
        proposal = self._proposal(digest)
        if proposal is None:
            return None
        cast = {
            peer: theirs
            for peer, theirs in self._votes.items()
            if (theirs.ballot, theirs.digest) == (ballot, digest)
        }
        lone = proposal.fork and self.view.may_fork and set(proposal.peers) <= cast.keys()
        if not lone and not is_quorum(self.view, cast):
            return None
        votes = tuple(Vote(peer, theirs.inc, theirs.sig) for peer, theirs in sorted(cast.items()))
        return proposal, Proof(self.view.lineage, self.view.number, ballot, votes)


@dataclass(slots=True)
class BaseWait:
    """Keep since when a quorum has lacked the base.

    It is one wait, however many ballots and candidates it takes. ``noted``: that it is lost has
    been said.
    """

    since_s: float | None = None
    noted: bool = False


class Electorate:
    """Tell a proposer what it needs to know of voters; this one knows no more than the view."""

    def renewed(self, bootstrap_view: View) -> View:
        """Return a bootstrap view with the incarnations that its voters have by now."""
        return bootstrap_view

    def graduated(self, following: View) -> View:
        """Return the next view with who of it is on probation."""
        return following

    def departed(self) -> Collection[bytes]:
        """Return the voters that the next view does not keep unless they have promised."""
        return ()

    def is_hopeless(self) -> bool:
        """Return whether the proposer has links to too few to get a quorum."""
        return False

    def looks_for_others(self) -> bool:
        """Return whether a proposer with a quorum waits for who may have gone on alone."""
        return False

    def waits_for_second(self) -> bool:
        """Return whether a proposer promises itself only after another voter has promised it."""
        return False


class Proposer:
    """Drive one ballot of ``view``: phase 1 unless it is the coordinator's own ballot 0."""

    def __init__(
        self,
        view: View,
        ballot: Ballot,
        timing: Timing,
        emit: Callable[[Effect], None],
        now_s: float,
        proposal: View | None = None,
        electorate: Electorate | None = None,
        wait: BaseWait | None = None,
    ) -> None:
        self.view = view
        self.ballot = ballot
        self.timing = timing
        self.emit = emit
        self.proposal = proposal
        self._wait = wait or BaseWait()
        self._electorate = electorate or Electorate()
        self.promises: dict[bytes, Promise] = {}  # those that count
        self._heard: dict[bytes, Promise] = {}  # all of them
        self._quorum_at_s: float | None = None
        self._sent_s = float("-inf")
        self._stands = False  # it has asked for its own promise as well
        # Competing candidates that retry in step would compete for ever: spread by a hash.
        mark = hashlib.sha256(ballot.peer + ballot.number.to_bytes(8, "big")).digest()[0]
        self.retry_at_s = now_s + timing.ballot_retry_s * (0.7 + 0.6 * mark / 255)

    def on_promise(self, source: bytes, promise: Promise) -> None:
        if promise.ballot != self.ballot or source not in self.view.peers:
            return
        self._heard[source] = promise
        lost = forgetful(self._heard)
        self.promises = {p: x for p, x in self._heard.items() if p not in lost}

    @property
    def _prepare(self) -> Prepare:
        return Prepare(self.view.lineage, self.view.number, self.ballot)

    def step(self, now_s: float, gone: set[bytes], lone_ok: bool) -> None:
        """Choose a value when enough is known; repeat what may have been lost or ignored.

        ``gone`` are voters that need not be waited for. ``lone_ok``: the policy lets those who
        have promised go on without a quorum, as a fork.
        """
        if self.proposal is None:
            self._choose_if_ready(now_s, gone, lone_ok)
        if not self._stands and (self._heard or not self._electorate.waits_for_second()):
            self._stands = True
            if self._heard:  # the others have been asked before
                self.emit(Send(self.ballot.peer, self._prepare))
        if now_s - self._sent_s < self.timing.repeat_s:
            return
        self._sent_s = now_s
        lineage, number = self.view.lineage, self.view.number
        own = self.ballot.peer
        alone = self.proposal is None and self._electorate.is_hopeless()
        accept = None  # one for all, so that it is encoded once
        if self.proposal is not None:
            accept = Accept(lineage, number, self.ballot, self.proposal)
        for peer in self.view.peers:
            if alone and peer != own:
                continue  # it would only keep them from standing, or from promising another one
            if accept is not None:
                if accept.proposal.fork and peer not in accept.proposal.peers:
                    continue  # its vote could only block its own coordinator's proposals
                self.emit(Send(peer, accept))
            elif peer not in self._heard and (peer != own or self._stands):
                self.emit(Send(peer, self._prepare))

    def _choose_if_ready(self, now_s: float, gone: set[bytes], lone_ok: bool) -> None:
        quorum = is_quorum(self.view, self.promises)
        if not quorum and not (lone_ok and self.promises):
            return
        if self.ballot.peer not in self.promises:
            return  # our own is on its way to our disk
        if self._quorum_at_s is None:
            self._quorum_at_s = now_s
        everyone = set(self.view.peers) <= self._heard.keys() | gone
        early = now_s - self._quorum_at_s < self.timing.gather_s
        if not everyone and (early or self._electorate.looks_for_others()):
            return
        chosen = self._choose(now_s, fork=not quorum)
        if chosen is not None:
            self.proposal = chosen
            self._sent_s = float("-inf")

    def _choose(self, now_s: float, fork: bool) -> View | None:
        """Return the accepted value of the highest ballot, else a view on the highest base.

        None while the base may yet be found, or where the run halts without it.
        """
        promises = self.promises
        voted = [p for p in promises.values() if p.accepted_view and not p.accepted_view.fork]
        if voted and not fork:  # a fork is another history: nothing binds it, and it binds nobody
            best = max(voted, key=lambda p: p.accepted_ballot or Ballot())
            return best.accepted_view
        reports = {peer: promise.report for peer, promise in promises.items()}
        base = base_of(self.view, reports)
        base_round, base_chain = base.round, base.chain
        disputed = 0 if fork else base.disputed  # a fork's history is its own
        lost = bool(disputed) or not base.held or base.round < self.view.base_round
        is_known = not disputed and base.round >= self.view.base_round
        spared = last_held(reports, base) if is_known else None
        # Of operations that nobody has, only who is silent may know.
        is_sure = spared is not None and self._heard.keys() >= {*self.view.replicas}
        if not lost or is_sure:
            self._wait.since_s = None
        else:
            if self._wait.since_s is None:
                self._wait.since_s = now_s
            if now_s - self._wait.since_s <= self.timing.lost_s:
                return None
        if lost and spared is not None:  # operations were lost, with a machine or its power
            (base_round, base_chain), lost = spared, False
        if lost:
            back = max(((r.round, r.chain) for r in reports.values() if r.holds), default=None)
            why = f"no living member holds round {max(base.round, self.view.base_round)}"
            if disputed:
                why = f"round {disputed} has two results, and who knows the right one is missing"
            if back is None or self.view.rules.on_lost == "halt":
                self._note_lost(f"{why}; the run halts")
                return None
            self._note_lost(f"{why}: going back to round {back[0]}")
            base_round, base_chain = back
        members = self._members(fork or lost)
        proposal = replace(
            self.view,
            number=self.view.number + 1,
            members=members,
            outbound=outbound_of(self.view, members),
            coordinator=self.ballot.peer,
            base_round=base_round,
            base_chain=base_chain,
            fork=False,
            rollback=lost,
            newcomers=(),
            absent=(),
        )
        proposal = self._electorate.graduated(proposal)
        if self.view.number == 0:
            return founded(proposal)
        return forked(proposal, self.ballot) if fork else proposal

    def _members(self, promisers_only: bool) -> tuple[Member, ...]:
        """Return the members of the next view, in the order of this one."""
        if self.view.number == 0:
            known = self._electorate.renewed(self.view).members
            return tuple(member for member in known if member.peer in self.promises)
        lost = {*self.view.peers} if promisers_only else {*self._electorate.departed()}
        lost -= self.promises.keys()
        return tuple(member for member in self.view.members if member.peer not in lost)

    def _note_lost(self, text: str) -> None:
        if not self._wait.noted:
            self._wait.noted = True
            self.emit(Note("base-lost", text))


class Base(NamedTuple):
    """Name the last position that may have been committed.

    ``held`` says whether a reporter holds its state; ``disputed`` is the first round on the way of
    which two results may have been, 0 for none.
    """

    round: int
    chain: bytes
    held: bool
    disputed: int


def base_of(view: View, reports: Mapping[bytes, Report]) -> Base:
    """Return the last position that may have been committed, by these reports.

    They are what voters of ``view`` have promised. From the highest committed round on, each
    round's result with the highest attempt follows, unless nobody holds it and those who report it
    are no quorum with all who are silent: then it was never committed, and nothing is lost.
    """
    silent = {*view.peers} - reports.keys()
    base_round, base_chain = max(committed_of(report) for report in reports.values())
    disputed = 0
    while following := _holders(reports, base_round + 1):
        possible = [run for run, peers in following.items() if is_quorum(view, peers | silent)]
        if len(possible) > 1 and not disputed:
            disputed = base_round + 1
        best = max(possible or following, key=lambda run: (len(following[run]), run.root))
        following_chain = chain_after(base_chain, best.round, best.fragment, best.root)
        held = any(_reaches(r, best.round, following_chain) for r in reports.values())
        if not possible and not held:
            break  # it was not committed, and nobody here has the result
        base_round, base_chain = best.round, following_chain
    held = any(_reaches(r, base_round, base_chain) for r in reports.values())
    return Base(base_round, base_chain, held, disputed)


def last_held(reports: Mapping[bytes, Report], base: Base) -> tuple[int, bytes] | None:
    """Return the last position that somebody holds, if only operations are known after it.

    These are never synced by themselves, so that a power cut may take them from all who hold the
    state, while a witness still knows of them. They have changed nothing. None where a step may
    lie between, or nobody holds anything.
    """
    known = {committed_of(report): report.unchanged for report in reports.values()}
    for report in reports.values():
        place = committed_of(report)
        known[place] = max(known[place], report.unchanged)
    least = base.round
    for (number, _), unchanged in sorted(known.items(), reverse=True):
        if number < least:
            break
        least = min(least, number - unchanged)
    held = ((r.round, r.chain) for r in reports.values() if r.holds and r.round >= least)
    return max(held, default=None) if (base.round, base.chain) in known else None


def committed_of(report: Report) -> tuple[int, bytes]:
    """Return the last position that a reporter knows to be committed."""
    return max((report.round, report.chain), (report.known_round, report.known_chain))


def _holders(reports: Mapping[bytes, Report], round_number: int) -> dict[Run, set[bytes]]:
    """Return the results of the last attempt at a round, and who reports each."""
    found: dict[Run, set[bytes]] = defaultdict(set)
    for peer, report in reports.items():
        for run in report.runs:
            if run.round == round_number:
                found[run].add(peer)
    last = max((run.attempt for run in found), default=0)
    return {run: peers for run, peers in found.items() if run.attempt == last}


def _reaches(report: Report, round_number: int, chain: bytes) -> bool:
    """Return whether the reporter's state and results lead to that position."""
    runs = {run.round: run for run in report.runs if run.round not in report.missing}
    reached = report.chain
    for number in range(report.round + 1, round_number + 1):
        if number not in runs:
            return False
        reached = chain_after(reached, number, runs[number].fragment, runs[number].root)
    return report.holds and reached == chain
