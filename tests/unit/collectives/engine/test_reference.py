"""The reduction in one process: the bytes that peers agree on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives import get_codec, grid_for
from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import F32, U8
from atoll.collectives.engine.reference import reduce_together
from atoll.collectives.errors import CodecError, ConfigError

CODECS = ["float32", "bfloat16", "int8", "int4", "fp4_e3m0", "int8_sr", "int4_shift"]


KEY = 7  # that of make_group's plans


def fill(vector: F32, grid: ChunkGrid, chunk: int, out: F32) -> None:
    lo, hi = grid.bounds(chunk)
    out[:] = vector[lo:hi]


def together(codec: str, grid: ChunkGrid, weights: list[float], vectors: list[F32]) -> U8:
    sources = [partial(fill, vector, grid) for vector in vectors]
    return reduce_together(get_codec(codec), grid, weights, sources, key=KEY).array


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("weights", [[1.0], [1.0, 3.0], [0.2, 0.0, 5.0, 1.0]], ids=str)
def test_it_gives_what_the_engine_gives(
    make_group: Callable[..., Any], codec: str, weights: list[float]
) -> None:
    group = make_group(get_codec(codec), weights=weights, total=5000, chunk_elements=1024)
    group.start()
    group.wait_done()
    found = together(codec, group.grid, weights, group.vectors)
    assert found.tobytes() == group.results[0].tobytes()


@pytest.mark.parametrize("codec", ["int4_sr", "int4_shift"])
def test_what_is_rounded_at_random_is_right_on_average_over_rounds(codec: str) -> None:
    """Each part and each result has a key of its own, and each round another one."""
    grid, rounds = grid_for(2000), 400
    vectors = [np.full(2000, 0.3, np.float32), np.full(2000, 0.1, np.float32)]
    for vector in vectors:
        vector[::256] = 1.0  # the scale of a block
    sources = [partial(fill, vector, grid) for vector in vectors]
    total, seen = np.zeros(2000), set()
    for key in range(rounds):
        found = reduce_together(get_codec(codec), grid, [1.0, 1.0], sources, key=key)
        again = reduce_together(get_codec(codec), grid, [1.0, 1.0], sources, key=key)
        assert found.array.tobytes() == again.array.tobytes()
        seen.add(found.array.tobytes())
        out = np.empty(2000, np.float32)
        get_codec(codec).decode(found.array, out)
        total += out
    assert len(seen) == rounds
    mean = np.delete(total / rounds, np.arange(0, 2000, 256))
    # A step is a seventh: a hundred times as much as the mean of so many may be off.
    np.testing.assert_allclose(mean.mean(), 0.2, atol=1e-3)
    assert abs(mean - 0.2).max() < 0.03


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=6).filter(any), st.integers(1, 3000))
def test_of_float32_it_is_the_weighted_mean(weights: list[float], elements: int) -> None:
    vectors = [np.full(elements, number, np.float32) for number in range(len(weights))]
    found = together("float32", grid_for(elements), weights, vectors).view(np.float32)
    mean = sum(n * weight for n, weight in enumerate(weights)) / sum(weights)
    np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6)


def test_who_has_no_weight_is_not_asked_and_what_is_wrong_is_refused() -> None:
    grid, codec = grid_for(10), get_codec("int8")
    ones = np.ones(10, np.float32)

    def refuse(chunk: int, out: F32) -> None:
        raise AssertionError("it has no weight")

    reduce_together(codec, grid, [0.0, 1.0], [refuse, partial(fill, ones, grid)])
    with pytest.raises(ConfigError, match="1 parts and 2 weights"):
        reduce_together(codec, grid, [1.0, 1.0], [refuse])
    with pytest.raises(ConfigError, match="sum of the weights"):
        together("int8", grid, [0.0], [ones])
    with pytest.raises(CodecError):
        together("float32", grid, [1.0, 1.0], [ones, ones * np.inf])
