"""Keep a peer's records in one file, in order, so that what was synced is there after any crash.

Theory. A record is a kind and a payload; what they mean is no matter of this file. How they lie in
the file, and how a reader tells a torn tail from damage, is in ledger_format.py. Here is when what
is written:

*Nothing that was synced is written again.* A block that is under way when the power fails may hold
anything afterwards. So a sync ends the block: what is appended later begins the next one, and only
blocks with nothing synced in them are ever under way. Hence also two copies in one file and one
sync, in place of two files and two: only a fault of the disk can hit both.

*Every opening and every compaction writes a new file*, beside the old one: all records, sync,
rename, sync of the folder. So a record that could be read in memory but is not on the disk (after a
failed sync) is on the disk before anybody hears of it, and mended copies are two again. The file of
before becomes a spare of the same size: also on a full disk, a compaction takes no new space.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.collectives.errors import DiskError
from atoll.collectives.units import count, size
from atoll.peer.durable import LEDGER
from atoll.peer.durable.disk import Disk, DiskFile, fill_with_zeros, reason
from atoll.peer.durable.ledger_format import (
    AMNESIA,
    BLOCK_BYTES,
    KINDS_MAX,
    MARK,
    NONCE_BYTES,
    PAYLOAD_BYTES_MAX,
    LedgerEntry,
    LedgerFound,
    LedgerHeader,
    LedgerRecord,
    LedgerVerdict,
    entry_bytes,
    judge_ledger,
    pack_entry,
    pack_header,
    whole_blocks,
)

NEW = "ledger.new"  # being written
OLD = "ledger.old"  # the one before, until it is the spare
SPARE = "ledger.spare"  # zeros; there is none before the first ledger is on the disk
BAD = "ledger.bad"  # what a damaged or copied one is kept as, for people
# Of each half: 500 syncs of up to 4 KiB. Twice as much, and so on, until what it begins with fills
# no more than a quarter.
HALF_BYTES = 2 << 20
# A compaction is due while there is still room for what may come until it is done: two views of a
# thousand members, with the votes that prove them, come to 0.4 MiB.
RESERVED_BYTES = 1 << 20
# What a reader takes into memory: no peer has so many views and rounds to remember.
FILE_BYTES_MAX = 512 << 20


@dataclass(frozen=True, slots=True)
class OpenedLedger:
    """Hold what was found: the records in order, and the ledger, to which more can be appended.

    ``text`` is a sentence for people. Who forgot has no records, but a ``position`` that goes on.
    """

    records: tuple[LedgerRecord, ...]
    position: int
    verdict: LedgerVerdict
    text: str
    ledger: DurableLedger


def open_ledger(disk: Disk, folder: Path, *, half_bytes: int = HALF_BYTES) -> OpenedLedger:
    """Read the ledger of a folder and write it anew, so that it can be appended to.

    One process at a time: the home is locked. Raises OSError where the disk has no room, DiskError
    where it fails, ConfigError for a file of a newer atoll; then nothing has changed.
    """
    disk.make_folder(folder)
    found, names = _read(disk, folder), disk.names(folder)
    disk.remove(folder / OLD)
    if found.verdict.forgot and LEDGER in names:
        disk.remove(folder / BAD)
        disk.link(folder / LEDGER, folder / BAD)
    ledger = DurableLedger(disk, folder, half_bytes)
    ledger.begin(found.records, found.position)
    return OpenedLedger(found.records, found.position, found.verdict, found.text, ledger)


def _read(disk: Disk, folder: Path) -> LedgerFound:
    path, names = folder / LEDGER, disk.names(folder)
    if LEDGER not in names and SPARE in names:
        return LedgerFound(LedgerVerdict.DAMAGED, f"{path} is gone, its spare is there; {AMNESIA}")
    if LEDGER not in names:
        return LedgerFound(LedgerVerdict.NEW, f"{path} is new: there was none")
    file = disk.open(path)
    try:
        data = _bytes_of(file, min(file.size(), FILE_BYTES_MAX))
        return judge_ledger(data, file.identity(), str(path))
    finally:
        file.close()


def _bytes_of(file: DiskFile, nbytes: int) -> bytes:
    """Return the contents of a file, with zeros for the blocks that the disk cannot read."""
    try:
        return file.read(nbytes, 0)
    except OSError:
        return b"".join(_block_of(file, at) for at in range(0, nbytes, BLOCK_BYTES))[:nbytes]


def _block_of(file: DiskFile, at: int) -> bytes:
    try:
        return file.read(BLOCK_BYTES, at)
    except OSError:
        return bytes(BLOCK_BYTES)


class DurableLedger:
    """Append records to a file; return from ``sync`` when they are on the disk.

    ``append`` does not wait for the disk. ``sync`` and ``compact`` do: they are for worker threads.
    After a DiskError of a sync nothing more is taken: the peer has crashed, and says nothing that
    depends on what it was about to write.
    """

    def __init__(self, disk: Disk, folder: Path, half_bytes: int) -> None:
        self.position = 0  # of the last record
        self.synced = 0  # of the last one that is on the disk: only this may be told to others
        self._disk, self._folder, self._half_bytes = disk, folder, half_bytes
        self._syncing = threading.Lock()  # held for a whole sync or compaction; taken first
        self._lock = threading.Lock()  # of what follows
        self._file: _Halves | None = None
        self._began_at = 0  # the position for which the file's first records stand ...
        self._first: list[LedgerRecord] = []  # ... which are these
        self._late: list[LedgerRecord] = []  # appended since the file was made
        self._failure: DiskError | None = None
        self._zeros_bytes = 0  # of the spare: its size, where it is known to hold zeros only

    @property
    def wants_compaction(self) -> bool:
        """Return whether it is time to compact; later the ledger is full."""
        with self._lock:
            file = self._open_file()
            return file.free_bytes < min(RESERVED_BYTES, file.half_bytes // 2)

    def has_room(self, payload: bytes) -> bool:
        """Return whether such a record can be appended now, or only after a compaction."""
        with self._lock:
            return self._open_file().free_bytes >= entry_bytes(payload)

    def append(self, kind: int, payload: bytes) -> int:
        """Write a record and return its position. A sync carries it, the next one or a later one.

        DiskError if there is no room, because nobody has compacted.
        """
        if not 0 < kind <= KINDS_MAX or len(payload) > PAYLOAD_BYTES_MAX:
            raise ValueError(f"no record has kind {kind} and {len(payload)} bytes")
        with self._lock:
            file = self._open_file()
            if file.free_bytes < entry_bytes(payload):
                raise DiskError(
                    f"the ledger has no room for {count(len(payload), 'byte')}",
                    fix="make room on the disk of the home: it is compacted then",
                )
            record = LedgerRecord(self.position + 1, kind, bytes(payload))
            with self._failing():
                file.append(record)
            self._late.append(record)
            self.position = record.position
            return record.position

    def records(self) -> tuple[list[LedgerRecord], int]:
        """Return all records that count, in order, and the position up to which they reach."""
        with self._lock:
            return [*self._first, *self._late], self.position

    def sync(self) -> int:
        """Wait until all that was appended is on the disk; return the last position of it."""
        with self._syncing:
            with self._lock:
                file, target = self._open_file(), self.position
                if target == self.synced:
                    return target
                sequence = file.end_block()
            with self._failing():
                file.sync()
                with self._lock:
                    self.synced = target
                    file.mark(sequence)
            return target

    def compact(self, records: Iterable[tuple[int, bytes]], position: int) -> None:
        """Let ``records`` (kind, payload) stand for all up to ``position``; later ones are kept.

        Positions go on. Everything is synced when this returns. OSError if there is no room for it:
        then the ledger is as it was.
        """
        with self._syncing:
            if not self._began_at <= position <= self.position:
                raise ValueError(f"records cannot stand for all up to position {position}")
            kept = [LedgerRecord(position, kind, bytes(payload)) for kind, payload in records]
            self._rewrite(kept, position)

    def begin(self, records: Sequence[LedgerRecord], position: int) -> None:
        """Make the file of this life from what was read. For ``open_ledger``, once."""
        with self._syncing:
            self.position = self.synced = position
            self._rewrite(records, position)
            with contextlib.suppress(OSError):  # the next compaction needs it, and says so
                self._zeros(self._folder / SPARE, self._half_bytes).close()
                self._zeros_bytes = 2 * self._half_bytes

    def close(self) -> None:
        """Close the file. What was not synced is left to the kernel."""
        with self._syncing, self._lock:
            if self._file is not None:
                self._file.file.close()
            self._file, self._failure = None, DiskError("the ledger is closed")

    # ------------------------------------------------------------ compaction

    def _rewrite(self, kept: Sequence[LedgerRecord], position: int) -> None:
        """Write a new file, put it in the ledger's place, and make the old one the spare.

        Others append meanwhile. What is late goes into the new file in the moment in which that
        gets its name; until then it is in the old one.
        """
        with self._lock:
            self._check()
            late = self._after(position)
        new = self._fresh(kept, late, position)
        with self._failing():
            new.sync()
            with self._lock:
                for record in self._after(position + len(late)):
                    new.append(record)
                old, self._file = self._file, new
                self._late, self._began_at = self._after(position), position
                self._first = list(kept)
                if old is not None:
                    self._disk.link(self._folder / LEDGER, self._folder / OLD)
                self._disk.rename(self._folder / NEW, self._folder / LEDGER)
                target, sequence = self.position, new.end_block()
            new.sync()
            self._disk.sync_folder(self._folder)
            with self._lock:
                self.synced = target
                new.mark(sequence)
            if old is not None:
                self._recycle(old)

    def _after(self, position: int) -> list[LedgerRecord]:
        return [record for record in self._late if record.position > position]

    def _fresh(
        self, kept: Sequence[LedgerRecord], late: Sequence[LedgerRecord], position: int
    ) -> _Halves:
        """Return a new file with these records, not synced. OSError if there is no room for it."""
        records = [*kept, *late]
        half_bytes = self._half_bytes
        while half_bytes < 4 * sum(entry_bytes(record.payload) for record in records):
            half_bytes *= 2
        if 2 * half_bytes > FILE_BYTES_MAX:
            raise DiskError(f"the ledger would take {size(2 * half_bytes)}")
        path = self._folder / NEW
        if SPARE in self._disk.names(self._folder):
            self._disk.rename(self._folder / SPARE, path)
        file = self._zeros(path, half_bytes)
        self._zeros_bytes = 0
        header = LedgerHeader(
            half_bytes,
            os.urandom(NONCE_BYTES),
            position,
            len(kept),
            len(records),
            file.identity(),
        )
        made = _Halves(file, header)
        made.write_all(records)
        return made

    def _zeros(self, path: Path, half_bytes: int) -> DiskFile:
        """Open a file of zeros of this size, with space for all of it; make it, if need be."""
        file = self._disk.open(path, create=path.name not in self._disk.names(self._folder))
        if file.size() > 2 * half_bytes:
            file.close()
            self._disk.remove(path)
            file = self._disk.open(path, create=True)
        if self._zeros_bytes != 2 * half_bytes or file.size() != 2 * half_bytes:
            try:
                file.reserve(2 * half_bytes)
                fill_with_zeros(file, 0, 2 * half_bytes)
            except BaseException:
                file.close()
                raise
        return file

    def _recycle(self, old: _Halves) -> None:
        """Make the spare of the file that was the ledger."""
        old.clear()
        old.file.close()
        self._disk.rename(self._folder / OLD, self._folder / SPARE)
        self._zeros_bytes = 2 * old.half_bytes

    # ------------------------------------------------------------ failures

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Take nothing more after an error: what is on the disk is not known."""
        try:
            yield
        except DiskError as error:
            self._failure = error
            raise
        except OSError as error:
            self._failure = DiskError(
                f"{self._folder / LEDGER} could not be written: {reason(error)}",
                fix="look for errors of the disk in the machine's log, then start this peer again",
            )
            raise self._failure from error

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _open_file(self) -> _Halves:
        self._check()
        assert self._file is not None, "begin comes first"
        return self._file


