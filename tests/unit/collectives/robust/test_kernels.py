"""The kernels of robust rules against numpy, bit for bit, with each instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from harness.floats import normal
from harness.roundtrip import decoded, encoded
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.codecs import CODECS, F32, NUMPY_CODECS
from atoll.collectives.native import KERNEL_CODECS, KERNELS, NUMPY_REASON, ROWS_MAX
from atoll.collectives.robust import coordinate
from atoll.collectives.robust.columns import Columns
from atoll.collectives.robust.coordinate import COLUMNS, Rows
from atoll.collectives.robust.gram import add_gram

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


@settings(max_examples=60, deadline=None)
@given(rows=stacks(), k=st.integers(1, 20), data=st.data())
def test_ordered_means_of_mixtures(rows: F32, k: int, data: st.DataObject) -> None:
    dice = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    matrix = dice.normal(size=(k, len(rows))) * dice.integers(0, 2, size=(k, len(rows)))
    f, kept = data.draw(st.integers(0, (k - 1) // 2)), data.draw(st.integers(1, k))
    with np.errstate(over="ignore"):
        found = [
            coordinate.trimmed_mean(rows, f, matrix),
            coordinate.median(rows, matrix),
            coordinate.around_median(rows, kept, matrix),
        ]
        with patch.object(coordinate, "KERNELS", None):
            plain = [
                coordinate.trimmed_mean(rows, f, matrix),
                coordinate.median(rows, matrix),
                coordinate.around_median(rows, kept, matrix),
            ]
    assert all(map(same, found, plain))


@settings(max_examples=60, deadline=None)
@given(rows=stacks())
def test_inner_products(rows: F32) -> None:
    """The bits that are promised, which are those of a matrix product but for rounding."""
    count, wide = len(rows), rows.astype(np.float64)
    found, total = np.zeros((count, count)), np.ones((count, count))
    buckets = np.zeros((8, count, count))
    for k, column in enumerate(wide.T):
        buckets[k % 8] += column[:, None] * column[None, :]
    plain = np.zeros((count, count))
    for bucket in buckets:
        plain += bucket
    add_gram(rows, found)
    assert found.tobytes() == plain.tobytes()
    add_gram(rows, total)
    assert total.tobytes() == (plain + 1.0).tobytes()
    lengths = np.sqrt(found.diagonal())
    assert (np.abs(found - wide @ wide.T) <= 1e-12 * np.outer(lengths, lengths)).all()


@pytest.mark.parametrize("count", [ROWS_MAX, ROWS_MAX + 1])
def test_inner_products_of_as_many_rows_as_it_takes_and_more(count: int) -> None:
    rows = np.random.default_rng(1).normal(size=(count, 5_000)).astype(np.float32)
    found, wide = np.zeros((count, count)), rows.astype(np.float64)
    add_gram(rows, found)
    np.testing.assert_allclose(found, wide @ wide.T, rtol=0, atol=1e-9 * 5_000)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("count", [1, 70, COLUMNS, COLUMNS + 1, 3 * COLUMNS - 65, 3 * COLUMNS])
def test_columns_of_parts(name: str, count: int) -> None:
    codec = CODECS[name]
    parts = [encoded(codec, normal(count, seed), key=seed) for seed in range(5)]
    columns = Columns(codec)
    blocks = [block.copy() for block in columns.of(parts, count)]
    assert [block.shape[1] for block in blocks[:-1]] == [COLUMNS] * ((count - 1) // COLUMNS)
    want = np.stack([decoded(NUMPY_CODECS[name], part, count) for part in parts])
    assert np.concatenate(blocks, axis=1).tobytes() == want.tobytes()
    assert 0 < columns.allocated_bytes <= 4 * 5 * (COLUMNS if name in KERNEL_CODECS else count)


@pytest.mark.parametrize("name", KERNEL_CODECS)
def test_no_bytes_make_columns_write_elsewhere(name: str) -> None:
    """They are not checked again: whatever is decoded, it is in its place."""
    assert KERNELS is not None
    dice, codec, count = np.random.default_rng(3), CODECS[name], 2 * COLUMNS + 100
    for lo in range(0, count, COLUMNS):
        width, room = min(COLUMNS, count - lo), np.full(COLUMNS + 2, 7, np.float32)
        part = dice.integers(0, 256, codec.encoded_bytes(count), np.uint8)
        KERNELS.decode_columns(name, [part], count, lo, room[1 : 1 + width])
        assert room[0] == 7
        assert (room[1 + width :] == 7).all()


@pytest.mark.parametrize("name", KERNEL_CODECS)
def test_columns_that_are_no_whole_pieces_are_refused(name: str) -> None:
    assert KERNELS is not None
    count, out = COLUMNS + 100, np.zeros(2 * COLUMNS, np.float32)
    parts = [encoded(CODECS[name], normal(count, seed), key=1) for seed in (1, 2)]
    for given_parts, lo, into in (
        (parts, 64, out),
        (parts, 0, out[:200]),
        (parts, COLUMNS, out),
        (parts, COLUMNS, out[:199]),
        (parts, 2 * COLUMNS, out[:0]),
        (parts, -1, out),
        ([*parts, parts[0][:-1]], 0, np.zeros(3 * COLUMNS, np.float32)),
        ([], 0, out),
        ([out.view(np.uint8)[: parts[0].size]], 0, out[:COLUMNS]),
    ):
        with pytest.raises(ValueError, match=r".+"):
            KERNELS.decode_columns(name, given_parts, count, lo, into)
    with pytest.raises(TypeError, match="not iterable"):
        KERNELS.decode_columns(name, 3, count, 0, out)  # type: ignore[arg-type]


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
            KERNELS.order(rows, n, None, pairs, first, keep, False, into)
    for wrong, pairs, keep, around in (
        (factors[:2], network, 1, False),
        (rows[:3], network[:0], 2, False),  # mixed there is one row only
        (factors, network[:2], 1, False),
        (np.ones(3 * (ROWS_MAX + 1), np.float32), network, 1, False),
        (out[:3], network[:0], 1, False),
        (None, network, 1, True),  # not from the second on
    ):
        with pytest.raises(ValueError, match=r".+"):
            KERNELS.order(rows, 3, wrong, pairs, int(around), keep, around, out)
    for n, given_factors, into in (
        (0, factors, out),
        (3, factors[:2], out),
        (3, factors, out[:3]),
        (3, factors, rows[:4]),
        (5, np.ones(5, np.float32), out),
    ):
        with pytest.raises(ValueError, match=r".+"):
            KERNELS.mix(rows, n, given_factors, into)
    total = np.zeros(9)
    for n, into in ((0, total), (ROWS_MAX + 1, total), (3, total[:8]), (5, np.zeros(25))):
        with pytest.raises(ValueError, match=r".+"):
            KERNELS.gram(rows, n, into)
    assert not out.any()
    assert not total.any()
