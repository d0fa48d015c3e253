"""The kernels in C against numpy, bit for bit."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from harness.floats import (
    MAX,
    any_values,
    around_limits,
    finite,
    halfway,
    near_ties,
    normal,
    shifted,
    special_values,
)
from harness.roundtrip import decoded, encoded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.collectives.codecs import CODECS, F32, NUMPY_CODECS, U8, Codec
from atoll.collectives.codecs.blocks import BlockCodec
from atoll.collectives.codecs.levels import LevelCodec
from atoll.collectives.counter_rng import random_words, unit_floats
from atoll.collectives.errors import CodecError
from atoll.collectives.native import KERNEL_CODECS, KERNELS, NUMPY_REASON, Kernels
from atoll.optim import outer_step as outer

REFERENCES = [NUMPY_CODECS[name] for name in KERNEL_CODECS]
WITH_SCALES = [codec for codec in REFERENCES if isinstance(codec, BlockCodec)]
every_codec = pytest.mark.parametrize("codec", REFERENCES, ids=lambda codec: codec.name)
block_codecs = pytest.mark.parametrize("codec", WITH_SCALES, ids=lambda codec: codec.name)
needs_kernels = pytest.mark.skipif(KERNELS is None, reason=f"no kernels: {NUMPY_REASON}")
checked = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# ---------------------------------------------------------------- the same bytes

any_key = st.integers(0, 2**64 - 1)


def same(ours: NDArray[Any], theirs: NDArray[Any]) -> bool:
    """Bit for bit; of NaN only that it is there."""
    nan = np.isnan(ours)
    return bool(
        np.array_equal(nan, np.isnan(theirs)) and ours[~nan].tobytes() == theirs[~nan].tobytes()
    )


def encode(kernels: Kernels, codec: Codec, values: F32, key: int = 0) -> bytes:
    out = shifted(np.full(codec.encoded_bytes(values.size), 0xEE, np.uint8), 1)
    assert kernels.encode(codec.name, values, key, out)
    return out.tobytes()


@every_codec
@given(values=any_values | special_values, by=st.integers(0, 3), key=any_key)
@checked
def test_encoding_gives_the_bytes_of_numpy(
    kernels: Kernels, codec: Codec, values: F32, by: int, key: int
) -> None:
    ours = encode(kernels, codec, shifted(values, by), key)
    assert ours == encoded(codec, values, key).tobytes()


@every_codec
def test_encoding_many_blocks_and_short_ones(kernels: Kernels, codec: Codec) -> None:
    for count in (*range(1, 140), 255, 256, 257, 511, 513, 4095, 4096, 4097, 8200, 130_001):
        values = normal(count, seed=count)
        ours = encode(kernels, codec, values, key=count)
        assert ours == encoded(codec, values, key=count).tobytes(), count


@pytest.mark.parametrize(
    "scale", [1.0, -1.0, 0.7, -3.3, 2.0**-105, -(2.0**-104), 2.0**125, 1.1 * 2.0**125, float(MAX)]
)
def test_dynamic8_beside_every_threshold_and_along_all_magnitudes(
    kernels: Kernels, scale: float
) -> None:
    """Show that wide vectors, which estimate the code, know where they may be wrong."""
    dynamic8 = NUMPY_CODECS["dynamic8"]
    assert isinstance(dynamic8, LevelCodec)
    limits = np.abs(dynamic8.levels.thresholds[: dynamic8.levels.count - 1])
    limits = np.unique(limits).view(np.int32)[:, None]
    exact = (limits + np.arange(-20, 21)).ravel()
    beside = (limits + np.arange(-20, 21) * 997).ravel()
    along = np.arange(2**-26, 1.0, 2**-16, np.float32).view(np.int32)
    small = np.arange(np.float32(2**-26).view(np.int32), np.float32(1).view(np.int32), 4001)
    magnitudes = np.concatenate([exact, beside, along, small]).astype(np.int32).view(np.float32)
    magnitudes = np.minimum(np.concatenate([magnitudes, np.zeros(80, np.float32)]), 1)
    scaled = magnitudes * np.float32(scale) * np.where(np.arange(magnitudes.size) % 3, 1, -1)
    scaled = scaled.astype(np.float32)
    scaled[::256] = np.float32(scale)
    assert encode(kernels, dynamic8, scaled) == encoded(dynamic8, scaled).tobytes()


@given(
    count=st.sampled_from([1, 63, 64, 65, 4032, 4095, 4096, 4097, 4160, 8192, 12_345]),
    levels=st.integers(1, 40) | st.integers(100, 2000),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1.0, -1.0, 1e-45, 1e-38, 3e38, 1 / 3]),
)
@checked
def test_topk_of_many_equal_magnitudes(
    kernels: Kernels, count: int, levels: int, seed: int, scale: float
) -> None:
    """Few levels: all that is kept is equal. Many: the smallest that are kept are."""
    random = np.random.default_rng(seed)
    signs = random.choice(np.array([1, -1], np.float32), count)
    values = random.integers(0, levels, count) / np.float32(levels) * np.float32(scale) * signs
    topk, values = NUMPY_CODECS["topk"], values.astype(np.float32)
    assert encode(kernels, topk, values) == encoded(topk, values).tobytes()


@pytest.mark.parametrize("factor", [1.0, 2.0**-100, 2.0**120, 1 / 3, 1e-30, float(MAX) / 9])
@pytest.mark.parametrize(
    "kept",
    [
        # A standard deviation of 4, so a bin of 6: 9 and 3 lie at the edges of bins.
        [3] * 7 + [-3] * 7 + [9, -9, 0, 0],
        [9] * 8 + [-9] * 8 + [0] * 65,
        [3, -3],
        [1, 1, 1],
        [-0.0] * 4,
    ],
)
def test_topk_of_values_at_the_edges_of_bins(
    kernels: Kernels, kept: list[float], factor: float
) -> None:
    values = np.zeros(64 * len(kept), np.float32)
    values[: len(kept)] = np.array(kept, np.float32) * np.float32(factor)
    topk = NUMPY_CODECS["topk"]
    assert encode(kernels, topk, values) == encoded(topk, values).tobytes()


@pytest.mark.parametrize(("name", "top"), [("int8_sr", 127), ("int4_sr", 7)])
def test_a_fraction_that_equals_its_random_number_is_rounded_down(
    kernels: Kernels, name: str, top: int
) -> None:
    codec, words = NUMPY_CODECS[name], np.empty(1024, np.uint32)
    random_words(9, 0, words)
    values = unit_floats(words)
    values[:: codec.contract.block] = top  # so the scale is 1
    ours = encode(kernels, codec, values, key=9)
    assert ours == encoded(codec, values, key=9).tobytes()
    assert np.count_nonzero(decoded(codec, np.frombuffer(ours, np.uint8), 1024)) == (
        1024 // codec.contract.block
    )


@pytest.mark.parametrize(("name", "top"), [("int8_sr", 127), ("int4_sr", 7)])
def test_what_is_divided_to_more_than_the_largest_code_is_not_rounded_up(
    kernels: Kernels, name: str, top: int
) -> None:
    codec, words = NUMPY_CODECS[name], np.empty(1 << 22, np.uint32)
    random_words(3, 0, words)
    candidates = np.arange(1, 2, 1e-4, np.float32)
    quotients = candidates / (candidates / np.float32(top))
    beyond = int(quotients.argmax())
    assert quotients[beyond] > top
    # As many elements as it takes until a random number is so small that it would be.
    place = int(np.argmax(unit_floats(words) < quotients[beyond] - top))
    assert words.view(np.float32)[place] < quotients[beyond] - top
    values = np.full(place + 1, candidates[beyond], np.float32)
    assert encode(kernels, codec, values, key=3) == encoded(codec, values, key=3).tobytes()


@block_codecs
def test_ties_and_scales_at_their_limits(kernels: Kernels, codec: BlockCodec) -> None:
    for values in (*near_ties(codec), *around_limits(codec)):
        assert encode(kernels, codec, values, 3) == encoded(codec, values, 3).tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_tie_of_halves(kernels: Kernels, name: str) -> None:
    for values in halfway(name):
        ours = encode(kernels, NUMPY_CODECS[name], values)
        assert ours == encoded(NUMPY_CODECS[name], values).tobytes()


# ---------------------------------------------------------------- the same values


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_half(kernels: Kernels, name: str) -> None:
    codec, all_bits = NUMPY_CODECS[name], np.arange(0x10000, dtype=np.uint16)
    good = all_bits[all_bits & 0x7FFF < (0x7F80 if name == "bfloat16" else 0x7C00)].view(np.uint8)
    out = np.empty(good.size // 2, np.float32)
    assert kernels.decode(name, good, out)
    assert out.tobytes() == decoded(codec, good, out.size).tobytes()
    for bits in (0, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF):
        for sign in (0, 0x8000):
            one = np.array([bits | sign], np.uint16).view(np.uint8)
            assert kernels.check(name, one, 1) == allowed(codec, one, 1)


def allowed(codec: Codec, data: U8, count: int) -> bool:
    with contextlib.suppress(CodecError):
        codec.check(data, count)
        return True
    return False


@every_codec
@given(
    values=any_values | special_values,
    key=any_key,
    factor=st.sampled_from([0.0, 0.25, 1 / 3, -1.0, 1.5, 1e-40, 3e38]),
    changes=st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4),
)
@checked
def test_decoding_gives_the_values_of_numpy(
    kernels: Kernels,
    codec: Codec,
    values: F32,
    key: int,
    factor: float,
    changes: list[tuple[int, int]],
) -> None:
    """Or both refuse: of some bytes others are put into their places."""
    count = values.size
    data = shifted(encoded(codec, values, key), 3)
    for place, byte in changes if data.size else ():
        data[place % data.size] = byte
    good = allowed(codec, data, count)
    out, into = np.full(count, 5, np.float32), shifted(normal(count, seed=1), 1)
    total = into.copy()
    if good:
        with np.errstate(all="ignore"):
            codec.decode_add(data, factor, total)
    assert kernels.check(codec.name, data, count) == good
    assert kernels.decode(codec.name, data, out) == good
    assert (
        out.tobytes() == (decoded(codec, data, count) if good else np.full_like(out, 5)).tobytes()
    )
    assert kernels.decode_add(codec.name, data, factor, into) == good
    assert same(into, total)


@every_codec
def test_decoding_many_blocks_and_short_ones(kernels: Kernels, codec: Codec) -> None:
    for count in (*range(140), 255, 256, 257, 513, 4095, 4096, 4097, 8200, 130_001):
        data = encoded(codec, normal(count, seed=count), key=count)
        out, into = np.full(count, np.nan, np.float32), normal(count, seed=1)
        total = into.copy()
        codec.decode_add(data, 1 / 3, total)
        assert kernels.decode(codec.name, data, out)
        assert kernels.decode_add(codec.name, data, 1 / 3, into)
        assert out.tobytes() == decoded(codec, data, count).tobytes(), count
        assert into.tobytes() == total.tobytes(), count


@needs_kernels
def test_threads_do_not_disturb_each_other() -> None:
    assert KERNELS is not None
    values = normal(100_000, seed=5)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda codec: encode(KERNELS, codec, values, 7), REFERENCES * 3))
    assert results == [encoded(codec, values, 7).tobytes() for codec in REFERENCES] * 3


# ---------------------------------------------------------------- the same errors


def refusal(codec: Codec, values: F32, key: int) -> str:
    with pytest.raises(CodecError) as caught:
        encoded(codec, values, key)
    return str(caught.value)


@every_codec
@pytest.mark.parametrize("count", [1, 64, 257, 4200])
def test_numpy_says_what_is_wrong_with_values(codec: Codec, count: int) -> None:
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        for place in {0, count // 2, count - 1}:
            values = np.ones(count, np.float32)
            values[place] = bad
            assert refusal(CODECS[codec.name], values, 1) == refusal(codec, values, 1)


@block_codecs
@pytest.mark.parametrize("key", [-1, 2**64, 2**90, -(2**90)])
def test_numpy_says_what_is_wrong_with_keys(codec: Codec, key: int) -> None:
    values = np.ones(70, np.float32)
    assert refusal(CODECS[codec.name], values, key) == refusal(codec, values, key)


# ---------------------------------------------------------------- the outer step


Scalar = np.float32 | np.float64


def numpy_step(
    rule: str, theta: Any, momentum: Any, delta: Any, lr: Scalar, mu: Scalar
) -> tuple[Any, Any]:
    if rule == "sgd":
        return theta - delta * lr, momentum
    kept = momentum * mu + delta
    step = kept * lr if rule == "heavy_ball" else (kept * mu + delta) * lr
    return theta - step, kept


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", ["nesterov", "heavy_ball", "sgd"])
@given(
    bits=st.tuples(*[st.binary(min_size=268, max_size=268)] * 3),
    rates=st.sampled_from([(0.7, 0.9), (1.0, 0.0), (0.1, 1 / 3), (1e-30, 0.999)]),
)
@checked
def test_outer_steps(kernels: Kernels, rule: Any, dtype: Any, bits: Any, rates: Any) -> None:
    inputs = [finite(data).astype(dtype) for data in bits]
    lr, mu = map(dtype, rates)
    with np.errstate(all="ignore"):
        expected = numpy_step(rule, *inputs, lr, mu)
        theta, momentum, scratch = (np.empty(67, dtype) for _ in range(3))
        with patch.object(outer, "KERNELS", None):
            outer.outer_step(
                rule,
                *inputs,
                lr=rates[0],
                mu=rates[1],
                out_theta=theta,
                out_momentum=momentum,
                scratch=scratch,
            )
        assert same(theta, expected[0])
        assert same(momentum, expected[1])
    out = np.empty(67, dtype), shifted(np.empty(67, dtype), 1)
    kernels.outer_step(rule, *inputs, *rates, *out)
    assert all(map(same, out, expected))
    kernels.outer_step(rule, *inputs, *rates, inputs[0], inputs[1])  # in place
    assert all(map(same, inputs[:2], expected))
