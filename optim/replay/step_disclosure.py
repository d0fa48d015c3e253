"""Open one segment of a trainer's work, with proof that it had committed to it. Pure.

::

    magic, extent, u32 segment, u8 flags (1: the end is whole, 2: the end of the round before)
    u64 length and bytes of: the start, its proof, the batches, their proof, the end, its proof,
    and the end of the round before
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from struct import error as StructError

from atoll.collectives.errors import RemoteProtocolError
from atoll.optim.manifest import Manifest
from atoll.optim.replay.batches import Steps, batches_bytes_max, batches_leaf, unpack
from atoll.optim.replay.checkpoint import (
    DIGESTS_BYTES,
    INNER_AT,
    WorkCheckpoint,
    checkpoint_bytes_max,
    leaf_of,
)
from atoll.optim.replay.commitment import EXTENT_BYTES, PROOF_BYTES_MAX, Extent

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
