"""Define the authority's list of those who are no longer welcome. Sans-I/O.

Each list is complete and has a higher number than the one before, so whoever has the highest number
knows everything, and a list that arrives late or twice changes nothing::

    version u8 = 1 | number u64 | count u32 | ids, 32 bytes each, rising | signature 64 bytes

An id is a peer's or a token's. With a token go all peers that came with it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.collectives.errors import ConfigError, PassForgedError
from atoll.peer.membership.signatures import KEY_BYTES, SIGNATURE_BYTES, verifies

# As many as a run may have peers; 128 KiB, well within a control frame.
REVOKED_MAX = 4096

_VERSION = 1
_HEAD = struct.Struct(">BQI")
_TEXT = b"atoll revocations 1\0"
REVOCATIONS_BYTES_MAX = _HEAD.size + REVOKED_MAX * KEY_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True, slots=True)
class Revocations:
    number: int = 0  # 0: none was ever made
    ids: frozenset[bytes] = frozenset()
    signature: bytes = b""

    def with_more(self, ids: Iterable[bytes], authority: Ed25519PrivateKey) -> Revocations:
        """Return the next list, signed, with more ids; ConfigError if it would be too long."""
        together, number = self.ids | frozenset(ids), self.number + 1
        if len(together) > REVOKED_MAX:
            raise ConfigError(
                f"a list of {len(together)} ids; {REVOKED_MAX} are the most",
                fix="make a new authority, and found the run again with it",
            )
        text = _TEXT + authority.public_key().public_bytes_raw() + _body(number, together)
        return Revocations(number, together, authority.sign(text))

    def encode(self) -> bytes:
        return _body(self.number, self.ids) + self.signature

    @classmethod
    def parse(cls, data: bytes, authority: bytes) -> Self:
        """Return the list that these bytes are.

        PassForgedError unless these are all bytes of a list that ``authority`` has signed.
        """
        end = len(data) - SIGNATURE_BYTES
        if not _HEAD.size <= end or len(data) > REVOCATIONS_BYTES_MAX:
            raise PassForgedError(f"a revocation list of {len(data)} bytes cannot be read")
        version, number, count = _HEAD.unpack_from(data)
        if version != _VERSION or number == 0 or end != _HEAD.size + count * KEY_BYTES:
            raise PassForgedError("this is no revocation list that this version of atoll can read")
        if not verifies(authority, _TEXT + authority + data[:end], data[end:]):
            raise PassForgedError(
                f"the run's authority ({authority.hex()[:16]}) has not signed this revocation list"
            )
        ids = [data[at : at + KEY_BYTES] for at in range(_HEAD.size, end, KEY_BYTES)]
        if any(former >= later for former, later in pairwise(ids)):
            raise PassForgedError("the ids of this revocation list are not in order")
        return cls(number, frozenset(ids), data[end:])


def _body(number: int, ids: frozenset[bytes]) -> bytes:
    return _HEAD.pack(_VERSION, number, len(ids)) + b"".join(sorted(ids))
