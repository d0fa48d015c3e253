"""Define the bytes of a ledger file, and judge what the bytes of one say. Pure.

The file has two halves of one size, and every record lies in both, at the same place. A half is::

    block 0       the header: how the file was made, and what it began with
    blocks 1...   records and marks, each with a checksum, one after the other; then zeros

After each sync a new block begins, as a rule with a *mark*: so many records are on the disk. Each
record says so as well. So a reader knows how many records must be there: one of these that is bad
in both halves is **damage**. What is bad beyond them is a **torn tail**, as a power cut leaves it.

A checksum is BLAKE2b, 8 bytes, keyed by a number that only this file has: a block of another file,
or of this one's former life, is never taken for a record. (CRC-32 would do against flipped bits,
but not against blocks in the wrong place.)
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple

from atoll.collectives.errors import ConfigError
from atoll.collectives.units import count, size
from atoll.peer.durable.file_identity import FileIdentity

VERSION = 1
BLOCK_BYTES = 4096  # what disks write at once, and what fails as a whole
# The specification of a run has 512 KiB at most, and is the largest thing in any record.
PAYLOAD_BYTES_MAX = 768 << 10
KINDS_MAX = 255
MARK = 0  # the kind that no record has
NONCE_BYTES = 16
AMNESIA = "this peer does not know what it has promised, and goes on without a vote"

_CHECK_BYTES = 8
_MAGIC = b"atoll-ld"
_HEADER = struct.Struct(">8sH6xQ16sQQQQQQ16s")
_REST = struct.Struct(">IB3xQQ")  # bytes of the payload, kind, sequence, synced
_ENTRY_BYTES = _CHECK_BYTES + _REST.size


class LedgerVerdict(enum.Enum):
    """Say what an opening has found."""

    NEW = "new"  # there was none: nothing has been promised from this home, or all of it is lost
    WHOLE = "whole"
    MENDED = "mended"  # something has one good copy of two
    CUT = "cut"  # the last write did not get to the disk as a whole
    DAMAGED = "damaged"  # something that was synced is lost
    COPIED = "copied"  # the file was made elsewhere

    @property
    def forgot(self) -> bool:
        """Return whether the peer has made promises that it does not know."""
        return self in (LedgerVerdict.DAMAGED, LedgerVerdict.COPIED)


class LedgerRecord(NamedTuple):
    """Be one record. What a compaction has kept has the position of the last record before it."""

    position: int
    kind: int
    payload: bytes


class LedgerHeader(NamedTuple):
    """Say how a file was made.

    It begins with ``snapshot`` records that stand for all up to ``position``. So many as ``synced``
    were on the disk before the file got its name.
    """

    half_bytes: int
    nonce: bytes
    position: int
    snapshot: int
    synced: int
    identity: FileIdentity

    def position_of(self, sequence: int) -> int:
        return self.position + max(0, sequence - self.snapshot)


class LedgerEntry(NamedTuple):
    """Be a record or a mark as it lies in a half.

    ``sequence`` counts the records of the file from 1; a mark has that of the last one before it.
    So many as ``synced`` were on the disk when it was appended.
    """

    kind: int
    sequence: int
    synced: int
    payload: bytes

    @property
    def nbytes(self) -> int:
        return entry_bytes(self.payload)


@dataclass(frozen=True, slots=True)
class LedgerFound:
    """Hold what the bytes of a file say. ``position`` is the highest that is named anywhere."""

    verdict: LedgerVerdict
    text: str
    records: tuple[LedgerRecord, ...] = ()
    position: int = 0


def entry_bytes(payload: bytes) -> int:
    """Return how much a record takes in each half."""
    return _ENTRY_BYTES + len(payload)


def whole_blocks(nbytes: int) -> int:
    """Return ``nbytes``, rounded up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def pack_entry(entry: LedgerEntry, nonce: bytes) -> bytes:
    rest = _REST.pack(len(entry.payload), entry.kind, entry.sequence, entry.synced) + entry.payload
    return _checksum(rest, nonce) + rest


def parse_entry(half: bytes, at: int, nonce: bytes) -> LedgerEntry | None:
    """Return what lies at a place, None if it is neither a record nor a mark of this file."""
    stop = at + _ENTRY_BYTES
    if stop > len(half):
        return None
    nbytes, kind, sequence, synced = _REST.unpack_from(half, at + _CHECK_BYTES)
    if nbytes > min(PAYLOAD_BYTES_MAX, len(half) - stop):
        return None
    check, rest = half[at : at + _CHECK_BYTES], half[at + _CHECK_BYTES : stop + nbytes]
    if _checksum(rest, nonce) != check:
        return None
    return LedgerEntry(kind, sequence, synced, rest[_REST.size :])


def pack_header(header: LedgerHeader) -> bytes:
    """Return a whole block. Its last bytes are the checksum, in every version."""
    made = header.identity
    packed = _HEADER.pack(
        _MAGIC,
        VERSION,
        header.half_bytes,
        header.nonce,
        header.position,
        header.snapshot,
        header.synced,
        made.inode,
        made.born_ns,
        made.filesystem,
        made.machine,
    )
    body = packed.ljust(BLOCK_BYTES - _CHECK_BYTES, b"\0")
    return body + _checksum(body)


