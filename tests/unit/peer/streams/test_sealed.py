"""Sealed records: whatever is not exactly the next one is refused, and no nonce comes twice."""

from __future__ import annotations

import hmac

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.peer.streams import sealed as sealing
from atoll.peer.streams.sealed import (
    EPOCH_S_MAX,
    RECORD_BYTES_MAX,
    RECORD_HEADER_BYTES,
    RECORD_OVERHEAD_BYTES,
    Opener,
    RecordKind,
    Sealer,
    direction_secrets,
)

SECRET = bytes(range(32))
NOTHING = memoryview(bytearray())


def sealed(sealer: Sealer, plain: bytes, kind: RecordKind = RecordKind.DATA) -> memoryview:
    out = memoryview(bytearray(len(plain) + RECORD_OVERHEAD_BYTES))
    assert sealer.seal(kind, memoryview(plain), out) == len(out)
    return out


def opened(opener: Opener, record: memoryview) -> bytes:
    out = memoryview(bytearray(len(record) - RECORD_OVERHEAD_BYTES))
    opener.open(record, out)
    return bytes(out)


def rekeyed(sealer: Sealer, now_s: float = 0.0) -> memoryview:
    out = memoryview(bytearray(RECORD_OVERHEAD_BYTES))
    assert sealer.rekey(out, now_s) == len(out)
    return out


def pair() -> tuple[Sealer, Opener]:
    return Sealer(SECRET, 0.0), Opener(SECRET)


def expand(secret: bytes, label: bytes, length: int = 32) -> bytes:
    """HKDF-Expand of one block (RFC 5869), from the standard library."""
    return hmac.digest(secret, b"atoll record " + label + b"\x01", "sha256")[:length]


# ---------------------------------------------------------------- what a record is


def test_the_bytes_of_a_record() -> None:
    """From the description alone: another program could read it."""
    sealer = Sealer(SECRET, 0.0)
    sealed(sealer, b"first")
    rekeyed(sealer)
    record = bytes(sealed(sealer, b"payload"))
    secret = expand(SECRET, b"next")
    header = b"\0\0\0\x07\0\0\0\x01\0\0\0\0\0\0\0\x02"
    assert record[:16] == header
    nonce = expand(secret, b"salt", 4) + header[8:]
    assert AESGCM(expand(secret, b"key")).decrypt(nonce, record[16:], header) == b"payload"


def test_the_two_directions_share_no_key() -> None:
    ours, theirs = direction_secrets(SECRET)
    assert len({ours, theirs, SECRET}) == 3
    record = sealed(Sealer(ours, 0.0), b"x")
    with pytest.raises(RemoteProtocolError, match="not authentic"):
        opened(Opener(theirs), record)
    assert opened(Opener(ours), record) == b"x"
    with pytest.raises(LocalProtocolError, match="31 bytes"):
        direction_secrets(SECRET[:31])


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=300), st.none()), max_size=20))
def test_what_is_sealed_is_opened(payloads: list[bytes | None]) -> None:
    sealer, opener = pair()
    for payload in payloads:  # None: a new key
        if payload is None:
            assert opener.open(rekeyed(sealer), NOTHING) is RecordKind.KEY
        else:
            assert opened(opener, sealed(sealer, payload)) == payload
    assert sealer.epoch == opener.epoch == payloads.count(None)
    assert opener.open(sealed(sealer, b"", RecordKind.END), NOTHING) is RecordKind.END


