"""Seal and open records of an encrypted data stream: keys, nonces, wear. Sans-I/O.

A record is a header of 16 bytes, the ciphertext (as long as the plaintext) and a tag of 16 bytes::

    length u32 | kind u8 | flags u8 | epoch u16 | counter u64      (big-endian)

AES-256-GCM, the whole header as associated data, the nonce a salt of 4 bytes and the counter
(reliability_and_security.md 3.1). The counter goes up by one from record to record and never
starts again; the opener takes exactly the next one. So a record that is replayed, lost, moved or
changed ends the stream. An END record ends it too: what stops without one was cut off.

Each direction has its own chain of secrets. HKDF makes from a secret the key and the salt of one
epoch and the next epoch's secret, from which nobody can compute back. A KEY record is the last of
its epoch.
"""

from __future__ import annotations

import enum
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError

# Plaintext of one record. Smaller ones cost more calls, larger ones leave the cache.
RECORD_BYTES_MAX = 1 << 20
RECORD_HEADER_BYTES = 16
TAG_BYTES = 16
RECORD_OVERHEAD_BYTES = RECORD_HEADER_BYTES + TAG_BYTES
SECRET_BYTES = 32
# RFC 8446 5.5: an AES-GCM key wears out after 2^24.5 records of 16 KiB, about 388 GB. Ours are
# counted with their overhead, for that costs blocks too.
EPOCH_BYTES_MAX = 256 << 30
EPOCH_RECORDS_MAX = 1 << 24
# A stolen key opens no more than this much of the past.
EPOCH_S_MAX = 3600.0
# Whoever stole a secret can compute all later ones: after a day or 6 TiB a new stream, with a key
# that comes out of TLS, should take this one's place.
EPOCHS_WORN = 24

_HEADER = struct.Struct(">IBBHQ")
_COUNTER = struct.Struct(">Q")
_SALT_BYTES = 4
_EPOCH_MAX = 0xFFFF
_NOTHING = memoryview(b"")


class RecordKind(enum.IntEnum):
    """Say what a record is for. Only DATA has a payload, and that is never empty."""

    DATA = 0
    KEY = 1  # the next record is under the next epoch's key
    END = 2  # nothing follows


_KINDS = frozenset(RecordKind)


def direction_secrets(secret: bytes) -> tuple[bytes, bytes]:
    """Return the first secrets of the two directions: the dialler's, then the other side's.

    ``secret``: SECRET_BYTES that both sides know and that no other connection ever uses.
    """
    if len(secret) != SECRET_BYTES:
        raise LocalProtocolError(f"a stream secret of {len(secret)} bytes, not {SECRET_BYTES}")
    return _expand(secret, b"from dialler"), _expand(secret, b"from acceptor")


class _Direction:
    """Hold the key of one direction, what it has protected in this epoch, and the next counter."""

    def __init__(self, secret: bytes) -> None:
        self.epoch = 0
        self.counter = 0
        self.records = 0  # under this key, as are the bytes
        self.wire_bytes = 0
        self._take(secret)

    def _take(self, secret: bytes) -> None:
        self.aead = AESGCM(_expand(secret, b"key"))
        self._nonce = bytearray(_expand(secret, b"salt", _SALT_BYTES) + bytes(_COUNTER.size))
        self._next_secret = _expand(secret, b"next")

    def ratchet(self) -> None:
        """Replace the key by the next epoch's, and forget what it came from."""
        self._take(self._next_secret)
        self.epoch += 1
        self.records = self.wire_bytes = 0

    def fits(self, length: int, *, spare: int = 0) -> bool:
        """Return whether the key may protect one more record of this ``length``.

        And ``spare`` empty ones besides.
        """
        wire_bytes = length + (1 + spare) * RECORD_OVERHEAD_BYTES
        return (
            self.records + 1 + spare <= EPOCH_RECORDS_MAX
            and self.wire_bytes + wire_bytes <= EPOCH_BYTES_MAX
        )

    def consume(self, length: int) -> bytearray:
        """Return the nonce of the next record, valid until the next call. Nobody gets it twice."""
        _COUNTER.pack_into(self._nonce, _SALT_BYTES, self.counter)
        self.counter += 1
        self.records += 1
        self.wire_bytes += length + RECORD_OVERHEAD_BYTES
        return self._nonce


