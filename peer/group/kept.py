"""Chunks that a broken attempt has finished, and who holds them: packed into BEGIN.

A record names a chunk, the origin of its mean, its digest and up to three holders as positions in
the view. 43 bytes each, so that the largest BEGIN stays within a control frame and a receiver
reads it without making an object per chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

__all__ = [
    "DIGEST_BYTES",
    "HOLDERS_MAX",
    "KEPT_BYTES_MAX",
    "KEPT_MAX",
    "RECORD_BYTES",
    "Kept",
    "pack_kept",
    "parse_kept",
]

DIGEST_BYTES = 32
HOLDERS_MAX = 3  # whom to ask, one after the other; more would only make BEGIN longer
KEPT_MAX = 16_384  # records in one BEGIN; chunks beyond it are reduced again
_NOBODY = 0xFFFF
_RECORD = np.dtype(
    [("chunk", ">u4"), ("origin", "u1"), ("holders", ">u2", (HOLDERS_MAX,)), ("digest", "V32")]
)
RECORD_BYTES = _RECORD.itemsize
KEPT_BYTES_MAX = KEPT_MAX * RECORD_BYTES


class Kept(NamedTuple):
    chunk: int  # of the fragment
    origin: int  # index into BEGIN's origins; 0 is the new attempt and never kept
    digest: bytes
    holders: tuple[int, ...]  # positions in the view's members


def pack_kept(kept: Iterable[Kept]) -> bytes:
    """Records in the order of their chunks, at most KEPT_MAX."""
    ordered = sorted(kept)[:KEPT_MAX]
    records = np.zeros(len(ordered), _RECORD)
    for record, item in zip(records, ordered, strict=True):
        named = item.holders[:HOLDERS_MAX]
        holders = (*named, *(_NOBODY,) * (HOLDERS_MAX - len(named)))
        record["chunk"], record["origin"], record["holders"] = item.chunk, item.origin, holders
        record["digest"] = np.void(item.digest)
    return records.tobytes()


def parse_kept(packed: bytes, members: int, origins: int) -> tuple[Kept, ...]:
    """ValueError for records that name no chunk once, no holder, or nobody of the view."""
    if len(packed) % _RECORD.itemsize or len(packed) > KEPT_BYTES_MAX:
        raise ValueError(f"{len(packed)} bytes are not a list of kept chunks")
    found = []
    last = -1
    for record in np.frombuffer(packed, _RECORD):
        holders = tuple(int(h) for h in record["holders"] if h != _NOBODY)
        chunk, origin = int(record["chunk"]), int(record["origin"])
        if chunk <= last or not 0 < origin < origins or not holders or max(holders) >= members:
            raise ValueError(f"kept chunk {chunk} has origin {origin} and holders {holders}")
        last = chunk
        found.append(Kept(chunk, origin, record["digest"].tobytes(), holders))
    return tuple(found)
