"""Pack into BEGIN which chunks a broken attempt has finished, and who holds them.

A record names a chunk, the origin of its mean, its digest and up to three holders as positions in
the view: 43 bytes each, so that the largest BEGIN stays within a control frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

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
    """Pack records in the order of their chunks, at most KEPT_MAX of them."""
    ordered = sorted(kept)[:KEPT_MAX]
    records = np.zeros(len(ordered), _RECORD)
    if ordered:
        fill = (_NOBODY,) * HOLDERS_MAX
        records["chunk"] = [item.chunk for item in ordered]
        records["origin"] = [item.origin for item in ordered]
        records["holders"] = [(*item.holders, *fill)[:HOLDERS_MAX] for item in ordered]
        digests = b"".join(item.digest for item in ordered)
        records["digest"] = np.frombuffer(digests, f"V{DIGEST_BYTES}")
    return records.tobytes()


def parse_kept(packed: bytes, members: int, origins: int) -> tuple[Kept, ...]:
    """Return the records that are packed.

    Raise ValueError for a wrong length and for records that do not name each chunk once and in
    order, or name no past origin, no holder, or nobody of the view.
    """
    if len(packed) % _RECORD.itemsize or len(packed) > KEPT_BYTES_MAX:
        raise ValueError(f"{len(packed)} bytes are not a list of kept chunks")
    records = np.frombuffer(packed, _RECORD)
    chunk, origin, holders = records["chunk"], records["origin"], records["holders"]
    named = holders != _NOBODY
    wrong = (origin == 0) | (origin >= origins) | ~named.any(axis=1)
    wrong |= (named & (holders >= members)).any(axis=1)
    wrong[1:] |= chunk[1:] <= chunk[:-1]
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        what = f"origin {origin[first]} and holders {holders[first].tolist()}"
        raise ValueError(f"kept chunk {chunk[first]} has {what}")
    who = [tuple(peer for peer in three if peer != _NOBODY) for three in holders.tolist()]
    digests = [digest.tobytes() for digest in records["digest"]]
    rows = zip(chunk.tolist(), origin.tolist(), digests, who, strict=True)
    return tuple(Kept(*row) for row in rows)
