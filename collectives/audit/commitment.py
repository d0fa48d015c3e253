"""Commit to encoded chunks before anybody sends: by one Merkle root for each owner's chunks.

The leaves are the SHA-256 digests of the encoded chunks that one participant owns, in ascending
order. So whoever gets some of them can check each one alone, and an owner can show to everybody
which bytes somebody has committed to, with nothing else of that vector.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.merkle import LEAF_BYTES, merkle_proof, merkle_root, merkle_verify


def shard_roots(digests: Sequence[bytes], owners: Sequence[int], count: int) -> list[bytes]:
    """Return for each participant the root over the digests of the chunks that it owns.

    There are ``count`` participants; the root is b"" for one that owns none. ``digests[c]`` and
    ``owners[c]`` belong to chunk c, and what NOBODY owns is in no root.
    """
    shards: list[list[bytes]] = [[] for _ in range(count)]
    for digest, owner in zip(digests, owners, strict=True):
        if owner >= 0:
            shards[owner].append(digest)
    return [merkle_root(shard) if shard else b"" for shard in shards]


def opening(digests: Sequence[bytes], owners: Sequence[int], chunk: int) -> bytes:
    """Return the proof that a chunk is in the root of its owner.

    It has 32 bytes for each level of the tree. Raises LocalProtocolError if nobody owns it.
    """
    place, shard = _place(owners, chunk)
    return merkle_proof([digests[other] for other in shard], place)


def opens(part_digest: bytes, chunk: int, owners: Sequence[int], proof: bytes, root: bytes) -> bool:
    """Return whether a participant has committed to a part with this digest.

    ``root`` is what it committed to for the owner of ``chunk``; digest, proof and root may be
    anything.
    """
    if len(part_digest) != LEAF_BYTES or not 0 <= chunk < len(owners) or owners[chunk] < 0:
        return False
    place, shard = _place(owners, chunk)
    return merkle_verify(part_digest, place, len(shard), proof, root)


def _place(owners: Sequence[int], chunk: int) -> tuple[int, list[int]]:
    """Return the place of a chunk among those of its owner, and these.

    Raises LocalProtocolError if nobody owns it.
    """
    if not 0 <= chunk < len(owners) or owners[chunk] < 0:
        raise LocalProtocolError(f"nobody owns chunk {chunk} of {len(owners)}")
    shard = [other for other, owner in enumerate(owners) if owner == owners[chunk]]
    return shard.index(chunk), shard
