"""Read what a peer's home still knows: ledger, checkpoints and rounds, folded into one state.

Theory. The ledger says what was promised and which rounds were committed (durable_records.py); the
newest checkpoint on that way, and the rounds after it, give the state. A round whose READY is in
the ledger, and whose commit is not, is *held*: its bytes are read, and not applied. Whatever the
files lack is fetched from others afterwards, as by any peer that is behind: no file but the ledger
decides about a vote. So a file that is damaged costs a transfer, and says so.

A vote needs the ledger only, so the peer is a voter again before its state is read. Every byte is
hashed before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from atoll.collectives import ChunkGrid, RoundResult
from atoll.collectives.codecs import U8, Decoder
from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import AtollError, CheckpointError, RemoteProtocolError
from atoll.collectives.units import count
from atoll.peer.checkpoint.format import CheckpointManifest
from atoll.peer.checkpoint.reader import LoadedCheckpoint, candidates, load_checkpoint, readable
from atoll.peer.durable.ledger import OpenedLedger
from atoll.peer.durable.ledger_format import LedgerRecord
from atoll.peer.durable.round_files import RoundFiles, RoundName
from atoll.peer.membership.durable_records import (
    AcceptedRecord,
    CommitRecord,
    IncarnationRecord,
    OperationsRecord,
    Place,
    Position,
    PromiseRecord,
    ReadyRecord,
    Record,
    Recovered,
    ViewRecord,
    recovered,
)
from atoll.peer.membership.view import MEMBERS_MAX
from atoll.peer.net.wire import decode, encode
from atoll.peer.rounds.attempt_plan import kept_of, shape_of
from atoll.peer.rounds.entries import INIT, EntryHead, entry_root
from atoll.peer.rounds.state import ReplicatedState

# A kind's number in the file is its place here and one; new kinds are added at the end.
KINDS: tuple[type, ...] = (
    IncarnationRecord,
    ViewRecord,
    PromiseRecord,
    AcceptedRecord,
    ReadyRecord,
    CommitRecord,
    OperationsRecord,
)


def packed(record: Record) -> tuple[int, bytes]:
    """Return a record's kind and payload as they are written."""
    return KINDS.index(type(record)) + 1, encode(record)


def parsed(entry: LedgerRecord) -> Record:
    """Return a record of the ledger. RemoteProtocolError if it is none of this version."""
    if not 0 < entry.kind <= len(KINDS):
        raise RemoteProtocolError(f"the ledger has a record of kind {entry.kind}")
    record: Record = decode(entry.payload, (KINDS[entry.kind - 1],))  # type: ignore[assignment]
    return record


@dataclass(slots=True)
class HeldResult:
    """Hold R of a round that this peer is READY for, with the digests of its chunks."""

    ready: ReadyRecord
    array: U8
    digests: list[bytes]


@dataclass(slots=True)
class ReplayedRound:
    """Hold a round that was applied again, as the log keeps it."""

    head: EntryHead | None  # None: operations that are not known one by one
    name: RoundName | None  # of its file; None of an operation
    position: Position
    digest: bytes  # of the state after it


@dataclass(slots=True)
class HomeContents:
    """Hold what the files of a home give back: the bytes, each of them checked."""

    recovered: Recovered  # as far as they go: less than the ledger says where files are bad
    state: ReplicatedState | None = None
    checkpoint: Position = (0, b"")
    checkpoint_digest: bytes = b""
    replayed: list[ReplayedRound] = field(default_factory=list)
    held: list[HeldResult] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # for people: what was bad

    @property
    def digest(self) -> bytes:
        return self.state.digest if self.state is not None else b""


