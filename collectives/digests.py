"""Choose by what the bytes of a chunk are known: three functions of one kind.

A digest says whether two peers have the same bytes. Where somebody may give others bytes that only
look the same, or where bytes are kept and checked later, it has to be the strong one. It costs more
than the sum of two chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

DIGEST_BYTES: Final = 32

Digest: TypeAlias = Callable[[NDArray[np.uint8]], bytes]


def strong_digest(*parts: Any) -> bytes:
    """Return the BLAKE3 of some bytes, one part after the other.

    ``parts`` are arrays of uint8 or anything with the bytes of one. Nobody finds others with the
    same; and it takes a third of what SHA-256 takes.
    """
    hashed = blake3()
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def quick_digest(data: NDArray[np.uint8]) -> bytes:
    """Return 128 bits that differ if bytes were changed by accident, padded to DIGEST_BYTES.

    XXH3, at the speed of memory. Whoever wants to finds other bytes with the same.
    """
    return xxhash.xxh3_128_digest(data.data) + bytes(DIGEST_BYTES - 16)


def no_digest(data: NDArray[np.uint8]) -> bytes:
    """Return a mark that says only that a chunk is here."""
    return b"-"