def test_the_largest_record() -> None:
    sealer, opener = pair()
    payload = bytes(range(256)) * (RECORD_BYTES_MAX // 256)
    assert opened(opener, sealed(sealer, payload)) == payload
    with pytest.raises(LocalProtocolError, match="1,048,577 bytes"):
        sealed(sealer, payload + b"x")


@pytest.mark.parametrize(
    ("kind", "plain"), [(RecordKind.DATA, b""), (RecordKind.KEY, b"x"), (RecordKind.END, b"x")]
)
def test_records_that_no_opener_would_take_are_not_made(kind: RecordKind, plain: bytes) -> None:
    with pytest.raises(LocalProtocolError, match=kind.name):
        sealed(Sealer(SECRET, 0.0), plain, kind)


# ---------------------------------------------------------------- nonces


def test_no_nonce_comes_twice_under_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[bytes, bytes]] = []

    class Recording:
        def __init__(self, key: bytes) -> None:
            self.key = key

        def encrypt_into(self, nonce: bytes, *rest: object) -> int:
            used.append((self.key, bytes(nonce)))
            return 0

    monkeypatch.setattr(sealing, "AESGCM", Recording)
    sealer = Sealer(SECRET, 0.0)
    for index in range(100):
        sealed(sealer, b"x")
        if index % 10 == 0:
            rekeyed(sealer)
    assert len(used) == len(set(used)) == 110
    assert len({key for key, _ in used}) == 11
    assert [nonce[4:] for _, nonce in used] == [n.to_bytes(8, "big") for n in range(110)]


def test_a_counter_is_used_up_even_if_its_record_is_not_made() -> None:
    sealer, opener = pair()
    with pytest.raises(ValueError):  # the library: there is no room for the tag
        sealer.seal(RecordKind.DATA, memoryview(b"abc"), memoryview(bytearray(20)))
    with pytest.raises(RemoteProtocolError, match="record 1 of epoch 0, where record 0"):
        opened(opener, sealed(sealer, b"abc"))


# ---------------------------------------------------------------- attacks


def test_every_flipped_bit_is_found_and_nothing_of_the_record_is_kept() -> None:
    record = bytes(sealed(Sealer(SECRET, 0.0), b"sixteen bytes...and more"))
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        out = memoryview(bytearray(len(record) - RECORD_OVERHEAD_BYTES))
        opener = Opener(SECRET)
        with pytest.raises((RemoteProtocolError, LocalProtocolError)) as caught:
            opener.open(memoryview(damaged), out)
        # Local: a length that the header claims, and for which no caller would pass this buffer.
        assert isinstance(caught.value, RemoteProtocolError) or bit < 32
        assert not any(out)


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ([0, 0], "record 0 of epoch 0, where record 1"),  # replayed
        ([1], "record 1 of epoch 0, where record 0"),  # lost or moved
        ([0, 2], "record 2 of epoch 0, where record 1"),
        ([0, 1, 3], "record 3 of epoch 1, where record 2 of epoch 0"),  # the new key was lost
        ([0, 1, 2, 0], "record 0 of epoch 0, where record 3 of epoch 1"),
        ([0, 1, 2, 3, 4, 4], "after the end of the stream"),
    ],
)
def test_only_the_next_record_is_taken(order: list[int], text: str) -> None:
    sealer, opener = pair()
    records = [sealed(sealer, b"a"), sealed(sealer, b"b"), rekeyed(sealer), sealed(sealer, b"c")]
    records.append(sealed(sealer, b"", RecordKind.END))
    for index in order[:-1]:
        opened(opener, records[index])
    with pytest.raises(RemoteProtocolError, match=text):
        opened(opener, records[order[-1]])


def test_nothing_is_taken_after_a_defect() -> None:
    sealer, opener = pair()
    good = sealed(sealer, b"good")
    bad = memoryview(bytearray(good))
    bad[-1] ^= 1
    with pytest.raises(RemoteProtocolError, match="record 0 is not authentic"):
        opened(opener, bad)
    with pytest.raises(RemoteProtocolError, match="a record after a defect"):
        opened(opener, good)
    with pytest.raises(RemoteProtocolError, match="a record after a defect"):
        opened(opener, sealed(sealer, b"next"))


def test_nothing_is_sealed_after_the_end() -> None:
    sealer, _ = pair()
    sealed(sealer, b"", RecordKind.END)
    with pytest.raises(LocalProtocolError, match="after the end"):
        sealed(sealer, b"more")


