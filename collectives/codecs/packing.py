"""Pack codes of 1, 2, 4, 8 and 12 bits into bytes, low bits first, and turn bytes into values.

    4 bits    byte i = c[2i] | c[2i+1] << 4
    2 bits    byte i = c[4i] | c[4i+1] << 2 | c[4i+2] << 4 | c[4i+3] << 6
    1 bit     byte i = c[8i] | c[8i+1] << 1 | ...
    12 bits   three bytes for two codes: c0 & 255, c0 >> 8 | (c1 & 15) << 4, c1 >> 4

What is left of the last byte is zero, and bytes where it is not are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs.base import F32, U8, WORK_ELEMENTS, scratch
from atoll.collectives.errors import CodecError

U16 = NDArray[np.uint16]

# The codes of one byte as one little-endian word, and the shifts that bring them together.
_WORDS: Final[dict[int, tuple[str, type, tuple[int, ...]]]] = {
    4: ("<u2", np.uint16, (4,)),
    2: ("<u4", np.uint32, (6, 12)),
    1: ("<u8", np.uint64, (7, 14, 28)),
}


def packed_bytes(count: int, bits: int) -> int:
    """Return how many bytes so many codes take."""
    return -(-count * bits // 8)


def pack(codes: U8, bits: int, out: U8) -> None:
    """Pack uint8[n] into uint8[packed_bytes(n, bits)]; at most a tile, and ``codes`` is used up."""
    if bits == 8:
        np.copyto(out, codes)
        return
    per_byte = 8 // bits
    whole = codes.size // per_byte
    dtype, native, shifts = _WORDS[bits]
    words = codes[: whole * per_byte].view(dtype)
    shifted = scratch("packing", native, whole)
    for shift in shifts:
        np.right_shift(words, shift, out=shifted)
        np.bitwise_or(words, shifted, out=words)
    np.copyto(out[:whole], words, casting="unsafe")
    if out.size > whole:
        rest = codes[whole * per_byte :].tolist()
        out[whole] = sum(code << bits * at for at, code in enumerate(rest))


def unpack(data: U8, bits: int, count: int) -> U8:
    """Return the codes of a few bytes as new uint8[count]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: U8 = data[:, None] >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(-1)[:count]


def pack12(codes: U16, out: U8) -> None:
    """Pack uint16[n], each below 4096, into uint8[packed_bytes(n, 12)]."""
    even = codes[: codes.size - codes.size % 2]
    first, second = even[0::2], even[1::2]
    triples = out[: 3 * first.size].reshape(-1, 3)
    np.copyto(triples[:, 0], first, casting="unsafe")
    np.copyto(triples[:, 1], first >> 8 | second << 4, casting="unsafe")
    np.copyto(triples[:, 2], second >> 4, casting="unsafe")
    if codes.size % 2:
        out[-2], out[-1] = codes[-1] & 0xFF, codes[-1] >> 8


def unpack12(data: U8, count: int) -> U16:
    """Return the 12-bit codes as new uint16[count].

    Raises CodecError if the padding is not zero.
    """
    codes: U16 = np.empty(count, np.uint16)
    pairs = count // 2
    triples = data[: 3 * pairs].reshape(-1, 3).astype(np.uint16)
    codes[0 : 2 * pairs : 2] = triples[:, 0] | (triples[:, 1] & 0x0F) << 8
    codes[1 : 2 * pairs : 2] = triples[:, 1] >> 4 | triples[:, 2] << 4
    if count % 2:
        if data[-1] >> 4:
            raise CodecError("the bits after the last index are not zero")
        codes[-1] = int(data[-2]) | int(data[-1]) << 8
    return codes


def byte_table(levels: Sequence[float], bits: int) -> F32:
    """Return the values of the codes in each byte, float32[256, 8 // bits]."""
    codes = unpack(np.arange(256, dtype=np.uint8), bits, 256 * (8 // bits))
    table: F32 = np.array(levels, np.float32)[codes].reshape(256, -1)
    table.setflags(write=False)
    return table


def expand(data: U8, table: F32, out: F32) -> None:
    """Fill float32[n] with the values of packed codes, by ``byte_table``; at most a tile."""
    per_byte = table.shape[1]
    whole = out.size // per_byte
    index = scratch("index", np.intp, whole)
    np.copyto(index, data[:whole])
    # mode="clip" lets numpy write into `out` at once; no byte is outside the table.
    np.take(table, index, 0, out[: whole * per_byte].reshape(-1, per_byte), "clip")
    out[whole * per_byte :] = table[data[whole], : out.size % per_byte] if data.size > whole else 0


def check_codes(data: U8, table: F32, name: str) -> None:
    """Raise CodecError if ``table`` has NaN for a code in ``data``."""
    wrong = np.isnan(table).any(axis=1)
    if not wrong.any():
        return
    for lo in range(0, data.size, WORK_ELEMENTS):
        part = data[lo : lo + WORK_ELEMENTS]
        index = scratch("index", np.intp, part.size)
        found: NDArray[Any] = scratch("found", np.bool_, part.size)
        np.copyto(index, part)
        np.take(wrong, index, 0, found, "clip")
        if found.any():
            at = lo + int(found.argmax())
            codes = np.isnan(table[data[at]])
            element = at * table.shape[1] + int(codes.argmax())
            raise CodecError(f"the {name} code at element {element} is not allowed")


def check_padding(data: U8, bits: int, count: int, name: str) -> None:
    """Raise CodecError unless the bits after the last code are zero."""
    used = count * bits % 8
    if used and data[-1] >> used:
        raise CodecError(f"the bits after the last {name} code are not zero")
