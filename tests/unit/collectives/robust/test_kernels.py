"""The kernels of robust rules against numpy, bit for bit, with each instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.codecs import F32
from atoll.collectives.native import KERNELS, NUMPY_REASON, ROWS_MAX
from atoll.collectives.robust import coordinate
from atoll.collectives.robust.coordinate import Rows

pytestmark = pytest.mark.skipif(KERNELS is None, reason=f"no kernels: {NUMPY_REASON}")
LEVELS = KERNELS.levels() if KERNELS is not None else ()


@pytest.fixture(autouse=True, params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    assert KERNELS is not None
    before = KERNELS.level()
    KERNELS.use(request.param)
    yield
    KERNELS.use(before)


@st.composite
def stacks(draw: st.DrawFn) -> F32:
    """With ties, zeros of both signs, and numbers of very different size."""
    n, columns = draw(st.integers(1, 20)), draw(st.sampled_from([1, 15, 16, 63, 64, 65, 300]))
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = dice.normal(size=(n, columns)) * draw(st.sampled_from([1.0, 1e-38, 1e30]))
    if draw(st.booleans()):
        rows = np.round(rows)
    rows *= dice.choice([1.0, -1.0, 0.0, -0.0], size=rows.shape)
    return rows.astype(np.float32)


def same(kernel: Rows, plain: Rows) -> bool:
    """The sign of a zero depends on the order of the rows: a rule makes all of them positive."""
    return (kernel + 0.0).tobytes() == (plain + 0.0).tobytes()


@settings(max_examples=60, deadline=None)
@given(rows=stacks(), data=st.data())
def test_ordered_means(rows: F32, data: st.DataObject) -> None:
    f = data.draw(st.integers(0, (len(rows) - 1) // 2))
    kept = data.draw(st.integers(1, len(rows)))
    found = [
        coordinate.trimmed_mean(rows, f),
        coordinate.median(rows),
        coordinate.around_median(rows, kept),
    ]
    with patch.object(coordinate, "KERNELS", None):
        plain = [
            coordinate.trimmed_mean(rows, f),
            coordinate.median(rows),
            coordinate.around_median(rows, kept),
        ]
    assert all(map(same, found, plain))


@settings(max_examples=60, deadline=None)
@given(rows=stacks(), k=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_mixtures(rows: F32, k: int, seed: int) -> None:
    dice = np.random.default_rng(seed)
    matrix = dice.normal(size=(k, len(rows))) * dice.integers(0, 2, size=(k, len(rows)))
    found = coordinate.mixed_rows(rows, matrix)
    with patch.object(coordinate, "KERNELS", None):
        plain = coordinate.mixed_rows(rows, matrix)
    assert found.tobytes() == plain.tobytes()


@pytest.mark.parametrize("count", [ROWS_MAX, ROWS_MAX + 1])
def test_as_many_rows_as_they_take_and_more(count: int) -> None:
    rows = np.random.default_rng(1).normal(size=(count, 70)).astype(np.float32)
    np.testing.assert_allclose(
        coordinate.trimmed_mean(rows, 9), np.sort(rows, axis=0)[9 : count - 9].mean(axis=0), 1e-4
    )
    matrix = np.full((2, count), 1 / count)
    np.testing.assert_allclose(coordinate.mixed_rows(rows, matrix)[1], rows.mean(axis=0), 0, 1e-5)


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    assert KERNELS is not None
    rows, out = np.ones(12, np.float32), np.zeros(4, np.float32)
    network, factors = np.array([0, 1, 1, 2], np.uint8), np.ones(3, np.float32)
    for n, pairs, first, keep, into in (
        (0, network, 0, 1, out),
        (-1, network, 0, 1, out),
        (ROWS_MAX + 1, network, 0, 1, out),
        (4, network, 0, 1, out),
        (3, network + 1, 0, 1, out),
        (3, network[:3], 0, 1, out),
        (3, network, -1, 1, out),
        (3, network, 0, 0, out),
        (3, network, 1, 3, out),
        (3, network, 4, 1, out),
        (3, network, 0, 1, rows[:4]),
        (3, network, 0, 1, out[:3]),
    ):
        with pytest.raises(ValueError, match=r".+"):
            KERNELS.order(rows, n, pairs, first, keep, False, into)
    for n, given_factors, into in (
        (0, factors, out),
        (3, factors[:2], out),
        (3, factors, out[:3]),
        (3, factors, rows[:4]),
        (5, np.ones(5, np.float32), out),
    ):
        with pytest.raises(ValueError, match=r".+"):
            KERNELS.mix(rows, n, given_factors, into)
    assert not out.any()
