"""Keep what linked peers say about evidence, and choose whom to ask for what. Sans-I/O.

What one peer says takes no room from what others say, and each is asked in its turn, so nobody can
hide evidence behind heaps of digests that nothing belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

SAID_MAX: Final = 4096  # digests of one peer that are remembered: more than it may have


@dataclass(slots=True)
class _Said:
    counts: dict[bytes, None] = field(default_factory=dict)  # it believes this evidence
    words: dict[bytes, None] = field(default_factory=dict)  # it says that this pair is to go
    absent: set[bytes] = field(default_factory=set)  # it has not given this when it was asked


class EvidenceIndex:
    """Keep what each linked peer says; who has not been asked for longest is first."""

    def __init__(self) -> None:
        self._said: dict[bytes, _Said] = {}

    def hear(self, peer: bytes, counts: Sequence[bytes], words: Sequence[bytes]) -> None:
        said = self._said.setdefault(peer, _Said())
        for known, new in ((said.counts, counts), (said.words, words)):
            known.update(dict.fromkeys(new))
            while len(known) > SAID_MAX:
                del known[next(iter(known))]

    def forget(self, peer: bytes) -> None:
        self._said.pop(peer, None)

    def of(self, digest: bytes) -> list[bytes]:
        """Return who speaks for this evidence."""
        return [
            p for p, said in self._said.items() if digest in said.counts or digest in said.words
        ]

    def believers(self, digests: Collection[bytes]) -> frozenset[bytes]:
        """Return for whom one of these counts."""
        return frozenset(
            p for p, said in self._said.items() if not said.counts.keys().isdisjoint(digests)
        )

    def next(
        self, able: Collection[bytes], lacks: Callable[[bytes], bool]
    ) -> tuple[bytes, bytes] | None:
        """Return whom of these to ask for what, and put it last in turn; None if nobody."""
        for peer, said in self._said.items():
            if peer not in able:
                continue
            named = (d for d in (*said.counts, *said.words) if d not in said.absent and lacks(d))
            if (digest := next(named, None)) is not None:
                self._said[peer] = self._said.pop(peer)
                return peer, digest
        return None

    def has_not(self, peer: bytes, digest: bytes) -> None:
        """Note that it was asked and did not give it: it is not asked again, over this link."""
        if peer in self._said:
            self._said[peer].absent.add(digest)