class HomeReader:
    """Read what ledger, rounds and checkpoints of a home say together.

    What was promised is known at once (``recovered``), and so is which round the files lead to, by
    their names. Their bytes take as long as the disk does (``read``).
    """

    def __init__(
        self,
        opened: OpenedLedger,
        rounds: RoundFiles | None,
        checkpoints: Path | None,
        run: str,
        secret: bytes,
        *,
        holds_state: bool,
    ) -> None:
        """Look at the files. ``rounds`` None: none are kept. ``checkpoints``: their folder."""
        self._records = [parsed(entry) for entry in opened.records]
        self._position = opened.position
        self._rounds, self._run, self._secret = rounds, run, secret
        self._holds_state = holds_state
        self._lines: list[str] = []
        self._manifests = _manifests(checkpoints, run, secret)
        heads = [record for record in self._records if isinstance(record, ReadyRecord)]
        present = set(rounds.names()) if rounds is not None else set()
        self._stored = {head.place for head in heads if name_of(head.place) in present}
        self.recovered = self._fold()

    def read(self) -> HomeContents:
        """Replay from the best checkpoint; after each file that is bad, from what is left.

        In a worker thread. Raises MemoryError where the state finds no room.
        """
        found = self.recovered
        while True:
            try:
                return self._replay(found)
            except _BadFileError as error:
                self._lines.append(str(error))
                self._do_without(error)
                found = self._fold()

    def _do_without(self, bad: _BadFileError) -> None:
        if bad.checkpoint is not None:
            del self._manifests[bad.checkpoint]
        else:
            self._stored.remove(bad.place)

    def _fold(self) -> Recovered:
        places = [(m.round, m.chain) for m in self._manifests.values()]
        return recovered(
            self._records, self._position, places, self._stored, holds_state=self._holds_state
        )

    def _replay(self, found: Recovered) -> HomeContents:
        contents = HomeContents(found, lines=self._lines)
        if not self._holds_state:
            return contents
        if found.checkpoint[0]:
            loaded = self._load(found.checkpoint)
            contents.state = loaded.state
            contents.checkpoint = found.checkpoint
            contents.checkpoint_digest = loaded.state.digest
        try:
            for step in found.replay:
                if isinstance(step, OperationsRecord):
                    _skip(step, contents)
                else:
                    self._apply(step, contents)
            for ready in found.ready:
                if ready.begin is not None and ready.run.round not in found.missing:
                    contents.held += self._held(ready, contents.state)
        except BaseException:
            if contents.state is not None:
                contents.state.close()
            raise
        return contents

    def _load(self, position: Position) -> LoadedCheckpoint:
        """Load the checkpoint of this position."""
        path = next(p for p, m in self._manifests.items() if (m.round, m.chain) == position)
        try:
            return load_checkpoint(path, run=self._run, secret=self._secret)
        except CheckpointError as error:
            raise _BadFileError(error.what, checkpoint=path) from error

    def _apply(self, ready: ReadyRecord, contents: HomeContents) -> None:
        """Apply a committed round to the state, and keep it for the log."""
        begin, run = ready.begin, ready.run
        name = None
        if begin is None or begin.operation is not None:
            array, origin_of = np.empty(0, np.uint8), b""
        else:
            name = name_of(ready.place)
            array, _, origin_of = self._result(ready, contents.state)
        state = contents.state
        if begin is not None and begin.kind == INIT:
            state = contents.state = ReplicatedState(begin.blob)
        if state is None or begin is None:
            raise _BadFileError(f"round {run.round} leads nowhere", place=ready.place)
        kind, blob = begin.kind, begin.blob if begin.kind == INIT else b""
        head = EntryHead(
            run.round, kind, run.fragment, begin.origins, origin_of, run.root, ready.after, blob
        )
        state.apply(head, array)
        contents.replayed.append(ReplayedRound(head, name, ready.end, state.digest))

    def _held(self, ready: ReadyRecord, state: ReplicatedState | None) -> list[HeldResult]:
        """Return R of a round that may yet be committed; nothing for one that changes no state."""
        if ready.begin is not None and ready.begin.operation is not None:
            return []
        array, digests, _ = self._result(ready, state)
        return [HeldResult(ready, array, digests)]

    def _result(
        self, ready: ReadyRecord, state: ReplicatedState | None
    ) -> tuple[U8, list[bytes], bytes]:
        """Return R of a round, the digests of its chunks and the origin of each.

        _BadFileError if it is not what this peer was READY for.
        """
        assert self._rounds is not None
        assert ready.begin is not None
        name = name_of(ready.place)
        try:
            codec, grid = shape_of(ready.begin, state)
            array, digests = read_result(self._rounds, name, codec, grid)
            origin_of = bytearray(grid.count if ready.begin.kept else 0)
            for item in kept_of(ready.begin, MEMBERS_MAX, grid.count):
                origin_of[item.chunk] = item.origin
        except (AtollError, OSError) as error:
            text = error.what if isinstance(error, AtollError) else str(error)
            raise _BadFileError(f"{name.file} cannot be read: {text}", place=ready.place) from error
        root = entry_root(ready.begin.origins, bytes(origin_of), digests, ready.begin.blob)
        if root != ready.run.root:
            text = f"rounds/{name.file} is damaged: it is not what was written there"
            raise _BadFileError(f"{text}; this peer fetches round {name.round}", place=ready.place)
        return array, digests, bytes(origin_of)


def _skip(step: OperationsRecord, contents: HomeContents) -> None:
    """Move the state on by operations, which have not changed it."""
    state = contents.state
    assert state is not None, "operations come after the first parameters"
    state.rename(step.last)
    contents.replayed.append(ReplayedRound(None, None, step.end, state.digest))


class _BadFileError(Exception):
    """Tell that a file is not what it should be, and which one."""

    def __init__(
        self, text: str, *, place: Place = (b"", 0, 0, 0), checkpoint: Path | None = None
    ) -> None:
        super().__init__(text)
        self.place, self.checkpoint = place, checkpoint


def name_of(place: Place) -> RoundName:
    """Return the name of the file of an attempt."""
    _, view, number, attempt = place
    return RoundName(number, view, attempt)


def read_result(
    rounds: RoundFiles, name: RoundName, codec: Decoder, grid: ChunkGrid
) -> tuple[U8, list[bytes]]:
    """Return R from its file, uint8[total], and the digest of each chunk. OSError."""
    result = RoundResult(codec, grid)
    reader = rounds.open(name)
    try:
        for chunk in range(grid.count):
            lo, hi = result.layout.slice(chunk)
            data = reader.read(lo, hi)
            if len(data) != hi - lo:
                raise OSError(f"it ends after {count(lo + len(data), 'byte')}")
            result.array[lo:hi] = np.frombuffer(data, np.uint8)
            result.digests[chunk] = strong_digest(data)
    finally:
        reader.close()
    return result.array, result.digests


def _manifests(folder: Path | None, run: str, secret: bytes) -> dict[Path, CheckpointManifest]:
    """Return the checkpoints of a folder that look right, the latest first."""
    if folder is None or not folder.is_dir():
        return {}
    return readable(candidates(folder, run), run=run, secret=secret)
