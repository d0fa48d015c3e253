"""Keep R of each round on disk: the encoded bytes that every replica applies.

Theory. Each round, view and attempt has a file of its own, ``K-V-A``, as long as R: chunks become
final in any order and lie at their offsets. A new attempt gets a new file, because what a peer has
said READY for must stay, bytes and all, until the next attempt is READY too. What a file holds is
said by the record of READY in the ledger (chunk digests, and the root over them): the file has no
header, and a file without such a record is a partial one.

Bytes that are bad here cost no vote: the ledger remembers READY, and the chunks that are good are
known one by one, so the others are fetched.

A disk that is full fails at the beginning of a round (the file is as long as R from the start) and
never touches the ledger, which has its own space.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import DiskError
from atoll.collectives.threads import worker
from atoll.collectives.units import size
from atoll.peer.durable.disk import DISK_FULL, Bytes, Disk, DiskFile, reason

# The disk begins with so much at a time while the rest of R comes, so that the sync finds little.
WRITE_BACK_BYTES = 8 << 20
COPY_BYTES = 1 << 20
SLICE_BYTES = 4 << 20  # of R that is handed over at a time where all of it is here
_NAME = re.compile(r"(\d{1,19})-(\d{1,19})-(\d{1,19})")


class RoundName(NamedTuple):
    """Name one attempt at one round."""

    round: int
    view: int
    attempt: int

    @property
    def file(self) -> str:
        return f"{self.round}-{self.view}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> RoundName | None:
        match = _NAME.fullmatch(text)
        name = cls(*map(int, match.groups())) if match else None
        return name if name and name.file == text else None


def unneeded(
    present: Iterable[RoundName],
    *,
    ready: Collection[RoundName],
    committed: Mapping[int, RoundName],
    checkpoints: Collection[int],
    writing: Collection[RoundName] = (),
) -> set[RoundName]:
    """Return which files may be deleted.

    ``ready``: those whose record of READY is synced and not void; ``committed``: of each committed
    round, whose bytes were committed; ``checkpoints``: the rounds of those that are on the disk;
    ``writing``: files under way. At a start there are none, and partial files go.
    """
    since = older_checkpoint(checkpoints)
    newest: dict[int, RoundName] = {}
    for name in sorted(ready):
        newest[name.round] = name
    newest |= committed
    return {
        name
        for name in present
        if name.round <= since or (newest.get(name.round) != name and name not in writing)
    }


def older_checkpoint(checkpoints: Collection[int]) -> int:
    """Return the round since which rounds are kept: that of the last checkpoint but one.

    If the last one is damaged, the one before it and the rounds since give the same state.
    """
    return sorted(checkpoints)[-2] if len(checkpoints) > 1 else 0


class RoundFiles:
    """Make, read and delete the files of a folder. Every method waits for the disk."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk, self._folder = disk, folder
        self._lock = threading.Lock()
        self._writing: dict[RoundName, RoundWriter] = {}  # until they are sealed or have ended
        self._beginning: set[RoundName] = set()  # which may take as long as the disk does
        disk.make_folder(folder)

    def names(self) -> list[RoundName]:
        """Return what is there, the earliest round first. Other files are none of ours."""
        return sorted(filter(None, map(RoundName.parse, self._disk.names(self._folder))))

    def write(self, name: RoundName, nbytes: int) -> RoundWriter:
        """Begin the file of an attempt. DiskError if there is no room for all of R.

        What an earlier life has left under this name goes: it had no READY. So does what the same
        attempt has begun before, and that first: it would take the new file away when it ends.
        """
        with self._lock:
            self._forget_ended()
            before = self._writing.get(name)
            self._beginning.add(name)
        try:
            if before is not None:
                before.abandon()
            writer = self._begin(name, nbytes)
            with self._lock:
                self._writing[name] = writer
        finally:
            with self._lock:
                self._beginning.discard(name)
        return writer

    def _begin(self, name: RoundName, nbytes: int) -> RoundWriter:
        path = self._folder / name.file
        self._disk.remove(path)
        file = self._disk.open(path, create=True)
        try:
            file.reserve(nbytes)
        except OSError as error:
            file.close()
            self._disk.remove(path)
            free = self._disk.free_bytes(self._folder)
            raise DiskError(
                f"round {name.round} needs {size(nbytes)} in {self._folder}:"
                f" {reason(error)} ({size(free)} free)",
                fix="make room: until then this peer votes, but holds its rounds in memory only",
            ) from error
        return RoundWriter(self._disk, path, file, nbytes)

    def open(self, name: RoundName) -> RoundReader:
        """Open a file to read. OSError if it is not there."""
        return RoundReader(self._disk.open(self._folder / name.file))

    def remove(self, names: Iterable[RoundName]) -> None:
        """Delete files, but for those that are being written.

        A crash may bring them back: the next start deletes them again.
        """
        for name in names:
            with self._lock:
                self._forget_ended()
                if name not in self._writing and name not in self._beginning:
                    self._disk.remove(self._folder / name.file)

    def _forget_ended(self) -> None:
        self._writing = {name: x for name, x in self._writing.items() if x.is_working}


