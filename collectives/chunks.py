"""Cut a flat float32 vector into chunks, and say where each chunk lies in encoded bytes.

The chunk is the unit of everything: of encoding, sending, reducing, digests and versions. The grid
depends only on the length of the vector, so all peers cut alike without talking about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from atoll.collectives.codecs import BLOCK_ELEMENTS, Decoder
from atoll.collectives.errors import ConfigError

# 1 MiB of float32: large enough that the cost of a frame is small, small enough that a few of them
# per peer fit in memory and that a slow link still shows progress often.
CHUNK_ELEMENTS_MAX: Final = 262_144
# 16 KiB of float32: below this, headers and wake-ups cost more than the payload.
CHUNK_ELEMENTS_MIN: Final = 4_096
# Small vectors are cut in so many chunks, so that even they are pipelined and shared out well.
CHUNKS_WANTED: Final = 64
# Of vectors that are reduced for their own sake: to send, add and send back at once; of few peers
# there are fewer chunks, of 128 KiB of float32 at least where that leaves one for each peer.
OPERATION_CHUNKS_PER_PEER: Final = 8
OPERATION_CHUNK_ELEMENTS_MIN: Final = 32_768


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Cut ``total`` elements into chunks of ``chunk_elements``; only the last one may be shorter.

    Raises ConfigError unless there is an element, and a chunk has whole blocks and a size allowed.
    """

    total: int
    chunk_elements: int

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ConfigError(f"a vector needs at least 1 element, not {self.total}")
        whole_blocks = self.chunk_elements % BLOCK_ELEMENTS == 0
        if not (whole_blocks and BLOCK_ELEMENTS <= self.chunk_elements <= CHUNK_ELEMENTS_MAX):
            raise ConfigError(
                f"a chunk is a multiple of {BLOCK_ELEMENTS} and at most {CHUNK_ELEMENTS_MAX} "
                f"elements, not {self.chunk_elements}"
            )

    @property
    def count(self) -> int:
        return -(-self.total // self.chunk_elements)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Return the element range [lo, hi) of a chunk. Raises IndexError if there is none."""
        if not 0 <= chunk < self.count:
            raise IndexError(f"chunk {chunk} of {self.count}")
        lo = chunk * self.chunk_elements
        return lo, min(lo + self.chunk_elements, self.total)

    def size(self, chunk: int) -> int:
        lo, hi = self.bounds(chunk)
        return hi - lo


def grid_for(total: int) -> ChunkGrid:
    """Return the grid that every peer uses for a vector of ``total`` elements."""
    blocks = -(-total // (CHUNKS_WANTED * BLOCK_ELEMENTS))
    wanted = blocks * BLOCK_ELEMENTS
    return ChunkGrid(total, min(max(wanted, CHUNK_ELEMENTS_MIN), CHUNK_ELEMENTS_MAX))


def operation_grid(total: int, peers: int) -> ChunkGrid:
    """Return the grid that ``peers`` use for a vector of their own, which no state is made of.

    Each frame costs some 0.2 ms of a processor on either side, whatever its size. So there are as
    many chunks as it takes to share them out and to overlap what is sent, added and sent back.
    """
    least = min(OPERATION_CHUNK_ELEMENTS_MIN, total // peers)
    wanted = max(total // (OPERATION_CHUNKS_PER_PEER * peers), least)
    blocks = -(-wanted // BLOCK_ELEMENTS)
    wanted = min(max(blocks * BLOCK_ELEMENTS, CHUNK_ELEMENTS_MIN), CHUNK_ELEMENTS_MAX)
    return ChunkGrid(total, wanted)


@dataclass(frozen=True, slots=True)
class EncodedLayout:
    """Say where each chunk lies in a whole encoded vector: in order, without gaps."""

    chunk_bytes: int
    total_bytes: int

    def slice(self, chunk: int) -> tuple[int, int]:
        """Return the byte range [lo, hi) of a chunk. Raises IndexError if there is none."""
        lo = chunk * self.chunk_bytes
        if not 0 <= lo < self.total_bytes:
            raise IndexError(f"chunk {chunk} lies outside {self.total_bytes} encoded bytes")
        return lo, min(lo + self.chunk_bytes, self.total_bytes)

    def size(self, chunk: int) -> int:
        lo, hi = self.slice(chunk)
        return hi - lo


def encoded_layout(grid: ChunkGrid, codec: Decoder) -> EncodedLayout:
    last = grid.count - 1
    chunk_bytes = codec.encoded_bytes(grid.size(0))
    return EncodedLayout(chunk_bytes, last * chunk_bytes + codec.encoded_bytes(grid.size(last)))
