"""Define what a peer writes down before it says it, and find out what its disk still says.

Theory. A voter of a Paxos, and a replica of a log, may forget only what it has told nobody: Paxos
is safe over any crashes if an acceptor's promises and votes are on stable storage before the answer
leaves (Lamport, "Paxos Made Simple", 2001, section 2.4; Chandra, Griesemer and Redstone, "Paxos
Made Live", 2007, on what follows when a disk forgets). So each peer keeps one append-only file of
*records*, its ledger, and ``SYNCED_FIRST`` says what is on the disk before which message leaves. A
process that comes back reads it (:func:`recovered`) and is the same voter as before: for the others
a restart is a silence and nothing else.

One file in one order is what makes the table short. A sync carries every record before it, so that
what needs no sync of its own (commits, views of others) is lost only as a suffix, and never under
anything that was synced. Three things follow from records alone:

- A *view* is the beginning of all that is said in it. Promises, votes and READY before it are void:
  attempts count from 1 in each view, and a READY that does not lead to the base of the next view
  has lost. Those that lead to it are committed by it.
- A *READY* says where its round leads from and to (chains), so that replay follows chains and not
  the order of lines. What is beyond the last *known commit* is held and not applied: the group may
  have given the attempt up since, and have committed other bytes for the same round.
- Whoever coordinates a view does so once. Attempt numbers, the one proposal of ballot 0 and the
  decision to give an attempt up are in memory only; so the view that a coordinator enters is synced
  before its first order leaves, and a process that finds such a view in its ledger *resigns*: it is
  a plain member, and the others elect somebody.

A peer that cannot read its ledger, or that others have heard say more than stands in it, has lost
its memory and must not vote: it comes back as a new incarnation (``Member.inc``), as one that was
never there. The number of its process (``life``) tells a restart from that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from atoll.peer.membership.messages import (
    Accept,
    Accepted,
    AskFinals,
    Begin,
    BootstrapHello,
    Commit,
    CoordinatorBeat,
    Join,
    Notice,
    Promise,
    Proof,
    Repair,
    Resync,
    Run,
    SyncTarget,
    Yield,
)
from atoll.peer.membership.view import (
    Ballot,
    Digest,
    Incarnation,
    Lineage,
    Rounds,
    View,
    Views,
    chain_after,
)
from atoll.peer.net.wire import message

# So many of the last operations stay by name in a compaction: a power cut may take them from others
# as long as their kernels have not written them, and then they have to be taken back.
OPERATIONS_KEPT = 256

Position = tuple[int, bytes]  # a round, and the chain after it
Place = tuple[bytes, int, int, int]  # lineage, view, round, attempt: what a file of R is named by


@message(wire="LedgerLife")
@dataclass(frozen=True, slots=True)
class IncarnationRecord:
    """Begin a new memory: whatever was promised as another incarnation is not this one's."""

    inc: Incarnation


@message(wire="LedgerView")
@dataclass(frozen=True, slots=True)
class ViewRecord:
    """Note a view that this peer has entered, and why it is decided."""

    view: View
    proof: Proof | None = None


@message(wire="LedgerPromise")
@dataclass(frozen=True, slots=True)
class PromiseRecord:
    """Note a promise: no vote below this ballot any more, and no READY in the view."""

    lineage: Lineage
    view: Views
    ballot: Ballot


@message(wire="LedgerVote")
@dataclass(frozen=True, slots=True)
class AcceptedRecord:
    """Note a vote and what it was for: another candidate has to be told that."""

    vote: Accepted
    proposal: View


@message(wire="LedgerReady")
@dataclass(frozen=True, slots=True)
class ReadyRecord:
    """Note a READY: the round leads from the chain ``before`` to the one that its root gives.

    Without ``begin`` it is an attester's, which has no R.
    """

    lineage: Lineage
    view: Views
    run: Run
    before: Digest
    begin: Begin | None = None

    @property
    def after(self) -> bytes:
        """Return the chain after the round."""
        return chain_after(self.before, self.run.round, self.run.fragment, self.run.root)

    @property
    def start(self) -> Position:
        return self.run.round - 1, self.before

    @property
    def end(self) -> Position:
        return self.run.round, self.after

    @property
    def changes_state(self) -> bool:
        """Return whether the round is no operation."""
        return self.begin is None or self.begin.operation is None

    @property
    def place(self) -> Place:
        return self.lineage, self.view, self.run.round, self.run.attempt