class RoundReader:
    """Read one file; close it."""

    def __init__(self, file: DiskFile) -> None:
        self._file = file

    def read(self, start: int, stop: int) -> bytes:
        """Return these bytes, fewer where the file ends or the disk cannot read them."""
        try:
            return self._file.read(stop - start, start)
        except OSError:
            return b""

    def bad_chunks(self, places: Sequence[tuple[int, int]], digests: Sequence[bytes]) -> list[int]:
        """Return the chunks whose bytes do not have their digests. ``places``: where each lies."""
        pairs = enumerate(zip(places, digests, strict=True))
        return [
            chunk for chunk, (place, digest) in pairs if strong_digest(self.read(*place)) != digest
        ]

    def close(self) -> None:
        self._file.close()


class RoundWriter:
    """Write the chunks of one R at their offsets, in a thread of its own, while they come.

    End it with ``seal``, ``abandon`` or ``drop``.
    """

    def __init__(self, disk: Disk, path: Path, file: DiskFile, nbytes: int) -> None:
        self.nbytes = nbytes
        self._disk, self._path, self._file = disk, path, file
        self._orders: queue.SimpleQueue[tuple[int, Bytes] | None] = queue.SimpleQueue()
        self._taken: set[tuple[int, int]] = set()  # what was put, from where to where
        self._error: OSError | DiskError | None = None
        self._dropped = threading.Event()
        self._thread = worker(self._work, f"write-{path.name}")
        self._thread.start()

    @property
    def is_working(self) -> bool:
        """Return whether the file is neither sealed nor given up."""
        return self._thread.is_alive()

    def put(self, offset: int, data: Bytes) -> None:
        """Take a final chunk, without waiting. Nobody may change ``data`` until the file is sealed.

        Nothing is copied: what waits is the memory of R itself.
        """
        if not 0 <= offset <= self.nbytes - len(data):
            raise ValueError(f"{len(data)} bytes at {offset} lie outside R of {self.nbytes} bytes")
        self._taken.add((offset, offset + len(data)))
        self._orders.put((offset, data))

    def fill(self, data: Bytes) -> None:
        """Take whatever of R was not put yet; ``data`` is all of it."""
        end = 0
        for start, stop in (*sorted(self._taken), (self.nbytes, self.nbytes)):
            for at in range(end, start, SLICE_BYTES):
                self.put(at, data[at : min(start, at + SLICE_BYTES)])
            end = max(end, stop)

    def keep(self, older: RoundReader, places: Iterable[tuple[int, int]]) -> None:
        """Take kept chunks from the file of an older attempt, and wait for it.

        Where they are still in memory, ``put`` has less to do. DiskError where they cannot be read.
        """
        for start, stop in places:
            for at in range(start, stop, COPY_BYTES):
                data = older.read(at, end := min(stop, at + COPY_BYTES))
                if len(data) < end - at:
                    raise DiskError(f"bytes {at} to {end} of an older attempt cannot be read")
                self.put(at, data)

    def seal(self) -> None:
        """Return when all that was put is on the disk, under its name. Waits for the disk.

        DiskError if it is not: then this R is not on the disk, and the file is gone.
        """
        self._orders.put(None)
        self._thread.join()
        try:
            if self._error is not None:
                raise self._error
            self._file.sync()
        except (OSError, DiskError) as error:
            self._remove()
            if isinstance(error, DiskError):
                raise
            fix = "make room" if error.errno in DISK_FULL else "look for errors of the disk"
            raise DiskError(f"{self._path} was not written: {reason(error)}", fix=fix) from error
        self._file.close()

    def abandon(self) -> None:
        """Drop what was not written yet, and delete the file: the attempt has ended."""
        self.drop()
        self._thread.join()

    def drop(self) -> None:
        """Do the same without waiting for it."""
        self._dropped.set()
        self._orders.put(None)

    def _remove(self) -> None:
        self._file.close()
        self._disk.remove(self._path)

    def _work(self) -> None:
        waiting: list[tuple[int, int]] = []  # written, and not given to the disk yet
        try:
            self._disk.sync_folder(self._path.parent)  # the name, while the first chunks come
            while (order := self._orders.get()) is not None and not self._dropped.is_set():
                offset, data = order
                self._file.write(data, offset)
                waiting.append((offset, offset + len(data)))
                if sum(stop - start for start, stop in waiting) >= WRITE_BACK_BYTES:
                    start = min(start for start, _ in waiting)
                    stop = max(stop for _, stop in waiting)
                    self._file.write_back(start, stop - start)
                    waiting.clear()
        except (OSError, DiskError) as error:
            self._error = error
            while self._orders.get() is not None:  # to be sealed, which tells, or dropped
                pass
        if self._dropped.is_set():
            self._remove()
