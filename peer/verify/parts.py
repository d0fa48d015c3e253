"""Hold encoded parts: all of one participant, which it commits to, and others' of its shard.

Both lie in one piece of memory each: fresh pages, chunk by chunk, cost more than copies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atoll.collectives.codecs import F32, U8
from atoll.collectives.errors import LocalProtocolError
from atoll.peer.verify.terms import ReductionTerms


def encoded_parts(work: ReductionTerms, source: Callable[[int, F32], None]) -> list[U8]:
    """Return the own part of each chunk, encoded, in one piece of memory.

    ``source`` fills float32 with the values of a chunk; what it raises goes on. CodecError for NaN
    and infinity.
    """
    grid, codec = work.grid, work.part_codec
    sizes = [codec.encoded_bytes(grid.size(chunk)) for chunk in range(grid.count)]
    whole, values = np.empty(sum(sizes), np.uint8), np.empty(grid.size(0), np.float32)
    parts, lo = [], 0
    for chunk, nbytes in enumerate(sizes):
        part = whole[lo : lo + nbytes]
        floats = values[: grid.size(chunk)]
        source(chunk, floats)
        codec.encode(floats, part)
        parts.append(part)
        lo += nbytes
    if lo != whole.size:
        raise LocalProtocolError("an encoded vector has another length than its chunks")
    return parts


class HeldParts:
    """Keep copies of all parts of the chunks that participant ``owner`` owns, of all who count."""

    def __init__(self, work: ReductionTerms, owner: int) -> None:
        self._rows = {sender: row for row, sender in enumerate(work.counted)}
        self._places: dict[int, slice] = {}
        end = 0
        for chunk in work.shards.get(owner, ()):
            nbytes = work.part_codec.encoded_bytes(work.grid.size(chunk))
            self._places[chunk] = slice(end, end + nbytes)
            end += nbytes
        self._all = np.empty((len(self._rows), end), np.uint8)

    def copy(self, sender: int, chunk: int, part: U8) -> U8:
        """Copy a part and return the copy. Safe in any thread; once for each part."""
        kept: U8 = self._all[self._rows[sender], self._places[chunk]]
        np.copyto(kept, part)
        return kept
