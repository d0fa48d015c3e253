"""Codecs refuse values that are not finite and bytes that encoding never writes."""

from __future__ import annotations

import numpy as np
import pytest
from harness.roundtrip import draw, encoded
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.codecs import CODECS, Codec, get_codec
from atoll.collectives.errors import CodecError

TINY = float(np.finfo(np.float32).tiny)
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)


@every_codec
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 255, 256, 299])
def test_encode_refuses_what_is_not_finite(codec: Codec, bad: float, at: int) -> None:
    values = np.ones(300, np.float32)
    values[at] = bad
    with pytest.raises(CodecError, match="NaN or infinity"):
        encoded(codec, values)


@pytest.mark.parametrize("key", [-1, 2**64])
def test_keys_have_64_bits(key: int) -> None:
    for codec in (get_codec("int8_shift"), get_codec("randk")):
        with pytest.raises(CodecError, match="key"):
            encoded(codec, np.ones(5, np.float32), key)


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


def refused_or_finite(codec: Codec, data: np.ndarray, count: int) -> None:
    """``decode`` and ``decode_add`` either refuse and write nothing, or give finite values."""
    out, into = np.full(count, 5, np.float32), np.zeros(count, np.float32)
    try:
        codec.check(data, count)
    except CodecError:
        for refused in (
            lambda: codec.decode(data, out),
            lambda: codec.decode_add(data, 1.0, into),
        ):
            with pytest.raises(CodecError):
                refused()
        assert (out == 5).all()
        assert not into.any()
    else:
        codec.decode(data, out)
        codec.decode_add(data, 1.0, into)
        assert np.isfinite(out).all()
        assert np.isfinite(into).all()
        if codec.contract.block > 1 and codec.name != "randk":
            assert (np.abs(out[out != 0]) >= TINY).all()


def fitting(codec: Codec, size: int) -> int:
    """The fewest elements that take so many bytes, or as few more as possible."""
    low, high = 0, 1 << 20
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if codec.encoded_bytes(middle) >= size else (middle + 1, high)
    return low


@given(raw=st.binary(min_size=0, max_size=900))
def test_any_bytes_are_refused_or_decode_to_finite_values(raw: bytes) -> None:
    for codec in CODECS.values():
        refused_or_finite(codec, np.frombuffer(raw, np.uint8), fitting(codec, len(raw)))


@given(
    count=st.integers(1, 700),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_changed_bytes_are_refused_or_decode_to_finite_values(
    count: int, changes: list[tuple[int, int]]
) -> None:
    values = draw("student_t3", count, seed=count)
    for codec in CODECS.values():
        data = encoded(codec, values, key=count)
        for at, byte in changes:
            data[at % data.size] = byte
        refused_or_finite(codec, data, count)


def test_unknown_codec_lists_the_known_ones() -> None:
    with pytest.raises(CodecError, match="float32") as caught:
        get_codec("int3")
    assert all(name in caught.value.fix for name in CODECS)
