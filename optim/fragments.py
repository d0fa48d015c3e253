"""Divide the vector into fragments: the parts that are reduced in rounds of their own.

A fragment is a contiguous range of the vector's chunks, so that it has a grid, a layout and a
reduction like a whole vector. With one fragment every round carries everything.
"""

from __future__ import annotations

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.errors import ConfigError

FRAGMENTS_MAX = 64  # Streaming DiLoCo (arXiv 2501.18512) uses 2 to 24


def chunk_range(fragment: int, fragments: int, chunks: int) -> tuple[int, int]:
    """Return the chunks [first, end) of a fragment.

    There is always at least one, and the sizes of fragments differ by one at most. Raise
    ConfigError if there are more fragments than chunks, or no such fragment.
    """
    if not 0 <= fragment < fragments <= chunks:
        raise ConfigError(
            f"there is no fragment {fragment} of {fragments} in a vector of {chunks} chunks",
            fix=f"set fragments to at most {chunks}",
        )
    return fragment * chunks // fragments, (fragment + 1) * chunks // fragments


def fragment_grid(grid: ChunkGrid, first: int, end: int) -> ChunkGrid:
    """Return the grid of the chunks [first, end) as a vector of their own, from chunk 0 on."""
    return ChunkGrid(grid.bounds(end - 1)[1] - grid.bounds(first)[0], grid.chunk_elements)
