"""Commit with 32 bytes to all local steps of a round that a trainer submits. Pure.

The leaves of a Merkle tree are the digests of checkpoint 0, the samples of segment 0, checkpoint 1,
the samples of segment 1, and so on until the last checkpoint. The commitment is the digest of the
root and of the ``Extent``, so nobody can say later that there were fewer steps or other segments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct

from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.merkle import LEAF_BYTES, MerkleTree, merkle_climb
from atoll.optim.run_spec import SYNC_EVERY_MAX

SEGMENTS_MAX = 1024  # in a round; more would cost more checkpoints than anybody keeps
PROOF_BYTES_MAX = 12 * LEAF_BYTES  # 2 x 1024 + 1 leaves
NUMBER_MAX = 2**53  # the largest number of a round or step
EXTENT = Struct("<QQII")
EXTENT_BYTES = EXTENT.size


@dataclass(frozen=True)
class Extent:
    """Describe the extent of a trainer's work.

    ``base``: the round after which the work began. ``first_step``: how many local steps the run had
    behind it then (``global_step``). ``steps`` of them follow, cut after every ``segment_steps``;
    the last segment may be shorter.
    """

    base: int
    first_step: int
    steps: int
    segment_steps: int

    @property
    def segments(self) -> int:
        return -(-self.steps // self.segment_steps)

    @property
    def leaves(self) -> int:
        return 2 * self.segments + 1

    def steps_of(self, segment: int) -> int:
        return min(self.segment_steps, self.steps - segment * self.segment_steps)

    def step_of(self, segment: int) -> int:
        """Return the ``global_step`` before a segment."""
        return self.first_step + segment * self.segment_steps

    def pack(self) -> bytes:
        return EXTENT.pack(self.base, self.first_step, self.steps, self.segment_steps)

    @classmethod
    def unpack(cls, data: bytes) -> Extent:
        """Read an extent from ``EXTENT_BYTES`` bytes of anyone.

        RemoteProtocolError for steps that no trainer takes.
        """
        extent = cls(*EXTENT.unpack(data))
        if (
            max(extent.base, extent.first_step) > NUMBER_MAX
            or not 0 < extent.segment_steps <= SYNC_EVERY_MAX
            or not 0 < extent.segments <= SEGMENTS_MAX
        ):
            raise RemoteProtocolError(f"local steps that no trainer takes: {extent}")
        return extent

    def commitment(self, root: bytes) -> bytes:
        """Return the commitment to the leaves under ``root``, 32 bytes."""
        return hashlib.sha256(b"atoll local steps" + self.pack() + root).digest()

    def leads_to(self, commitment: bytes, leaf: bytes, index: int, proof: bytes) -> bool:
        """Return whether ``leaf`` is number ``index`` of those behind ``commitment``."""
        root = merkle_climb(leaf, index, self.leaves, proof)
        return root is not None and self.commitment(root) == commitment


@dataclass(frozen=True)
class WorkCommitment:
    """Hold a trainer's own commitment, with all leaves."""

    extent: Extent
    leaves: Sequence[bytes]

    @cached_property
    def _tree(self) -> MerkleTree:
        return MerkleTree(self.leaves)

    @cached_property
    def digest(self) -> bytes:
        """Return the 32 bytes that the trainer tells the others."""
        return self.extent.commitment(self._tree.root)

    def proof(self, index: int) -> bytes:
        return self._tree.proof(index)
