"""Check that what peers say is so: READY, COMMIT, reports, and beats that a coordinator goes by.

The rest of the checker sees a wrong word only once it has done harm, which may take a second fault
at the right moment. Here each word is compared with what is known about who says it:

- READY is of the attempt at hand, by somebody who is synced and holds just that result;
- BEGIN of an attempt names members that live, as far as its coordinator knows, and of INIT who
  gives the parameters owns no part of them if somebody else can;
- under a robust rule or an audit nobody tells which chunks of a step it has, and none are kept;
- COMMIT has a quorum of members, in the lives that the view names, who have said READY for that
  attempt, and all of them for one result;
- a promise reports the base of its view and rounds that were begun in it, or less, also that of
  a candidate to itself;
- so does the base of the view that follows, unless that is a fork or a rollback, and nobody who has
  promised holds more;
- results and states differ only where a memory has failed, and then only a minority is left out;
- a coordinator goes by beats of those lives that its view names, of none that is over, and counts
  only what was said by who was synced;
- who comes into a view has the state of its base, or of the round before;
- who is started again with all that was committed fetches nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.messages import GATHER, INIT, REDUCE, STEP
from atoll.peer.membership.view import REPLICA, Ballot, View
from harness.decisions import suffice

if TYPE_CHECKING:
    from atoll.peer.membership.coordinator import Coordinator
    from harness.host import Host

__all__ = ["Statements"]

# What is compared with what is known about who says it (``Statements._says``).
_JUDGED = frozenset(
    (
        *(ms.Heartbeat, ms.Ready, ms.Miss, ms.Finals, ms.Begin),
        *(ms.Accept, ms.Commit, ms.Promise, ms.Resync),
    )
)
Attempt = tuple[bytes, int, int, int]  # lineage, view, round, attempt
Chains = Mapping[bytes, tuple[bytes, object]]  # each with the one before it


class Statements:
    """Part of the checker, which knows all views and the history of every chain."""

    def __init__(
        self,
        views: Mapping[tuple[bytes, int], View],
        history: Chains,
        operations: Collection[bytes],
    ) -> None:
        self.keeps_nothing = False  # a robust rule, or an audit: no word about a chunk is believed
        self.bad_memory = False  # somebody's bytes have come out wrong, at any time
        self._views = views
        self._history = history
        self._operations = operations  # chains of rounds that change no state
        self._ready: dict[Attempt, dict[tuple[bytes, int], bytes]] = {}  # who (life) -> root
        self._committed: set[Attempt] = set()
        self._waited: dict[Attempt, dict[bytes, set[bytes]]] = {}  # for whom each says it has
        self._begun: dict[Attempt, int] = {}  # with how often it had stalled
        self._last: dict[tuple[bytes, int, int], ms.Begin] = {}  # of each round in a view
        self._proposed: set[View] = set()
        self._chosen: set[tuple[bytes, int, Ballot]] = set()  # ballots of which a value is known
        self._positions: dict[tuple[bytes, int], set[tuple[int, bytes]]] = {}  # that it has told
        self._misses: dict[tuple[Host, bytes], tuple[bytes, ...]] = {}  # the last of an attempt
        self._lives: dict[tuple[Host, bytes], int] = {}  # the last that a coordinator has gone by
        self._own_promise: dict[Host, ms.Promise] = {}  # the last of a candidate to itself
        self._made_in: dict[bytes, tuple[bytes, int]] = {}  # chain -> lineage and view of its BEGIN
        self._pending: dict[bytes, list[tuple[View, View]]] = {}  # by the later base

    # ------------------------------------------------------------ what is said

    def watch(self, host: Host, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        if host.node.coordinator is not None and type(event) is ev.Received:
            if type(event.message) is ms.Heartbeat:
                self._goes_by_lives(host, event.source)
            if type(event.message) in (ms.Heartbeat, ms.Ready):
                self._counts_what_was_said(host, event.source)
            if type(event.message) is ms.Miss:
                self._counts_misses(host, event.source, event.message)
        self._promises_itself(host)
        last: object = None
        for effect in effects:
            kind = type(effect)
            if kind is ev.Send:
                message = effect.message
                if message is not last:  # the same one to many
                    last = message
                    if type(message) in _JUDGED:
                        self._says(host, message, effects)
            elif kind is ev.Note and effect.kind == "recovered":
                self._fetches_what_it_lacks(host, effects)
            elif kind is ev.Note and effect.kind == "retry" and "results differ" in effect.text:
                assert self.bad_memory, f"invariant 3: {host.name} has two results: {effect.text}"
                self._leaves_out_few(host)

    def _says(self, host: Host, message: object, effects: Sequence[ev.Effect]) -> None:
        kind = type(message)
        if kind is ms.Heartbeat:
            told = self._positions.setdefault((host.peer, message.inc), set())
            told.add((message.round, message.chain))
            beyond = message.digest_round > message.round
            assert not beyond, f"invariant 3: {host.name} tells the state of a round to come"
            for run in message.runs if not message.unsynced else ():
                if run.root:
                    self._note_ready(host, (message.lineage, message.view), run)
        elif kind is ms.Ready:
            self._note_ready(host, (message.lineage, message.view), message)
            self._is_ready(host, message)
        elif kind is ms.Miss:
            begin = host.node.follower.begins.get(message.round)
            of = (message.round, message.attempt)
            is_now = begin is not None and (begin.round, begin.attempt) == of
            # The same event may have ended the view, and with it the attempts of that.
            has_gone_on = host.node.view is None or host.node.view.number != message.view
            ends = has_gone_on and any(type(effect) is ev.Installed for effect in effects)
            is_now = is_now or ends
            assert is_now, f"I5: {host.name} misses peers in attempt {of}, which is over"
        elif kind is ms.Finals:
            begin = host.node.follower.begins.get(message.round)
            secret = self.keeps_nothing and begin is not None and begin.kind == STEP
            what = f"I4: {host.name} tells of chunks that nobody may believe it has made well"
            assert not (secret and message.digests), what
            attempt = (message.lineage, message.view, message.round, message.attempt)
            self._waited.setdefault(attempt, {})[host.peer] = {*message.missing}
        elif kind is ms.Begin:
            self._begins_well(host, message)
        elif kind is ms.Accept and message.ballot.number == 0:
            self._lets_in(host, message.proposal)
        elif kind is ms.Accept:
            chosen = message.lineage, message.view, message.ballot
            if chosen not in self._chosen:  # what comes later, and was not needed, may know more
                self._chosen.add(chosen)
                self._goes_on_from_what_is_held(host, message.proposal)
        elif kind is ms.Commit:
            self._is_backed(host, message, effects)
        elif kind is ms.Promise:
            self._reports_history(host, message)
        elif kind is ms.Resync:
            assert self.bad_memory, f"invariant 3: {host.name} doubts states, which are all right"

    def _goes_on_from_what_is_held(self, host: Host, proposal: View) -> None:
        election = host.node.election
        heard = election.candidate.promises if election and election.candidate else {}
        is_bound = any(promise.accepted_view == proposal for promise in heard.values())
        if proposal.fork or proposal.rollback or is_bound or proposal.number == 1:
            return  # founders may have checkpoints of more than one history
        held = max((p.report.round for p in heard.values() if p.report.holds), default=0)
        what = f"{host.name} proposes to go on from round {proposal.base_round}"
        assert held <= proposal.base_round, f"I5: {what}, and somebody holds round {held}"

    def _fetches_what_it_lacks(self, host: Host, effects: Sequence[ev.Effect]) -> None:
        own = host.node.follower
        for goal in (effect.goal for effect in effects if type(effect) is ev.StartSync):
            has = (own.round, own.chain) == (goal.round, goal.chain)
            assert not has, (
                f"I5: {host.name} is back and fetches round {goal.round}, which it holds"
            )

    def _note_ready(self, host: Host, place: tuple[bytes, int], said: ms.Ready | ms.Run) -> None:
        who = host.peer, host.node.me.inc
        self._ready.setdefault((*place, said.round, said.attempt), {})[who] = said.root

    def _is_ready(self, host: Host, ready: ms.Ready) -> None:
        own = host.node.follower
        what = f"{host.name} says READY {ready.round}.{ready.attempt}"
        assert not own.unsynced, f"I5: {what} and is unsynced"
        begin = own.begins.get(ready.round)
        if begin is None or not own.is_replica:
            return  # a witness votes for what others hold
        assert begin.attempt == ready.attempt, f"I5: {what} in attempt {begin.attempt}"
        attests = begin.kind == REDUCE and host.peer not in begin.participants
        of_an_earlier_life = begin.operation is not None and not own.takes_part(begin)
        if begin.kind == GATHER or attests or of_an_earlier_life:
            return  # there is nothing to hold, or nobody that it would be for
        job = host.jobs.get(ready.round)
        holds = job is not None and job.complete and job.begin == begin and job.root == ready.root
        assert holds, f"I5: {what} without that result"

    def _lets_rest(self, lead: Coordinator, begin: ms.Begin, now_s: float, what: str) -> None:
        """Raise if a round of an asynchronous run has somebody who takes no part for a while.

        For want of others it may.
        """
        terms = lead.eligibility.terms
        records = lead.eligibility.flaky_peers._records
        resting = {p for p in begin.participants if p in records and now_s < records[p].until_s}
        others = len(begin.participants) - len(resting)
        if terms.asynchronous and terms.least == 1 and not terms.probation and resting:
            few = 2 * others <= len(begin.participants)
            assert few, f"I2: {what} with {len(resting)} that take no part"

    def _begins_well(self, host: Host, begin: ms.Begin) -> None:
        believes = self.keeps_nothing and begin.kind == STEP and begin.kept
        assert not believes, f"I4: {host.name} keeps chunks, and believes whoever says it has them"
        attempt, lead = (
            (begin.lineage, begin.view, begin.round, begin.attempt),
            host.node.coordinator,
        )
        if attempt in self._begun or lead is None:
            return
        place = attempt[:3]
        budget, last = lead._budgets.get(begin.round), self._last.get(place)
        stalls = budget.stalls if budget is not None else 0
        self._begun[attempt] = stalls
        self._last[place] = begin
        made = lead.attempts.get(begin.round)
        is_new = made is not None and (made.begin, made.began_s) == (begin, host.node.now_s)
        dead = {*begin.participants} - lead.roster.alive(host.node.now_s)
        dead = dead if is_new else set()  # else it has waited until the view was on the disk
        what = f"{host.name} begins {begin.round}.{begin.attempt}"
        assert not dead, f"I2: {what} with {len(dead)} that it takes for dead"
        if last is not None and stalls == 1 and lead.roster.links.is_complete:
            first = self._begun[(*place, last.attempt)] == 0
            staying = lead.roster.alive(host.node.now_s) - lead.admission.leaving
            out = {*last.participants} & staying - {*begin.participants}
            assert not first or len(out) < 2, f"I2: {what} without {len(out)} after one stall"
            self._was_named(host, last, out if first else set(), what)
        if last is None and begin.kind == STEP and lead.roster.links.is_complete:
            self._lets_rest(lead, begin, host.node.now_s, what)
        if begin.kind == INIT and begin.layout is not None:
            own = [share for share, x in zip(begin.layout.shares, begin.weights, strict=True) if x]
            alone = sum(map(bool, begin.layout.shares)) == 1
            assert alone or not any(own), f"{what}, and who gives the parameters owns a part"

    def _was_named(self, host: Host, last: ms.Begin, out: set[bytes], what: str) -> None:
        """Raise if somebody is left out whom no two have waited for, the coordinator among them."""
        said = self._waited.get((last.lineage, last.view, last.round, last.attempt), {})
        for peer in out:
            by = {reporter for reporter, named in said.items() if peer in named}
            own = peer in by or (host.peer in last.participants and host.peer != peer)
            assert len(by - {peer}) + own >= 2, f"I2: {what} without one that {len(by)} waited for"

    def _lets_in(self, host: Host, proposal: View) -> None:
        """Those who are new have said that they have the state, or had it a moment ago."""
        lead = host.node.coordinator
        if lead is None or proposal in self._proposed:  # it is repeated
            return
        self._proposed.add(proposal)
        own = host.node.follower
        near = ((own.round, own.chain), own.previous)
        for member in proposal.members:
            if lead.view.member(member.peer) is None and member.role == REPLICA:
                said = self._positions.get((member.peer, member.inc), set())
                what = f"I2: {host.name} lets in one that is at round {max(said, default=(0,))[0]}"
                assert not said.isdisjoint(near), what

    def _is_backed(self, host: Host, commit: ms.Commit, effects: Sequence[ev.Effect]) -> None:
        attempt = commit.lineage, commit.view, commit.round, commit.attempt
        view = self._views.get(attempt[:2])
        if attempt in self._committed or view is None:
            return
        self._committed.add(attempt)
        said = self._ready.pop(attempt, {})
        lives = {(member.peer, member.inc) for member in view.members}
        backing = {peer: root for (peer, inc), root in said.items() if (peer, inc) in lives}
        what = f"COMMIT {commit.round}.{commit.attempt} of {host.name}"
        applied = (e.begin for e in effects if type(e) is ev.Apply)
        own = any((x.round, x.attempt) == (commit.round, commit.attempt) for x in applied)
        if own or not host.node.follower.is_replica:  # what it tells itself is heard by nobody else
            backing.setdefault(host.peer, next(iter(backing.values()), b""))
        few = f"invariant 2: {what} has READY of {len(backing)} of {len(view.members)}"
        assert suffice(view, {*backing}), few

    def _reports_history(self, host: Host, promise: ms.Promise) -> None:
        view = self._views.get((promise.lineage, promise.view))
        report = promise.report
        if view is None or view.number == 0 or report.round < view.base_round:
            return
        fits = self._is_of(view, (report.round, report.chain))
        what = f"I5: {host.name} reports round {report.round}, which is not of view {view.number}"
        assert fits is not False, what

    def _promises_itself(self, host: Host) -> None:
        """A candidate tells itself what it holds, which nobody else hears."""
        election = host.node.election
        if election is not None and election.candidate is not None:
            promise = election.candidate.promises.get(host.peer)
            if promise is not None and promise is not self._own_promise.get(host):
                self._own_promise[host] = promise
                self._reports_history(host, promise)

    def _counts_what_was_said(self, host: Host, source: bytes) -> None:
        """READY that a coordinator has noted is of that attempt, and of that root."""
        lead = host.node.coordinator
        assert lead is not None
        tag = lead.view.lineage, lead.view.number
        for number, attempt in lead.attempts.items():
            counted = attempt.ready.get(source)
            said = self._ready.get((*tag, number, attempt.begin.attempt), {})
            member = lead.view.member(source)
            if counted is not None and member is not None:
                what = f"I5: {host.name} counts a READY for {number}.{attempt.begin.attempt}"
                assert said.get((source, member.inc)) == counted, f"{what} that was not said"

    def _counts_misses(self, host: Host, source: bytes, miss: ms.Miss) -> None:
        """Check that what a participant misses is counted for its attempt, and for no other."""
        lead = host.node.coordinator
        attempt = lead.attempts.get(miss.round) if lead is not None else None
        if lead is None or attempt is None:
            return
        if (miss.lineage, miss.view) != (lead.view.lineage, lead.view.number):
            return
        participants = attempt.begin.participants
        named = {*miss.peers} & {*participants} - attempt.links.apart_from(source, participants)
        if miss.attempt != attempt.begin.attempt:
            wrong = attempt.misses.get(source) == miss.peers != self._misses.get((host, source))
            assert not wrong, f"I5: {host.name} counts what is missing in attempt {miss.attempt}"
        elif named and source in participants:
            self._misses[host, source] = miss.peers
            assert source in attempt.misses, f"I5: {host.name} does not hear what {source!r} misses"

    def _leaves_out_few(self, host: Host) -> None:
        """After results that differ, nobody who lives is left out unless most have another one."""
        lead = host.node.coordinator
        if lead is None:
            return
        alive = lead.roster.alive(host.node.now_s)
        for cleanup in lead.cleanups.values():
            attempt = cleanup.attempt
            votes = Counter(attempt.ready[p] for p in attempt.jury if p in attempt.copies)
            going = cleanup.participants(alive, excluding=False)
            out = {*attempt.begin.participants} & alive - {*going}
            fair = 2 * max(votes.values(), default=0) > sum(votes.values())
            what = f"{host.name} goes on without {len(out)} that live, {[*votes.values()]} agree"
            assert fair or not out or not attempt.dispute, f"invariant 3: {what}"

    def _goes_by_lives(self, host: Host, source: bytes) -> None:
        lead, view = host.node.coordinator, host.node.view
        beat = lead.roster.heartbeats.get(source) if lead is not None else None
        if beat is None or view is None:
            return
        member = view.member(source)
        named = member is not None and member.inc == beat.inc
        assert named, f"I2: {host.name} goes by a beat of another life: {member}, {beat.inc}"
        last = self._lives.get((host, source), 0)
        assert beat.life >= last, f"I2: {host.name} goes back to life {beat.life} after {last}"
        self._lives[host, source] = beat.life

    # ------------------------------------------------------------ views and chains

    def installed(self, view: View) -> None:
        """The first time that anybody enters this view."""
        before = self._views.get((view.lineage, view.number - 1))
        if before is None or view.rollback or view.fork or view.number == 1:
            return
        if not self._builds_on(view, before):
            last = max((before.base_round, before.base_chain), (view.base_round, view.base_chain))
            self._pending.setdefault(last[1], []).append((view, before))

    def applied(self, begin: ms.Begin, chain: bytes) -> None:
        """The first time that anybody applies a round."""
        self._made_in[chain] = begin.lineage, begin.view
        for view, before in self._pending.pop(chain, ()):
            self._builds_on(view, before)

    def _builds_on(self, view: View, before: View) -> bool:
        """Return whether it is known that the base is on the history of the view before."""
        base = view.base_round, view.base_chain
        fits = self._is_of(before, base)
        assert fits is not False, (
            f"invariant 5: view {view.number} leaves the history of its lineage"
        )
        return fits is True

    def _is_of(self, view: View, position: tuple[int, bytes]) -> bool | None:
        """Return whether all rounds from a view's base to there were begun in it.

        What was taken back in a rollback is on the same history, and was not. A position before
        the base is of it where there are only operations between. None if that is not known yet.
        """
        (number, chain), (base, base_chain) = position, (view.base_round, view.base_chain)
        while base > number:
            if base_chain not in self._history:
                return None
            if base_chain not in self._operations:
                return False
            base, base_chain = base - 1, self._history[base_chain][0]
        while number > base:
            if chain not in self._history:
                return None
            if self._made_in.get(chain) != (view.lineage, view.number):
                return False
            number, chain = number - 1, self._history[chain][0]
        return number == 0 or chain == base_chain  # before the first round there is nothing
