"""The encoded parts of one participant, all of them: what it commits to. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atoll.collectives.codecs import F32, U8
from atoll.collectives.errors import LocalProtocolError
from atoll.peer.audit.terms import Work

__all__ = ["encoded_parts"]


def encoded_parts(work: Work, source: Callable[[int, F32], None]) -> list[U8]:
    """The own part of each chunk, encoded, in one piece of memory. What ``source`` raises goes on;
    CodecError for NaN and infinity."""
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
