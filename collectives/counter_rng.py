"""Compute random numbers from (key, index) alone, for codecs that round or choose at random.

A counter-based generator has no state: any part of a stream can be computed by anybody, in any
order, on any processor. So an encoding can be repeated for an audit, and the C kernels and numpy
agree. It is a hash, good enough to round numbers with, and it keeps nothing secret.

The key is 64 bits; ``mixed`` is one step of splitmix64, of which k0 is the low half and k1 the high
half. All arithmetic below is modulo 2**32::

    x = index * 0x9E3779B9 + k0
    x = (x ^ x >> 16) * 0x7FEB352D + k1
    x = (x ^ x >> 15) * 0x846CA68B
    x =  x ^ x >> 16

The multipliers and shifts are those of Wellons' lowbias32 (github.com/skeeto/hash-prospector). The
two halves of the key enter at different places, so that the streams of two keys are not
permutations of each other. The index is modulo 2**32, far beyond the elements of a chunk.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]

KEY_BITS: Final = 64
_MASK64: Final = (1 << KEY_BITS) - 1
_MASK32: Final = 0xFFFF_FFFF
# Work goes through pieces that stay in the first-level cache beside their copy.
_PIECE: Final = 8_192
_STEP: Final = 0x9E37_79B9
_STEPS: Final[U32] = (np.arange(_PIECE, dtype=np.uint64) * _STEP & _MASK32).astype(np.uint32)
_STEPS.setflags(write=False)


def derive_key(*parts: bytes | int) -> int:
    """Return a 64-bit key made of what it is for, such as run, round, chunk and peer.

    The first eight bytes, little-endian, of SHA-256 over the parts, each with its length in front.
    An integer is taken as sixteen bytes, little-endian and signed.
    """
    hashed = hashlib.sha256()
    for part in parts:
        data = part.to_bytes(16, "little", signed=True) if isinstance(part, int) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(hashed.digest()[:8], "little")


def random_words(key: int, first: int, out: U32) -> None:
    """Fill uint32[n] with the numbers ``first`` to ``first + n - 1`` of the key's stream."""
    low, high = _halves(key)
    spare: U32 = np.empty(min(_PIECE, out.size), np.uint32)
    for lo in range(0, out.size, _PIECE):
        x = out[lo : lo + _PIECE]
        shifted = spare[: x.size]
        np.add(_STEPS[: x.size], np.uint32(((first + lo) * _STEP + low) & _MASK32), out=x)
        np.right_shift(x, 16, out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        np.multiply(x, np.uint32(0x7FEB_352D), out=x)
        np.add(x, np.uint32(high), out=x)
        np.right_shift(x, 15, out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        np.multiply(x, np.uint32(0x846C_A68B), out=x)
        np.right_shift(x, 16, out=shifted)
        np.bitwise_xor(x, shifted, out=x)


def random_word(key: int, index: int) -> int:
    """Return number ``index`` of the key's stream, as ``random_words`` gives it."""
    low, high = _halves(key)
    x = (index * _STEP + low) & _MASK32
    x = ((x ^ x >> 16) * 0x7FEB_352D + high) & _MASK32
    x = (x ^ x >> 15) * 0x846C_A68B & _MASK32
    return x ^ x >> 16


def unit_floats(words: U32) -> NDArray[np.float32]:
    """Turn random words into multiples of 2**-24 in [0, 1), float32[n].

    They come from the upper 24 bits of each word, and take the place of the words.
    """
    np.right_shift(words, 8, out=words)
    floats = words.view(np.float32)
    # As int32, because that conversion is one instruction on every processor.
    np.copyto(floats, words.view(np.int32), casting="unsafe")
    np.multiply(floats, np.float32(2**-24), out=floats)
    return floats


def _halves(key: int) -> tuple[int, int]:
    mixed = (key + 0x9E37_79B9_7F4A_7C15) & _MASK64
    mixed = (mixed ^ mixed >> 30) * 0xBF58_476D_1CE4_E5B9 & _MASK64
    mixed = (mixed ^ mixed >> 27) * 0x94D0_49BB_1331_11EB & _MASK64
    mixed ^= mixed >> 31
    return mixed & _MASK32, mixed >> 32