@message(wire="LedgerCommit")
@dataclass(frozen=True, slots=True)
class CommitRecord:
    """Note that this round is committed, with all before it."""

    round: Rounds
    chain: Digest
    unchanged: Rounds = 0  # so many rounds, up to this one, have changed no state


@message(wire="LedgerOperations")
@dataclass(frozen=True, slots=True)
class OperationsRecord:
    """Note that all rounds from one position to another were operations: the state is the same.

    A compaction puts it in the place of their records, of which there may be millions between two
    steps.
    """

    first: Rounds  # the position before them ...
    before: Digest
    last: Rounds  # ... and after
    after: Digest

    @property
    def start(self) -> Position:
        return self.first, self.before

    @property
    def end(self) -> Position:
        return self.last, self.after

    @property
    def changes_state(self) -> bool:
        return False


Record = (
    IncarnationRecord
    | ViewRecord
    | PromiseRecord
    | AcceptedRecord
    | ReadyRecord
    | CommitRecord
    | OperationsRecord
)
ReplayStep = ReadyRecord | OperationsRecord

# Before a message of this kind leaves, whatever records of these kinds were to be synced are. READY
# is not here: member.py says it as a vote, in messages, heartbeats and reports, when its record is
# synced, and that of an operation, which no disk keeps, waits for no other record. Orders of a
# coordinator wait for its view. The first message of a life waits for the number of that life,
# which the home writes (Home).
SYNCED_FIRST: Mapping[type, tuple[type, ...]] = {
    Promise: (PromiseRecord, AcceptedRecord),
    Accepted: (AcceptedRecord,),
    BootstrapHello: (IncarnationRecord,),
    Join: (IncarnationRecord,),
    Accept: (ViewRecord,),
    AskFinals: (ViewRecord,),
    Begin: (ViewRecord,),
    Commit: (ViewRecord,),
    CoordinatorBeat: (ViewRecord,),
    Notice: (ViewRecord,),
    Repair: (ViewRecord,),
    Resync: (ViewRecord,),
    SyncTarget: (ViewRecord,),
    Yield: (ViewRecord,),
}


# ---------------------------------------------------------------- what a ledger says


@dataclass(frozen=True, slots=True)
class Recovered:
    """Hold what a peer's home still knows: the machine begins with it (Node)."""

    position: int  # of the last record: numbers go on from here, and never back
    inc: int
    view: View | None  # the last that it was in; None after a new incarnation began
    proof: Proof | None
    promised: Ballot  # in that view
    frozen: bool
    accepted: AcceptedRecord | None
    known: Position  # the last commit that it knows of ...
    unchanged: int  # ... up to which so many rounds have changed no state
    state: Position  # what its checkpoint and rounds give: `known`, or less where files are missing
    ready: tuple[ReadyRecord, ...]  # what it has said READY for in that view, beyond `known`
    missing: frozenset[int] = frozenset()  # rounds of these whose R is not here
    checkpoint: Position = (0, b"")  # from which ...
    replay: tuple[ReplayStep, ...] = ()  # ... these rounds lead to `state`

    @property
    def has_files(self) -> bool:
        """Return whether files are to be read: of a state, or R of a round that it is READY for."""
        return self.state[0] > 0 or any(head.begin is not None for head in self.ready)


