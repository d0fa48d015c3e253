"""The disk of one simulated home: what a ledger, rounds and checkpoints on it still say afterwards.

Records that are written lie in the page cache until they are synced. A killed process loses none of
them; a machine that loses its power keeps any number of the first, never one behind a gap. What is
read back goes through the codec of the product, as the bytes of a real ledger do.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from atoll.peer.membership import messages as ms
from atoll.peer.membership.durable_records import (
    AcceptedRecord,
    IncarnationRecord,
    OperationsRecord,
    Place,
    PromiseRecord,
    ReadyRecord,
    Record,
    Recovered,
    compacted,
    recovered,
)
from atoll.peer.membership.messages import Begin
from atoll.peer.net.wire import decode, encode
from harness.values import Entry, Job, Mean, State

__all__ = ["Disk", "Stored"]

R = TypeVar("R")
CHECKPOINTS = 2  # the older one is for when the newer is damaged
SYNC_S = 0.004


@dataclass(frozen=True, eq=False)
class Stored:
    """R of an attempt, as a file has it."""

    begin: Begin
    first: int
    means: tuple[Mean, ...]
    origin_of: bytes
    root: bytes

    def entry(self, before: bytes, after: bytes) -> Entry:
        means = () if self.begin.operation is not None else self.means
        return Entry(self.begin, self.first, means, before, after, self.origin_of)

    def job(self) -> Job:
        finals = dict(enumerate(self.means))
        return Job(self.begin, None, finals, active=False, complete=True, root=self.root)


@dataclass(eq=False)
class Disk:
    """One disk. It is there before and after each process of its peer."""

    sync_s: float = SYNC_S
    records: list[tuple[int, Record]] = field(default_factory=list)  # with their positions
    synced: int = 0  # position up to which a power cut takes nothing
    rounds: dict[Place, Stored] = field(default_factory=dict)
    checkpoints: list[State] = field(default_factory=list)  # the newest last
    fails: bool = False  # the next sync does
    keeps_rounds: bool = True  # else it has room for votes only
    memory: object = field(default_factory=object)  # another one once it has forgotten something
    rotten: set[object] = field(
        default_factory=set
    )  # files whose bytes are bad, though they look well
    _opened: tuple[list[object], int] = ([], 0)

    @property
    def position(self) -> int:
        return self.records[-1][0] if self.records else 0

    # ------------------------------------------------------------ while a process writes

    def write(self, position: int, record: Record, result: Stored | None) -> None:
        self.records.append((position, record))
        if result is not None and self.keeps_rounds and isinstance(record, ReadyRecord):
            self.rounds[record.place] = result

    def sync(self, position: int) -> None:
        self.synced = max(self.synced, position)

    def save(self, state: State) -> None:
        """A checkpoint is on the disk, and what it replaces goes: rounds, never votes."""
        if state.round == 0 or (self.checkpoints and self.checkpoints[-1].chain == state.chain):
            return
        self.checkpoints = [*self.checkpoints, state][-CHECKPOINTS:]
        if len(self.checkpoints) < CHECKPOINTS:
            return
        since = min(saved.round for saved in self.checkpoints)
        position = self.position
        rounds = [saved.round for saved in self.checkpoints]
        records = (record for _, record in self.records)
        kept = compacted(records, since, checkpoints=rounds)
        self.records = [(position, record) for record in kept]
        self.synced = position
        places = {record.place for record in kept if isinstance(record, ReadyRecord)}
        self.rounds = {place: r for place, r in self.rounds.items() if place in places}

    def backs(self, message: object) -> bool:
        """Check that a word that must not be forgotten is synced before it leaves. Its table is not
        that of the product."""
        if type(message) is ms.Promise:
            place = message.lineage, message.view
            promised = [
                record.ballot
                for record in self._synced(PromiseRecord)
                if (record.lineage, record.view) == place
            ]
            voted = [  # who votes at a ballot has promised it, if it has promised any
                record.vote.ballot
                for record in self._synced(AcceptedRecord)
                if (record.vote.lineage, record.vote.view) == place
            ]
            return bool(promised) and max(promised + voted) >= message.ballot
        if type(message) is ms.Accepted:
            return any(
                (record.vote.ballot, record.vote.digest) == (message.ballot, message.digest)
                and record.proposal.digest == message.digest
                for record in self._synced(AcceptedRecord)
            )
        return True

    def _synced(self, kind: type[R]) -> Iterator[R]:
        synced = self.synced
        return (r for position, r in self.records if position <= synced and isinstance(r, kind))

    # ------------------------------------------------------------ what befalls it

    def lose_power(self, dice: random.Random) -> None:
        """What was not synced may be there or not, from some record on."""
        loose = [i for i, (position, _) in enumerate(self.records) if position > self.synced]
        if loose:
            end = dice.choice([*loose, len(self.records)])
            gone = {r.place for _, r in self.records[end:] if isinstance(r, ReadyRecord)}
            self.records = self.records[:end]
            for place in gone - {r.place for _, r in self.records if isinstance(r, ReadyRecord)}:
                self.rounds.pop(place, None)

    def image(self) -> Disk:
        """A copy that may be put in the place of this disk later."""
        kept = copy.copy(self)
        kept.records, kept.rounds = [*self.records], {**self.rounds}
        kept.checkpoints, kept.memory = [*self.checkpoints], object()
        kept.rotten = {*self.rotten}
        return kept

    def damage(self, dice: random.Random) -> None:
        """One file of R or one checkpoint is gone, or is read and turns out to be bad."""
        looks_well = dice.random() < 0.5
        if self.rounds and dice.random() < 0.7:
            place = dice.choice(sorted(self.rounds))
            if looks_well:
                self.rotten.add(place)
            else:
                del self.rounds[place]
        elif self.checkpoints:
            at = dice.randrange(len(self.checkpoints))
            if looks_well:
                self.rotten.add(self.checkpoints[at].chain)
            else:
                del self.checkpoints[at]

    # ------------------------------------------------------------ the next process

    def open(self, holds_state: bool) -> Recovered:
        """What the home says: it is synced before anybody hears of it."""
        self.synced = self.position
        read = [decode(encode(record)) for _, record in self.records]
        self._opened = read, self.position
        return self._fold(holds_state)

    def read(self) -> Recovered:
        """Return what a replica's home said when it was opened, without files that are bad."""
        for place in self.rotten & self.rounds.keys():
            del self.rounds[place]
        self.checkpoints = [each for each in self.checkpoints if each.chain not in self.rotten]
        self.rotten.clear()
        return self._fold(holds_state=True)

    def _fold(self, holds_state: bool) -> Recovered:
        records, position = self._opened
        places = [(state.round, state.chain) for state in self.checkpoints]
        return recovered(
            records,  # type: ignore[arg-type]
            position,
            places,
            {*self.rounds},
            holds_state=holds_state,
        )

    def state(self, found: Recovered, chunks: int) -> tuple[State, list[Entry]]:
        """The state that recovery comes to, and the rounds that it has applied for that."""
        starts = (s for s in self.checkpoints if (s.round, s.chain) == found.checkpoint)
        state, entries = next(starts, State()), []
        for head in found.replay:
            if isinstance(head, OperationsRecord):
                state = state.renamed(head.last, head.after)
                entries.clear()
                continue
            stored = self.rounds.get(head.place)
            if stored is None:  # an operation
                assert head.begin is not None
                entry = Entry(head.begin, 0, (), head.before, head.after)
            else:
                entry = stored.entry(head.before, head.after)
            state = state.after(entry, chunks)
            entries.append(entry)
        return state, entries

    def incarnation(self) -> int:
        incs = [record.inc for _, record in self.records if isinstance(record, IncarnationRecord)]
        return incs[-1] if incs else 0
