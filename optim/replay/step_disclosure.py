"""Commit to all local steps of a round, and disclose one segment of them. Pure.

A trainer commits with the 32 bytes that it submits. The leaves of a Merkle tree are the digests of
checkpoint 0, the samples of segment 0, checkpoint 1, the samples of segment 1, and so on until the
last checkpoint. The commitment is the digest of the root and of the ``Extent``, so nobody can say
later that there were fewer steps or other segments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from struct import Struct
from struct import error as StructError
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.collectives.merkle import LEAF_BYTES, MerkleTree, merkle_climb
from atoll.optim.manifest import Manifest
from atoll.optim.replay.checkpoint import (
    DIGESTS_BYTES,
    INNER_AT,
    WorkCheckpoint,
    checkpoint_bytes_max,
    leaf_of,
)
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


# ---------------------------------------------------------------- batches
#
# Pack and unpack which samples a trainer took at each of its local steps. Pure.
#
# ::
#
#     u32 steps
#     each step:    u32 batches      several where gradients are accumulated or a step was skipped
#     each batch:   u32 indices, u32 bytes of each of two states of random numbers (0: none)
#                   int64 each index; these states


I64 = NDArray[np.int64]
INDICES_MAX = 8192  # in a step: 64 KiB. For longer batches note a seed, or the first of a row
BATCHES_MAX = 4096  # in a step: gradients of so many are seldom accumulated
RNG_BYTES_MAX = 8192  # for a state; the Mersenne Twister on the host has 5,056
STEP_BYTES_MAX = 8 * INDICES_MAX + BATCHES_MAX * (12 + 2 * RNG_BYTES_MAX)
COUNT, BATCH = Struct("<I"), Struct("<III")


@dataclass(frozen=True)
class Batch:
    """Hold what a batch was made of.

    ``indices``: int64[n], what the user's loop knows it by. ``rng``: the states of the random
    numbers of the host, and of the device, when it was begun; empty if they are not kept.
    """

    indices: I64
    rng: tuple[bytes, bytes] = (b"", b"")


Steps: TypeAlias = list[tuple[Batch, ...]]


def check_step(step: tuple[Batch, ...]) -> None:
    """Raise ConfigError for more than a step may have."""
    indices = sum(batch.indices.size for batch in step)
    if indices > INDICES_MAX or len(step) > BATCHES_MAX:
        raise ConfigError(
            f"a local step of {len(step)} batches with {indices:,} indices; at most {BATCHES_MAX:,}"
            f" and {INDICES_MAX:,} are kept for a replay",
            fix="note something shorter from which the same batch can be made, as a seed",
        )
    if max((len(state) for batch in step for state in batch.rng), default=0) > RNG_BYTES_MAX:
        raise ConfigError(f"a random number generator has a state of over {RNG_BYTES_MAX} bytes")


def pack(steps: Steps) -> bytes:
    """Pack the batches of steps as bytes; ConfigError for a step that is too large."""
    parts = [COUNT.pack(len(steps))]
    for step in steps:
        check_step(step)
        parts.append(COUNT.pack(len(step)))
        for batch in step:
            parts.append(BATCH.pack(batch.indices.size, *map(len, batch.rng)))
            parts += [batch.indices.astype("<i8").tobytes(), *batch.rng]
    return b"".join(parts)


def unpack(data: bytes, count: int) -> Steps:
    """Unpack ``count`` steps from bytes of anyone: the inverse of ``pack``.

    RemoteProtocolError for bytes that are none.
    """
    try:
        return _unpacked(memoryview(data), count)
    except (StructError, ValueError, ConfigError) as error:
        raise RemoteProtocolError(f"the samples of local steps cannot be read: {error}") from error


def _unpacked(data: memoryview, count: int) -> Steps:
    (steps,) = COUNT.unpack_from(data)
    if steps != count:
        raise ValueError(f"{steps} steps, not {count}")
    at, found = COUNT.size, []
    for _ in range(steps):
        (batches,) = COUNT.unpack_from(data, at)
        at += COUNT.size
        if not 0 < batches <= BATCHES_MAX:
            raise ValueError(f"{batches} batches of a step")
        step = []
        for _ in range(batches):
            indices, *states = BATCH.unpack_from(data, at)
            at += BATCH.size
            if indices > INDICES_MAX or max(states) > RNG_BYTES_MAX:
                raise ValueError(f"{indices} indices, random states of {states} bytes")
            ends = np.cumsum([at, 8 * indices, *states]).tolist()
            if ends[-1] > len(data):
                raise ValueError("they are cut off")
            first, second = (bytes(data[a:b]) for a, b in pairwise(ends[1:]))
            values = np.frombuffer(data[at : ends[1]], "<i8").astype(np.int64)
            step.append(Batch(values, (first, second)))
            at = ends[-1]
        check_step(tuple(step))
        found.append(tuple(step))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes too many")
    return found


def batches_leaf(packed: bytes) -> bytes:
    """Return the leaf in the tree for the packed batches of a segment."""
    return hashlib.sha256(b"atoll local batches" + packed).digest()


def batches_bytes_max(steps: int) -> int:
    """Return the most bytes of the batches of so many steps; a reader refuses more."""
    return COUNT.size + steps * (COUNT.size + STEP_BYTES_MAX)


# ---------------------------------------------------------------- segments that are shown
#
# Open one segment of a trainer's work, with proof that it had committed to it. Pure.
#
# ::
#
#     magic, extent, u32 segment, u8 flags (1: the end is whole, 2: the end of the round before)
#     u64 length and bytes of: the start, its proof, the batches, their proof, the end, its proof,
#     and the end of the round before


MAGIC = b"atollseg"
HEAD = Struct("<IB")
LENGTH = Struct("<Q")
WHOLE, BEFORE = 1, 2


@dataclass(frozen=True)
class RoundEnding:
    """Hold how a trainer's last round ended: the digests of the parts of its last checkpoint."""

    extent: Extent
    digests: bytes
    proof: bytes

    def pack(self) -> bytes:
        return self.extent.pack() + self.digests + self.proof

    @classmethod
    def unpack(cls, data: bytes) -> RoundEnding:
        """Read an ending from bytes of anyone; RemoteProtocolError for bytes that are none."""
        at = EXTENT_BYTES + DIGESTS_BYTES
        if not at <= len(data) <= at + PROOF_BYTES_MAX:
            raise RemoteProtocolError(f"the end of a round in {len(data)} bytes")
        return cls(Extent.unpack(data[:EXTENT_BYTES]), data[EXTENT_BYTES:at], data[at:])

    def leads_to(self, commitment: bytes) -> bool:
        leaf, last = leaf_of(self.digests), self.extent.leaves - 1
        return self.extent.leads_to(commitment, leaf, last, self.proof)


