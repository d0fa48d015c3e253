"""Sketches and distances: the same bits in numpy and in every kernel, and what they promise."""

from __future__ import annotations

import hashlib
import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from harness.floats import any_values, special_values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.collectives.audit import sketch as module
from atoll.collectives.audit.sketch import (
    SEED_BYTES,
    SKETCH_WIDTH,
    bucket_sums,
    distance,
    sign_bits,
    sketch,
)
from atoll.collectives.codecs import F32, U8
from atoll.collectives.errors import LocalProtocolError

SEED = bytes(range(SEED_BYTES))
MAX = float(np.finfo(np.float32).max)
checked = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def by_hand(values: F32, bits: U8) -> list[np.float32]:
    """The definition, element by element."""
    sums = [0.0] * SKETCH_WIDTH
    for k, value in enumerate(values.tolist()):
        minus = int(bits[k // 8]) >> k % 8 & 1
        sums[k % SKETCH_WIDTH] += -value if minus else value
    return [np.float32(min(max(total, -MAX), MAX)) for total in sums]


def distance_by_hand(values: F32, other: F32) -> np.float32:
    sums = [0.0] * SKETCH_WIDTH
    for k, (a, b) in enumerate(zip(values.tolist(), other.tolist(), strict=True)):
        sums[k % SKETCH_WIDTH] += (a - b) * (a - b)
    total = 0.0
    for part in sums:
        total += part
    return np.float32(min(math.sqrt(total), MAX))


def normal(count: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


# ---------------------------------------------------------------- the same bits everywhere


@given(values=any_values | special_values, chunk=st.integers(0, 2**40))
@checked
def test_kernels_sketch_by_the_definition(kernels: Any, values: F32, chunk: int) -> None:
    values = values.astype(np.float32)
    bits = sign_bits(SEED, chunk, values.size)
    found = np.array(by_hand(values, bits))
    assert sketch(values, bits).tobytes() == found.tobytes()
    other = np.roll(values, 1)
    assert distance(values, other).tobytes() == distance_by_hand(values, other).tobytes()


@given(values=any_values | special_values, chunk=st.integers(0, 2**40))
@checked
def test_numpy_sketches_by_the_definition(values: F32, chunk: int) -> None:
    values = values.astype(np.float32)
    bits = sign_bits(SEED, chunk, values.size)
    other = np.roll(values, 1)
    with patch.object(module, "KERNELS", None):
        assert sketch(values, bits).tobytes() == np.array(by_hand(values, bits)).tobytes()
        assert distance(values, other).tobytes() == distance_by_hand(values, other).tobytes()


@pytest.mark.parametrize("count", [*range(20), 4095, 32_768, 32_769, 65_535, 65_549, 262_144])
def test_kernels_and_numpy_agree_on_many(kernels: Any, count: int) -> None:
    """Of very different sizes, so that another order of the sums would show."""
    values = normal(count) * np.exp2(normal(count, 1) * 20).astype(np.float32)
    other = values + normal(count, 2)
    bits = sign_bits(SEED, 3, count)
    found = sketch(values, bits), distance(values, other)
    with patch.object(module, "KERNELS", None):
        plain = sketch(values, bits), distance(values, other)
    assert found[0].tobytes() == plain[0].tobytes()
    assert found[1].tobytes() == plain[1].tobytes()


def test_values_and_bits_may_not_change_and_may_lie_anywhere(kernels: Any) -> None:
    whole = normal(1000)
    values, bits = whole[3:900], sign_bits(SEED, 0, 897 + 8)[1:]
    before = whole.copy()
    whole.flags.writeable = False
    assert sketch(values, bits).tobytes() == np.array(by_hand(values, bits)).tobytes()
    assert distance(values, values) == 0
    assert (whole == before).all()


def test_what_is_too_large_for_float32_is_clamped(kernels: Any) -> None:
    values = np.full(64, MAX, np.float32)
    plus, minus = np.zeros(8, np.uint8), np.full(8, 255, np.uint8)
    assert (sketch(values, plus) == MAX).all()
    assert (sketch(values, minus) == -MAX).all()
    assert distance(values, -values) == np.float32(MAX)


def test_kernels_refuse_wrong_lengths(kernels: Any) -> None:
    values, out = normal(17), np.zeros(8)
    for bits in (np.zeros(2, np.uint8), np.zeros(4, np.uint8)):
        with pytest.raises(ValueError, match="bits has"):
            kernels.sketch(values, bits, out)
    with pytest.raises(ValueError, match="out has"):
        kernels.sketch(values, np.zeros(3, np.uint8), np.zeros(7))
    with pytest.raises(ValueError, match="other has"):
        kernels.squares(values, normal(16), out)
    with pytest.raises(ValueError, match="out has"):
        kernels.squares(values, values, np.zeros(9))
    with pytest.raises(ValueError, match="shares memory"):
        kernels.squares(out.view(np.float32), normal(16), out)
    assert (out == 0).all()


# ---------------------------------------------------------------- what they promise


def test_signs_are_those_of_shake256() -> None:
    """The format: other implementations must draw the same."""
    text = b"atoll-sketch" + SEED + (5).to_bytes(8, "little")
    assert sign_bits(SEED, 5, 77).tobytes() == hashlib.shake_256(text).digest(10)
    assert sign_bits(SEED, 5, 0).size == 0


def test_signs_differ_by_seed_and_chunk_and_are_fair() -> None:
    many = 1 << 16
    drawn = [sign_bits(SEED, 0, many), sign_bits(SEED, 1, many), sign_bits(bytes(32), 0, many)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        differing = int(np.unpackbits(drawn[a] ^ drawn[b]).sum())
        assert abs(differing - many // 2) < 5 * math.sqrt(many) / 2
    assert abs(int(np.unpackbits(drawn[0]).sum()) - many // 2) < 5 * math.sqrt(many) / 2


@pytest.mark.parametrize("seed", [b"", bytes(31), bytes(33)])
def test_a_seed_has_32_bytes(seed: bytes) -> None:
    with pytest.raises(LocalProtocolError, match="32 bytes"):
        sign_bits(seed, 0, 8)


def test_the_sketch_of_a_sum_is_the_sum_of_sketches() -> None:
    """Of integers every sum is exact."""
    dice = np.random.default_rng(5)
    parts = dice.integers(-100, 100, (4, 1001)).astype(np.float32)
    bits = sign_bits(SEED, 9, 1001)
    whole = sketch(parts.sum(axis=0), bits)
    assert (whole == sum(sketch(part, bits) for part in parts)).all()


def test_the_squared_length_is_estimated_without_bias() -> None:
    values = normal(203)
    exact = float((values.astype(np.float64) ** 2).sum())
    draws = 4000
    found = [
        float((sketch(values, sign_bits(SEED, chunk, 203)).astype(np.float64) ** 2).sum())
        for chunk in range(draws)
    ]
    # One estimate has a standard deviation of sqrt(2 / 8) of the squared length.
    assert abs(np.mean(found) / exact - 1) < 5 * 0.5 / math.sqrt(draws)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1001])
def test_bucket_sums(count: int) -> None:
    values = np.random.default_rng(count).integers(0, 100, count).astype(np.float64)
    assert bucket_sums(values).tolist() == [values[b::SKETCH_WIDTH].sum() for b in range(8)]
