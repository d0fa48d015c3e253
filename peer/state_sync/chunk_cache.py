"""Keep chunks that a joiner has received, in its home, until its state is in place.

The state that is being put together lies in memory and dies with the process; whoever is killed in
the middle of a long way finds here what had come. Every chunk has been verified before it is kept,
and is believed again only if its bytes have the hash that was noted and the group agrees on the
digest of the state that it is of, as with a chunk that a donor sends.

    file:   magic, SHA-256 of the specification, records
    record: chunk, round, digest of that round's state, digest of the data, length; CRC; data

Records are appended; the last one of a chunk counts, and one that was cut short ends the file.
Nothing is synced: a power cut may cost what the hashes then refuse.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from atoll.collectives.digests import strong_digest
from atoll.collectives.threads import worker
from atoll.collectives.units import duration, size

MAGIC = b"atoll-chunks-1\n\0"
HEAD = struct.Struct(">IQ32s32sI")
RECORD = struct.Struct(f">{HEAD.size}sI")
# Chunk, round, digest of that round's state, digest of the data, the data.
Record = tuple[int, int, bytes, bytes, bytes]
# Of the free space, when a state begins to come: the home's own records matter more.
SPACE_SHARE_MAX = 0.5
# Of at most 2 MiB each: a disk that is slower than the network keeps what it can.
WAITING_MAX = 8
SETTLE_S = 30.0  # of a disk with the last file: then it hangs, and nothing is kept
# Chunks may come twice, when the donors' logs have dropped what the first ones need.
SIZE_FACTOR_MAX = 2


class ChunkCache:
    """Keep chunks in one file.

    ``add``, ``clear`` and ``close`` wait for no disk: a thread writes, and what comes faster than
    it writes is not kept. ``begin`` and ``chunks`` are for worker threads; who reads ends where
    another one begins anew or closes. Trouble with the disk is logged and costs nothing but this.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._path, self._log = path, log
        self._begins = threading.Lock()  # one file is opened after the other
        self._lock = threading.Lock()  # of the two below; nobody waits for a disk with it
        self._open: _OpenFile | None = None
        self._last: threading.Thread | None = None  # which writes, or still closes or removes

    def begin(self, blob_digest: bytes, state_bytes: int) -> None:
        """Open the file for chunks of a state of this specification, which are going to come."""
        with self._begins:
            self.close()
            self.settle()
            try:
                if self._last is not None and self._last.is_alive():
                    raise OSError(f"the disk has hung for {duration(SETTLE_S)}")
                opened = _OpenFile(self._path, self._log, blob_digest, state_bytes)
            except OSError as error:
                self._log(_given_up(str(error)))
                return
            with self._lock:
                self._open, self._last = opened, opened.thread

    def chunks(self, sizes: Sequence[int]) -> Iterator[Record]:
        """Yield the records whose bytes are right, in the order in which they came.

        ``sizes``: bytes of each chunk.
        """
        opened, end = self._open, len(MAGIC) + 32
        while opened is not None and opened is self._open:
            record = opened.record(end, sizes)
            if record is None:
                return
            end += RECORD.size + len(record[-1])
            yield record

    def add(
        self, chunk: int, number: int, digest: bytes, data_digest: bytes, data: memoryview
    ) -> None:
        """Add a verified chunk of the state after round ``number``, which has that digest."""
        fields = HEAD.pack(chunk, number, digest, data_digest, len(data))
        opened = self._open
        if opened is not None:
            opened.add(RECORD.pack(fields, zlib.crc32(fields)), data)

    def clear(self) -> None:
        """Remove the file: the state is in place, and nothing is kept any more."""
        with self._lock:
            opened, self._open = self._open, None
            if opened is None and not (self._last is not None and self._last.is_alive()):
                # An earlier process may have left it.
                self._last = worker(partial(_remove, self._path, self._log), "chunk-cache")
                self._last.start()
        if opened is not None:
            opened.end(removes=True)

    def close(self) -> None:
        """Close the file; what is kept stays for the next process."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None:
            opened.end(removes=False)

    def settle(self) -> None:
        """Wait until what was closed or cleared is, if the disk does that. For a worker thread."""
        if self._last is not None:
            self._last.join(SETTLE_S)


class _OpenFile:
    """Write what is added to the file, in a thread of its own, until it is ended."""

    def __init__(
        self, path: Path, log: Callable[[str], None], blob_digest: bytes, state_bytes: int
    ) -> None:
        """Open it and find out what room there is. OSError."""
        self._path, self._log = path, log
        head = MAGIC + blob_digest
        # Never through a link, and for nobody else: it is the model.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
        self._lock = threading.Lock()  # a descriptor that is in use must not be closed
        self._records: queue.Queue[tuple[bytes, bytes] | None] = queue.Queue()
        self._removes = False
        here_bytes = os.fstat(self._file.fileno()).st_size
        if self._file.read(len(head)) != head:  # of another run, or nothing
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(head)
            here_bytes = len(head)
        space = os.fstatvfs(self._file.fileno())
        free_bytes = space.f_bavail * space.f_frsize
        self._left_bytes = SIZE_FACTOR_MAX * state_bytes - here_bytes
        self.thread = worker(self._work, "chunk-cache")
        if max(0, state_bytes - here_bytes) > SPACE_SHARE_MAX * free_bytes:
            self._give_up(
                f"{size(free_bytes)} of the disk are free, the state takes {size(state_bytes)}"
            )
        self.thread.start()

    def record(self, at: int, sizes: Sequence[int]) -> Record | None:
        """Return the record at a place; None where no more can be read: new ones go there."""
        with self._lock:
            if self._file.closed:
                return None
            try:
                record = read_record(self._file, at, sizes)
                if record is None:
                    self._file.truncate(at)
                    self._file.seek(at)
            except OSError as error:
                self._give_up(str(error))
                return None
            return record

    def add(self, head: bytes, data: memoryview) -> None:
        """Have a record written, unless too many wait for the disk or the file is large enough."""
        nbytes = len(head) + len(data)
        if nbytes <= self._left_bytes and self._records.qsize() < WAITING_MAX:
            self._left_bytes -= nbytes
            self._records.put((head, bytes(data)))

    def end(self, *, removes: bool) -> None:
        self._removes = removes
        self._records.put(None)

    def _work(self) -> None:
        while (record := self._records.get()) is not None:
            with self._lock:
                try:
                    if not (self._removes or self._file.closed):
                        self._write(record)
                except OSError as error:
                    self._give_up(str(error))
        with self._lock:
            self._file.close()
            if self._removes:
                _remove(self._path, self._log)

    def _write(self, record: tuple[bytes, bytes]) -> None:
        if os.writev(self._file.fileno(), record) != sum(map(len, record)):
            raise OSError("the disk is full")

    def _give_up(self, why: str) -> None:
        self._log(_given_up(why))
        self._file.close()
        _remove(self._path, self._log)


def _remove(path: Path, log: Callable[[str], None]) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log(f"{path} cannot be removed, and is not needed any more: {error}")


def _given_up(why: str) -> str:
    return f"what comes is not kept on disk, a joiner that is killed begins anew: {why}"


def read_record(file: BinaryIO, at: int, sizes: Sequence[int]) -> Record | None:
    """Return the record at a place of the file.

    None if it is not whole, or not of such a state, or if its bytes are not those that were noted.
    """
    file.seek(at)
    head = file.read(RECORD.size)
    if len(head) < RECORD.size:
        return None
    fields, crc = RECORD.unpack(head)
    chunk, number, digest, data_digest, length = HEAD.unpack(fields)
    if zlib.crc32(fields) != crc or chunk >= len(sizes) or length != sizes[chunk]:
        return None
    data = file.read(length)
    if strong_digest(data) != data_digest:
        return None
    return chunk, number, digest, data_digest, data
