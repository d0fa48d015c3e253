"""Error bounds: what encoding did to any vector lies within them, and not far below."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from harness.floats import any_values, special_values
from harness.roundtrip import decoded, encoded
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.audit import sketch as module
from atoll.collectives.audit.sketch import check_codec, error_bounds, widened
from atoll.collectives.codecs import CODECS, F32, NUMPY_CODECS, Codec, get_codec
from atoll.collectives.errors import CodecError, ConfigError

BOUNDED = ["float32", "bfloat16", "float16", "int8", "int8_sr", "int8_shift"]
BOUNDED += ["int4", "int4_sr", "int4_shift", "fp4_e3m0"]
every_codec = pytest.mark.parametrize("name", BOUNDED)
# Beyond them these clamp.
LARGEST = {"float16": 65_504.0, "bfloat16": 2.0**128 - 2.0**120}
LARGEST |= {"int8_shift": 3.38e38, "int4_shift": 3.17e38}


def bucketed(codec: Codec, values: F32, key: int = 0) -> tuple[list[float], list[float]]:
    """The squared errors that there are, and their bounds."""
    data = encoded(codec, values, key)
    back = decoded(codec, data, values.size)
    squares = (values.astype(np.float64) - back) ** 2
    return [float(squares[b::8].sum()) for b in range(8)], error_bounds(
        codec, data, values.size
    ).tolist()


@every_codec
@settings(max_examples=80, deadline=None)
@given(values=any_values | special_values, key=st.integers(0, 2**64 - 1))
def test_every_error_is_within_its_bound(name: str, values: F32, key: int) -> None:
    limit = np.float32(LARGEST.get(name, np.finfo(np.float32).max))
    values = np.clip(values.astype(np.float32), -limit, limit)
    for codec in (CODECS[name], NUMPY_CODECS[name]):
        for value in values[:20]:  # one at a time, where no other hides it
            errors, bounds = bucketed(codec, np.array([value], np.float32), key)
            assert errors[0] <= bounds[0]
            assert bounds[1:] == [0.0] * 7
        errors, bounds = bucketed(codec, values, key)
        assert all(error <= bound for error, bound in zip(errors, bounds, strict=True))


@every_codec
@pytest.mark.parametrize("count", [1, 7, 63, 64, 65, 255, 256, 257, 1000, 70_001])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-36, 1e-42, 1e4])
def test_bounds_are_not_far_above_errors(name: str, count: int, scale: float) -> None:
    codec = get_codec(name)
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    errors, bounds = bucketed(codec, values * np.float32(scale), key=count)
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True))
    if name == "float32":
        assert bounds == [0.0] * 8
    elif count > 1000 and scale > 1e-30:
        # An error that is evenly spread has a third of the largest square, of levels less.
        assert all(bound < 9 * error for error, bound in zip(errors, bounds, strict=True))


@pytest.mark.parametrize("name", ["int8", "int4", "fp4_e3m0", "bfloat16", "float16"])
def test_the_worst_that_rounding_does_reaches_the_bound(name: str) -> None:
    """Values half-way between two that can be encoded."""
    between = {"int8": 0.5, "int4": 2.5, "fp4_e3m0": 0.125, "bfloat16": 1 + 2**-8}
    top = {"int8": 127, "int4": 7, "fp4_e3m0": 16, "bfloat16": 1, "float16": 1}
    values = np.full(64, between.get(name, 1 + 2.0**-11), np.float32)
    values[0] = top[name]  # fixes the scale
    errors, bounds = bucketed(get_codec(name), values)
    assert errors[1] <= bounds[1] < 1.001 * errors[1]


@pytest.mark.parametrize("name", ["int8", "int8_sr", "int8_shift", "int4", "int4_sr", "fp4_e3m0"])
def test_a_scale_that_no_value_shows_excuses_nothing(name: str) -> None:
    """Zeros, or the smallest codes, under a scale of a million."""
    codec = get_codec(name)
    values = np.random.default_rng(0).uniform(-0.01, 0.01, 1024).astype(np.float32)
    data = encoded(codec, values)
    header = codec.contract.header_bytes
    blocks = 1024 // codec.contract.block
    data[header + 4 * blocks :] = 0
    honest = error_bounds(codec, data, 1024)
    data[header : header + 4 * blocks].view("<f4")[:] = 1e6
    forged = error_bounds(codec, data, 1024)
    if "shift" in name:  # zeros decode to the shifts, that are large then
        worst = np.abs(decoded(codec, data, 1024)).max() / 100
        assert forged.max() <= 128 * worst**2
    else:
        assert forged.tolist() == honest.tolist()
        assert forged.max() < 1e-50


def test_codecs_without_bounds_are_refused() -> None:
    for name, codec in CODECS.items():
        if name in BOUNDED:
            check_codec(codec)
            continue
        with pytest.raises(ConfigError, match="audited rounds cannot"):
            check_codec(codec)
        with pytest.raises(ConfigError, match="use one of float32"):
            error_bounds(codec, np.zeros(8, np.uint8), 1)


def test_malformed_bytes_have_no_bounds() -> None:
    for name in BOUNDED:
        codec = get_codec(name)
        data = encoded(codec, np.ones(100, np.float32))
        with pytest.raises(CodecError):
            error_bounds(codec, data[:-1], 100)
        data[:] = 255
        with pytest.raises(CodecError):
            error_bounds(codec, data, 100)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 20), seed=st.integers(0, 2**32 - 1), size=st.integers(1, 100))
def test_sums_in_float32_are_within_the_widened_bounds(n: int, seed: int, size: int) -> None:
    """With parts that are long and almost cancel out, where rounding is all that is left."""
    dice = np.random.default_rng(seed)
    parts = dice.standard_normal((n, size)).astype(np.float32)
    parts *= np.exp2(dice.integers(-20, 20, (n, 1))).astype(np.float32)
    parts = np.concatenate([parts, -parts + dice.normal(0, 1e-3, parts.shape)]).astype(np.float32)
    factors = dice.uniform(-1, 1, len(parts)).astype(np.float32)
    factors[n:] = factors[:n]
    total = np.zeros(size, np.float32)
    for factor, part in zip(factors, parts, strict=True):
        total += factor * part
    exact = (factors.astype(np.float64)[:, None] * parts).sum(axis=0)
    norms = np.linalg.norm(parts - total, axis=1).astype(np.float32)
    length = float(np.linalg.norm(total))
    found = widened(np.zeros(8), factors.astype(np.float64), norms, length, size)
    assert ((total - exact) ** 2).sum() <= found.min()
    both = widened(np.full(8, 4.0), factors.astype(np.float64), norms, length, size)
    assert np.allclose(np.sqrt(both), 2.0 + np.sqrt(found))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 255, 256, 257, 1000, 70_001])
def test_kernels_find_the_bounds_of_numpy(kernels: Any, count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    values[:: count // 3 + 1] *= -100
    for name in BOUNDED:
        data = encoded(get_codec(name), values)
        found = error_bounds(get_codec(name), data, count)
        with patch.object(module, "KERNELS", None):
            assert error_bounds(get_codec(name), data, count).tobytes() == found.tobytes()


def test_kernels_find_the_largest_of_no_other_blocks(kernels: Any) -> None:
    values, out = np.arange(10, dtype=np.float32) - 7, np.zeros(4, np.float32)
    kernels.peaks(values, 3, out)
    assert out.tolist() == [7, 4, 1, 2]
    kernels.peaks(values[:0], 3, out[:0])
    for block, into in ((0, out), (-1, out), (2, out), (4, out), (3, values[:4])):
        with pytest.raises(ValueError, match=r"blocks|count|out has|shares"):
            kernels.peaks(values, block, into)
