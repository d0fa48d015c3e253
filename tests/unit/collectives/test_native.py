"""The kernels in C against numpy, bit for bit, and what they refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.collectives.native import KERNELS, NUMPY_REASON, Kernels
from atoll.optim.outer import nesterov_step

ROOT = Path(__file__).parents[3]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
MAX, TINY = np.finfo(np.float32).max, np.finfo(np.float32).tiny
LEVELS = np.array([0, 0.25, 0.5, 1, 2, 4, 8, 16], np.float32)
MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2

needs_kernels = pytest.mark.skipif(KERNELS is None, reason=f"no kernels: {NUMPY_REASON}")
checked = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# ---------------------------------------------------------------- the numpy forms


class Form(NamedTuple):
    name: str
    block: int  # 0: no scales
    bits: int
    range: float
    scale_min: float


FLOAT32 = Form("float32", 0, 32, 0, 0)
INT8 = Form("int8", 256, 8, 127, TINY)
INT4 = Form("int4", 64, 4, 7, TINY)
E3M0 = Form("fp4_e3m0", 64, 4, 16, 4 * TINY)
FORMS = (FLOAT32, INT8, INT4, E3M0)
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
block_forms = pytest.mark.parametrize("form", FORMS[1:], ids=lambda form: form.name)


def scale_max(form: Form) -> np.float32:
    return np.nextafter(MAX / np.float32(form.range), np.float32(0))


def blocks(form: Form, count: int) -> int:
    return -(-count // form.block) if form.block else 0


def size(form: Form, count: int) -> int:
    return 4 * blocks(form, count) + -(-count * form.bits // 8)


def numpy_encode(form: Form, values: F32) -> bytes:
    """Of finite values."""
    if not form.block:
        return values.tobytes()
    scales, codes = [], []
    for lo in range(0, values.size, form.block):
        block = values[lo : lo + form.block]
        scale = np.minimum(np.abs(block).max() / np.float32(form.range), scale_max(form))
        scale = scale if scale >= form.scale_min else np.float32(0)
        scaled = block / (scale or np.float32(1))
        scales.append(scale)
        if form is E3M0:
            index = np.searchsorted(MIDDLES, np.abs(scaled))
            tie = np.isin(np.abs(scaled), MIDDLES) & (index % 2 == 1)
            codes.append((index + tie) | np.signbit(block) * 8)
        else:
            codes.append(np.rint(scaled).astype(np.int8))
    flat = np.concatenate([*codes, []]).astype(np.int8).view(np.uint8)
    if form.bits == 4:
        flat = np.append(flat, np.uint8(0))[: 2 * -(-values.size // 2)] & 15
        flat = flat[::2] | flat[1::2] << 4
    return np.array(scales, "<f4").tobytes() + flat.tobytes()


def numpy_values(form: Form, data: U8, count: int) -> F32:
    if not form.block:
        return data.copy().view("<f4")
    scales = data[: 4 * blocks(form, count)].copy().view("<f4")
    codes = data[scales.nbytes :]
    if form.bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=1).reshape(-1)[:count]
    if form is E3M0:
        numbers = np.copysign(LEVELS[codes & 7], np.where(codes & 8, -1, 1).astype(np.float32))
    else:
        numbers = (codes << (8 - form.bits)).view(np.int8).astype(np.float32)
        numbers /= np.float32(1 << (8 - form.bits))
    return numbers * np.repeat(scales, form.block)[:count]


def numpy_check(form: Form, data: U8, count: int) -> bool:
    if not form.block:
        return bool(np.isfinite(data.copy().view("<f4")).all())
    scales = data[: 4 * blocks(form, count)].copy().view("<f4")
    codes = data[scales.nbytes :]
    good = (scales >= form.scale_min) & (scales <= scale_max(form)) | (scales.view("<u4") == 0)
    if form is INT8:
        return bool(good.all() and (codes != 0x80).all())
    nibbles = np.stack((codes & 15, codes >> 4), axis=1).reshape(-1)
    padded = not count % 2 or nibbles[-1] == 0
    return bool(good.all() and padded and (form is E3M0 or (nibbles != 8).all()))


# ---------------------------------------------------------------- inputs

SPECIAL = [0.0, -0.0, 1.0, -1.0, 127.0, 16.0, 7.0, 1e-45, -1e-45, 1.1754942e-38, float(TINY)]
SPECIAL += [float(TINY) * 127, 0.5, 1.5, -2.5, 3.0, 6.0, 12.0, 0.125, 0.75, float(MAX), -float(MAX)]
SPECIAL += [float(scale_max(form)) for form in FORMS[1:]]
SPECIAL_VALUES = np.array(SPECIAL, np.float32)


def finite(data: bytes) -> F32:
    """Any bits, but of infinities and NaN one bit is cleared."""
    bits = np.frombuffer(data[: len(data) // 4 * 4], np.uint32)
    return np.where(bits >> 23 & 255 == 255, bits & 0xBFFF_FFFF, bits).view(np.float32)


any_values = st.binary(max_size=2800).map(finite)
special_values = st.binary(max_size=300).map(
    lambda data: SPECIAL_VALUES[np.frombuffer(data, np.uint8) % SPECIAL_VALUES.size]
)


def normal(count: int, seed: int) -> F32:
    """Values over many binades, so that blocks differ."""
    random = np.random.default_rng(seed)
    spread = np.exp2(random.integers(-30, 30, count // 50 + 1).repeat(50)[:count])
    return (random.standard_normal(count) * spread).astype(np.float32)


def shifted(values: NDArray[Any], by: int) -> NDArray[Any]:
    """The same values, ``by`` elements into a buffer: vectors there are not aligned."""
    buffer = np.empty(values.size + by, values.dtype)
    buffer[by:] = values
    return buffer[by:]


def same(ours: NDArray[Any], theirs: NDArray[Any]) -> bool:
    """Bit for bit; of NaN only that it is there."""
    nan = np.isnan(ours)
    return bool(
        np.array_equal(nan, np.isnan(theirs)) and ours[~nan].tobytes() == theirs[~nan].tobytes()
    )


def encode(kernels: Kernels, form: Form, values: F32) -> bytes:
    out = shifted(np.full(size(form, values.size), 0xEE, np.uint8), 1)
    assert kernels.encode(form.name, values, out)  # type: ignore[arg-type]
    return out.tobytes()


# ---------------------------------------------------------------- the same bits


@every_form
@given(values=any_values | special_values, by=st.integers(0, 3))
@checked
def test_encoding_gives_the_bytes_of_numpy(
    kernels: Kernels, form: Form, values: F32, by: int
) -> None:
    assert encode(kernels, form, shifted(values, by)) == numpy_encode(form, values)


@block_forms
def test_encoding_many_blocks_and_short_ones(kernels: Kernels, form: Form) -> None:
    for count in (*range(1, 140), 255, 256, 257, 511, 513, 1000, 30_001):
        values = normal(count, seed=count)
        assert encode(kernels, form, values) == numpy_encode(form, values), count


@block_forms
def test_ties_and_their_neighbours(kernels: Kernels, form: Form) -> None:
    """With powers of two as scales every quotient is exact; with others it is rounded."""
    ties = MIDDLES if form is E3M0 else np.arange(form.range, dtype=np.float32) + np.float32(0.5)
    near = np.concatenate([np.nextafter(ties, np.float32(side)) for side in (0, 99)] + [ties])
    for factor in (1.0, 2.0**-100, 2.0**90, 3.3, 1e-30):
        scale = np.float32(factor)
        for sign in (1, -1):
            row = np.full(form.block, np.float32(form.range) * scale)
            for lo in range(0, near.size, form.block - 1):
                part = near[lo : lo + form.block - 1] * scale * np.float32(sign)
                row[: part.size] = part
                assert encode(kernels, form, row) == numpy_encode(form, row)


@block_forms
def test_scales_at_their_limits(kernels: Kernels, form: Form) -> None:
    """Largest magnitudes around which a scale becomes 0 or reaches its maximum."""
    low, high = np.float32(form.scale_min * form.range), scale_max(form) * np.float32(form.range)
    for limit in (0, low, high, MAX):
        for steps in range(-130, 131):
            top = np.float32(limit).view(np.int32) + np.int32(steps)
            value = np.clip(top, 0, MAX.view(np.int32)).astype(np.int32).view(np.float32)
            for row in (value, -value):
                values = np.array([row, row / 2, -row / 3], np.float32)
                assert encode(kernels, form, values) == numpy_encode(form, values)


@every_form
@given(
    values=any_values,
    scale=st.floats(4 * float(TINY), 2.0**120, width=32) | st.just(0.0),
    factor=st.sampled_from([0.0, 0.25, 1 / 3, -1.0, 1.5, 1e-40, 3e38]),
)
@checked
def test_decoding_gives_the_values_of_numpy(
    kernels: Kernels, form: Form, values: F32, scale: float, factor: float
) -> None:
    count = values.size
    data = shifted(np.frombuffer(numpy_encode(form, values), np.uint8), 3)
    if form.block and count:
        data[:4] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
    expected, out = numpy_values(form, data, count), np.full(count, np.nan, np.float32)
    assert kernels.check(form.name, data, count)  # type: ignore[arg-type]
    assert kernels.decode(form.name, data, out)  # type: ignore[arg-type]
    assert out.tobytes() == expected.tobytes()
    into = shifted(normal(count, seed=1), 1)
    with np.errstate(all="ignore"):
        total = into + np.float32(factor) * expected
    assert kernels.decode_add(form.name, data, factor, into)  # type: ignore[arg-type]
    assert same(into, total)


@every_form
@given(values=any_values, changes=st.lists(st.tuples(st.integers(0), st.integers(0, 255))))
@checked
def test_the_same_bytes_are_allowed(
    kernels: Kernels, form: Form, values: F32, changes: list[tuple[int, int]]
) -> None:
    data = np.frombuffer(numpy_encode(form, values), np.uint8).copy()
    for place, byte in changes if data.size else ():
        data[place % data.size] = byte
    allowed = numpy_check(form, data, values.size)
    assert kernels.check(form.name, data, values.size) == allowed  # type: ignore[arg-type]


@needs_kernels
def test_threads_do_not_disturb_each_other() -> None:
    assert KERNELS is not None
    values = normal(100_000, seed=5)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda form: encode(KERNELS, form, values), FORMS * 4))
    assert results == [numpy_encode(form, values) for form in FORMS] * 4


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
        if rule == "nesterov":
            theta, momentum, scratch = (np.empty(67, dtype) for _ in range(3))
            nesterov_step(
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
