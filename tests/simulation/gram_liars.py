"""Owners that lie about inner products, which only they can know: see collectives/audit/checks.py.

What is told stays what some vectors have: anything else is refused when it is heard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from atoll.collectives.audit.recompute import is_linear
from atoll.collectives.robust.gram import Matrix, grams_of_chunks, packed_gram
from atoll.peer.verify.statement import Resultant, SignedStatement, StatementPhase, body_of
from simulation.liar import Lies

__all__ = ["EvenGram", "FarGram", "OneGram", "StretchedGram", "TwoGrams"]

FACTOR = 1e6  # of squares: beyond what eight projections of one chunk can be off by


class EvenGram(Lies):
    """In all chunks alike: vectors that are longer, or shorter, than they are."""

    kind = "wrong inner products"

    def gram(self, data: bytes) -> bytes:
        grams = grams_of_chunks(data, len(self.terms.work.counted))
        factor = self.rng.choice((FACTOR, 1 / FACTOR))
        self.must_fall = True
        return self._packed([gram * factor for gram in grams])

    def _packed(self, grams: list[Matrix]) -> bytes:
        return b"".join(map(packed_gram, grams))


class OneGram(EvenGram):
    """In one of its chunks."""

    kind = "wrong inner products of a chunk"

    def gram(self, data: bytes) -> bytes:
        grams = list(grams_of_chunks(data, len(self.terms.work.counted)))
        place = self.rng.randrange(len(grams))
        grams[place] = grams[place] * self.rng.choice((FACTOR, 1 / FACTOR))
        self.must_fall = True
        return self._packed(grams)


class StretchedGram(EvenGram):
    """Of vectors that are four times as long: too little for projections of a few chunks, but with
    a linear rule all know how far they are from the result."""

    kind = "stretched vectors"

    def gram(self, data: bytes) -> bytes:
        grams = grams_of_chunks(data, len(self.terms.work.counted))
        self.must_fall = is_linear(self.terms.work.rule)
        return self._packed([gram * 16.0 for gram in grams])


class FarGram(EvenGram):
    """One vector is moved far away from all others, or onto another one."""

    kind = "moved vector"

    def gram(self, data: bytes) -> bytes:
        count = len(self.terms.work.counted)
        moved, other = self.rng.sample(range(count), 2)
        mixing = np.eye(count)
        if self.rng.random() < 0.5:
            mixing[moved] = mixing[other]
        else:
            mixing[moved, other] -= FACTOR
            mixing[moved, moved] += FACTOR
        grams = grams_of_chunks(data, count)
        self.must_fall = True
        return self._packed([mixing @ gram @ mixing.T for gram in grams])


class TwoGrams(Lies):
    """Signs others than it has told the owners before."""

    kind = "other inner products"

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        yield (
            0.0,
            self._changed(message) if self._is_mine(message, StatementPhase.RESULT) else message,
        )

    def _changed(self, message: object) -> object:
        assert isinstance(message, SignedStatement)
        body = body_of(message.statement)
        assert isinstance(body, Resultant)
        if not body.gram:
            return message
        self.must_fall = True
        grams = grams_of_chunks(body.gram, len(self.terms.work.counted))
        gram = b"".join(packed_gram(each * (1 + 2.0**-20)) for each in grams)
        return self._other(message, replace(body, gram=gram))
