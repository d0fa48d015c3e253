"""Tiles, and what is sent of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import CodecError, ConfigError
from atoll.optim.every_step.tiles import VALUES, Tiling, pack_part, part_bytes, unpack_part

every_kind = pytest.mark.parametrize("values", VALUES)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((128, 192), (128, 192, 64, 64)),
        ((100, 64), (100, 64, 50, 64)),
        ((64,), (1, 64, 1, 64)),
        ((640,), (1, 640, 1, 64)),
        ((67, 2), (67, 2, 1, 2)),  # a prime
        ((32, 3, 3, 3), (32, 27, 32, 27)),
        ((), (1, 1, 1, 1)),
        ((0, 5), (0, 0, 1, 1)),
    ],
)
def test_the_largest_divisors_up_to_64(shape, expected):
    tiling = Tiling.of(shape, 64, 32)
    assert (tiling.rows, tiling.columns, tiling.height, tiling.width) == expected
    assert tiling.topk == min(32, tiling.elements)
    assert tiling.count * tiling.elements == np.prod(shape)


def test_impossible_numbers_are_refused():
    with pytest.raises(ConfigError, match="tile is 65"):
        Tiling.of((3,), 65, 1)
    with pytest.raises(ConfigError, match="topk is 0"):
        Tiling.of((3,), 64, 0)


def test_twelve_bits_for_a_place_in_4096():
    """Two places in three bytes, as SparseLoCo packs them."""
    tiling = Tiling.of((64, 64), 64, 2)
    assert tiling.place_bits == 12
    places, coefficients = np.array([[0x123, 0xABC]]), np.array([[1.0, -2.0]], np.float32)
    packed = pack_part(tiling, places, coefficients, "bfloat16")
    assert packed == bytes([1, 0x23, 0xC1, 0xAB, 0x80, 0x3F, 0x00, 0xC0])
    assert part_bytes(tiling, "bfloat16") == len(packed) == 8
    assert pack_part(tiling, places, coefficients, "sign") == bytes([1, 0x23, 0xC1, 0xAB, 0b10])


def test_bytes_of_a_large_tensor():
    """Acceptance test 14: 28, 13 or 44 bits for each of 32 of 4096."""
    tiling = Tiling.of((1024, 2048), 64, 32)
    for values, bits in [("bfloat16", 28), ("sign", 13), ("float32", 44)]:
        expected = bits * 32 / 4096 * 1024 * 2048 / 8
        assert expected < part_bytes(tiling, values) < 1.02 * expected


@st.composite
def chosen(draw):
    """A tiling, ascending places and values, some tiles and some values zero."""
    shape = draw(st.sampled_from([(128, 64), (6, 10), (130,), (1,), (35, 21), (64, 4096)]))
    tiling = Tiling.of(shape, 64, draw(st.integers(1, 40)))
    dice = np.random.default_rng(draw(st.integers(0, 999)))
    picked = [
        np.sort(dice.permutation(tiling.elements)[: tiling.topk]) for _ in range(tiling.count)
    ]
    values = dice.standard_normal((tiling.count, tiling.topk)).astype(np.float32)
    values[dice.random(values.shape) < draw(st.sampled_from([0, 0.5]))] = 0
    values[dice.random(tiling.count) < draw(st.sampled_from([0, 0.5]))] = 0
    return tiling, np.array(picked).reshape(values.shape), values


@every_kind
@settings(deadline=None, derandomize=True, max_examples=40)
@given(chosen())
def test_round_trip(values, chosen):
    tiling, places, coefficients = chosen
    if values == "bfloat16":
        coefficients = (coefficients.view(np.uint32) & 0xFFFF0000).view(np.float32)
    packed = pack_part(tiling, places, coefficients, values)
    found, end = unpack_part(tiling, b"abc" + packed + b"de", 3, values)
    assert end == 3 + len(packed) <= 3 + part_bytes(tiling, values)
    dense = np.zeros((tiling.count, tiling.elements), np.float32)
    np.put_along_axis(dense, places, coefficients, 1)
    expected = np.sign(dense) if values == "sign" else dense
    assert (np.diff(found.places) > 0).all()
    assert (found.places == np.flatnonzero(expected)).all()
    assert (found.values == expected.reshape(-1)[found.places]).all()


def test_a_tile_of_zeros_costs_one_bit():
    tiling = Tiling.of((128, 64), 64, 32)
    places = np.tile(np.arange(32), (2, 1))
    coefficients = np.stack([np.zeros(32), np.ones(32)]).astype(np.float32)
    packed = pack_part(tiling, places, coefficients, "sign")
    assert len(packed) == part_bytes(tiling, "sign", 1) < part_bytes(tiling, "sign")


@every_kind
def test_malformed_bytes_are_refused(values):
    tiling = Tiling.of((6, 10), 64, 3)  # 60 elements: places of six bits, one tile
    places, coefficients = np.array([[1, 2, 59]]), np.ones((1, 3), np.float32)
    good = pack_part(tiling, places, coefficients, values)
    for cut in range(len(good)):
        with pytest.raises(CodecError, match="too few"):
            unpack_part(tiling, good[:cut], 0, values)
    wrong = [
        (bytes([0b11]) + good[1:], "not zero"),  # a second tile
        (pack_part(tiling, np.array([[1, 2, 60]]), coefficients, values), "too large"),
        (pack_part(tiling, np.array([[2, 1, 59]]), coefficients, values), "out of order"),
        (good[:3] + bytes([good[3] | 0b100]) + good[4:], "not zero"),  # after 18 bits
    ]
    if values == "sign":
        wrong.append((good[:-1] + bytes([0b1000]), "not zero"))
    else:
        wrong.append((good[:-2] + b"\x80\x7f", "NaN or infinity"))
    for data, why in wrong:
        with pytest.raises(CodecError, match=why):
            unpack_part(tiling, data, 0, values)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.binary(max_size=40))
def test_any_bytes_are_a_part_or_refused(data):
    tiling = Tiling.of((6, 20), 10, 3)  # two tiles of 6 x 10
    for values in VALUES:
        try:
            found, end = unpack_part(tiling, data, 0, values)
        except CodecError:
            continue
        assert end <= len(data)
        assert ((found.places >= 0) & (found.places < 120)).all()
        assert np.isfinite(found.values).all()
