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
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from atoll.collectives.digests import strong_digest
from atoll.collectives.units import size

MAGIC = b"atoll-chunks-1\n\0"
HEAD = struct.Struct(">IQ32s32sI")
RECORD = struct.Struct(f">{HEAD.size}sI")
# Chunk, round, digest of that round's state, digest of the data, the data.
Record = tuple[int, int, bytes, bytes, bytes]
# Of the free space, when a state begins to come: the home's own records matter more.
SPACE_SHARE_MAX = 0.5
# Chunks may come twice, when the donors' logs have dropped what the first ones need.
SIZE_FACTOR_MAX = 2


class ChunkCache:
    """Keep chunks in one file.

    For several threads: who reads ends where another one begins anew or closes. Trouble with the
    disk is logged and costs nothing but this.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._path, self._log = path, log
        self._file: BinaryIO | None = None
        self._left_bytes = 0
        self._lock = threading.RLock()  # a descriptor that is in use must not be closed

    def begin(self, blob_digest: bytes, state_bytes: int) -> None:
        """Open the file for chunks of a state of this specification, which are going to come."""
        with self._lock:
            self.close()
            try:
                self._open(blob_digest, state_bytes)
            except OSError as error:
                self._give_up(str(error))

    def _open(self, blob_digest: bytes, state_bytes: int) -> None:
        head = MAGIC + blob_digest
        # Never through a link, and for nobody else: it is the model.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(self._path, flags, 0o600), "r+b", buffering=0)
        here_bytes = os.fstat(self._file.fileno()).st_size
        if self._file.read(len(head)) != head:  # of another run, or nothing
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(head)
            here_bytes = len(head)
        space = os.fstatvfs(self._file.fileno())
        free_bytes = space.f_bavail * space.f_frsize
        self._left_bytes = SIZE_FACTOR_MAX * state_bytes - here_bytes
        if max(0, state_bytes - here_bytes) > SPACE_SHARE_MAX * free_bytes:
            self._give_up(
                f"{size(free_bytes)} of the disk are free, the state takes {size(state_bytes)}"
            )

    def chunks(self, sizes: Sequence[int]) -> Iterator[Record]:
        """Yield the records whose bytes are right, in the order in which they came.

        ``sizes``: bytes of each chunk.
        """
        file, end = self._file, len(MAGIC) + 32
        while True:
            with self._lock:
                if file is None or file is not self._file:
                    return
                try:
                    record = read_record(file, end, sizes)
                    if record is None:  # what follows cannot be read: new records go here
                        file.truncate(end)
                        file.seek(end)
                        return
                except OSError as error:
                    return self._give_up(str(error))
            end += RECORD.size + len(record[-1])
            yield record

    def add(
        self, chunk: int, number: int, digest: bytes, data_digest: bytes, data: memoryview
    ) -> None:
        """Add a verified chunk of the state after round ``number``, which has that digest."""
        wanted = RECORD.size + len(data)
        fields = HEAD.pack(chunk, number, digest, data_digest, len(data))
        head = RECORD.pack(fields, zlib.crc32(fields))
        with self._lock:
            if self._file is None:
                return
            self._left_bytes -= wanted
            if self._left_bytes < 0:
                return
            try:
                if os.writev(self._file.fileno(), [head, data]) != wanted:
                    raise OSError("the disk is full")
            except OSError as error:
                self._give_up(str(error))

    def clear(self) -> None:
        """Remove the file: the state is in place, and nothing is kept any more."""
        self.close()
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._log(f"{self._path} cannot be removed, and is not needed any more: {error}")

    def close(self) -> None:
        """Close the file; what is kept stays for the next process."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _give_up(self, why: str) -> None:
        self._log(f"what comes is not kept on disk, a joiner that is killed begins anew: {why}")
        self.clear()


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
