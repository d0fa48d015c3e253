"""Encode ZerothOrder's steps as bytes, and keep the log of them that a joiner replays.

One byte is a projected gradient: its sign, and 7 bits of the logarithm of its magnitude, in steps
of an eighth from ``exp(-63 / 8)`` to ``exp(63 / 8)``, that is 0.0004 to 2,600::

    bits 0 to 6   0 for zero, or c for exp((c - 64) / 8)
    bit 7         1 for negative; not with zero

A step's record, little-endian: the learning rate (float32), how many parts, and of each part in the
order of their numbers: number, count, and so many bytes. The *chain* is a hash of parameters and of
all records since: whoever has the same chain after as many steps has the same parameters.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError

SAMPLES_MAX = 4096  # of one peer in one step; each costs two evaluations, and published runs use 30
PARTS_MAX = 1024  # a run has as many members at most
CHAIN_BYTES = 32
_HEAD = struct.Struct("<fH")
_PART = struct.Struct("<HH")
_ZERO, _MIDDLE, _PER_UNIT = 0, 64, 8


def _scalars() -> F32:
    """Return the value of each byte, float32[256].

    By Decimal, whose exp is rounded correctly: a library's may differ in the last bit.
    """
    steps = (Decimal(code - _MIDDLE) / _PER_UNIT for code in range(1, 128))
    magnitudes = np.array([0.0, *(float(step.exp()) for step in steps)], np.float32)
    return np.concatenate([magnitudes, -magnitudes])


SCALARS: F32 = _scalars()  # the value of each byte
SCALARS.setflags(write=False)


def to_byte(value: float) -> int:
    """Return the nearest byte, in the logarithm; larger values are cut off, smaller are zero."""
    if value == 0:
        return _ZERO
    code = round(_PER_UNIT * math.log(abs(value))) + _MIDDLE
    return 0 if code < 1 else min(code, 127) | (128 if value < 0 else 0)


@dataclass(frozen=True, slots=True)
class ScalarPart:
    """Hold what the peer with this number has found in a step: a byte for each sample."""

    number: int
    codes: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """Hold the learning rate and the parts of one step."""

    lr: float
    parts: tuple[ScalarPart, ...]

    @classmethod
    def of(cls, lr: float, parts: Iterable[ScalarPart]) -> Record:
        """Make a record of unordered parts; RemoteProtocolError for what cannot be a step."""
        record = cls(lr, tuple(sorted(parts, key=lambda part: part.number)))
        record._check()
        return record

    def to_bytes(self) -> bytes:
        parts = (_PART.pack(p.number, len(p.codes)) + p.codes for p in self.parts)
        return _HEAD.pack(self.lr, len(self.parts)) + b"".join(parts)

    @classmethod
    def split(cls, data: bytes) -> list[tuple[Record, bytes]]:
        """Return records that lie one after the other, each with its own bytes.

        RemoteProtocolError for what is cut off, or cannot be a step.
        """
        found, at = [], 0
        try:
            while at < len(data):
                begin = at
                lr, count = _HEAD.unpack_from(data, at)
                at += _HEAD.size
                parts = []
                for _ in range(count):
                    number, size = _PART.unpack_from(data, at)
                    at += _PART.size + size
                    parts.append(ScalarPart(number, data[at - size : at]))
                record = cls(lr, tuple(parts))
                record._check()
                found.append((record, data[begin:at]))
        except struct.error as error:
            raise RemoteProtocolError("a log of steps is cut off") from error
        if at > len(data):
            raise RemoteProtocolError("a log of steps is cut off")
        return found

    def _check(self) -> None:
        numbers = [part.number for part in self.parts]
        sizes = [len(part.codes) for part in self.parts]
        if not 0 <= self.lr < math.inf:
            raise RemoteProtocolError(f"a learning rate of {self.lr}")
        if any(a >= b for a, b in pairwise(numbers)):
            raise RemoteProtocolError(f"two peers have one number in a step: {numbers[:20]}")
        if len(numbers) > PARTS_MAX or max(sizes, default=0) > SAMPLES_MAX:
            raise RemoteProtocolError(f"a step of {len(numbers)} parts and {sum(sizes)} bytes")
        if any(128 in part.codes for part in self.parts):
            raise RemoteProtocolError("a byte that stands for minus zero")


class ScalarLog:
    """Keep the records of the last steps, up to ``bytes_max``; then drop the older half.

    A trainer that stands before ``begin`` must take the parameters instead.
    """

    def __init__(self, steps: int, chain: bytes, bytes_max: int) -> None:
        if bytes_max < 0:
            raise ConfigError(f"a log of {bytes_max} bytes")
        self.begin, self._bytes_max, self._bytes = steps, bytes_max, 0
        self._records: list[bytes] = []
        self._chains = [chain]  # before each record, and after the last

    @property
    def steps(self) -> int:
        return self.begin + len(self._records)

    @property
    def chain(self) -> bytes:
        return self._chains[-1]

    @property
    def first_chain(self) -> bytes:
        return self._chains[0]

    def add(self, record: bytes) -> None:
        self._records.append(record)
        self._chains.append(hashlib.sha256(self.chain + record).digest())
        self._bytes += len(record)
        if self._bytes > self._bytes_max:
            self._drop(-(-len(self._records) // 2))

    def has(self, steps: int, chain: bytes) -> bool:
        """Return whether a trainer at this step and chain can come here by what is in the log."""
        at = steps - self.begin
        return 0 <= at < len(self._chains) and self._chains[at] == chain

    def since(self, steps: int) -> bytes:
        """Return all records after so many steps, one after the other."""
        return b"".join(self._records[steps - self.begin :])

    def _drop(self, count: int) -> None:
        self._bytes -= sum(map(len, self._records[:count]))
        del self._records[:count], self._chains[:count]
        self.begin += count
