"""Follow rounds as a member: take part, hold results, apply them when they are committed.

Theory. A member at round k knows of attempts at rounds k+1, k+2, ... (more than one only where the
method keeps rounds of different fragments in flight). About each it is in one of three situations:
it takes part or waits (``begins``), it has been told that the attempt is over (``closed``), or it
holds that attempt's whole result (``held``). It says READY for round k+1 only, so that a READY is
always said from the position that the round builds on. A newer attempt replaces an older one, a
commit or a new view ends it. Rounds are applied in order: a commit of round n is applied if the
results held for k+1 ... n lead from the own chain to the committed one. A member that cannot do
that is *unsynced*: it neither contributes nor counts as a copy until it has caught up
(syncing.py). A *frozen* member has promised a candidate to answer no more READY in this view
(that is what makes the candidate's report complete), but may still apply a COMMIT.

A witness holds nothing: it votes for results that others hold, and follows the position only.

READY is a vote, and is said as one (in READY, heartbeats and reports) once its record and the
result are on this peer's disk. Until then READY only tells that the result is here, so that nobody
waits for a slow disk: a commit needs a quorum of votes, and of the others only that they hold the
result. Where there is no ledger, a vote is durable at once, for as long as the process lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.collectives.units import listed
from atoll.peer.membership.bans import BanBook
from atoll.peer.membership.durable_records import CommitRecord, ReadyRecord, Recovered
from atoll.peer.membership.events import (
    Abort,
    Applied,
    Apply,
    Configured,
    Effect,
    Fetch,
    FinalChunks,
    HomeRead,
    ListFinal,
    Note,
    Persist,
    Reduce,
    ReduceFailed,
    Restored,
    Submitted,
    TakeBack,
    TellTrainer,
)
from atoll.peer.membership.kept_chunks import DIGEST_BYTES, KEPT_MAX
from atoll.peer.membership.messages import (
    AskFinals,
    Begin,
    Finals,
    Miss,
    Notice,
    Ready,
    Repair,
    Report,
    Run,
    Terms,
)
from atoll.peer.membership.operations import Call, without_objects
from atoll.peer.membership.outbox import Outbox
from atoll.peer.membership.probation import CompletedRounds
from atoll.peer.membership.view import WITNESS, Member, View, chain_after, genesis_chain, short
from atoll.peer.rounds.entries import GATHER, INIT, REDUCE, ROUNDS_IN_FLIGHT_MAX, STEP, entry_root

# Operations since the last step that can be taken back without fetching the state: some 200 bytes
# for each. Of a power cut only those are lost that the kernel had not written, 30 s of them.
OPERATIONS_MAX = 1024
CALLS_NAMED_MAX = 4  # to people, of those that were lost


@dataclass(frozen=True, slots=True)
class Held:
    """Hold the result of an attempt, complete here.

    On a witness, it is known to be held by others. ``place``: the lineage and view of the attempt.
    """

    run: Run
    begin: Begin | None
    place: tuple[bytes, int]
    written: bool = False  # its READY record is
    durable: bool = False  # ... and synced
    is_here: bool = True  # not so where the file of R was damaged
    is_kept: bool = False  # the result is on the disk as well, not the vote alone

    @property
    def changes_state(self) -> bool:
        """Return whether a round that is lost with the disk would be missed: no operation is."""
        return self.begin is None or self.begin.operation is None


class MemberState:
    """Keep this peer's position, its attempts and results, and what its trainer has submitted.

    ``round`` and ``chain`` identify the last committed state that this peer holds.
    """

    def __init__(
        self,
        me: Member,
        emit: Callable[[Effect], None],
        outbox: Outbox | None = None,
        life: int = 0,
    ) -> None:
        self.me = me.peer
        self.life = life
        self.is_replica = me.role != WITNESS
        self._emit = emit
        self._outbox = outbox or Outbox()
        self.round = 0
        self.chain = b""
        self.known = (0, b"")  # the last commit that we know of: our position, or a later one ...
        self.unchanged = 0  # ... up to which so many rounds have changed no state
        self.previous = (0, b"")  # the position before the last commit; (0, b"") if not known
        self.digest = b""
        self.digest_round = -1
        self._earlier = (b"", -1)  # the digest before, and of what round
        self.epoch = max(1, life)  # of an earlier life it is another one
        self.spec = ""  # the run specification of our state, shown when a JOIN differs ...
        self.fragments = 1  # ... and what it asks for
        self.rounds_in_flight = 1
        self.terms: Terms | None = None  # of who counts; None until the specification is known
        self.completed = CompletedRounds()
        self.bans = BanBook(me.peer)
        self.unsynced = False
        self.loading = False  # what we stand at, or are READY for, is being read from our disk
        self._genesis = b""  # the chain of the run's beginning
        self.suspect = False  # our bytes differ from the others' although the chain agrees
        self._doubted = (0, b"")  # after which round that was said last
        self.diverged = False  # our state is not on the history of the view
        self.attached = False  # rounds wait for our trainer
        self.since = -1  # the round at which it came; -1 without one
        self.submissions: dict[int, Submitted] = {}  # fragment -> what waits for its next round
        self._missed = MissedRounds(me.peer)
        self.offer = b""  # what our trainer would initialise a void run with
        self.begins: dict[int, Begin] = {}  # round -> the attempt at hand
        self.held: dict[int, Held] = {}
        self.closed: set[int] = set()  # rounds whose attempt at hand is over
        self._unusable: set[int] = set()  # ... to which our contribution cannot be used
        self._last_of: dict[int, int] = {}  # fragment -> its last committed round
        # Operations since the state has changed last: what was called, and the position before it.
        self._operations: deque[tuple[int, bytes, str]] = deque(maxlen=OPERATIONS_MAX)
        self._keeps_rounds = True  # as far as there is a ledger
        self._lost = ""  # which operations were taken back, until our trainer has heard of it

    # ------------------------------------------------------------ the state

    def on_restored(self, event: Restored) -> None:
        """Begin with the state of a checkpoint."""
        self.round, self.chain = event.round, event.chain
        self.digest, self.digest_round = event.digest, event.round
        self.known = max(self.known, (event.round, event.chain))

    def on_home_read(self, event: HomeRead) -> None:
        """Have the state that our home had promised, or go back to what its files have given."""
        self.loading = False
        if event.is_whole:
            if self.digest_round < event.round <= self.round:  # it may have gone back meanwhile
                self.digest, self.digest_round = event.digest, event.round
            return
        for number in event.missing & self.held.keys():
            self.held[number] = replace(self.held[number], is_here=False, is_kept=False)
        self._operations.clear()
        self.previous = (0, b"")
        self.round, self.chain = event.round, event.chain or self._genesis
        self.digest, self.digest_round = event.digest, event.round
        if self.known[0] > self.round and not self.unsynced:
            self.fell_behind("files of this peer are damaged: it downloads what they lack")

    def recover(self, recovered: Recovered) -> None:
        """Begin where the ledger and the files of this peer's home end."""
        view = recovered.view
        self.round, self.chain = recovered.state
        self.loading = self.is_replica and recovered.has_files
        if view is None:
            self.known = recovered.state
            return
        self._genesis = view.base_chain if view.base_round == 0 else genesis_chain(view.lineage)
        self.chain = self.chain if self.round else self._genesis
        self.known, self.unchanged = recovered.known, recovered.unchanged
        self.completed = CompletedRounds(view)
        self.unsynced = recovered.known[0] > self.round
        for head in recovered.ready:
            here = head.run.round not in recovered.missing
            place = (head.lineage, head.view)
            said = {"written": True, "durable": True, "is_here": here, "is_kept": here}
            kept = Held(head.run, head.begin, place, **said)
            self.held[head.run.round] = kept
            if head.begin is not None:
                self.begins[head.run.round] = head.begin
        for step in recovered.replay:
            if isinstance(step, ReadyRecord):
                self._note_operation(step.begin, *step.start)

    def on_configured(self, event: Configured) -> None:
        self.spec, self.terms = event.spec, event.terms
        self.fragments, self.rounds_in_flight = event.fragments, event.rounds_in_flight

    def on_applied(self, event: Applied) -> None:
        if event.round > self.round:
            return  # it has been taken back since
        self._earlier = (self.digest, self.digest_round)
        self.digest, self.digest_round = event.digest, event.round

    def digest_after(self, round_number: int) -> bytes:
        """Return the digest of our state after one of the last two rounds, or nothing."""
        known = ((self.digest, self.digest_round), self._earlier)
        found = (digest for digest, number in known if number == round_number)
        return next(found, b"") if self.holds else b""

    def compare(self, round_number: int, chain: bytes, digest: bytes) -> None:
        """Doubt our bytes, outside a view, if those of its coordinator are others."""
        here = (self.round, self.chain) == (round_number, chain) and self.holds
        if here and self.digest_round == self.round and digest not in (b"", self.digest):
            self.on_resync()

    def on_resync(self) -> bool:
        """Doubt our bytes; return whether to download those of the others.

        Not while we are READY, which must not be taken back; the next round's digest asks again.
        (Nobody is READY for a round after the next.)
        """
        if not self.is_replica:
            return False
        if self._doubted != (self.round, self.chain):
            self._doubted = self.round, self.chain
            text = f"this peer's state after round {self.round} is not that of most others"
            self._emit(Note("doubt", text))
        if self.round + 1 in self.held:
            return False
        self.suspect = True
        self.fell_behind("downloading the others' state")
        return True

    # ------------------------------------------------------------ the trainer

    def submitted(self, submission: Submitted) -> None:
        """Keep a submission for the next BEGIN, or answer at once that it is not used.

        Then this round goes on without it, or the trainer has to take the state anew first.
        """
        fragment = submission.fragment
        running = self._running(fragment)
        missed = self._missed.pending(submission)
        if self._lost and submission.operation is not None:
            why, self._lost = self._lost, ""
            self._tell("lost", self.round, fragment, text=why)
        elif submission.epoch != self.epoch:
            self._tell("reload", self.round, fragment)
        elif missed:
            self._tell("missed", missed, fragment)
        elif submission.base_round < self._last_of.get(fragment, 0):
            self._tell("missed", self.round, fragment)  # it crossed the COMMIT
        elif running is not None and self._is_late(submission, running):
            self._tell("missed", running.round, fragment)
        else:
            self.submissions[fragment] = submission

    def _is_late(self, submission: Submitted, running: Begin) -> bool:
        """Return whether a submission is late for this attempt, not early for the next.

        An operation of a trainer that nobody waited for when the round began is for the next.
        """
        return submission.operation is None or self.takes_part(running)

    def _running(self, fragment: int) -> Begin | None:
        """Return the attempt that a submission of this fragment comes too late for, or None."""
        for begin in self.begins.values():
            over = begin.round in self._unusable or begin.round in self.closed
            if begin.fragment == fragment and begin.kind != INIT and not over:
                return begin
        return None

    def unusable(self, round_number: int, why: str) -> None:
        """Note that our contribution to this attempt cannot be used.

        Its trainer goes on, and what it submits next is kept for the attempt after this one.
        """
        self._unusable.add(round_number)
        begin = self.begins.get(round_number)
        waiting = self.submissions.pop(begin.fragment, None) if begin is not None else None
        if begin is not None and waiting is not None:
            self._missed.told(begin.round)
            kind = "missed" if waiting.operation is None else "failed"
            self._tell(kind, begin.round, begin.fragment, text=why)

    def _leave_out(self, begin: Begin) -> None:
        kind, why = self._missed.resolve(begin, self.submissions.get(begin.fragment))
        if kind:
            del self.submissions[begin.fragment]
            if why:
                self._emit(Note("mismatch", why))
            self._tell(kind, begin.round, begin.fragment, text=why)

    def came(self, waits: bool) -> None:
        """Note that a trainer is here; it may say so again, with another ``waits``."""
        self.attached = waits
        if self.since < 0:
            self.since = self.round

    def detached(self) -> None:
        self.attached, self.since = False, -1
        self.offer, self._lost = b"", ""
        self._missed.clear()
        read = {b.fragment for b in self.begins.values() if self.takes_part(b)}
        self.submissions = {f: s for f, s in self.submissions.items() if f in read}

    def waiting(self) -> tuple[tuple[int, ...], tuple[float, ...], Call]:
        """Return the fragments that wait for a round, their weights, and what the first calls."""
        if not self.submissions:
            return (), (), None
        fragments = tuple(sorted(self.submissions))
        weights = tuple([self.submissions[fragment].weight for fragment in fragments])
        return fragments, weights, self.submissions[fragments[0]].operation

    @property
    def given(self) -> bytes:
        """Return the object of the GATHER that our trainer waits for."""
        waiting = self.submissions.get(0)  # operations are of runs with one fragment
        return waiting.given if waiting is not None else b""

    @property
    def contributes(self) -> bool:
        """Return whether an attempt in progress reads our trainer's region.

        The next attempt at the same round may read it, too.
        """
        return any(
            self.takes_part(begin)
            and (begin.kind != INIT or self.me in begin.counted)
            and begin.round not in self._unusable
            for begin in self.begins.values()
        )

    def takes_part(self, begin: Begin) -> bool:
        """Return whether this process is a participant: an earlier one had other submissions."""
        if self.me not in begin.participants:
            return False
        return not begin.lives or begin.lives[begin.participants.index(self.me)] == self.life

    def _tell(
        self,
        kind: str,
        round_number: int,
        fragment: int = 0,
        begin: Begin | None = None,
        text: str = "",
    ) -> None:
        self._emit(TellTrainer(kind, round_number, self.epoch, fragment, begin, text))

    # ------------------------------------------------------------ attempts

    def on_begin(self, begin: Begin) -> Ready | Miss | None:
        """Start or restart an attempt; return the READY of a GATHER, to be sent at once, else None.

        The caller has checked that we are in the view and not frozen. The result of a GATHER is
        BEGIN's blob. Between two attempts another trainer may have come and called something else:
        then return that we cannot take part.
        """
        if self.is_behind or not self.round < begin.round <= self.round + ROUNDS_IN_FLIGHT_MAX:
            return None  # one that missed a commit learns of it from the coordinator's next beat
        known, held = self.begins.get(begin.round), self.held.get(begin.round)
        if known is not None and begin.attempt <= known.attempt:
            return None
        if held is not None and begin.attempt <= held.run.attempt:
            return None  # a witness has voted for it already: NOTICE was faster
        self._drop_attempt(begin.round)
        self.begins[begin.round] = begin
        self._leave_out(begin)
        if begin.kind == GATHER:
            root = entry_root(begin.origins, b"", (), begin.blob)
            return self.on_reduced(begin.round, begin.attempt, root) if self.is_replica else None
        if not (self.takes_part(begin) or self._owns(begin)):
            return None
        waiting = self.submissions.get(begin.fragment)
        is_other = waiting is not None and waiting.operation != begin.operation
        if self.takes_part(begin) and is_other:
            why = "its trainer is another one by now, and calls something else"
            return self.on_reduce_failed(ReduceFailed(begin.round, begin.attempt, (), why))
        self._emit(Reduce(begin))
        return None

    def _owns(self, begin: Begin) -> bool:
        """Return whether this process is a witness that owns parts of an attempt."""
        owners = begin.owners
        if owners is None or self.me not in owners.peers:
            return False
        return owners.lives[owners.peers.index(self.me)] == self.life

    def on_repair(self, repair: Repair) -> None:
        begin, held = self._current(repair.round, repair.attempt), self.held.get(repair.round)
        if begin is not None and (held is None or not held.is_here):
            self._emit(Fetch(begin, repair.holder))

    def on_ask_finals(self, ask: AskFinals) -> None:
        """Say what of an attempt that is over is finished, and nothing else about it any more."""
        if self._current(ask.round, ask.attempt) is not None:
            self.closed.add(ask.round)
            self._emit(ListFinal(ask.round, ask.attempt))

    def on_reduced(self, round_number: int, attempt: int, root: bytes) -> Ready | None:
        """Hold the whole result; return the READY to send, if the attempt is the current one.

        READY is said about the next round only, by who stands before it: a result of a later one is
        kept, and its turn comes with the commit.
        """
        begin, known = self._current(round_number, attempt), self.held.get(round_number)
        if known is not None and not known.is_here and known.run.root == root:
            self.held[round_number] = replace(known, is_here=True)
            return self.ready()
        if begin is None or known is not None or self.me in begin.helpers:
            return None  # a witness that owns parts votes when it is asked, as others do
        run = Run(round_number, attempt, begin.fragment, root)
        self.held[round_number] = Held(run, begin, (begin.lineage, begin.view))
        return self.ready() if round_number == self.round + 1 else None

    def _at_hand(self) -> Held | None:
        """Return the result held for the next round, of which it is time to write READY."""
        held = self.held.get(self.round + 1)
        if held is not None and not held.written:
            synced = held.changes_state
            held = replace(held, written=True, durable=not (self._outbox.is_on and synced))
            self.held[held.run.round] = held
            begin = held.begin
            if begin is not None and begin.kind == GATHER:  # no operation's result is kept
                sizes = without_objects(begin.blob, len(begin.participants))
                begin = replace(begin, blob=sizes)
            self._write(ReadyRecord(*held.place, held.run, self.chain, begin), synced=synced)
        return held

    def on_durable(self, record: ReadyRecord) -> Ready | None:
        """Note that a READY is synced; return it, now as a vote, if it still counts."""
        held = self.held.get(record.run.round)
        if held is None or held.run != record.run or held.place != (record.lineage, record.view):
            return None
        self.held[record.run.round] = replace(held, durable=True, is_kept=self._keeps_rounds)
        return self.ready()

    def on_rounds_kept(self, keeps: bool) -> None:
        """Hear whether results go to the disk from now on."""
        self._keeps_rounds = keeps

    @property
    def keeps_rounds(self) -> bool:
        """Return whether the result of the round at hand is on this peer's disk, or will be."""
        held = self.held.get(self.round + 1)
        if held is not None and held.durable:
            return held.is_kept
        return self.is_replica and self._outbox.is_on and self._keeps_rounds

    def on_reduce_failed(self, event: ReduceFailed) -> Miss | None:
        """Return what to tell the coordinator of broken edges; None if the attempt is over."""
        begin = self.begins.get(event.round)
        if begin is None or begin.attempt != event.attempt:
            return None
        if not event.peers:
            self.unusable(event.round, event.why)
        names = ", ".join(short(peer) for peer in event.peers)
        what = f"the exchange with {names} fails" if names else "this peer cannot take part"
        self._emit(Note("miss", f"round {event.round}: {what}: {event.why}"))
        missing = event.peers or (self.me,)
        return Miss(begin.lineage, begin.view, event.round, event.attempt, missing)

    def on_final_chunks(self, event: FinalChunks) -> Finals | None:
        """Return what to tell the coordinator of what is left of an attempt that is over."""
        begin = self.begins.get(event.round)
        if begin is None or begin.attempt != event.attempt:
            return None
        keeps_nothing = begin.kind == STEP and self.terms is not None and self.terms.keeps_nothing
        keeps_nothing |= self.me in begin.helpers
        digests = b"" if keeps_nothing else event.digests[: DIGEST_BYTES * KEPT_MAX]
        tag = (begin.lineage, begin.view, event.round, event.attempt)
        return Finals(*tag, digests, event.missing)

    def ready(self) -> Ready | None:
        """Return the READY that we can say about the next round, or None."""
        held = self._at_hand()
        if held is None or self.is_behind or not held.is_here:
            return None
        if held.begin is None and not held.durable:
            return None  # who holds nothing has only its vote to give
        run = held.run
        said = (*held.place, run.round, run.attempt, run.root, not held.durable)
        return Ready(*said, self.life, self.keeps_rounds)

    def on_notice(self, notice: Notice) -> Ready | None:
        """Return our vote for a result that others hold and we need not, or None.

        After it we vote for no older attempt.
        """
        known = self.held.get(notice.round)
        late = not self.round < notice.round <= self.round + ROUNDS_IN_FLIGHT_MAX
        begin = self._of_others(notice)
        holds = self.is_replica and begin is None
        if holds or late or (known and known.run.attempt > notice.attempt):
            return None
        if known is None or known.run.attempt < notice.attempt:
            run = Run(notice.round, notice.attempt, notice.fragment, notice.root)
            self.held[notice.round] = Held(run, begin, (notice.lineage, notice.view))
        return self.ready()

    def _of_others(self, notice: Notice) -> Begin | None:
        """Return the attempt if it is a REDUCE of others' vectors: it changes no state."""
        begin = self._current(notice.round, notice.attempt)
        if begin is None or self.is_behind or begin.kind != REDUCE or self.me in begin.participants:
            return None
        return begin

    def _current(self, round_number: int, attempt: int) -> Begin | None:
        begin = self.begins.get(round_number)
        over = begin is None or begin.attempt != attempt or round_number in self.closed
        return None if over else begin

    def runs(self) -> tuple[Run, ...]:
        """Return the attempts at hand, with the root of the one that we are READY for."""
        if not self.begins and not self.held:
            return ()
        known = {
            number: Run(number, begin.attempt, begin.fragment)
            for number, begin in self.begins.items()
            if number not in self.closed
        }
        held = self._at_hand()
        if held is not None and held.is_here:
            known[held.run.round] = held.run
        return tuple([known[number] for number in sorted(known)[:ROUNDS_IN_FLIGHT_MAX]])

    @property
    def pending(self) -> bool:
        """Return whether the result that this peer is READY for is not on its disk yet."""
        held = self._at_hand()
        return held is not None and not held.durable

    def _drop_attempt(self, round_number: int) -> None:
        begin = self.begins.pop(round_number, None)
        if begin is not None:
            self._emit(Abort(begin.round, begin.attempt))
        self.held.pop(round_number, None)
        self.closed.discard(round_number)
        self._unusable.discard(round_number)

    def drop_attempts(self) -> None:
        for number in sorted({*self.begins, *self.held}):
            self._drop_attempt(number)

    # ------------------------------------------------------------ commits

    def committed(self, round_number: int, chain: bytes, unchanged: int = 0) -> None:
        """Apply the round that the group has committed if we hold it, else fall behind.

        A witness only moves to the position. ``unchanged``: so many rounds, up to this one, have
        changed no state.
        """
        if self.is_behind:
            return
        path = self._path_to(round_number, chain)
        if path is not None:
            for held in path:
                self._apply(held, unchanged - (round_number - held.run.round))
        elif self.is_replica:
            self.fell_behind(f"missed round {round_number}, downloading it")
        else:
            self.move_to(round_number, chain, unchanged)

    def hears_unchanged(self, round_number: int, chain: bytes, unchanged: int) -> None:
        """Hear of others how many rounds, up to a commit, have changed no state."""
        if (round_number, chain) == self.known:
            self.unchanged = max(self.unchanged, unchanged)

    def _path_to(self, round_number: int, chain: bytes) -> list[Held] | None:
        """Return the results held that lead from our position to that one, or None."""
        if round_number - self.round > len(self.held):
            return None
        between = range(self.round + 1, round_number + 1)
        path = [self.held[n] for n in between if n in self.held and self.held[n].is_here]
        reached = self.chain
        for held in path:
            reached = chain_after(reached, held.run.round, held.run.fragment, held.run.root)
        whole = len(path) == round_number - self.round and reached == chain
        return path if whole else None

    def _apply(self, held: Held, unchanged: int = 0) -> None:
        run, begin = held.run, held.begin
        begun = self.begins.get(run.round)
        if begun is not None and self.me in begun.helpers:
            self._emit(Abort(begun.round, begun.attempt))
        chain = chain_after(self.chain, run.round, run.fragment, run.root)
        self._forget(run.round)
        self.previous = (self.round, self.chain)
        self._note_operation(begin, *self.previous)
        if not held.changes_state:
            unchanged = max(unchanged, self.unchanged + 1)
        self._stands_at(run.round, chain, unchanged)
        self._last_of[run.fragment] = run.round
        self.offer = b""
        self.completed.count(begin)
        if begin is None or not self.is_replica:
            return
        self._emit(Apply(begin, chain, run.root))
        if begin.kind == INIT:
            self._tell("reload", self.round)
            self.submissions.clear()
        elif self._waits_for_later(begin):
            return
        elif self.submissions.pop(run.fragment, None) is not None:
            kind = "committed" if self.takes_part(begin) else "missed"
            done = begin if kind == "committed" and begin.operation is not None else None
            self._tell(kind, self.round, run.fragment, done)

    def _note_operation(self, begin: Begin | None, before: int, chain: bytes) -> None:
        """Remember what may be taken back by name: all that came after the last step."""
        if begin is not None and begin.operation is not None:
            self._operations.append((before, chain, str(begin.operation)))
        else:
            self._operations.clear()

    def _waits_for_later(self, begin: Begin) -> bool:
        """Return whether what waits here was never meant for this round."""
        waiting = self.submissions.get(begin.fragment)
        operation = waiting.operation if waiting is not None else None
        return operation is not None and not self.takes_part(begin)

    def _forget(self, round_number: int) -> None:
        self.begins.pop(round_number, None)
        self.held.pop(round_number, None)
        self.closed.discard(round_number)
        self._unusable.discard(round_number)

    def drop_passed(self, round_number: int) -> None:
        """Drop attempts at rounds that are committed, up to ``round_number``."""
        for number in sorted({*self.begins, *self.held}):
            if number <= round_number:
                self._drop_attempt(number)

    def move_to(self, round_number: int, chain: bytes, unchanged: int = 0) -> None:
        """Move to a position without a state: as a witness, or in a void run.

        It may go back.
        """
        self.drop_passed(round_number)
        self.previous = (self.round, self.chain) if round_number == self.round + 1 else (0, b"")
        self._operations.clear()
        self.unsynced = self.suspect = self.diverged = False
        self._stands_at(round_number, chain, unchanged)

    @property
    def position(self) -> tuple[int, bytes]:
        """Return where we stand in the history of the view: at its base, if we left it."""
        return self.known if self.diverged else (self.round, self.chain)

    def _stands_at(self, round_number: int, chain: bytes, unchanged: int = 0) -> None:
        """Be at a committed position, and write down that it is one, unless it was taken back.

        ``unchanged``: at least so many rounds, up to this one, have changed no state.
        """
        self.round, self.chain = at = round_number, chain
        if self.digest_round > round_number:  # of a round of another history, until we hear more
            self.digest, self.digest_round, self._earlier = b"", -1, (b"", -1)
        if self.diverged:
            return
        unchanged = max(0, unchanged)
        if at > self.known:
            self.known, self.unchanged = at, unchanged
        elif at == self.known:
            unchanged = self.unchanged = max(self.unchanged, unchanged)
        self._write(CommitRecord(round_number, chain, unchanged), synced=False)

    def _write(self, record: ReadyRecord | CommitRecord, *, synced: bool) -> None:
        if self._outbox.is_on:
            self._emit(Persist(record, synced))

    def caught_up(self, round_number: int, chain: bytes) -> None:
        """Have the state of that position by other ways than its rounds."""
        self.drop_passed(round_number)
        self._operations.clear()
        self._stands_at(round_number, chain)

    def fell_behind(self, why: str) -> None:
        """Note that we are unsynced; what we hold stays.

        Others may have counted our READY, so it must stay in our report.
        """
        for number in sorted(self.begins.keys() - self.held.keys()):
            self._drop_attempt(number)
        self.unsynced = True
        self._emit(Note("unsynced", why))

    # ------------------------------------------------------------ views

    def on_install(self, view: View, restarted: tuple[bytes, ...] = ()) -> None:
        """Reset what belonged to the old view and reach the new one's base, if we hold it.

        ``restarted``: the members that were started again while this peer was beyond that base.
        """
        self._missed.clear()
        base = (view.base_round, view.base_chain)
        path = self._path_to(*base) if not self.unsynced else None
        for held in path or ():
            self._apply(held)
        self.completed = CompletedRounds(view)
        if base != self.known:  # what the view takes back was not committed, or is given up
            self.known, self.unchanged = base, self._unchanged_at(base)
        self.drop_attempts()
        if not self.chain:
            self.chain = genesis_chain(view.lineage)
        if (self.round, self.chain) == base:
            return
        if not self.is_replica or view.base_round == 0:
            self.move_to(*base)
        elif not self.unsynced and self._take_back(*base, restarted):
            return
        else:
            self.diverged = self.round >= view.base_round
            if not self.unsynced:
                self.fell_behind(f"missed round {view.base_round}, downloading it")

    def _unchanged_at(self, base: tuple[int, bytes]) -> int:
        """Return how many rounds, up to a view's base, are known to have changed no state.

        A base of another history may lie behind steps that this peer has never heard of.
        """
        if base not in self._operations_began():
            return 0
        return max(0, self.unchanged - (self.known[0] - base[0]))

    def _operations_began(self) -> list[tuple[int, bytes]]:
        """Return the positions from which only operations have led here."""
        return [(before, chain) for before, chain, _ in self._operations]

    def _take_back(
        self, round_number: int, chain: bytes, restarted: tuple[bytes, ...] = ()
    ) -> bool:
        """Go back over operations that a power cut has taken from the others, if there is no more.

        The state is that of the base, so nothing is fetched. What its trainer has of them the
        others may not have: its next call says so.
        """
        taken = [what for before, _, what in self._operations if before >= round_number]
        if (round_number, chain) not in self._operations_began():
            return False
        for _ in taken:
            self._operations.pop()
        last, self.previous = self.round, (0, b"")
        self._emit(TakeBack(round_number, chain))
        self._stands_at(round_number, chain)
        calls = ", ".join(taken[-CALLS_NAMED_MAX:])
        first = f"rounds {round_number + 1} to {last}" if len(taken) > 1 else f"round {last}"
        who = listed([short(peer) for peer in restarted]) or "other peers"
        text = f"{first} ({calls}) were lost when {who} lost power and started again"
        self._emit(Note("lost-calls", f"{text}; the trainer is told with its next call"))
        self._tell_lost(text)
        return True

    def _tell_lost(self, text: str) -> None:
        """Tell our trainer now, if it waits in a call, else with the next one."""
        self.epoch += 1
        waiting = [f for f, s in self.submissions.items() if s.operation is not None]
        self.submissions.clear()
        self._last_of.clear()
        self._lost = text
        if waiting:
            self._lost = ""
            self._tell("lost", self.round, waiting[0], text=text)
        else:
            self._tell("reload", self.round)

    def on_excluded(self) -> None:
        """Drop all attempts, as we are out of the view; the state stays.

        It may still be the group's when we are back.
        """
        self.drop_attempts()

    def reload(self) -> None:
        """Tell the trainer to take our state anew: it has changed other than by commits."""
        self.epoch += 1
        self.submissions.clear()
        self._last_of.clear()
        self._tell("reload", self.round)

    def missed(self) -> None:
        """Tell the trainer that commits went by without it.

        It keeps its parameters and goes on.
        """
        for fragment in sorted(self.submissions):
            self._tell("missed", self.round, fragment)
        self.submissions.clear()

    @property
    def is_behind(self) -> bool:
        """Return whether the state that rounds build on is not here, or not yet."""
        return self.unsynced or self.loading

    @property
    def holds(self) -> bool:
        """Return whether the state after ``round`` is here, and not in doubt."""
        return self.is_replica and not self.suspect

    def standing(self) -> tuple[int, bytes, bool]:
        """Return the position that a report names, and whether its state is here."""
        if self.diverged:
            return 0, b"", False
        self._at_hand()
        return self.round, self.chain, self.holds

    def report(self) -> Report:
        """Return what a candidate must know before it may choose the base of the next view."""
        standing = self.standing()
        if self.diverged:
            return Report(*standing)
        said = [held for _, held in sorted(self.held.items()) if held.durable]
        runs = tuple(held.run for held in said)
        missing = tuple(held.run.round for held in said if not held.is_here)
        later = self.known if self.known[0] > self.round else (0, b"")
        return Report(*standing, runs, *later, missing, self.unchanged)


