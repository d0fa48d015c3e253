"""Describe committed rounds as log entries, and compute the root that covers their bytes.

The result R of a round is the encoded bytes of the chunks of one fragment. A chunk's *origin* says
whose submissions are in its mean, with which weights: chunks that were kept from a broken attempt
have another origin than those that were reduced again. Every leaf covers digest and origin, the
root covers the leaves, and the chain covers the root, so equal chains mean equal bytes and equal
accounts of who contributed.

Rounds of a session's own collectives (GATHER and REDUCE, peer/membership/operations.py) are
entries too, so that they are ordered with all others; they change no state, so the log keeps their
heads only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from atoll.collectives.errors import StateError
from atoll.collectives.merkle import merkle_root
from atoll.optim.manifest import FRAGMENTS_MAX
from atoll.optim.run_spec import BLOB_BYTES_MAX
from atoll.peer.membership.view import MEMBERS_MAX, Digest, PeerId, Rounds, chain_after
from atoll.peer.net.wire import Within, message

INIT = "init"  # log entry 1: specification, manifest and raw parameters of the first trainer
INIT_ROUND = 1
STEP = "step"  # an averaged pseudo-gradient
GATHER = "gather"  # the objects of all trainers, in BEGIN's blob; the state stays what it is
REDUCE = "reduce"  # the reduced vector of all trainers; the state stays what it is
OPERATIONS = (GATHER, REDUCE)
KINDS = (INIT, STEP, *OPERATIONS)
WEIGHT_MAX = 1e15  # tokens in one round; sums of a thousand of them are exact in float64
ORIGINS_MAX = 16  # attempts of one round (attempts.ATTEMPTS_MAX): one origin each
ROUNDS_IN_FLIGHT_MAX = 4  # of different fragments: each takes memory for a whole result
CHUNKS_MAX = 1 << 20  # of a fragment: a terabyte of parameters

Blob = Annotated[bytes, Within(0, BLOB_BYTES_MAX)]
Fragment = Annotated[int, Within(0, FRAGMENTS_MAX - 1)]


def fragment_of(round_number: int, fragments: int) -> int:
    """Return the number of the fragment that a round reduces.

    From round 2 on they take turns; round 1 (INIT) is the whole vector, and counts as fragment 0.
    """
    return (round_number - 2) % fragments if round_number > 1 else 0


@message(wire="Origin")
@dataclass(frozen=True, slots=True)
class EntryOrigin:
    """Name whose submissions are in a mean, and with which weights.

    ``participants`` are sorted peer ids, each with its weight in the mean.
    """

    participants: Annotated[tuple[PeerId, ...], Within(0, MEMBERS_MAX)]
    weights: Annotated[tuple[float, ...], Within(0, MEMBERS_MAX)]

    def __post_init__(self) -> None:
        if len(self.participants) != len(self.weights):
            raise ValueError("one weight per participant")
        if list(self.participants) != sorted(set(self.participants)) or not self.participants:
            raise ValueError("participants are named once each, in order")
        if not all(0 <= weight <= WEIGHT_MAX for weight in self.weights) or not any(self.weights):
            raise ValueError(f"weights are 0 to {WEIGHT_MAX:g} and not all zero")

    @property
    def counted(self) -> tuple[bytes, ...]:
        """Return the peers whose submissions are in the mean; those without weight are not."""
        pairs = zip(self.participants, self.weights, strict=True)
        return tuple(peer for peer, weight in pairs if weight > 0)

    @property
    def contributors(self) -> int:
        return len(self.counted)

    def share_of(self, peer: bytes) -> float:
        """Return the peer's part of the mean, 0 to 1."""
        weights = dict(zip(self.participants, self.weights, strict=True))
        return weights.get(peer, 0.0) / sum(self.weights)

    def digest(self) -> bytes:
        text = hashlib.sha256(b"atoll-origin")
        for peer, weight in zip(self.participants, self.weights, strict=True):
            text.update(peer + weight.hex().encode() + b";")
        return text.digest()


@message(wire="EntryHead")
@dataclass(frozen=True, slots=True)
class EntryHead:
    """Describe everything about a committed round but its bytes.

    ``chain`` is the one after it. ``origin_of`` has one byte per chunk of the fragment; empty means
    origin 0 for all.
    """

    round: Rounds
    kind: str
    fragment: Fragment
    origins: Annotated[tuple[EntryOrigin, ...], Within(1, ORIGINS_MAX)]
    origin_of: Annotated[bytes, Within(0, CHUNKS_MAX)]
    root: Digest
    chain: Digest
    blob: Blob = b""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a log entry is one of {', '.join(KINDS)}")
        if (self.kind != STEP and self.fragment) or (self.kind != INIT and self.blob):
            raise ValueError("only STEP is of a fragment, and only INIT has a specification")
        if self.origin_of and max(self.origin_of) >= len(self.origins):
            raise ValueError("a chunk's origin is one of the entry's")

    def share_of(self, peer: bytes) -> float:
        """Return the peer's part of the mean, 0 to 1: that of all chunks.

        A chunk of an attempt without this peer may have been kept, and be the only one.
        """
        which = self.origin_of or bytes(1)
        return sum(
            which.count(place) / len(which) * origin.share_of(peer)
            for place, origin in enumerate(self.origins)
        )

    @property
    def contributors(self) -> tuple[bytes, ...]:
        """Return the peers whose submissions are in the mean of the last attempt, in order."""
        return self.origins[-1].counted

    def origin(self, chunk: int) -> EntryOrigin:
        """Return whose submissions are in a chunk of the fragment, with their weights.

        The root says the same, so nobody can say otherwise.
        """
        return self.origins[self.origin_of[chunk] if self.origin_of else 0]


def entry_root(
    origins: Sequence[EntryOrigin], origin_of: bytes, digests: Sequence[bytes], blob: bytes = b""
) -> bytes:
    """Return the root of R from the ``digests`` of its encoded chunks, in order.

    StateError if ``origin_of`` speaks of another number of chunks.
    """
    if origin_of and len(origin_of) != len(digests):
        raise StateError(f"an entry of {len(digests)} chunks names {len(origin_of)} origins")
    marks = [b"atoll-r" + origin.digest() for origin in origins]
    which = origin_of or bytes(len(digests))
    leaves = [
        hashlib.sha256(marks[origin] + digest).digest()
        for origin, digest in zip(which, digests, strict=True)
    ]
    root = merkle_root(leaves or [hashlib.sha256(marks[0]).digest()])  # GATHER has no chunks
    if blob:
        root = hashlib.sha256(hashlib.sha256(blob).digest() + root).digest()
    return root


def entry_chain(before: bytes, head: EntryHead) -> bytes:
    """Return what ``head.chain`` must be, given the chain after the round before."""
    return chain_after(before, head.round, head.fragment, head.root)
