"""L-GreCo: against all choices there are, its bounds, and bits of layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from harness.gradients import averages, manifest_of
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import ConfigError
from atoll.optim import LayerBits, LGreCo

BUCKETS = 500


@st.composite
def layers(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Errors and sizes of up to 5 layers with 4 choices each, and a uniform choice."""
    count = draw(st.integers(1, 5))
    errors = draw(st.lists(st.floats(0, 100, width=32), min_size=4 * count, max_size=4 * count))
    sizes = draw(st.lists(st.integers(0, 1000), min_size=4 * count, max_size=4 * count))
    uniform = draw(st.integers(0, 3))
    return (
        np.array(errors).reshape(count, 4),
        np.array(sizes).reshape(count, 4),
        np.full(count, uniform),
    )


@given(layers())
def test_it_is_the_best_of_all_choices(problem: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Of those whose errors, rounded up to buckets, fit; and never larger than the uniform one."""
    errors, sizes, uniform = problem
    every = np.arange(len(errors))
    budget = errors[every, uniform].sum()
    found = LGreCo().choose(errors, sizes, uniform, BUCKETS)
    assert sizes[every, found].sum() <= sizes[every, uniform].sum()
    assert errors[every, found].sum() <= budget * (1 + len(errors) / BUCKETS) * (1 + 1e-9)
    if budget > 0:
        costs = np.maximum(1, np.ceil(errors * (BUCKETS / budget)))
        best = min(
            sizes[every, choice].sum()
            for choice in map(np.array, itertools.product(range(4), repeat=len(errors)))
            if costs[every, choice].sum() <= BUCKETS + len(errors)
        )
        assert sizes[every, found].sum() == best


def test_choices_that_are_not_there_and_budgets_that_nothing_fits() -> None:
    errors = np.array([[np.inf, 2, 1], [5, np.inf, np.nan]])
    sizes = np.array([[0, 10, 20], [7, 0, 0]])
    assert LGreCo().choose(errors, sizes, np.array([2, 0])).tolist() == [2, 0]
    assert LGreCo(alpha=1.5).choose(errors, sizes, np.array([2, 0])).tolist() == [1, 0]
    assert LGreCo(alpha=0.1).choose(errors, sizes, np.array([1, 0])).tolist() == [2, 0]
    # Nothing is measured yet: all as it was.
    assert LGreCo().choose(np.zeros((2, 3)), sizes, np.array([1, 0])).tolist() == [1, 0]
    assert LGreCo().choose(np.zeros((0, 3)), sizes[:0], np.array([], int)).tolist() == []


def test_when_it_is_due() -> None:
    assert [step for step in range(301) if LGreCo(every=100).is_due(step)] == [100, 200, 300]
    for wrong in [{"every": 0}, {"alpha": 0.0}, {"alpha": -1.0}]:
        with pytest.raises(ConfigError):
            LGreCo(**wrong)


# ---------------------------------------------------------------- bits


def gradient(n: int, s: int) -> F32:
    """Of the first layer it is large; the second is hardly anything."""
    random = np.random.default_rng((n, s))
    values = random.standard_normal(2 * 64 * 64).astype(np.float32)
    return values * np.repeat(np.array([1, 0.01], np.float32), 64 * 64)


def error_of(mean: F32, step: int) -> float:
    exact = (gradient(0, step) + gradient(1, step)) / 2
    return float(np.linalg.norm(mean - exact))


def test_bits_go_to_the_layers_that_need_them() -> None:
    manifest = manifest_of((64, 64), (64, 64))
    workers = [LayerBits(choice=LGreCo(every=2, alpha=1.2)) for _ in range(2)]
    found = averages(lambda n: workers[n], manifest, gradient, range(4))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))
    for worker in workers:
        chosen = [worker.codecs[int(c)] for c in worker._chosen]
        assert chosen == ["int4", "int2"]
    assert error_of(found[0][3], 3) < 1.3 * error_of(found[0][1], 1)


def test_each_layer_is_what_its_codec_makes_of_it() -> None:
    manifest = manifest_of((64, 64), (64, 64))
    made = averages(lambda n: LayerBits(uniform="int8"), manifest, gradient, [0], workers=1)
    codec = get_codec("int8")
    data = np.empty(codec.encoded_bytes(4096), np.uint8)
    for lo in (0, 4096):
        part = gradient(0, 0)[lo : lo + 4096]
        for _ in range(2):  # a butterfly encodes the parts, and the sum
            codec.encode(part, data)
            part = np.empty_like(part)
            codec.decode(data, part)
        np.testing.assert_allclose(made[0][0][lo : lo + 4096], part, atol=1e-6 * np.abs(part).max())


def test_vectors_and_what_is_named_travel_in_the_codec_of_the_run() -> None:
    manifest = manifest_of((64, 64), (64, 64))
    found = averages(lambda n: LayerBits(dense=("0.",)), manifest, gradient, [0])
    exact = (gradient(0, 0) + gradient(1, 0)) / 2
    np.testing.assert_allclose(found[0][0][:4096], exact[:4096], atol=1e-6)
    assert not np.allclose(found[0][0][4096:], exact[4096:], atol=1e-6)
    with pytest.raises(ConfigError, match="no parameter's name begins with head"):
        averages(lambda n: LayerBits(dense=("head",)), manifest, gradient, [0])
    for wrong in [{"uniform": "int8", "codecs": ("int4",)}, {"codecs": ("int4", "int4_sr")}]:
        with pytest.raises(ConfigError, match="LayerBits"):
            LayerBits(**wrong)


def test_nobody_has_anything_to_give() -> None:
    manifest = manifest_of((64, 64), (64, 64))
    absent = [(0, 0), (1, 0), (1, 1)]
    found = averages(lambda n: LayerBits(), manifest, gradient, range(2), absent=absent)
    assert found[0][0] is None
    codec_error = np.linalg.norm(found[0][1] - gradient(0, 1)) / np.linalg.norm(gradient(0, 1))
    assert 0 < codec_error < 0.3