_STEP = "a step of the optimizer"


class MissedRounds:
    """Remember which round without it our trainer has yet to hear of.

    It is a part of the follower. A trainer hears once that a round goes on without it: at once if
    something of it waits, else when it calls its next operation.
    """

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._untold = 0  # the round of which it does not know yet
        self._told = 0  # the last one of which it knows

    def clear(self) -> None:
        """Forget these rounds: they were of another view, or another trainer."""
        self._untold = self._told = 0

    def told(self, round_number: int) -> None:
        self._told = round_number

    def pending(self, submission: Submitted) -> int:
        """Return the round that this submission comes too late for, 0 for none.

        A step is for the next round, whichever that is.
        """
        pending, self._untold = self._untold, 0
        if not pending or submission.operation is None:
            return 0
        self._told = pending
        return pending

    def resolve(self, begin: Begin, waiting: Submitted | None) -> tuple[str, str]:
        """Return what to tell the trainer, and why; "" for nothing.

        ``waiting`` is over if it is told.
        """
        if self._me not in begin.without or begin.round <= self._told:
            return "", ""
        if waiting is None:
            self._untold = begin.round
            return "", ""
        mine, theirs = waiting.operation, begin.operation
        if mine == theirs:
            if mine is None:
                return "", ""  # a late step hears of it with the commit
            self._told = begin.round
            return "missed", ""
        self._told = begin.round
        called, others = mine or _STEP, theirs or _STEP
        why = f"this trainer called {called}, and the others {others} (round {begin.round})"
        return "missed" if mine is None else "mismatch", why
