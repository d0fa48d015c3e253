"""Prove what donors say. Pure.

What a peer that syncs knows for certain: heads that fold to a chain, digests that several peers
name, pieces that lead to a root.

Folding proves a whole stretch from its end: who knows the chain after the last entry knows, because
nobody finds another input with the same hash, every head before it and the chain before the first.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.merkle import LEAF_BYTES, merkle_climb
from atoll.peer.membership.view import short
from atoll.peer.rounds.entries import EntryHead, entry_chain

WITNESSES_MAX = 2  # beside the coordinator; two wrong ones would have to name the same digest
DISSENT_S = 3.0  # one voice against the coordinator's and another's: it may just be late
_SIBLINGS_MAX = 20  # of 2^20 chunks
_HEAD = struct.Struct("<BBI")  # same, siblings, bytes of data
PART_HEAD_BYTES_MAX = _HEAD.size + LEAF_BYTES * _SIBLINGS_MAX
RUN_MAX = 64  # entries of one chunk in one frame; of more than these, the chunk itself is smaller
_UNKNOWN = bytes(32)


# ---------------------------------------------------------------- pieces


@dataclass(frozen=True, slots=True)
class ReceivedPart:
    """Describe a chunk as it arrives.

    ``same``: the receiver has these bytes already; then none follow.
    """

    same: bool
    proof: bytes
    data: memoryview
    data_digest: bytes  # of ``data``


def part_head(proof: bytes, nbytes: int, *, same: bool) -> bytes:
    """Return what stands before ``nbytes`` of data in a piece."""
    return _HEAD.pack(same, len(proof) // LEAF_BYTES, nbytes) + proof


def open_parts(payload: memoryview) -> tuple[ReceivedPart, ...]:
    """Return what is in a piece: one part or more, each a ``part_head`` and its data.

    For bytes from anyone: RemoteProtocolError if they are malformed. Hashes: not for the event
    loop.
    """
    parts: list[ReceivedPart] = []
    begin = 0
    while begin < len(payload) or not parts:
        if len(payload) - begin < _HEAD.size or len(parts) == RUN_MAX:
            raise RemoteProtocolError(f"a piece of {len(payload)} bytes with a malformed end")
        same, siblings, nbytes = _HEAD.unpack_from(payload, begin)
        proof = begin + _HEAD.size
        data = proof + LEAF_BYTES * siblings
        begin = data + nbytes
        if same > 1 or siblings > _SIBLINGS_MAX or begin > len(payload) or (same and nbytes):
            raise RemoteProtocolError(f"a piece of {len(payload)} bytes with a malformed head")
        data_digest = strong_digest(payload[data:begin])
        parts.append(
            ReceivedPart(bool(same), bytes(payload[proof:data]), payload[data:begin], data_digest)
        )
    return tuple(parts)


def state_of(leaf: bytes, chunk: int, chunks: int, proof: bytes, blob_digest: bytes) -> bytes:
    """Return the state digest that a chunk's proof leads to; empty if it leads nowhere."""
    root = merkle_climb(leaf, chunk, chunks, proof)
    return hashlib.sha256(blob_digest + root).digest() if root else b""


def entry_leaf(head: EntryHead, index: int, data_digest: bytes) -> bytes:
    """Return the leaf of an entry's chunk (see ``entries.entry_root``)."""
    origin = head.origins[head.origin_of[index] if index < len(head.origin_of) else 0]
    return hashlib.sha256(b"atoll-r" + origin.digest() + data_digest).digest()


def entry_holds(head: EntryHead, index: int, count: int, part: ReceivedPart) -> bool:
    """Return whether these are an entry's bytes of chunk ``index``, from the origin it names."""
    root = merkle_climb(entry_leaf(head, index, part.data_digest), index, count, part.proof)
    if root and head.blob:  # INIT
        root = hashlib.sha256(hashlib.sha256(head.blob).digest() + root).digest()
    return root == head.root


# ---------------------------------------------------------------- history


def fold(before: bytes, first: int, heads: Sequence[EntryHead]) -> bytes:
    """Return the chain after the last of consecutive heads; empty if they contradict themselves."""
    chain = before
    for number, head in enumerate(heads, first):
        if head.round != number or head.chain != entry_chain(chain, head):
            return b""
        chain = head.chain
    return chain


