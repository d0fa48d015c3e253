"""Codecs of the nearest level: the search, the formats of others, and the bytes."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from harness.roundtrip import decoded, draw, encoded, through
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.codecs.levels import DYNAMIC_LEVELS, LEVEL_CODECS
from atoll.collectives.errors import CodecError

E3M0 = get_codec("fp4_e3m0")
E3M0_SCALE_MAX = np.nextafter(np.finfo(np.float32).max / np.float32(16), np.float32(0))
TINY = np.finfo(np.float32).tiny
few = settings(max_examples=40)
finite = arrays(
    np.float32,
    st.integers(0, 700),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def blocks_of(values: F32, width: int) -> list[F32]:
    return [values[lo : lo + width] for lo in range(0, values.size, width)]


@pytest.mark.parametrize("codec", LEVEL_CODECS, ids=lambda codec: codec.name)
def test_the_search_finds_the_nearest_level(codec) -> None:
    """Against brute force in exact arithmetic, at, just below and just above every threshold."""
    levels = codec.levels
    allowed = [code for code in range(levels.values.size) if not np.isnan(levels.values[code])]
    exact = {code: float(levels.values[code]) for code in allowed}
    ordered = sorted(set(exact.values()))
    middles = [(a + b) / 2 for a, b in itertools.pairwise(ordered)]
    around = np.array([*ordered, *middles, 1e5, -1e5, 0.0, 1e-44], np.float32)
    values = np.concatenate(
        [
            around,
            np.nextafter(around, np.float32(np.inf)),
            np.nextafter(around, np.float32(-np.inf)),
        ]
    )
    values = np.concatenate([values, draw("gauss", 300) * np.float32(max(ordered) / 3)])
    codes = np.empty(values.size, np.uint8)
    levels.nearest(values.copy(), codes)
    for value, code in zip(values.tolist(), codes.tolist(), strict=True):
        signs = [
            c
            for c in allowed
            if not levels.signed or bool(c >> levels.bits - 1) == (math.copysign(1, value) < 0)
        ]
        want = min(signs, key=lambda c: (abs(exact[c] - value), c % 2))
        assert code == want, (value, code, want)


@pytest.mark.parametrize("codec", LEVEL_CODECS, ids=lambda codec: codec.name)
def test_floats_with_equal_upper_halves_share_at_most_one_threshold(codec) -> None:
    steps = codec.levels.thresholds[: codec.levels.count - 1]
    cells = steps.view(np.uint32) >> 16
    assert np.unique(cells).size == cells.size


@few
@given(finite)
def test_e3m0_bytes_follow_the_definition(values: F32) -> None:
    levels = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    scales, codes = [], []
    for block in blocks_of(values, 64):
        scale = min(np.abs(block).max() / np.float32(16), E3M0_SCALE_MAX)
        if scale < 4 * TINY:  # a quarter of it must be a normal number
            scale = np.float32(0)
        scales.append(scale)
        for value in block:
            scaled = abs(float(value / (scale or np.float32(1))))
            index = min(range(8), key=lambda i: (abs(levels[i] - scaled), i % 2))
            codes.append(bool(np.signbit(value)) << 3 | index)
    codes += [0] * (len(codes) % 2)
    packed = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    want = np.array(scales, "<f4").tobytes() + packed
    assert encoded(E3M0, values).tobytes() == want


MX = {
    "fp8_e4m3": (8, 448, ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    "fp8_e5m2": (15, 57344, ml_dtypes.float8_e5m2, torch.float8_e5m2),
    "fp4_e2m1": (2, 6, ml_dtypes.float4_e2m1fn, None),
}


@pytest.mark.parametrize("name", MX)
@few
@given(values=finite)
def test_microscaling_formats_are_those_of_ml_dtypes_and_torch(name: str, values: F32) -> None:
    exponent_max, top, dtype, torch_dtype = MX[name]
    data, got = encoded(get_codec(name), values), through(get_codec(name), values)
    for at, block in enumerate(blocks_of(values, 32)):
        part = got[32 * at : 32 * at + block.size]
        absmax = float(np.abs(block).max())
        if not data[at]:
            # The least scale makes the format's smallest subnormal a normal float32.
            scale_min = 2.0**-126 / float(ml_dtypes.finfo(dtype).smallest_subnormal)
            assert absmax < scale_min * 2.0**exponent_max
            assert not part.any()
            continue
        exponent = math.frexp(absmax)[1] - 1 - exponent_max
        assert data[at] == exponent + 127
        scale = np.float32(2.0**exponent)
        scaled = np.clip(block / scale, -top, top)
        assert (part == scaled.astype(dtype).astype(np.float32) * scale).all()
        if torch_dtype is not None:
            cast = torch.from_numpy(scaled).to(torch_dtype).float().numpy()
            assert part.tobytes() == (cast * scale).tobytes()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_microscaling_refuses_scales_that_decode_to_extremes(name: str) -> None:
    codec = get_codec(name)
    data = encoded(codec, np.ones(64, np.float32))
    for byte in (255, 254, 1):
        data[1] = byte
        with pytest.raises(CodecError, match="scale of block 1"):
            codec.check(data, 64)
    data[1] = 0
    assert not decoded(codec, data, 64)[32:].any()


@pytest.mark.parametrize(("name", "code"), [("fp8_e4m3", 0x7F), ("fp8_e5m2", 0xFC)])
def test_fp8_refuses_codes_that_are_no_numbers(name: str, code: int) -> None:
    data = encoded(get_codec(name), np.ones(64, np.float32))
    data[2 + 40] = code
    with pytest.raises(CodecError, match="element 40"):
        get_codec(name).check(data, 64)


def test_dynamic_map_is_that_of_dettmers() -> None:
    assert DYNAMIC_LEVELS.size == 256
    assert (np.diff(DYNAMIC_LEVELS) > 0).all()
    assert {0.0, 1.0} <= set(DYNAMIC_LEVELS.tolist())
    assert DYNAMIC_LEVELS[0] == pytest.approx(-(1 - 0.9 / 128))
    positive = DYNAMIC_LEVELS[DYNAMIC_LEVELS > 0]
    assert positive[0] == pytest.approx(0.55e-6)
    assert positive[-2] == pytest.approx(1 - 0.9 / 128)


@few
@given(values=finite)
def test_dynamic8_keeps_the_largest_value_of_a_block(values: F32) -> None:
    back = through(get_codec("dynamic8"), values)
    for lo in range(0, values.size, 256):
        block = values[lo : lo + 256]
        at = int(np.abs(block).argmax())
        if abs(block[at]) > 1e-30:
            assert back[lo + at] == block[at]


def test_int2_levels_are_those_of_lloyd_and_max() -> None:
    """A level is the mean of the Gaussian values that are nearest to it."""
    inner, outer = (float(level) for level in get_codec("int2").levels.values[:2])
    middle = (inner + outer) / 2
    density = math.exp(-(middle**2) / 2) / math.sqrt(2 * math.pi)
    above = math.erfc(middle / math.sqrt(2)) / 2
    assert outer == pytest.approx(density / above, abs=2e-4)
    assert inner == pytest.approx((1 / math.sqrt(2 * math.pi) - density) / (0.5 - above), abs=2e-4)


@few
@given(arrays(np.float32, st.integers(1, 600), elements=st.floats(-100, 100, width=32)))
def test_int2_chooses_by_rms_and_scales_by_least_squares(values: F32) -> None:
    data = encoded(get_codec("int2"), values)
    levels = get_codec("int2").levels.values.astype(np.float64)
    blocks = blocks_of(values, 256)
    scales, codes = data[: 4 * len(blocks)].view("<f4"), data[4 * len(blocks) :]
    codes = (codes[:, None] >> np.array([0, 2, 4, 6]) & 3).reshape(-1)
    for at, block in enumerate(blocks):
        chosen = levels[codes[256 * at : 256 * at + block.size]]
        exact = block.astype(np.float64)
        rms = math.sqrt(np.mean(exact**2))
        if rms > 1e-6:
            sure = np.abs(np.abs(exact) / rms - 0.9816) > 1e-5
            assert ((np.abs(chosen) > 1) == (np.abs(exact) > 0.9816 * rms))[sure].all()
            assert scales[at] == pytest.approx(chosen @ exact / (chosen @ chosen), rel=1e-6)
        assert (np.signbit(chosen) == np.signbit(block)).all()


@given(arrays(np.float32, st.integers(1, 600), elements=st.floats(-100, 100, width=32)))
def test_sign_is_the_sign_times_the_mean_magnitude(values: F32) -> None:
    back = through(get_codec("sign"), values)
    for lo in range(0, values.size, 256):
        block, part = values[lo : lo + 256], back[lo : lo + 256]
        mean = np.abs(block.astype(np.float64)).mean()
        assert np.abs(part) == pytest.approx(mean if mean > 1e-37 else 0, rel=1e-6)
        assert (np.signbit(part) == np.signbit(block)).all()
