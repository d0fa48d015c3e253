from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.chunks import grid_for
from atoll.collectives.errors import ConfigError
from atoll.optim.manifest import FRAGMENTS_MAX, chunk_range, fragment_grid


@pytest.mark.parametrize("fragments", range(1, FRAGMENTS_MAX + 1))
def test_fragments_partition_the_chunks(fragments):
    for chunks in (fragments, fragments + 1, 2 * fragments - 1, 64, 1000, 65_537):
        if chunks < fragments:
            continue
        ranges = [chunk_range(f, fragments, chunks) for f in range(fragments)]
        assert [c for first, end in ranges for c in range(first, end)] == list(range(chunks))
        sizes = {end - first for first, end in ranges}
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("place", [(-1, 2, 4), (2, 2, 4), (0, 5, 4), (0, 0, 4)])
def test_there_is_no_such_fragment(place):
    with pytest.raises(ConfigError, match="fragment"):
        chunk_range(*place)


@given(st.integers(1, 1 << 40), st.data())
def test_fragment_grids_cut_like_the_whole(total, data):
    grid = grid_for(total)
    fragments = data.draw(st.integers(1, min(FRAGMENTS_MAX, grid.count)))
    fragment = data.draw(st.integers(0, fragments - 1))
    first, end = chunk_range(fragment, fragments, grid.count)
    part = fragment_grid(grid, first, end)
    assert part.count == end - first
    offset = grid.bounds(first)[0]
    for chunk in {0, part.count - 1}:
        lo, hi = part.bounds(chunk)
        assert (lo + offset, hi + offset) == grid.bounds(first + chunk)
