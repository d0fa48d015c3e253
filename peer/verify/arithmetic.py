"""Compute which results of an audited attempt are in doubt, and which bytes are right. Pure.

This follows from what all have said in the attempt and from parts that are opened, with the
functions in collectives/audit/.

Arrays travel as little-endian float32. They are compared as bytes: whoever computes them from the
same part, result and seed gets the same bits, on any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.accumulator import PartError
from atoll.collectives.audit.bounds import widened
from atoll.collectives.audit.checks import (
    identity_holds,
    shard_identity_holds,
    suspicious,
)
from atoll.collectives.audit.grams import gram_holds, implausible_grams, unlike_norms
from atoll.collectives.audit.recompute import chunk_gram, coefficients, is_linear, recomputed
from atoll.collectives.audit.sketch import SKETCH_WIDTH, distance, sign_bits, sketch
from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.errors import CodecError
from atoll.collectives.robust.gram import Matrix, grams_of_chunks, unpacked_gram
from atoll.peer.verify.bodies import shard_gram
from atoll.peer.verify.numbers import ResultNumbers
from atoll.peer.verify.statements import Check, Resultant
from atoll.peer.verify.terms import ReductionTerms

# The last digits depend on the processor: sums in float64 and a few iterations. A choice of vectors
# is all or nothing, and coefficients of many peers are a sixty-fourth or more.
MATRIX_OFF: Final = 1e-4
# Chunks that are opened in an attempt: all that 16 million parameters have.
DOUBTED_MAX: Final = 64
F64 = NDArray[np.float64]
_F32: Final = np.dtype("<f4")
_DIGEST_BYTES: Final = 32


# ---------------------------------------------------------------- numbers of one part


def part_numbers(
    work: ReductionTerms, seed: bytes, chunk: int, part: bytes | U8, result: bytes | U8
) -> bytes:
    """Return sketch and norm, float32[9] as bytes, of an encoded part of a chunk.

    The norm is the distance of the part to the encoded result; b"" for bytes that do not decode.
    """
    size = work.grid.size(chunk)
    try:
        values, whole = _decoded(work.part_codec, part, size), _decoded(work.codec, result, size)
    except CodecError:
        return b""
    numbers = np.empty(SKETCH_WIDTH + 1, _F32)
    numbers[:SKETCH_WIDTH] = sketch(values, sign_bits(seed, chunk, size))
    numbers[SKETCH_WIDTH] = distance(values, whole)
    return numbers.tobytes()


# ---------------------------------------------------------------- what all have said together


def gram_of(work: ReductionTerms, said: Mapping[int, Resultant]) -> Matrix | None:
    """Return the inner products of whole vectors, summed from what each owner has signed.

    None where the rule needs none. They are summed as owners sum them
    (collectives/robust_parts.py).
    """
    if work.rule is None or not work.rule.needs_gram:
        return None
    count = len(work.counted)
    heard = (unpacked_gram(shard_gram(work, said[owner]), count) for owner in sorted(work.shards))
    return sum(heard, np.zeros((count, count)))


def matrix_fits(work: ReductionTerms, said: Mapping[int, Resultant], owner: int) -> bool:
    """Return whether the matrix that an owner has signed is what the rule gives.

    The rule makes it of the inner products that all have signed; a difference by rounding
    (MATRIX_OFF) is allowed. True where the rule needs no inner products.
    """
    rule = work.rule
    if rule is None or not rule.needs_gram:
        return True
    count = len(work.counted)
    made = rule.matrix(gram_of(work, said), count, work.plan.key)
    true = np.eye(count) if made is None else made
    signed = _matrix(work, said[owner])
    if signed is None or signed.shape != true.shape:
        return False
    return bool((np.abs(signed - true) <= MATRIX_OFF * max(1.0, float(np.abs(true).max()))).all())


def _matrix(work: ReductionTerms, said: Resultant) -> Matrix | None:
    """Return the matrix of coefficients as an owner has signed it.

    For rules that need no inner products it is the one that everybody knows; None for a mean.
    """
    rule, count = work.rule, len(work.counted)
    if rule is None:
        return None
    if not rule.needs_gram:
        return rule.matrix(None, count, work.plan.key)
    return np.frombuffer(said.matrix, _F32).reshape(-1, count).astype(np.float64)


def doubted(
    work: ReductionTerms,
    checks: Mapping[int, Check],
    said: Mapping[int, Resultant],
    results: Sequence[ResultNumbers],
) -> list[int]:
    """Return the chunks whose result or inner products are in doubt, DOUBTED_MAX at most.

    They do not fit what those who count have said of their parts.
    """
    found: list[list[int]] = []
    for owner, chunks in sorted(work.shards.items()):
        if not matrix_fits(work, said, owner):
            found.append([chunks[0]])
            continue
        told = _Told(work, checks, said[owner])
        seen = [told.result(chunk, results[chunk]) for chunk in chunks]
        wrong = [c for c, one in zip(chunks, seen, strict=True) if told.is_wrong(c, one)]
        if told.is_wrong_together(chunks, seen):
            wrong = list({*wrong, told.worst(chunks, seen)})
        found.append(wrong)
        if said[owner].gram:
            grams = grams_of_chunks(said[owner].gram, len(work.counted))
            off = {*implausible_grams(grams, told.sketches[chunks])}
            off |= {*told.grams_off(grams, chunks, seen)}
            found.append([chunks[place] for place in off])  # beside others, and behind none
    return _chosen(found, checks[work.counted[0]].seed)


def _chosen(by_owner: Iterable[list[int]], seed: bytes) -> list[int]:
    """Choose which doubted chunks are opened: of each owner alike, in an order drawn from ``seed``.

    Nobody could know before the draw which ones. Else one would hide a wrong chunk behind others,
    of honest owners too, that only look wrong.
    """

    def drawn(chunk: int) -> bytes:
        return hashlib.sha256(seed + chunk.to_bytes(8, "little")).digest()

    rows = zip_longest(*(sorted(chunks, key=drawn) for chunks in by_owner))
    found = dict.fromkeys(chunk for row in rows for chunk in row if chunk is not None)
    return list(found)[:DOUBTED_MAX]


class _Told:
    """Hold what all who count have said.

    ``sketches``: float32[chunks, n, width]; ``_norms``: float32[chunks, n]; ``_weights``: of their
    parts, where an owner's result is a sum of them.
    """

    def __init__(self, work: ReductionTerms, checks: Mapping[int, Check], owner: Resultant) -> None:
        self._work = work
        counted = [checks[index] for index in work.counted]
        shape = (work.grid.count, SKETCH_WIDTH)
        sketches = [np.frombuffer(check.sketches, _F32).reshape(shape) for check in counted]
        self.sketches: F32 = np.stack(sketches, axis=1)
        self._norms: F32 = np.stack([np.frombuffer(c.norms, _F32) for c in counted], axis=1)
        self._weights: F64 | None = None
        if is_linear(work.rule):
            matrix = _matrix(work, owner)
            mean = coefficients(None, None, len(counted), work.plan.key)
            self._weights = mean if matrix is None else matrix[0]

    def result(self, chunk: int, seen: ResultNumbers) -> tuple[F32, F64, float]:
        """Return the sketch of a result, how far it may be off in each bucket, and how far in all.

        For the last, each told norm counts as no more than the median: a norm that one alone tells
        may excuse what it is multiplied with, and not a result that lies far from everybody.
        """
        bounds, size = seen.bounds, self._work.grid.size(chunk)
        error = float(np.sqrt(bounds.sum()))
        if self._weights is not None:
            norms = self._norms[chunk]
            usual = np.minimum(norms, np.median(norms))
            error = float(np.sqrt(widened(bounds, self._weights, usual, seen.length, size).sum()))
            bounds = widened(bounds, self._weights, norms, seen.length, size)
        return seen.sketch, bounds, error

    def is_wrong(self, chunk: int, seen: tuple[F32, F64, float]) -> bool:
        result, bounds, error = seen
        sketches = self.sketches[chunk]
        # In a mean one part may move the result away from all others, and that is no owner's doing.
        if self._work.rule is not None and suspicious(self._norms[chunk], sketches, error):
            return True
        weights = self._weights
        return weights is not None and not identity_holds(weights, sketches, result, bounds)

    def is_wrong_together(
        self, chunks: Sequence[int], seen: Sequence[tuple[F32, F64, float]]
    ) -> bool:
        if self._weights is None:
            return False
        results = np.stack([result for result, _, _ in seen])
        bounds = np.stack([bound for _, bound, _ in seen])
        return not shard_identity_holds(self._weights, self.sketches[chunks], results, bounds)

    def grams_off(
        self, grams: Matrix, chunks: Sequence[int], seen: Sequence[tuple[F32, F64, float]]
    ) -> list[int]:
        """Return the places of chunks whose inner products do not give the distances to the result.

        These distances are the norms that all have told.
        """
        if self._weights is None:
            return []
        errors = np.array([error for _, _, error in seen])
        return unlike_norms(grams, self._weights, self._norms[chunks], errors)

    def worst(self, chunks: Sequence[int], seen: Sequence[tuple[F32, F64, float]]) -> int:
        """Return the chunk whose sketch is off most, relative to its bounds."""
        assert self._weights is not None
        gaps = [
            np.square(self._weights @ self.sketches[chunk] - result).sum() / bounds.sum()
            for chunk, (result, bounds, _) in zip(chunks, seen, strict=True)
        ]
        return chunks[int(np.argmax(gaps))]


def recomputed_digest(
    work: ReductionTerms, chunk: int, parts: Mapping[int, bytes], owner: Resultant
) -> bytes:
    """Return the SHA-256 of the result that an honest owner makes of these encoded parts.

    ``parts``: participant -> bytes. It is made with the matrix that the owner has signed; b"" where
    an honest owner would refuse the parts: then it signs nothing.
    """
    size, matrix = work.grid.size(chunk), _matrix(work, owner)
    try:
        made = recomputed(work.plan, chunk, parts, work.part_codec, work.codec, size, matrix)
    except (CodecError, PartError):
        return b""
    return hashlib.sha256(made).digest()


def gram_fits(
    work: ReductionTerms, chunk: int, parts: Mapping[int, bytes], owner: Resultant
) -> bool:
    """Return whether the inner products that a chunk's owner has signed are those of its parts.

    ``parts``: participant -> encoded bytes. False where an honest owner would refuse them; true
    where the rule needs no inner products.
    """
    if not owner.gram:
        return True
    place = work.shards[work.plan.owners[chunk]].index(chunk)
    told = grams_of_chunks(owner.gram, len(work.counted))[place]
    counted = [parts[index] for index in work.counted]
    try:
        return gram_holds(told, chunk_gram(counted, work.part_codec, work.grid.size(chunk)))
    except CodecError:
        return False


def _decoded(codec: Codec, data: bytes | U8, size: int) -> F32:
    values = np.empty(size, np.float32)
    codec.decode(np.frombuffer(data, np.uint8), values)
    return values
