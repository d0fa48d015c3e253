"""Cut tensors into tiles, and pack the few coefficients of each tile that are sent as bytes.

A tensor of two dimensions is cut into tiles of h x w, where h and w are the largest divisors of its
dimensions up to ``tile`` (64); one of more dimensions is a matrix of its first dimension and the
rest, one of less a single row. Of the h w = L coefficients of each tile k = min(topk, L) are sent,
of a tile of zeros none. A tensor's part of a message, for T tiles of which P are present:

    present   ceil(T / 8) bytes: a bit for each tile, low bits first
    places    ceil(P k b / 8) bytes: k places in each present tile, ascending, of b bits each; b is
              enough for L - 1, so 12 for a tile of 4096
    values    P k * float32 or bfloat16; as "sign" ceil(P k / 8) bytes, of bits that are 1 for -1

All bits low first. A coefficient that is zero, where a tile has fewer others than k, repeats the
place before it; its value or bit is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32
from atoll.collectives.codecs.base import U8
from atoll.collectives.errors import CodecError, ConfigError

I64 = NDArray[np.int64]
TILE_MAX = 64  # so that a place in a tile has 12 bits, and float64 is exact in dct.py
VALUES = {"bfloat16": 16, "float32": 32, "sign": 1}  # how coefficients travel: bits of each


@dataclass(frozen=True, slots=True)
class Tiling:
    """Describe how a tensor is a matrix that is cut into tiles.

    The matrix has ``rows`` x ``columns``, its tiles ``height`` x ``width``, of which ``topk``
    coefficients each are sent.
    """

    rows: int
    columns: int
    height: int
    width: int
    topk: int

    @classmethod
    def of(cls, shape: Sequence[int], tile: int, topk: int) -> Tiling:
        """Return the tiling of a tensor of this shape.

        ConfigError for a tile that is not 1 to 64, or less than one coefficient.
        """
        if not 0 < tile <= TILE_MAX:
            raise ConfigError(f"tile is {tile}", fix=f"a tile has 1 to {TILE_MAX} rows and columns")
        if topk < 1:
            raise ConfigError(f"topk is {topk}", fix="send at least one coefficient of each tile")
        rows = shape[0] if len(shape) > 1 else 1
        columns = math.prod(shape) // max(1, rows)
        height, width = _divisor(rows, tile), _divisor(columns, tile)
        return cls(rows, columns, height, width, min(topk, height * width))

    @property
    def elements(self) -> int:
        """Return the number of elements of one tile."""
        return self.height * self.width

    @property
    def count(self) -> int:
        """Return the number of tiles."""
        return self.rows * self.columns // self.elements

    @property
    def place_bits(self) -> int:
        return (self.elements - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Chosen:
    """Hold the coefficients of a tensor that are not zero.

    They are places in its tiles end to end, ascending int64[n], and values, float32[n].
    """

    places: I64
    values: F32


def part_bytes(tiling: Tiling, values: str, present: int | None = None) -> int:
    """Return the bytes of a tensor's part.

    ``present``: the number of tiles that are present; by default all, so that no part has more
    bytes.
    """
    kept = (tiling.count if present is None else present) * tiling.topk
    bits = (tiling.count, kept * tiling.place_bits, kept * VALUES[values])
    return sum(-(-n // 8) for n in bits)


def pack_part(tiling: Tiling, places: I64, coefficients: F32, values: str) -> bytes:
    """Pack a part of a message, from places int64[T, k] and coefficients float32[T, k].

    Places ascend in each tile. As bfloat16 the lower half of each coefficient must be zero already.
    """
    present = (coefficients != 0).any(1)
    places, coefficients = places[present], coefficients[present]
    if (coefficients == 0).any():
        places, coefficients = _zeros_last(places, coefficients)
    if values == "sign":
        data = _pack((coefficients.reshape(-1) < 0).astype(np.uint16), 1)
    elif values == "bfloat16":
        data = (coefficients.astype("<f4").view("<u4") >> 16).astype("<u2")
    else:
        data = coefficients.astype("<f4")
    packed = _pack(places.reshape(-1).astype(np.uint16), tiling.place_bits)
    return b"".join(a.tobytes() for a in (_pack(present.astype(np.uint16), 1), packed, data))


def unpack_part(tiling: Tiling, data: bytes, begin: int, values: str) -> tuple[Chosen, int]:
    """Unpack the part that begins at ``begin``; return it and where it ends.

    CodecError for anything that is none.
    """
    head = part_bytes(tiling, values, 0)
    tiles = np.flatnonzero(_unpack(data, begin, 1, tiling.count))
    end = begin + part_bytes(tiling, values, tiles.size)
    kept = tiles.size * tiling.topk
    places = _unpack(data, begin + head, tiling.place_bits, kept).reshape(-1, tiling.topk)
    if places.size and (places.max() >= tiling.elements or (np.diff(places, axis=1) < 0).any()):
        raise CodecError("places are out of order or too large")
    values_at = begin + head + -(-kept * tiling.place_bits // 8)
    if values == "sign":
        coefficients = 1 - 2 * _unpack(data, values_at, 1, kept).astype(np.float32)
    else:
        coefficients = _floats(data[values_at:end], values, kept)
    coefficients = coefficients.reshape(places.shape)
    coefficients[:, 1:][places[:, 1:] == places[:, :-1]] = 0
    sent = coefficients != 0
    return Chosen((places + tiles[:, None] * tiling.elements)[sent], coefficients[sent]), end


def _divisor(n: int, most: int) -> int:
    """Return the largest divisor of ``n`` up to ``most``; 1 for an ``n`` of 0."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0) if n else 1


def _zeros_last(places: I64, coefficients: F32) -> tuple[I64, F32]:
    """Put zeros last in each tile; they take over the place before them.

    Each tile must have a coefficient that is not zero.
    """
    zero = coefficients == 0
    order = np.argsort(zero, axis=1, kind="stable")
    places = np.take_along_axis(places, order, 1)
    coefficients = np.take_along_axis(coefficients, order, 1)
    filled = np.count_nonzero(~zero, axis=1)[:, None]
    last = np.take_along_axis(places, filled - 1, 1)
    return np.where(np.arange(places.shape[1]) < filled, places, last), coefficients


def _pack(codes: NDArray[np.uint16], bits: int) -> U8:
    planes = codes[:, None] >> np.arange(bits, dtype=np.uint16) & 1
    return np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little")


def _unpack(data: bytes, begin: int, bits: int, count: int) -> I64:
    """Return int64[count], from ``bits`` bits each.

    CodecError if the bytes are not there, or what is left of the last has ones.
    """
    size = -(-count * bits // 8)
    piece = np.frombuffer(data, np.uint8)[begin : begin + size]
    if piece.size < size:
        raise CodecError(f"{len(data)} bytes are too few")
    planes = np.unpackbits(piece, bitorder="little")
    if planes[count * bits :].any():
        raise CodecError("the bits after the last one are not zero")
    weights = 1 << np.arange(bits, dtype=np.int64)
    codes: I64 = planes[: count * bits].reshape(count, bits).astype(np.int64) @ weights
    return codes


def _floats(data: bytes, values: str, count: int) -> F32:
    if len(data) < count * VALUES[values] // 8:
        raise CodecError(f"{len(data)} bytes are too few for {count} values")
    if values == "bfloat16":
        floats = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        floats = np.frombuffer(data, "<f4").astype(np.float32)
    if not np.isfinite(floats).all():
        raise CodecError("NaN or infinity among the values")
    return floats
