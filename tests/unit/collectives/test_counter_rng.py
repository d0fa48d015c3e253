"""The counter-based generator: its definition, and that its numbers look random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.counter_rng import (
    U32,
    derive_key,
    random_word,
    random_words,
    unit_floats,
)

M32, M64 = 2**32 - 1, 2**64 - 1
keys = st.integers(0, M64)


def words(key: int, first: int, count: int) -> U32:
    out = np.empty(count, np.uint32)
    random_words(key, first, out)
    return out


def naive(key: int, index: int) -> int:
    mixed = (key + 0x9E3779B97F4A7C15) & M64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & M64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & M64
    mixed ^= mixed >> 31
    x = (index * 0x9E3779B9 + (mixed & M32)) & M32
    x = ((x ^ x >> 16) * 0x7FEB352D + (mixed >> 32)) & M32
    x = ((x ^ x >> 15) * 0x846CA68B) & M32
    return x ^ x >> 16


@given(key=keys, first=st.integers(0, 2**32), count=st.integers(0, 40))
def test_words_follow_the_definition(key: int, first: int, count: int) -> None:
    assert words(key, first, count).tolist() == [naive(key, first + i) for i in range(count)]


def test_known_words() -> None:
    """For the kernels in C and on the GPU."""
    assert words(0, 0, 4).tolist() == KNOWN[0]
    assert words(0x0123456789ABCDEF, 262_140, 4).tolist() == KNOWN[1]
    # The first output of splitmix64 with seed 0 is 0xE220A8397B1DCDAF.
    x = ((0x7B1DCDAF ^ 0x7B1DCDAF >> 16) * 0x7FEB352D + 0xE220A839) & M32
    x = ((x ^ x >> 15) * 0x846CA68B) & M32
    assert KNOWN[0][0] == x ^ x >> 16


KNOWN = [
    [3716298144, 2444944381, 1034661673, 1429616293],
    [417071062, 354610881, 2993715465, 372556618],
]


@given(key=keys, cut=st.integers(0, 20_000))
def test_any_part_of_a_stream_can_be_computed_by_itself(key: int, cut: int) -> None:
    whole = words(key, 5, 20_000)
    assert words(key, 5 + cut, 20_000 - cut).tolist() == whole[cut:].tolist()


def test_unit_floats_are_the_upper_bits() -> None:
    stream = words(3, 0, 5000)
    floats = unit_floats(stream.copy())
    assert floats.dtype == np.float32
    assert (floats.astype(np.float64) * 2**24).tolist() == (stream >> 8).tolist()
    assert unit_floats(np.array([0, M32], np.uint32)).tolist() == [0, 1 - 2**-24]


# ---------------------------------------------------------------- quality

SOME_KEYS = [0, 1, 2, 2**32, 2**63, M64, derive_key(b"run", 5)]
N = 2**17


@pytest.mark.parametrize("key", SOME_KEYS)
def test_every_bit_is_set_half_the_time(key: int) -> None:
    bits = np.unpackbits(words(key, 0, N).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(N)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("key", SOME_KEYS)
def test_bytes_are_evenly_distributed(key: int, shift: int) -> None:
    counts = np.bincount(words(key, 0, N) >> shift & 255, minlength=256)
    chi_square = np.sum((counts - N / 256) ** 2) / (N / 256)
    assert 255 - 5 * np.sqrt(510) < chi_square < 255 + 5 * np.sqrt(510)


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 256, 4096])
@pytest.mark.parametrize("key", SOME_KEYS)
def test_neighbours_are_not_correlated(key: int, lag: int) -> None:
    unit = unit_floats(words(key, 0, N)).astype(np.float64) - 0.5
    assert abs(np.mean(unit[:-lag] * unit[lag:]) * 12) < 5 / np.sqrt(N)


@pytest.mark.parametrize("bit", [*range(0, 64, 7), 31, 32, 62])
def test_streams_of_similar_keys_have_nothing_in_common(bit: int) -> None:
    one, other = words(77, 0, N), words(77 ^ 1 << bit, 0, N)
    flipped = np.unpackbits((one ^ other).view(np.uint8)).mean()
    assert flipped == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(32 * N))
    # Nor is one a permutation of the other: two random streams of this length share N^2 / 2^32.
    assert np.intersect1d(one, other).size == pytest.approx(N**2 / 2**32, abs=12)


# ---------------------------------------------------------------- keys


def test_derived_keys_tell_all_parts_apart() -> None:
    parts = [(b"run", 1, 2, b"peer"), (b"run", 2, 1, b"peer"), (b"run", 1, 2, b"peer", 0)]
    parts += [(b"ru", b"n", 1, 2, b"peer"), (b"run", 1, 2, b"reep"), (b"run", -1, 2, b"peer")]
    derived = {derive_key(*part) for part in parts}
    assert len(derived) == len(parts)
    assert all(0 <= key < 2**64 for key in derived)


def test_a_derived_key_never_changes() -> None:
    assert derive_key(b"run", 7, 3, b"peer") == KEY_OF_RUN


KEY_OF_RUN = 0x98690DB400F81860


def test_one_word_is_that_of_the_stream() -> None:
    words = np.empty(40, np.uint32)
    for key in (0, 7, (1 << 64) - 1):
        random_words(key, 2**32 - 20, words)
        assert [random_word(key, 2**32 - 20 + n) for n in range(40)] == words.tolist()
