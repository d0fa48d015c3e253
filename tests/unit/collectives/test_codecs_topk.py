"""topk: the largest of each block, their packed places, and a lookup of four values."""

from __future__ import annotations

import numpy as np
import pytest
from harness.roundtrip import decoded, draw, encoded, through
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.codecs.packing import pack12, packed_bytes, unpack12
from atoll.collectives.errors import CodecError

TOPK = get_codec("topk")


def naive(values: F32) -> tuple[list[int], list[float], list[int]]:
    """Places, lookup and codes, told slowly."""
    places: list[int] = []
    for lo in range(0, values.size, 4096):
        block = values[lo : lo + 4096]
        order = sorted(range(block.size), key=lambda i: (-abs(float(block[i])), i))
        places += [lo + i for i in sorted(order[: -(-block.size // 64)])]
    kept = [float(values[place]) for place in places]
    mean = 0.0
    for value in kept:
        mean += value
    mean /= len(kept)
    variance = 0.0
    for value in kept:
        variance += (value - mean) * (value - mean)
    step = 6 * np.sqrt(variance / len(kept)) / 4 or 1.0
    codes = [int(min(max(round((value - mean) / step + 2), 0), 3)) for value in kept]
    lookup = []
    for code in range(4):
        members = [value for value, c in zip(kept, codes, strict=True) if c == code]
        total = 0.0
        for value in members:
            total += value
        lookup.append(float(np.float32(total / len(members))) if members else 0.0)
    return places, lookup, codes


def reference_bytes(places: list[int], lookup: list[float], codes: list[int]) -> bytes:
    """As in reference/compression_and_robustness.md: two indices in three bytes."""
    indices = [place % 4096 for place in places]
    packed = bytearray()
    for first, second in zip(indices[::2], indices[1::2], strict=False):
        packed += bytes([first & 255, first >> 8 | (second & 15) << 4, second >> 4])
    if len(indices) % 2:
        packed += bytes([indices[-1] & 255, indices[-1] >> 8])
    padded = codes + [0] * (-len(codes) % 4)
    values = bytes(
        a | b << 2 | c << 4 | d << 6
        for a, b, c, d in zip(*(padded[at::4] for at in range(4)), strict=True)
    )
    return np.array(lookup, "<f4").tobytes() + bytes(packed) + values


@pytest.mark.parametrize("count", [1, 64, 65, 200, 4095, 4096, 4097, 10_000, 70_001])
@pytest.mark.parametrize("kind", ["gauss", "student_t3"])
def test_bytes_follow_the_definition(kind: str, count: int) -> None:
    values = draw(kind, count, seed=count)
    places, lookup, codes = naive(values)
    data = encoded(TOPK, values)
    assert data.tobytes() == reference_bytes(places, lookup, codes)
    want = np.zeros(count, np.float32)
    want[places] = np.array(lookup, np.float32)[codes]
    assert decoded(TOPK, data, count).tobytes() == want.tobytes()


@given(arrays(np.float32, st.integers(1, 300), elements=st.sampled_from([0.0, 1.0, -1.0, 2.0])))
def test_of_equal_magnitudes_the_first_are_kept(values: F32) -> None:
    places, lookup, codes = naive(values)
    assert encoded(TOPK, values).tobytes() == reference_bytes(places, lookup, codes)


def test_blocks_of_equal_values_keep_their_first_64() -> None:
    values = np.ones(2 * 4096 + 130, np.float32)
    kept = np.flatnonzero(through(TOPK, values))
    assert kept.tolist() == [*range(64), *range(4096, 4160), 8192, 8193, 8194]


def test_nothing_to_send_is_sent_as_zeros() -> None:
    assert not through(TOPK, np.zeros(5000, np.float32)).any()
    assert TOPK.encoded_bytes(0) == 16
    assert encoded(TOPK, np.empty(0, np.float32)).tolist() == [0] * 16


def test_decode_add_touches_nothing_else() -> None:
    values = draw("gauss", 9000)
    into = np.full(9000, -0.0, np.float32)
    data = encoded(TOPK, values)
    TOPK.decode_add(data, 0.5, into)
    kept = decoded(TOPK, data, 9000) != 0
    assert np.signbit(into[~kept]).all()
    assert np.count_nonzero(into) == np.count_nonzero(kept)


@given(st.lists(st.integers(0, 4095), max_size=70))
def test_twelve_bits_there_and_back(codes: list[int]) -> None:
    data = np.empty(packed_bytes(len(codes), 12), np.uint8)
    pack12(np.array(codes, np.uint16), data)
    assert unpack12(data, len(codes)).tolist() == codes


def changed(count: int, **places: int) -> np.ndarray:
    """Encoded ones, with the i-th index replaced: ``i3=7``."""
    data = encoded(TOPK, np.ones(count, np.float32))
    kept = -(-count // 64)
    part = data[16 : 16 + packed_bytes(kept, 12)]
    indices = unpack12(part, kept)
    for name, index in places.items():
        indices[int(name[1:])] = index
    pack12(indices, part)
    return data


@pytest.mark.parametrize(
    ("count", "places"),
    [
        (4096, {"i3": 2}),  # repeated
        (4096, {"i3": 1}),  # out of order
        (300, {"i4": 300}),  # beyond the vector
        (4096 + 300, {"i68": 4000}),  # beyond the last block
        (8192, {"i64": 9, "i65": 9}),  # repeated in the second block
    ],
)
def test_wrong_indices_are_refused(count: int, places: dict[str, int]) -> None:
    TOPK.check(changed(count), count)
    into = np.full(count, 5, np.float32)
    with pytest.raises(CodecError, match="indices"):
        TOPK.decode_add(changed(count, **places), 1.0, into)
    assert (into == 5).all()


def test_an_index_may_be_as_large_in_one_block_as_the_next_begins() -> None:
    TOPK.check(changed(8192, i63=4095), 8192)


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0, 1e-40])
def test_wrong_values_are_refused(value: float) -> None:
    data = encoded(TOPK, np.ones(4096, np.float32))
    data[4:8].view("<f4")[:] = value
    with pytest.raises(CodecError, match="topk value"):
        TOPK.check(data, 4096)


@pytest.mark.parametrize("at", [16 + 2 + 5, -1])
def test_bits_that_stand_for_nothing_must_be_zero(at: int) -> None:
    data = encoded(TOPK, np.ones(300, np.float32))  # five kept: 12 + 4 bits left, 6 bits left
    data[at] |= 0x80
    with pytest.raises(CodecError, match="after the last"):
        TOPK.check(data, 300)
