"""Digests of chunks: what each of the three tells."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from blake3 import blake3

from atoll.collectives.digests import (
    DIGEST_BYTES,
    Digest,
    no_digest,
    quick_digest,
    strong_digest,
)

DATA = np.arange(1000, dtype=np.uint8)


@pytest.mark.parametrize("digest", [strong_digest, quick_digest])
def test_one_bit_makes_another_digest(digest: Digest) -> None:
    other = DATA.copy()
    other[500] ^= 1
    assert digest(DATA) == digest(DATA.copy())
    assert digest(DATA) != digest(other)
    assert digest(DATA) != digest(DATA[:-1])
    assert len(digest(DATA)) == DIGEST_BYTES


def test_they_are_those_of_their_libraries() -> None:
    assert strong_digest(DATA) == blake3(DATA.tobytes()).digest()
    assert quick_digest(DATA) == xxhash.xxh3_128(DATA.tobytes()).digest() + bytes(16)
    assert no_digest(DATA)
    assert no_digest(DATA) == no_digest(DATA[:1])