@given(st.binary(min_size=RECORD_HEADER_BYTES, max_size=RECORD_HEADER_BYTES))
def test_hostile_headers(header: bytes) -> None:
    try:
        kind, length = Opener(SECRET).expect(memoryview(header))
    except RemoteProtocolError:
        return
    assert length <= RECORD_BYTES_MAX
    assert (length > 0) == (kind is RecordKind.DATA)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("ffffffff 00 00 0000 0000000000000000", "4,294,967,295 bytes; at most 1,048,576"),
        ("00100001 00 00 0000 0000000000000000", "1,048,577 bytes"),
        ("00000000 00 00 0000 0000000000000000", "kind 0, flags 0 and 0 bytes"),
        ("00000001 01 00 0000 0000000000000000", "kind 1, flags 0 and 1 bytes"),
        ("00000001 03 00 0000 0000000000000000", "kind 3, flags 0"),
        ("00000001 00 01 0000 0000000000000000", "flags 1"),
        ("00000001 00 00 0001 0000000000000000", "record 0 of epoch 1"),
        ("00000001 00 00 0000 ffffffffffffffff", "record 18446744073709551615"),
    ],
)
def test_a_header_is_refused_before_anything_is_waited_for(header: str, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        Opener(SECRET).expect(memoryview(bytes.fromhex(header)))


@given(st.binary(min_size=RECORD_OVERHEAD_BYTES + 1, max_size=80))
def test_hostile_records(body: bytes) -> None:
    """With a right header: none is let through."""
    length = len(body) - RECORD_OVERHEAD_BYTES
    record = bytearray(length.to_bytes(4, "big") + bytes(12) + body[RECORD_HEADER_BYTES:])
    with pytest.raises(RemoteProtocolError, match="not authentic"):
        opened(Opener(SECRET), memoryview(record))


# ---------------------------------------------------------------- wear


def test_a_key_wears_out_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "EPOCH_BYTES_MAX", 1000)
    sealer, opener = pair()
    count = 0
    while not sealer.is_due(100, 0.0):
        opened(opener, sealed(sealer, bytes(100)))
        count += 1
    assert count == 7  # 132 bytes each; 32 for the new key and 32 for the end are left
    opened(opener, rekeyed(sealer))
    assert not sealer.is_due(100, 0.0)
    assert opened(opener, sealed(sealer, bytes(100))) == bytes(100)


def test_a_key_wears_out_by_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "EPOCH_RECORDS_MAX", 5)
    sealer, opener = pair()
    for _ in range(3):
        assert not sealer.is_due(1, 0.0)
        opened(opener, sealed(sealer, b"x"))
    assert sealer.is_due(1, 0.0)
    for _ in range(2):  # the limit itself holds for both sides, whoever asks
        opened(opener, sealed(sealer, b"x"))
    with pytest.raises(LocalProtocolError, match="number 5 of its key"):
        sealed(sealer, b"x")
    monkeypatch.setattr(sealing, "EPOCH_RECORDS_MAX", 6)
    record = sealed(sealer, b"x")
    monkeypatch.setattr(sealing, "EPOCH_RECORDS_MAX", 5)
    with pytest.raises(RemoteProtocolError, match="worn out"):
        opened(opener, record)


def test_a_key_wears_out_by_time() -> None:
    sealer, _ = pair()
    assert not sealer.is_due(1, EPOCH_S_MAX - 1)
    assert sealer.is_due(1, EPOCH_S_MAX)
    rekeyed(sealer, now_s=EPOCH_S_MAX)
    assert not sealer.is_due(1, EPOCH_S_MAX + 1)
    assert sealer.is_due(1, 2 * EPOCH_S_MAX)


def test_the_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "_EPOCH_MAX", 1)
    sealer, opener = pair()
    opened(opener, rekeyed(sealer))
    with pytest.raises(LocalProtocolError, match="all its epochs"):
        rekeyed(sealer)
    monkeypatch.setattr(sealing, "_EPOCH_MAX", 2)
    record = rekeyed(sealer)
    monkeypatch.setattr(sealing, "_EPOCH_MAX", 1)
    with pytest.raises(RemoteProtocolError, match="after the last epoch"):
        opened(opener, record)