def parse_header(block: bytes) -> LedgerHeader | None:
    """Return the header that a block holds, None if it is none. ConfigError for a newer atoll's."""
    body, check = block[:-_CHECK_BYTES], block[-_CHECK_BYTES:]
    if len(block) != BLOCK_BYTES or _checksum(body) != check:
        return None
    magic, version, half_bytes, nonce, *numbers, machine = _HEADER.unpack_from(body)
    if magic != _MAGIC:
        return None
    if version != VERSION:
        raise ConfigError(
            f"the ledger of this home has format {version}, and this atoll reads {VERSION}",
            fix="start the version of atoll that has written it",
        )
    position, snapshot, synced, inode, born_ns, filesystem = numbers
    machine = machine if machine.strip(b"\0") else b""
    identity = FileIdentity(inode, born_ns, filesystem, machine)
    return LedgerHeader(half_bytes, nonce, position, snapshot, synced, identity)


def judge_ledger(data: bytes, identity: FileIdentity, name: str) -> LedgerFound:
    """Return what a file with these bytes and this identity holds; ``name`` is for the text."""
    middle = len(data) // 2
    headers = [parse_header(data[at : at + BLOCK_BYTES]) for at in (0, middle)]
    header = headers[0] or headers[1]
    if header is None:
        text = f"{name} has no header that can be read; {AMNESIA}"
        return LedgerFound(LedgerVerdict.DAMAGED, text)
    found = _Scan(header, data).judge(name, is_header_lone=None in headers)
    if difference := identity.difference(header.identity):
        text = f"{name} is a copy, or was restored: {difference}; {AMNESIA}"
        return LedgerFound(LedgerVerdict.COPIED, text, (), found.position)
    return found


def _checksum(data: bytes, nonce: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECK_BYTES, key=nonce).digest()


class _Scan:
    """Read both halves at once, from the first record to the last that can be reached."""

    def __init__(self, header: LedgerHeader, data: bytes) -> None:
        self._header, self._missing = header, 2 * header.half_bytes - len(data)
        half_bytes = header.half_bytes
        self._halves = data[:half_bytes], data[half_bytes : 2 * half_bytes]
        self._records: list[LedgerRecord] = []
        self._synced = header.synced  # so many records must be there
        self._last = header.synced  # the highest that is named anywhere
        # Of each entry with one good copy: how many records are synced where it is synced as well.
        self._lone: list[int] = []
        self._at = BLOCK_BYTES
        while self._step():
            pass
        self._look_ahead()

    def _step(self) -> bool:
        """Take what comes next; return whether there may be more."""
        found = [parse_entry(half, self._at, self._header.nonce) for half in self._halves]
        for entry in found:
            if entry is not None and self._follows(entry):
                if found[0] != found[1]:
                    self._lone.append(entry.sequence + (entry.kind == MARK))
                self._take(entry)
                return True
        if self._at % BLOCK_BYTES == 0:
            return False
        self._at = whole_blocks(self._at)
        return True

    def _follows(self, entry: LedgerEntry) -> bool:
        return entry.sequence == len(self._records) + (entry.kind != MARK)

    def _take(self, entry: LedgerEntry) -> None:
        if entry.kind != MARK:
            position = self._header.position_of(entry.sequence)
            self._records.append(LedgerRecord(position, entry.kind, entry.payload))
        self._synced = max(self._synced, entry.synced)
        self._at += entry.nbytes

    def _look_ahead(self) -> None:
        """Hear what later blocks say of the records that must be there."""
        self._last = max(self._last, len(self._records))
        for half in self._halves:
            for at in range(self._at, len(half), BLOCK_BYTES):
                if entry := parse_entry(half, at, self._header.nonce):
                    self._synced = max(self._synced, entry.synced)
                    self._last = max(self._last, entry.sequence, entry.synced)

    def judge(self, name: str, *, is_header_lone: bool) -> LedgerFound:
        found, position_of = len(self._records), self._header.position_of
        if what := self._damage():
            text = f"{name} is damaged: {what}; {AMNESIA}"
            return LedgerFound(LedgerVerdict.DAMAGED, text, (), position_of(self._last))
        position = position_of(found)
        verdict, text = LedgerVerdict.WHOLE, f"{name} is whole, up to record {position}"
        synced = sum(needed <= self._synced for needed in self._lone)
        if synced < len(self._lone) or self._has_rest():
            verdict = LedgerVerdict.CUT
            text = f"{name} ends in a write that was cut short; it is cut after record {position}"
        if synced or is_header_lone or self._missing > 0:
            places = count(max(1, synced + is_header_lone), "place")
            verdict = LedgerVerdict.MENDED
            text = (
                f"{name} has lost one of two copies in {places} and is written anew, up to record"
                f" {position}: nothing is lost, but its disk is failing"
            )
        return LedgerFound(verdict, text, tuple(self._records), position)

    def _has_rest(self) -> bool:
        """Return whether there is anything after the last entry."""
        return any(half[self._at :].strip(b"\0") for half in self._halves)

    def _damage(self) -> str:
        """Return in words what was synced and is lost; empty if nothing is known to be."""
        found, position_of = len(self._records), self._header.position_of
        if self._synced > found:
            first, last = position_of(found + 1), position_of(self._synced)
            return f"records {first} to {last} are bad in both copies"
        if len(self._halves[0]) < min(self._at + BLOCK_BYTES, self._header.half_bytes):
            return f"the file ends after {size(len(self._halves[0]))}"
        return ""