@dataclass(slots=True)
class _Ledger:
    """Fold records, in their order, into what holds after the last of them."""

    inc: int = 0
    view: ViewRecord | None = None
    promised: Ballot = field(default_factory=Ballot)
    frozen: bool = False
    accepted: AcceptedRecord | None = None
    committed: dict[int, bytes] = field(default_factory=dict)  # round -> chain
    fresh: set[int] = field(default_factory=set)  # rounds of commits heard since the last renewal
    unchanged: dict[Position, int] = field(default_factory=dict)  # rounds up to a commit
    heads: dict[Position, ReadyRecord] = field(default_factory=dict)  # by where they lead to
    skips: dict[Position, OperationsRecord] = field(default_factory=dict)  # ... and come from
    ready: dict[int, ReadyRecord] = field(default_factory=dict)  # of the view, the latest attempts

    def add(self, record: Record) -> None:
        match record:
            case IncarnationRecord():
                self.inc, self.view = record.inc, None
                self._anew()
                self.ready.clear()
                self.fresh.clear()
            case ViewRecord():
                self._enter(record)
            case PromiseRecord() if self._is_of_view(record.lineage, record.view):
                self.promised, self.frozen = max(self.promised, record.ballot), True
            case AcceptedRecord() if self._is_of_view(record.vote.lineage, record.vote.view):
                self.accepted = record
                self.promised = max(self.promised, record.vote.ballot)
            case ReadyRecord():
                self.heads[record.run.round, record.after] = record
                if self._is_of_view(record.lineage, record.view):
                    self.ready[record.run.round] = record
            case CommitRecord():
                self._commit(record)
            case OperationsRecord():
                self.skips[record.start] = record

    def _is_of_view(self, lineage: bytes, number: int) -> bool:
        view = self.view.view if self.view is not None else None
        return view is not None and (view.lineage, view.number) == (lineage, number)

    def _anew(self) -> None:
        self.promised, self.frozen, self.accepted = Ballot(), False, None

    def _enter(self, record: ViewRecord) -> None:
        """Void what was said in the view before, and whatever the new base takes back."""
        view = record.view
        self.view = record
        self._anew()
        self.ready.clear()
        if view.number == 0:
            return
        kept = self._leads_to(view)
        self.committed = {n: chain for n, chain in kept.items() if n <= view.base_round}
        self.committed[view.base_round] = view.base_chain

    def _leads_to(self, view: View) -> dict[int, bytes]:
        """Return the known commits that are of the history of a view.

        Those from before this peer was renewed may be of a lineage that has given way to this one.
        How far the two are the same nobody says, unless the base was known then.
        """
        base = view.base_round
        if self.committed.get(base, view.base_chain) != view.base_chain:
            return {}
        if base in self.committed and base not in self.fresh:
            return self.committed
        return {number: chain for number, chain in self.committed.items() if number in self.fresh}

    def _commit(self, record: CommitRecord) -> None:
        """Know a commit. Only a view takes one back: a lower one is on the way to what is known."""
        self.committed[record.round] = record.chain
        self.fresh.add(record.round)
        self.unchanged[record.round, record.chain] = record.unchanged
        self.ready = {n: ready for n, ready in self.ready.items() if n > self.known[0]}

    @property
    def known(self) -> Position:
        return max(self.committed.items(), default=(0, b""))

    def rounds_from(self, start: Position, stored: Collection[Place]) -> list[ReplayStep]:
        """Return the committed rounds that lead on from a state, as long as their R is here."""
        found: list[ReplayStep] = []
        while (step := self._step_from(start)) is not None and _is_stored(step, stored):
            found.append(step)
            start = step.end
        return found

    def _step_from(self, at: Position) -> ReplayStep | None:
        skip = self.skips.get(at)
        if skip is not None and self.is_committed(skip):
            return skip
        number = at[0] + 1
        head = self.heads.get((number, self.committed.get(number, b"")))
        return head if head is not None and head.start == at else None

    def is_committed(self, step: ReplayStep) -> bool:
        number, after = step.end
        return self.committed.get(number) == after


def _is_stored(step: ReplayStep, stored: Collection[Place]) -> bool:
    """Return whether R of this round is here; an operation has none."""
    return not step.changes_state or (isinstance(step, ReadyRecord) and step.place in stored)