class _Halves:
    """Append to both halves of a file."""

    def __init__(self, file: DiskFile, header: LedgerHeader) -> None:
        self.file, self.half_bytes = file, header.half_bytes
        self._header = header
        self._at = 0
        self._sequence = 0
        self._synced = header.synced

    @property
    def free_bytes(self) -> int:
        return self.half_bytes - self._at

    def write_all(self, records: Iterable[LedgerRecord]) -> None:
        """Write the header and the records that the file begins with."""
        packed = [pack_header(self._header)]
        for record in records:
            self._sequence += 1
            entry = LedgerEntry(record.kind, self._sequence, self._synced, record.payload)
            packed.append(pack_entry(entry, self._header.nonce))
        data = b"".join(packed)
        for start in (0, self.half_bytes):
            self.file.write(data, start)
        self._at = whole_blocks(len(data))

    def append(self, record: LedgerRecord) -> None:
        self._sequence += 1
        self._write(LedgerEntry(record.kind, self._sequence, self._synced, record.payload))

    def mark(self, synced: int) -> None:
        """Note that so many records are on the disk. The next sync carries the note."""
        self._synced = max(self._synced, synced)
        if self.free_bytes >= entry_bytes(b""):
            self._write(LedgerEntry(MARK, self._sequence, self._synced, b""))

    def end_block(self) -> int:
        """Begin a new block with what comes next; return how many records lie before it."""
        self._at = whole_blocks(self._at)
        return self._sequence

    def sync(self) -> None:
        self.file.sync()

    def clear(self) -> None:
        """Fill both halves with zeros as far as they were written."""
        for start in (0, self.half_bytes):
            fill_with_zeros(self.file, start, start + self._at)

    def _write(self, entry: LedgerEntry) -> None:
        packed = pack_entry(entry, self._header.nonce)
        for start in (0, self.half_bytes):
            self.file.write(packed, start + self._at)
        self._at += len(packed)