class Sealer:
    """Make the records of one direction, in order. One thread at a time."""

    def __init__(self, secret: bytes, now_s: float) -> None:
        self._key = _Direction(secret)
        self._since_s = now_s
        self._ended = False

    @property
    def epoch(self) -> int:
        return self._key.epoch

    def is_due(self, length: int, now_s: float) -> bool:
        """Return whether :meth:`rekey` must come before a record of ``length`` plaintext bytes.

        ``now_s``: of the clock that the sealer was made with, and that never goes back.
        """
        # Room is left for the record that announces the next key, and for the end.
        return now_s - self._since_s >= EPOCH_S_MAX or not self._key.fits(length, spare=2)

    def seal(self, kind: RecordKind, plain: memoryview, out: memoryview) -> int:
        """Write one record into ``out``, which must not overlap ``plain``; return its bytes.

        ``plain``: at most RECORD_BYTES_MAX; ``out``: RECORD_OVERHEAD_BYTES more, at least. The
        counter is used up even if the record is never sent. LocalProtocolError for what no opener
        would take.
        """
        length = len(plain)
        if self._ended or not _is_possible(kind, length) or not self._key.fits(length):
            raise LocalProtocolError(
                f"a {kind.name} record of {length:,} bytes was about to be sealed"
                f" as number {self._key.records:,} of its key{', after the end' * self._ended}"
            )
        header = out[:RECORD_HEADER_BYTES]
        _HEADER.pack_into(header, 0, length, kind, 0, self._key.epoch, self._key.counter)
        nonce = self._key.consume(length)
        end = length + RECORD_OVERHEAD_BYTES
        self._key.aead.encrypt_into(nonce, plain, header, out[RECORD_HEADER_BYTES:end])
        self._ended = kind is RecordKind.END
        return end

    def rekey(self, out: memoryview, now_s: float) -> int:
        """Write the record that announces the next key, and take that key; return its bytes.

        LocalProtocolError if all epochs are used up.
        """
        if self._key.epoch >= _EPOCH_MAX:
            raise LocalProtocolError("a data stream has used up all its epochs")
        end = self.seal(RecordKind.KEY, _NOTHING, out)
        self._key.ratchet()
        self._since_s = now_s
        return end


class Opener:
    """Take the records of one direction, in order, and nothing after the first defect."""

    def __init__(self, secret: bytes) -> None:
        self._key = _Direction(secret)
        self._over = ""  # why nothing is taken any more

    @property
    def epoch(self) -> int:
        return self._key.epoch

    def expect(self, header: memoryview) -> tuple[RecordKind, int]:
        """Return the kind of the record that begins with ``header``, and its plaintext bytes.

        Not authenticated before :meth:`open` has returned: good for waiting for the rest only.
        RemoteProtocolError if it cannot be the next record; the length is at most
        RECORD_BYTES_MAX.
        """
        length, kind, flags, epoch, counter = _HEADER.unpack(header)
        if self._over:
            raise RemoteProtocolError(f"a record after {self._over}")
        if length > RECORD_BYTES_MAX:
            raise self._defect(
                f"a record of {length:,} bytes; at most {RECORD_BYTES_MAX:,} are allowed"
            )
        if counter != self._key.counter or epoch != self._key.epoch:
            raise self._defect(
                f"record {counter} of epoch {epoch}, where record {self._key.counter}"
                f" of epoch {self._key.epoch} was next"
            )
        if kind not in _KINDS or flags != 0 or not _is_possible(kind, length):
            raise self._defect(f"a record of kind {kind}, flags {flags} and {length:,} bytes")
        if not self._key.fits(length):
            raise self._defect("a record under a key that is worn out")
        return RecordKind(kind), length

    def open(self, record: memoryview, out: memoryview) -> RecordKind:
        """Verify one whole record and write its plaintext into ``out``; return its kind.

        ``out`` is exactly as long as the plaintext, else LocalProtocolError. RemoteProtocolError if
        anything about the record is wrong; ``out`` is all zeros then, and holds nothing that has
        not been authenticated.
        """
        kind, length = self.expect(record[:RECORD_HEADER_BYTES])
        if len(record) != length + RECORD_OVERHEAD_BYTES or len(out) != length:
            raise LocalProtocolError(
                f"{len(record):,} bytes for a record, and a buffer of {len(out):,}"
                f" for {length:,} bytes of it"
            )
        header, sealed = record[:RECORD_HEADER_BYTES], record[RECORD_HEADER_BYTES:]
        counter = self._key.counter
        nonce = self._key.consume(length)
        try:
            self._key.aead.decrypt_into(nonce, sealed, header, out)
        except InvalidTag as error:
            out[:] = bytes(length)  # the library leaves what it has deciphered
            raise self._defect(
                f"record {counter} is not authentic: damaged, forged, or under another key"
            ) from error
        if kind is RecordKind.KEY:
            if self._key.epoch >= _EPOCH_MAX:
                raise self._defect("a new key after the last epoch")
            self._key.ratchet()
        elif kind is RecordKind.END:
            self._over = "the end of the stream"
        return kind

    def _defect(self, what: str) -> RemoteProtocolError:
        self._over = "a defect"
        return RemoteProtocolError(what)


def _is_possible(kind: int, length: int) -> bool:
    return 0 < length <= RECORD_BYTES_MAX if kind == RecordKind.DATA else length == 0


def _expand(secret: bytes, label: bytes, length: int = SECRET_BYTES) -> bytes:
    return HKDFExpand(SHA256(), length, b"atoll record " + label).derive(secret)