def recovered(
    records: Iterable[Record],
    position: int,
    checkpoints: Iterable[Position] = (),
    stored: Collection[Place] = (),
    *,
    holds_state: bool = True,
) -> Recovered:
    """Return what these records mean, with the files that are whole beside them.

    ``position`` is that of the last record. ``checkpoints`` are those that can be read; where
    the run began is one too. ``stored``: the rounds whose R is here. Without ``holds_state``, as on
    a witness, a position needs no files.
    """
    ledger = _Ledger()
    for record in records:
        ledger.add(record)
    known = ledger.known
    starts = [(0, b""), *(c for c in checkpoints if ledger.committed.get(c[0]) == c[1])]
    ways = [(start, _rounds_from_start(ledger, start, stored)) for start in starts]
    checkpoint, replay = max(ways, key=lambda way: (_end(*way)[0], way[0][0]))
    state = _end(checkpoint, replay) if holds_state else known
    view = ledger.view
    ready = tuple(head for _, head in sorted(ledger.ready.items()))
    lacking = (h for h in ready if h.begin is not None and not _is_stored(h, stored))
    return Recovered(
        position,
        ledger.inc,
        view.view if view is not None else None,
        view.proof if view is not None else None,
        ledger.promised,
        ledger.frozen,
        ledger.accepted,
        known,
        ledger.unchanged.get(known, 0),
        state,
        ready,
        frozenset(head.run.round for head in lacking),
        checkpoint,
        tuple(replay),
    )


def _rounds_from_start(
    ledger: _Ledger, start: Position, stored: Collection[Place]
) -> list[ReplayStep]:
    """Return the way on from a state; from nothing, the first round says itself what it is."""
    if start[0] == 0:
        first = ledger.heads.get((1, ledger.committed.get(1, b"")))
        start = (0, first.before) if first is not None else start
    return ledger.rounds_from(start, stored)


def _end(start: Position, rounds: list[ReplayStep]) -> Position:
    return rounds[-1].end if rounds else start


def compacted(
    records: Iterable[Record],
    since: int,
    until: int | None = None,
    *,
    checkpoints: Collection[int] = (),
    writing: int | None = None,
) -> tuple[Record, ...]:
    """Return the records that say the same, of rounds after ``since`` only.

    That is the round of the older checkpoint. A checkpoint takes the place of rounds; promises,
    votes and READY of the view stay, and so does the number of this memory. Operations become one
    record, but for the last OPERATIONS_KEPT. ``until``: of the rounds after this one only the last
    commit is kept, for they cannot be replayed. ``checkpoints``: the rounds of those on the disk;
    ``writing``: one of this round or a later one is under way.
    """
    ledger = _Ledger()
    for record in records:
        ledger.add(record)
    view, last = ledger.view, ledger.known[0]
    base = view.view.base_round if view is not None else last
    until = last if until is None else until
    every: list[ReplayStep] = [*ledger.heads.values(), *ledger.skips.values()]
    steps = [step for step in every if since < step.end[0] <= until and ledger.is_committed(step)]
    stops = {since, base, last, *checkpoints}
    foldable = last - OPERATIONS_KEPT if writing is None else min(last - OPERATIONS_KEPT, writing)
    rounds = _folded(sorted(steps, key=lambda step: step.end), stops, foldable)
    ends = stops | {step.end[0] for step in rounds}
    committed = [
        CommitRecord(number, chain, ledger.unchanged.get((number, chain), 0))
        for number, chain in sorted(ledger.committed.items())
        if (number in ends and since <= number <= until) or number in (base, last)
    ]
    fresh = ledger.fresh if view is None else ledger.committed
    kept: list[Record] = [record for record in committed if record.round not in fresh]
    kept += [IncarnationRecord(ledger.inc), *rounds]
    kept += (r for r in committed if r.round <= base and r.round in fresh)
    if view is not None:
        kept.append(view)  # which voids commits beyond its base: these follow
        kept += (record for record in committed if record.round > base)
        if ledger.frozen:
            kept.append(PromiseRecord(view.view.lineage, view.view.number, ledger.promised))
        if ledger.accepted is not None:
            kept.append(ledger.accepted)
    kept += (head for _, head in sorted(ledger.ready.items()))
    return tuple(kept)


def _folded(steps: Iterable[ReplayStep], stops: Collection[int], until: int) -> list[ReplayStep]:
    """Put one record in the place of operations that follow each other, up to ``until``.

    The positions after the rounds ``stops`` stay: a checkpoint, or a view, begins there.
    """
    found: list[ReplayStep] = []
    for step in steps:
        last = found[-1] if found else None
        if (
            last is not None
            and last.end == step.start
            and not (last.changes_state or step.changes_state)
            and last.end[0] not in stops
            and step.end[0] <= until
        ):
            found[-1] = OperationsRecord(*last.start, *step.end)
        else:
            found.append(step)
    return found
