"""The grid of chunks and their place in encoded bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.chunks import (
    CHUNK_ELEMENTS_MAX,
    ChunkGrid,
    encoded_layout,
    grid_for,
    operation_grid,
)
from atoll.collectives.codecs import CODECS
from atoll.collectives.errors import ConfigError

totals = st.integers(1, 200_000) | st.integers(1, 2**40)


@given(totals)
def test_grid_follows_the_formula(total: int) -> None:
    grid = grid_for(total)
    per_chunk = -(-total // 64)
    rounded = -(-per_chunk // 256) * 256
    assert grid.chunk_elements == sorted((4096, rounded, CHUNK_ELEMENTS_MAX))[1]
    assert (grid.count - 1) * grid.chunk_elements < total <= grid.count * grid.chunk_elements


@pytest.mark.parametrize(
    ("total", "peers", "chunk", "count"),
    [
        (1, 2, 4096, 1),
        (5000, 2, 4096, 2),
        (1 << 18, 2, 32_768, 8),
        (1 << 18, 4, 32_768, 8),
        (1 << 18, 16, 16_384, 16),  # one for each
        (1 << 22, 2, 262_144, 16),
        (1 << 22, 4, 131_072, 32),
        (1 << 24, 2, CHUNK_ELEMENTS_MAX, 64),
    ],
)
def test_vectors_of_few_peers_have_few_chunks(
    total: int, peers: int, chunk: int, count: int
) -> None:
    grid = operation_grid(total, peers)
    assert (grid.chunk_elements, grid.count) == (chunk, count)


@given(totals, st.integers(1, 512))
def test_the_grid_of_an_operation_has_a_chunk_for_each_peer_where_that_can_be(
    total: int, peers: int
) -> None:
    grid = operation_grid(total, peers)
    assert (grid.count - 1) * grid.chunk_elements < total <= grid.count * grid.chunk_elements
    assert grid.count >= peers or grid.chunk_elements <= max(4096, total // peers + 256)


@given(total=st.integers(1, 50_000), blocks=st.integers(1, 20))
def test_chunks_and_their_bytes_tile_the_whole(total: int, blocks: int) -> None:
    grid = ChunkGrid(total, 256 * blocks)
    for codec in CODECS.values():
        layout = encoded_layout(grid, codec)
        element = byte = 0
        for chunk in range(grid.count):
            lo, hi = grid.bounds(chunk)
            assert (lo, hi - lo) == (element, grid.size(chunk))
            assert layout.slice(chunk) == (byte, byte + codec.encoded_bytes(hi - lo))
            assert layout.size(chunk) <= layout.chunk_bytes
            element, byte = hi, layout.slice(chunk)[1]
        assert (element, byte) == (total, layout.total_bytes)


@pytest.mark.parametrize("chunk", [-1, 3])
def test_chunks_outside_the_grid_are_refused(chunk: int) -> None:
    grid = ChunkGrid(700, 256)
    with pytest.raises(IndexError):
        grid.bounds(chunk)
    with pytest.raises(IndexError):
        encoded_layout(grid, CODECS["int8"]).slice(chunk)


@pytest.mark.parametrize(
    ("total", "chunk_elements"), [(0, 256), (10, 0), (10, 100), (10, 2 * CHUNK_ELEMENTS_MAX)]
)
def test_impossible_grids_are_refused(total: int, chunk_elements: int) -> None:
    with pytest.raises(ConfigError):
        ChunkGrid(total, chunk_elements)
