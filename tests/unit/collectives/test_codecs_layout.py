"""The bytes of each codec follow its definition, told once more in slow and plain code."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from harness.roundtrip import decoded, draw, encoded, through
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atoll.collectives.codecs import (
    CODECS,
    F32,
    SCALE_MAX,
    SCALE_MIN,
    TILE_ELEMENTS,
    Codec,
    get_codec,
)
from atoll.collectives.errors import CodecError

INT8, INT4, E3M0 = get_codec("int8"), get_codec("int4"), get_codec("fp4_e3m0")
TINY = np.finfo(np.float32).tiny
FLOAT_MAX = np.finfo(np.float32).max
few = settings(max_examples=40)
finite = arrays(
    np.float32,
    st.integers(0, 700),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def float_scale(block: F32, divisor: float) -> np.float32:
    """absmax / divisor, within the range that is allowed."""
    high = np.nextafter(FLOAT_MAX / np.float32(divisor), np.float32(0))
    scale = min(np.float32(np.abs(block).max()) / np.float32(divisor), high)
    return scale if scale >= TINY else np.float32(0)


def blocks_of(values: F32, width: int) -> list[F32]:
    return [values[lo : lo + width] for lo in range(0, values.size, width)]


def nibbles(codes: list[int]) -> bytes:
    codes = [code & 15 for code in codes] + [0] * (len(codes) % 2)
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


# ---------------------------------------------------------------- plain


@given(finite)
def test_float32_bytes_are_the_values(values: F32) -> None:
    assert encoded(get_codec("float32"), values).tobytes() == values.astype("<f4").tobytes()


@given(finite)
def test_bfloat16_is_what_torch_makes_of_it(values: F32) -> None:
    codec = get_codec("bfloat16")
    clamped = np.clip(values, -float(2**128 - 2**120), float(2**128 - 2**120))
    want = torch.from_numpy(clamped).to(torch.bfloat16)
    assert encoded(codec, values).tobytes() == want.view(torch.int16).numpy().tobytes()
    assert through(codec, values).tobytes() == want.float().numpy().tobytes()


@given(finite)
def test_float16_is_what_torch_makes_of_it(values: F32) -> None:
    codec = get_codec("float16")
    want = torch.from_numpy(np.clip(values, -65504, 65504)).to(torch.float16)
    assert encoded(codec, values).tobytes() == want.numpy().tobytes()
    assert through(codec, values).tobytes() == want.float().numpy().tobytes()


@pytest.mark.parametrize(("name", "word"), [("bfloat16", 0x7F80), ("float16", 0xFC00)])
def test_halves_refuse_infinity_from_the_wire(name: str, word: int) -> None:
    data = np.array([0, 0, word], "<u2").view(np.uint8)
    with pytest.raises(CodecError, match="element 2"):
        get_codec(name).decode(data, np.empty(3, np.float32))


def test_float32_refuses_nan_from_the_wire() -> None:
    data = np.array([1, np.nan], "<f4").view(np.uint8)
    with pytest.raises(CodecError, match="NaN"):
        get_codec("float32").decode_add(data, 1.0, np.zeros(2, np.float32))


# ---------------------------------------------------------------- int8 and int4


def naive_integers(values: F32, width: int, code_max: int) -> tuple[bytes, list[int]]:
    """Block by block, in float32 scalars."""
    scales, codes = [], []
    for block in blocks_of(values, width):
        scale = float_scale(block, code_max)
        scales.append(scale)
        codes += [0 if scale == 0 else round(float(value / scale)) for value in block]
    return np.array(scales, "<f4").tobytes(), codes


@given(finite)
def test_int8_bytes_follow_the_definition(values: F32) -> None:
    scales, codes = naive_integers(values, 256, 127)
    assert encoded(INT8, values).tobytes() == scales + np.array(codes, np.int8).tobytes()


@given(finite)
def test_int4_bytes_follow_the_definition(values: F32) -> None:
    scales, codes = naive_integers(values, 64, 7)
    assert encoded(INT4, values).tobytes() == scales + nibbles(codes)


@pytest.mark.parametrize("extra", [-1, 0, 257])
def test_integers_follow_the_definition_beyond_a_tile(extra: int) -> None:
    values = draw("laplace", TILE_ELEMENTS + extra)
    scales, codes = naive_integers(values, 256, 127)
    assert encoded(INT8, values).tobytes() == scales + np.array(codes, np.int8).tobytes()
    scales, codes = naive_integers(values, 64, 7)
    assert encoded(INT4, values).tobytes() == scales + nibbles(codes)


def test_int4_packs_the_first_code_into_the_low_bits() -> None:
    values = np.array([7, -1, 0, 2, -7], np.float32)
    data = encoded(INT4, values)
    assert data.tobytes() == struct.pack("<f", 1.0) + bytes([0xF7, 0x20, 0x09])
    assert decoded(INT4, data, 5).tolist() == values.tolist()


@given(finite)
def test_int8_error_is_at_most_half_a_step(values: F32) -> None:
    back = through(INT8, values).astype(np.float64)
    for lo in range(0, values.size, 256):
        block = values[lo : lo + 256].astype(np.float64)
        bound = np.abs(block).max() / 127 / 2 * (1 + 2e-5) + 127 * float(SCALE_MIN)
        assert np.abs(block - back[lo : lo + 256]).max() <= bound


@pytest.mark.parametrize("name", ["int8", "int4", "fp4_e3m0", "sign"])
def test_a_zero_block_has_scale_and_codes_zero(name: str) -> None:
    assert not encoded(get_codec(name), np.zeros(256, np.float32)).any()


BAD_SCALES = [np.nan, np.inf, -np.inf, -1.0, -0.0, 1e-40, float(np.nextafter(SCALE_MAX, np.inf))]


@pytest.mark.parametrize("scale", BAD_SCALES)
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


def test_integers_refuse_the_code_that_has_no_opposite() -> None:
    data = encoded(INT8, np.ones(600, np.float32))
    data[3 * 4 + 417] = 0x80
    with pytest.raises(CodecError, match="element 417"):
        INT8.decode(data, np.empty(600, np.float32))
    for byte, element in [(0x08, 416), (0x81, 417)]:
        data = encoded(INT4, np.ones(600, np.float32))
        data[10 * 4 + 208] = byte
        with pytest.raises(CodecError, match=f"element {element}"):
            INT4.decode(data, np.empty(600, np.float32))


@pytest.mark.parametrize("name", ["int4", "fp4_e3m0", "fp4_e2m1", "int2", "sign", "ternary"])
def test_bits_after_the_last_code_must_be_zero(name: str) -> None:
    codec = get_codec(name)
    data = encoded(codec, np.ones(65, np.float32))
    data[-1] |= 0x40
    with pytest.raises(CodecError, match="after the last"):
        codec.check(data, 65)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_unaligned_bytes_work(codec: Codec) -> None:
    values = draw("gauss", 777, seed=3)
    data = encoded(codec, values)
    shifted = np.empty(data.size + 1, np.uint8)[1:]
    codec.encode(values, shifted)
    assert shifted.tobytes() == data.tobytes()
    assert decoded(codec, shifted, 777).tobytes() == decoded(codec, data, 777).tobytes()
