"""The bytes of a ledger: whatever is in a file is judged, and never taken for more than it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.durable.file_identity import FileIdentity
from atoll.peer.durable.ledger_format import (
    BLOCK_BYTES,
    LedgerEntry,
    LedgerHeader,
    LedgerVerdict,
    judge_ledger,
    pack_entry,
    pack_header,
    parse_entry,
    parse_header,
)

IDENTITY = FileIdentity(5, 6, 7, b"m" * 16)
NONCE = bytes(range(16))
HALF_BYTES = 4 * BLOCK_BYTES
U64 = st.integers(0, (1 << 64) - 1)
NUMBER = st.integers(0, (1 << 32) - 1)


@given(st.integers(0, 255), U64, U64, st.binary(max_size=500), st.binary(max_size=50))
def test_an_entry_is_what_was_packed(
    kind: int, sequence: int, synced: int, payload: bytes, before: bytes
) -> None:
    entry = LedgerEntry(kind, sequence, synced, payload)
    packed = pack_entry(entry, NONCE)
    assert len(packed) == entry.nbytes
    assert parse_entry(before + packed + b"more", len(before), NONCE) == entry
    assert parse_entry(packed[:-1], 0, NONCE) is None
    assert parse_entry(packed, 0, bytes(16)) is None


@given(st.data(), st.binary(min_size=1, max_size=200))
def test_an_entry_with_a_flipped_bit_is_none(data: st.DataObject, payload: bytes) -> None:
    packed = bytearray(pack_entry(LedgerEntry(1, 2, 3, payload), NONCE))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert parse_entry(bytes(packed), 0, NONCE) is None


@given(U64, NUMBER, NUMBER, st.sampled_from((b"", b"x" * 16)))
def test_a_header_is_what_was_packed(
    position: int, snapshot: int, synced: int, machine: bytes
) -> None:
    identity = FileIdentity(5, 6, 7, machine)
    header = LedgerHeader(HALF_BYTES, NONCE, position, snapshot, synced, identity)
    assert parse_header(pack_header(header)) == header


@given(st.binary(max_size=2 * BLOCK_BYTES))
def test_any_bytes_are_damage(data: bytes) -> None:
    assert judge_ledger(data, IDENTITY, "it").verdict is LedgerVerdict.DAMAGED


@given(st.binary(max_size=3 * BLOCK_BYTES), st.binary(max_size=3 * BLOCK_BYTES))
def test_any_bytes_after_the_records_are_a_torn_tail(one: bytes, other: bytes) -> None:
    header = LedgerHeader(HALF_BYTES, NONCE, 9, 0, 1, IDENTITY)
    first = pack_header(header) + pack_entry(LedgerEntry(1, 1, 0, b"kept"), NONCE)
    halves = [(first.ljust(BLOCK_BYTES * 2, b"\0") + rest)[:HALF_BYTES] for rest in (one, other)]
    data = b"".join(half.ljust(HALF_BYTES, b"\0") for half in halves)
    found = judge_ledger(data, IDENTITY, "it")
    is_torn = any(half[2 * BLOCK_BYTES :].strip(b"\0") for half in halves)
    assert found.verdict is (LedgerVerdict.CUT if is_torn else LedgerVerdict.WHOLE)
    assert found.records == ((10, 1, b"kept"),)