class Heads:
    """Hold the heads of entries ``first`` to ``last`` of the history that leads to ``tip``."""

    def __init__(self, before: bytes, first: int, heads: Sequence[EntryHead]) -> None:
        self.before, self.first = before, first
        self._heads = list(heads)

    @property
    def last(self) -> int:
        return self.first + len(self._heads) - 1

    @property
    def tip(self) -> bytes:
        return self._heads[-1].chain if self._heads else self.before

    def chain_after(self, number: int) -> bytes:
        """Return the chain after a round; empty for one that is not covered."""
        if number == self.first - 1:
            return self.before
        head = self.head(number)
        return head.chain if head else b""

    def head(self, number: int) -> EntryHead | None:
        return self._heads[number - self.first] if self.first <= number <= self.last else None

    def between(self, after: int, last: int) -> list[EntryHead]:
        return self._heads[max(0, after + 1 - self.first) : max(0, last + 1 - self.first)]

    def extend(self, heads: Sequence[EntryHead]) -> None:
        self._heads += heads

    def forget_until(self, number: int) -> None:
        """Drop the heads up to this round, which they cover: the history goes on from there."""
        self.before = self.chain_after(number)
        del self._heads[: number + 1 - self.first]
        self.first = number + 1

    def contradicts(self, other: Heads) -> bool:
        """Return whether the two are of different histories, as far as both reach."""
        last = min(self.last, other.last)
        mine, others = self.chain_after(last), other.chain_after(last)
        return bool(mine) and bool(others) and mine != others


class Attestation:
    """Record who names which digest for the state after which round, and what is agreed.

    A digest is agreed when the coordinator names it and as many other members as can, two at most.
    Without the coordinator among those that hold the state, three members are asked for. A member
    that has gone past a round without knowing its digest (it has joined since) cannot name it. A
    single one that contradicts the coordinator and somebody else is outvoted after DISSENT_S.
    """

    def __init__(self) -> None:
        self._named: dict[int, dict[bytes, bytes]] = {}
        self.agreed: dict[int, bytes] = {}
        self._disputed_s = float("inf")  # since when there is such a single one

    def record(self, peer: bytes, first: int, digests: bytes) -> None:
        for i in range(len(digests) // 32):
            digest = digests[32 * i : 32 * i + 32]
            if digest != _UNKNOWN:
                self._named.setdefault(first + i, {})[peer] = digest

    def recount(self, coordinator: bytes, members: Mapping[bytes, int], now_s: float) -> bool:
        """Count again; return whether anything has changed.

        ``members``: each with the round it is at.
        """
        before, self.agreed = self.agreed, {}
        disputed = False
        for number, named in self._named.items():
            voices = {peer: digest for peer, digest in named.items() if peer in members}
            able = sum(peer in voices or at < number for peer, at in members.items())
            if coordinator in members:
                digest = voices.get(coordinator, b"")
                needed = min(1 + WITNESSES_MAX, able)
            else:
                ranked = Counter(voices.values()).most_common(1)
                digest = ranked[0][0] if ranked else b""
                needed = min(1 + WITNESSES_MAX, max(able, 1))
            agree = sum(named == digest for named in voices.values())
            if digest and agree >= needed:
                self.agreed[number] = digest
            elif coordinator in members and agree >= 2 and len(voices) == agree + 1:
                disputed = True
                if now_s >= self._disputed_s + DISSENT_S:
                    self.agreed[number] = digest
        if disputed:
            self._disputed_s = min(self._disputed_s, now_s)
        elif max(self._named, default=-1) in self.agreed:
            self._disputed_s = float("inf")
        return self.agreed != before

    def dissenters(self) -> dict[bytes, int]:
        """Return peers that name another digest than the agreed one, each with a round."""
        found: dict[bytes, int] = {}
        for number, digest in self.agreed.items():
            for peer, named in self._named.get(number, {}).items():
                if named != digest:
                    found[peer] = number
        return found

    def forget(self, peer: bytes) -> None:
        """Forget what a peer has named; so memory is bounded by one answer of each donor."""
        for named in self._named.values():
            named.pop(peer, None)
        self._named = {number: named for number, named in self._named.items() if named}

    def describe(self, number: int) -> str:
        """Describe for people who says what about a round."""
        named = self._named.get(number, {})
        said = ", ".join(f"{short(p)} says {d.hex()[:8]}" for p, d in sorted(named.items()))
        return said or "nobody names one"