@dataclass(frozen=True)
class Opened:
    """Hold an ``StepDisclosure`` that was proven; ``end`` is None if only its digests were sent."""

    extent: Extent
    segment: int
    start: WorkCheckpoint
    steps: Steps
    end: WorkCheckpoint | None
    end_digests: bytes
    before: RoundEnding | None

    @property
    def is_first(self) -> bool:
        """Return whether it is the first segment; then ``start.starts_at`` can be asked."""
        return self.segment == 0

    @property
    def is_last(self) -> bool:
        """Return whether it is the last segment; then ``end`` is what was submitted."""
        return self.segment == self.extent.segments - 1

    def carries_over(self, commitment: bytes) -> bool:
        """Return whether a first segment goes on from the state of inner optimizers.

        It does if it begins with the state with which the work behind ``commitment``, that of the
        round before, had ended.
        """
        if self.before is None or not self.is_first or not self.before.leads_to(commitment):
            return False
        return self.before.digests[INNER_AT] == self.start.digests()[INNER_AT]


@dataclass(frozen=True)
class StepDisclosure:
    """Hold one encoded segment with its proofs.

    ``start`` and ``end`` are encoded checkpoints (``end`` may be its four digests), ``batches``
    packed steps; each has its proof.
    """

    extent: Extent
    segment: int
    start: bytes | bytearray | memoryview
    start_proof: bytes
    batches: bytes
    batches_proof: bytes
    end: bytes | bytearray | memoryview
    end_proof: bytes
    before: RoundEnding | None = None

    @property
    def end_is_whole(self) -> bool:
        return len(self.end) != DIGESTS_BYTES

    def encode(self) -> bytes:
        flags = WHOLE * self.end_is_whole + BEFORE * (self.before is not None)
        before = self.before.pack() if self.before is not None else b""
        parts = [MAGIC, self.extent.pack(), HEAD.pack(self.segment, flags)]
        for part in (
            self.start,
            self.start_proof,
            self.batches,
            self.batches_proof,
            self.end,
            self.end_proof,
            before,
        ):
            parts += [LENGTH.pack(len(part)), bytes(part)]
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes | memoryview, manifest: Manifest) -> StepDisclosure:
        """Read an opening from bytes of anyone: the inverse of ``encode``.

        ``manifest`` is that of the run. Checkpoints stay where they are; ``open`` looks into them.
        RemoteProtocolError for bytes that are none.
        """
        view, at = memoryview(data), len(MAGIC) + EXTENT_BYTES + HEAD.size
        if len(view) < at or bytes(view[: len(MAGIC)]) != MAGIC:
            raise RemoteProtocolError("no segment of local steps")
        extent = Extent.unpack(bytes(view[len(MAGIC) : len(MAGIC) + EXTENT_BYTES]))
        segment, flags = HEAD.unpack(view[at - HEAD.size : at])
        if segment >= extent.segments or flags & ~(WHOLE | BEFORE):
            raise RemoteProtocolError(f"segment {segment} of {extent.segments}, flags {flags}")
        whole = checkpoint_bytes_max(manifest)
        most = (
            whole,
            PROOF_BYTES_MAX,
            batches_bytes_max(extent.steps_of(segment)),
            PROOF_BYTES_MAX,
            whole if flags & WHOLE else DIGESTS_BYTES,
            PROOF_BYTES_MAX,
            EXTENT_BYTES + DIGESTS_BYTES + PROOF_BYTES_MAX if flags & BEFORE else 0,
        )
        parts = _parts(view[at:], most)
        if (len(parts[4]) == DIGESTS_BYTES) == bool(flags & WHOLE):
            raise RemoteProtocolError(f"the end of a segment in {len(parts[4])} bytes")
        before = RoundEnding.unpack(bytes(parts[6])) if flags & BEFORE else None
        start_proof, batches, batches_proof = (bytes(part) for part in parts[1:4])
        return cls(
            extent,
            segment,
            parts[0],
            start_proof,
            batches,
            batches_proof,
            parts[4],
            bytes(parts[5]),
            before,
        )

    def open(self, commitment: bytes) -> Opened:
        """Return the segment once it is proven, for which checkpoints are hashed.

        RemoteProtocolError unless it is what ``commitment`` was made of.
        """
        start = WorkCheckpoint.decode(self.start)
        end = WorkCheckpoint.decode(self.end) if self.end_is_whole else None
        digests = bytes(self.end) if end is None else end.digests()
        leaves = (leaf_of(start.digests()), batches_leaf(self.batches), leaf_of(digests))
        proofs = (self.start_proof, self.batches_proof, self.end_proof)
        for number, (leaf, proof) in enumerate(zip(leaves, proofs, strict=True)):
            if not self.extent.leads_to(commitment, leaf, 2 * self.segment + number, proof):
                what = ("start", "samples", "end")[number]
                raise RemoteProtocolError(
                    f"the {what} of segment {self.segment} is not what its trainer has committed to"
                )
        steps = unpack(self.batches, self.extent.steps_of(self.segment))
        return Opened(self.extent, self.segment, start, steps, end, digests, self.before)


def opening_bytes_max(manifest: Manifest, segment_steps: int) -> int:
    """Return the most bytes of an encoded opening; a receiver refuses more."""
    rest = len(MAGIC) + 2 * EXTENT_BYTES + HEAD.size + DIGESTS_BYTES + 4 * PROOF_BYTES_MAX
    both = 2 * checkpoint_bytes_max(manifest)
    return both + batches_bytes_max(segment_steps) + rest + 7 * LENGTH.size


def _parts(data: memoryview, most: tuple[int, ...]) -> list[memoryview]:
    found, at = [], 0
    for limit in most:
        try:
            (length,) = LENGTH.unpack_from(data, at)
        except StructError as error:
            raise RemoteProtocolError("a segment of local steps is cut off") from error
        at += LENGTH.size
        if length > min(limit, len(data) - at):
            raise RemoteProtocolError(f"a part of {length} bytes in a segment of local steps")
        found.append(data[at : at + length])
        at += length
    if at != len(data):
        raise RemoteProtocolError(f"{len(data) - at} bytes too many in a segment of local steps")
    return found
