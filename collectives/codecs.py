"""Codecs: how float32 values become bytes on the wire and come back.

A codec is a pure function between values and bytes. Both directions are bit-deterministic (float32,
one fixed order of operations, no fused multiply-add), because every member applies the decoded
bytes and the chain of rounds is made of their digests.

Encoded layout of ``n`` elements, little-endian and without padding::

    float32   n * float32
    int8      ceil(n / 256) * float32 scale, then n * int8 code        value = code * scale

int8 is symmetric absmax over blocks of 256: ``scale = absmax / 127``, ``code = rint(x / scale)``
with ties to even. A scale is 0 (all codes 0) or a normal number of at most ``SCALE_MAX``. So no
bytes that pass ``check`` decode to NaN or infinity, and a processor that flushes subnormal numbers
to zero decodes like every other.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import CodecError

__all__ = [
    "BLOCK_ELEMENTS",
    "CODECS",
    "F32",
    "U8",
    "Codec",
    "Contract",
    "Float32Codec",
    "Int8Codec",
    "get_codec",
]

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# One scale per 256 elements costs 0.125 bit per element. Against one scale per tensor it gains two
# to three orders of magnitude in error on heavy tails.
BLOCK_ELEMENTS: Final = 256
# Work goes through scratch of this size: small enough to stay in cache and to keep one per thread,
# large enough that the fixed cost of a numpy call (about 1 us, and one GIL hand-over) is small.
TILE_ELEMENTS: Final = 131_072

CODE_MAX: Final = np.float32(127)
# Below the smallest normal number absmax / 127 loses so many bits that a code could pass 127.
SCALE_MIN: Final = np.finfo(np.float32).tiny
# One step under float32's maximum / 127, so that 127 * scale cannot round up to infinity.
SCALE_MAX: Final = np.nextafter(np.finfo(np.float32).max / CODE_MAX, np.float32(0))
_MAGNITUDE_BITS: Final = np.int32(0x7FFF_FFFF)


@dataclass(frozen=True, slots=True)
class Contract:
    """What a codec promises about its error, and what it costs.

    ``exact``: decode(encode(x)) is x. ``unbiased``: right in expectation. ``contractive``: the
    error is smaller than the value, but biased. ``bits_per_element`` includes the scales.
    """

    kind: Literal["exact", "unbiased", "contractive"]
    bits_per_element: float
    block: int


class Codec(ABC):
    """A stateless codec, safe to use from any number of threads.

    Arrays are one-dimensional and C-contiguous. Nothing of the size of the input is allocated. The
    decoding methods check the bytes before they write, so a refused input leaves the output alone.
    """

    name: ClassVar[str]
    contract: ClassVar[Contract]

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """The exact number of bytes that ``count`` elements take."""

    @abstractmethod
    def encode(self, values: F32, out: U8) -> None:
        """Encode float32[n] into uint8[encoded_bytes(n)]; CodecError on NaN or infinity."""

    @abstractmethod
    def check(self, data: U8, count: int) -> None:
        """CodecError unless ``data`` encodes ``count`` finite elements."""

    @abstractmethod
    def decode(self, data: U8, out: F32) -> None:
        """Decode uint8[encoded_bytes(n)] into float32[n]; CodecError on malformed bytes."""

    @abstractmethod
    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        """``into += float32(factor) * decode(data)``, each step rounded to float32.

        CodecError on malformed bytes.
        """

    def _check_length(self, data: U8, count: int) -> None:
        if data.size != self.encoded_bytes(count):
            raise CodecError(
                f"{count} elements take {self.encoded_bytes(count)} bytes in {self.name}, "
                f"not {data.size}"
            )


class _Scratch(threading.local):
    """Buffers of one thread; they go when it ends."""

    def __init__(self) -> None:
        self.tile: F32 = np.empty(TILE_ELEMENTS, np.float32)
        self.scales: F32 = np.empty(TILE_ELEMENTS // BLOCK_ELEMENTS, np.float32)


_scratch = _Scratch()


class Float32Codec(Codec):
    """The values as they are; the reference that other codecs are compared with."""

    name = "float32"
    contract = Contract("exact", 32.0, 1)

    def encoded_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: F32, out: U8) -> None:
        self._check_length(out, values.size)
        _check_finite(values)
        np.copyto(out.view("<f4"), values)

    def check(self, data: U8, count: int) -> None:
        self._check_length(data, count)
        _check_finite(data.view("<f4"))

    def decode(self, data: U8, out: F32) -> None:
        self.check(data, out.size)
        np.copyto(out, data.view("<f4"))

    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        self.check(data, into.size)
        values = data.view("<f4")
        for lo in range(0, into.size, TILE_ELEMENTS):
            part = into[lo : lo + TILE_ELEMENTS]
            scaled = _scratch.tile[: part.size]
            np.multiply(values[lo : lo + TILE_ELEMENTS], np.float32(factor), out=scaled)
            np.add(part, scaled, out=part)


class Int8Codec(Codec):
    """Symmetric absmax int8 with one float32 scale per 256 elements."""

    name = "int8"
    contract = Contract("contractive", 8 + 32 / BLOCK_ELEMENTS, BLOCK_ELEMENTS)

    def encoded_bytes(self, count: int) -> int:
        return 4 * _blocks(count) + count

    def encode(self, values: F32, out: U8) -> None:
        self._check_length(out, values.size)
        scales, codes = _split(out, values.size)
        for lo, hi, width in _tiles(values.size):
            first = lo // BLOCK_ELEMENTS
            _quantize(
                values[lo:hi].reshape(-1, width),
                scales[first : first + _blocks(hi - lo)],
                codes[lo:hi].reshape(-1, width),
            )

    def check(self, data: U8, count: int) -> None:
        self._check_length(data, count)
        scales, codes = _split(data, count)
        # NaN fails every comparison, and -0.0 carries a sign that encode never writes.
        valid = (scales >= SCALE_MIN) & (scales <= SCALE_MAX) | (scales.view("<u4") == 0)
        if not valid.all():
            block = int(np.argmin(valid))
            raise CodecError(f"the int8 scale of block {block} is not allowed: {scales[block]!r}")
        if codes.size and codes.min() < -CODE_MAX:
            raise CodecError(f"the int8 code -128 at element {int(codes.argmin())} is not allowed")

    def decode(self, data: U8, out: F32) -> None:
        self.check(data, out.size)
        scales, codes = _split(data, out.size)
        for lo, hi, width in _tiles(out.size):
            _dequantize(scales, codes, lo, width, out[lo:hi])

    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        self.check(data, into.size)
        scales, codes = _split(data, into.size)
        for lo, hi, width in _tiles(into.size):
            values = _scratch.tile[: hi - lo]
            _dequantize(scales, codes, lo, width, values)
            np.multiply(values, np.float32(factor), out=values)
            np.add(into[lo:hi], values, out=into[lo:hi])


def _quantize(values: F32, scales: F32, codes: NDArray[np.int8]) -> None:
    """Quantize (blocks, width) values, one scale per row."""
    tile = _scratch.tile[: values.size].reshape(values.shape)
    absmax = _scratch.scales[: scales.size]
    # Magnitudes order like their bits read as integers, and NaN and infinity come last: an integer
    # maximum is twice as fast as one of floats and finds them both.
    np.bitwise_and(values.view(np.int32), _MAGNITUDE_BITS, out=tile.view(np.int32))
    np.maximum.reduce(tile.view(np.int32), axis=1, out=absmax.view(np.int32))
    if not np.isfinite(absmax).all():
        raise CodecError("NaN or infinity cannot be encoded")
    np.divide(absmax, CODE_MAX, out=absmax)
    np.minimum(absmax, SCALE_MAX, out=absmax)
    flushed = absmax < SCALE_MIN
    absmax[flushed] = 0
    scales[:] = absmax
    absmax[flushed] = 1  # such values are below 1e-35, so their codes round to 0
    np.divide(values, absmax[:, None], out=tile)
    np.rint(tile, out=tile)
    np.copyto(codes, tile, casting="unsafe")


def _dequantize(scales: F32, codes: NDArray[np.int8], lo: int, width: int, out: F32) -> None:
    """``out = code * scale`` for the elements from ``lo`` on, in rows of ``width``."""
    rows = out.reshape(-1, width)
    first = lo // BLOCK_ELEMENTS
    # Convert, then multiply: one call with mixed types goes through numpy's small cast buffers.
    np.copyto(out, codes[lo : lo + out.size])
    np.multiply(rows, scales[first : first + len(rows), None], out=rows)


def _tiles(count: int) -> Iterator[tuple[int, int, int]]:
    """(lo, hi, row width) of tiles of whole blocks, then of the short last block."""
    whole = count - count % BLOCK_ELEMENTS
    for lo in range(0, whole, TILE_ELEMENTS):
        yield lo, min(lo + TILE_ELEMENTS, whole), BLOCK_ELEMENTS
    if whole < count:
        yield whole, count, count - whole


def _split(data: U8, count: int) -> tuple[F32, NDArray[np.int8]]:
    """The scales and the codes inside encoded bytes, without a copy."""
    scale_bytes = 4 * _blocks(count)
    return data[:scale_bytes].view("<f4"), data[scale_bytes:].view(np.int8)


def _blocks(count: int) -> int:
    return -(-count // BLOCK_ELEMENTS)


def _check_finite(values: F32) -> None:
    # min and max hand on NaN, and need no mask of the size of the input.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise CodecError("NaN or infinity in float32 values")


CODECS: Final[dict[str, Codec]] = {codec.name: codec for codec in (Float32Codec(), Int8Codec())}


def get_codec(name: str) -> Codec:
    """The codec of that name; CodecError lists the known names."""
    try:
        return CODECS[name]
    except KeyError:
        known = ", ".join(sorted(CODECS))
        raise CodecError(
            f"there is no codec {name!r}; known: {known}", fix=f"use one of: {known}"
        ) from None
