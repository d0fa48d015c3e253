"""Codecs: exact layout, distortion, determinism, and what they refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atoll.collectives.codecs import (
    BLOCK_ELEMENTS,
    CODECS,
    F32,
    SCALE_MAX,
    SCALE_MIN,
    TILE_ELEMENTS,
    U8,
    Codec,
    get_codec,
)
from atoll.collectives.errors import CodecError

FLOAT_MAX = float(np.finfo(np.float32).max)
INT8 = get_codec("int8")
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
finite = arrays(
    np.float32,
    st.integers(0, 700),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def encoded(codec: Codec, values: F32) -> U8:
    out = np.full(codec.encoded_bytes(values.size), 0xEE, np.uint8)
    codec.encode(values, out)
    return out


def decoded(codec: Codec, data: U8, count: int) -> F32:
    out = np.full(count, np.nan, np.float32)
    codec.decode(data, out)
    return out


def naive_int8(values: F32) -> bytes:
    """The definition, block by block, in float32 scalars."""
    scales, codes = [], []
    for lo in range(0, values.size, BLOCK_ELEMENTS):
        block = values[lo : lo + BLOCK_ELEMENTS]
        scale = min(np.float32(np.abs(block).max()) / np.float32(127), SCALE_MAX)
        if scale < SCALE_MIN:
            scale = np.float32(0)
        scales.append(scale)
        codes += [0 if scale == 0 else round(float(value / scale)) for value in block]
    return np.array(scales, "<f4").tobytes() + np.array(codes, np.int8).tobytes()


@given(finite)
def test_int8_bytes_follow_the_definition(values: F32) -> None:
    assert encoded(INT8, values).tobytes() == naive_int8(values)


@given(finite)
def test_float32_bytes_are_the_values(values: F32) -> None:
    assert encoded(get_codec("float32"), values).tobytes() == values.astype("<f4").tobytes()


@given(finite)
def test_int8_error_is_at_most_half_a_step(values: F32) -> None:
    back = decoded(INT8, encoded(INT8, values), values.size).astype(np.float64)
    for lo in range(0, values.size, BLOCK_ELEMENTS):
        block = values[lo : lo + BLOCK_ELEMENTS].astype(np.float64)
        bound = np.abs(block).max() / 127 / 2 * (1 + 2e-5) + 127 * float(SCALE_MIN)
        assert np.abs(block - back[lo : lo + BLOCK_ELEMENTS]).max() <= bound


@every_codec
@given(values=finite)
def test_encoding_decoded_bytes_gives_the_same_bytes(codec: Codec, values: F32) -> None:
    once = encoded(codec, values)
    # -0.0 decodes from code 0 as 0.0, so values may differ in that sign; bytes may not.
    assert encoded(codec, decoded(codec, once, values.size)).tobytes() == once.tobytes()


@every_codec
@given(values=finite, factor=st.floats(0, 1, width=32), start=st.floats(-4, 4, width=32))
def test_decode_add_is_literally_multiply_then_add(
    codec: Codec, values: F32, factor: float, start: float
) -> None:
    data = encoded(codec, values)
    into = np.full(values.size, start, np.float32)
    want = into + np.float32(factor) * decoded(codec, data, values.size)
    codec.decode_add(data, factor, into)
    assert into.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("draw", "expected"),
    [("standard_normal", 4.9e-5), ("laplace", 1.0e-4)],
    ids=["gauss", "laplace"],
)
def test_int8_distortion_matches_the_reference_table(draw: str, expected: float) -> None:
    values = getattr(np.random.default_rng(7), draw)(size=2**20).astype(np.float32)
    error = decoded(INT8, encoded(INT8, values), values.size).astype(np.float64) - values
    assert np.sum(error**2) / np.sum(values.astype(np.float64) ** 2) == pytest.approx(
        expected, rel=0.05
    )


@every_codec
@pytest.mark.parametrize("extra", [-1, 0, 1, 257])
def test_tiles_are_invisible(codec: Codec, extra: int) -> None:
    count = TILE_ELEMENTS + extra
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    data = encoded(codec, values)
    if codec is INT8:
        assert data.tobytes() == naive_int8(values)
    into = np.ones(count, np.float32)
    codec.decode_add(data, 0.3, into)
    want = np.float32(1) + np.float32(0.3) * decoded(codec, data, count)
    assert into.tobytes() == want.tobytes()


@every_codec
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 255, 256, 299])
def test_encode_refuses_what_is_not_finite(codec: Codec, bad: float, at: int) -> None:
    values = np.ones(300, np.float32)
    values[at] = bad
    with pytest.raises(CodecError, match="NaN or infinity"):
        encoded(codec, values)


@pytest.mark.parametrize("extreme", [FLOAT_MAX, -FLOAT_MAX, 1e-38, 1e-44, 127 * float(SCALE_MIN)])
def test_int8_stays_finite_and_in_range_at_the_extremes(extreme: float) -> None:
    values = np.array([extreme, 0, -extreme / 3, extreme / 2], np.float32)
    back = decoded(INT8, encoded(INT8, values), 4)
    assert np.isfinite(back).all()
    assert np.abs(back - values).max() <= abs(extreme) / 127 + 127 * float(SCALE_MIN)


def test_int8_zero_block_has_scale_and_codes_zero() -> None:
    assert not encoded(INT8, np.zeros(256, np.float32)).any()


@pytest.mark.parametrize(
    "scale", [np.nan, np.inf, -np.inf, -1.0, -0.0, 1e-40, float(np.nextafter(SCALE_MAX, np.inf))]
)
def test_int8_refuses_bad_scales_and_leaves_the_output_alone(scale: float) -> None:
    data = encoded(INT8, np.ones(600, np.float32))
    data[4:8].view("<f4")[:] = scale
    into = np.full(600, 5, np.float32)
    for refused in (
        lambda: INT8.check(data, 600),
        lambda: INT8.decode(data, into),
        lambda: INT8.decode_add(data, 1.0, into),
    ):
        with pytest.raises(CodecError, match="scale of block 1"):
            refused()
    assert (into == 5).all()


def test_int8_refuses_code_minus_128() -> None:
    data = encoded(INT8, np.ones(600, np.float32))
    data[3 * 4 + 417] = 0x80
    with pytest.raises(CodecError, match="element 417"):
        INT8.decode(data, np.empty(600, np.float32))


def test_float32_refuses_nan_from_the_wire() -> None:
    data = np.array([1, np.nan], "<f4").view(np.uint8)
    with pytest.raises(CodecError, match="NaN"):
        get_codec("float32").decode_add(data, 1.0, np.zeros(2, np.float32))


@every_codec
@pytest.mark.parametrize("wrong", [-1, 1])
def test_every_wrong_length_is_refused(codec: Codec, wrong: int) -> None:
    bad = np.zeros(codec.encoded_bytes(300) + wrong, np.uint8)
    values = np.zeros(300, np.float32)
    for refused in (
        lambda: codec.encode(values, bad),
        lambda: codec.check(bad, 300),
        lambda: codec.decode(bad, values),
        lambda: codec.decode_add(bad, 1.0, values),
    ):
        with pytest.raises(CodecError, match="300 elements take"):
            refused()


@every_codec
@given(raw=st.binary(min_size=0, max_size=900))
def test_any_bytes_are_refused_or_decode_to_finite_values(codec: Codec, raw: bytes) -> None:
    count = next((n for n in range(len(raw) + 1) if codec.encoded_bytes(n) >= len(raw)), 0)
    out = np.zeros(count, np.float32)
    try:
        codec.decode(np.frombuffer(raw, np.uint8), out)
    except CodecError:
        assert not out.any()
    assert np.isfinite(out).all()


@every_codec
def test_unaligned_bytes_work(codec: Codec) -> None:
    values = np.random.default_rng(3).standard_normal(777).astype(np.float32)
    data = encoded(codec, values)
    shifted = np.empty(data.size + 1, np.uint8)[1:]
    codec.encode(values, shifted)
    assert shifted.tobytes() == data.tobytes()
    assert decoded(codec, shifted, 777).tobytes() == decoded(codec, data, 777).tobytes()


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_threads_do_not_share_scratch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = [rng.standard_normal(50_000).astype(np.float32) for _ in range(8)]
    with ThreadPoolExecutor(4) as threads:
        parallel = list(threads.map(lambda values: encoded(INT8, values).tobytes(), vectors * 3))
    assert parallel == [encoded(INT8, values).tobytes() for values in vectors] * 3


@every_codec
def test_contract_tells_the_true_size(codec: Codec) -> None:
    bits = 8 * codec.encoded_bytes(2**20) / 2**20
    assert bits == codec.contract.bits_per_element
    assert get_codec(codec.name) is codec


def test_unknown_codec_lists_the_known_ones() -> None:
    with pytest.raises(CodecError, match="float32, int8") as caught:
        get_codec("int3")
    assert "int8" in caught.value.fix
