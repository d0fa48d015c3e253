"""Build binary Merkle trees over 32-byte leaves: one root for many chunks, a short proof for each.

Leaves and inner nodes are hashed with different prefixes, so that no node passes for a leaf
(RFC 6962). An odd node at the end of a level moves up as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from atoll.collectives.errors import LocalProtocolError

LEAF_BYTES = 32


class MerkleTree:
    """Hold all nodes over at least one leaf, for many proofs. Never changes."""

    __slots__ = ("_levels", "leaves")

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self.leaves = tuple(leaves)
        self._levels = [[_leaf(leaf) for leaf in self.leaves]]
        while len(self._levels[-1]) > 1:
            below = self._levels[-1]
            level = [_node(below[i], below[i + 1]) for i in range(0, len(below) - 1, 2)]
            self._levels.append(level + below[len(below) & ~1 :])

    @property
    def root(self) -> bytes:
        return self._levels[-1][0]

    def proof(self, index: int) -> bytes:
        """Return the sibling hashes from leaf ``index`` up to the root, 32 bytes each.

        Raises IndexError if there is no such leaf.
        """
        if not 0 <= index < len(self.leaves):
            raise IndexError(f"leaf {index} of {len(self.leaves)}")
        siblings = []
        for level in self._levels[:-1]:
            siblings += level[index ^ 1 : (index ^ 1) + 1]  # none if the level ends before it
            index //= 2
        return b"".join(siblings)


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root over at least one leaf."""
    return MerkleTree(leaves).root


def merkle_proof(leaves: Sequence[bytes], index: int) -> bytes:
    """Return one proof; for many make a ``MerkleTree``."""
    return MerkleTree(leaves).proof(index)


def merkle_verify(leaf: bytes, index: int, count: int, proof: bytes, root: bytes) -> bool:
    """Return whether ``leaf`` stands at ``index`` of ``count`` leaves under ``root``."""
    return merkle_climb(leaf, index, count, proof) == root


def merkle_climb(leaf: bytes, index: int, count: int, proof: bytes) -> bytes | None:
    """Return the root that ``proof`` leads to.

    Return None if it has not the length that this place needs, or there is no such place.
    """
    if not 0 <= index < count:
        return None
    node, taken = _leaf(leaf), 0
    while count > 1:
        if (index ^ 1) < count:
            sibling = proof[taken : taken + LEAF_BYTES]
            if len(sibling) != LEAF_BYTES:
                return None
            taken += LEAF_BYTES
            node = _node(sibling, node) if index & 1 else _node(node, sibling)
        index, count = index // 2, (count + 1) // 2
    return node if taken == len(proof) else None


def _leaf(leaf: bytes) -> bytes:
    return hashlib.sha256(b"\0" + leaf).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


# ---------------------------------------------------------------- roots of shards
#
# Commit to encoded chunks before anybody sends: by one Merkle root for each owner's chunks.
#
# The leaves are the digests of the encoded chunks that one participant owns, in ascending
# order. So whoever gets some of them can check each one alone, and an owner can show to everybody
# which bytes somebody has committed to, with nothing else of that vector.


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
