"""Compute the numbers of an audited attempt, and what is in doubt or right by them.

Arrays travel as little-endian float32. They are compared as bytes: whoever computes them from the
same part, result and seed gets the same bits, on any machine. What anybody can compute from public
things are functions here; ``Numbers`` computes what one participant needs, each once and as soon as
it can. Distances and the bounds of encoding need no draw: who brings a chunk of the result computes
them, while others are still on their way; one thread at a time, in the same memory, for fresh pages
cost more than the arithmetic on them. Projections need the draw; but nobody has to have told
anything for those of the results and of the parts that are held here, so they are done by the time
all have.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

import numpy as np

from atoll.collectives.audit.checks import (
    gram_holds,
    identity_holds,
    implausible_grams,
    shard_identity_holds,
    suspicious,
    unlike_norms,
)
from atoll.collectives.audit.recompute import chunk_gram, coefficients, is_linear, recomputed
from atoll.collectives.audit.sketch import (
    F64,
    SKETCH_WIDTH,
    distance,
    error_bounds,
    sign_bits,
    sketch,
    widened,
)
from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.digests import strong_digest
from atoll.collectives.engine.parts import PartError
from atoll.collectives.errors import CodecError
from atoll.collectives.robust.gram import Matrix, grams_of_chunks, unpacked_gram
from atoll.peer.verify.statement import Check, Resultant, shard_gram
from atoll.peer.verify.terms import ReductionTerms

# Chunks that a thread looks at for one that it brings: more than come, so that none are left over
# for long, and few, as its stream waits meanwhile.
EACH_TIME: Final = 2
Parts = Mapping[tuple[int, int], U8]  # (sender, chunk): encoded


class ResultNumbers(NamedTuple):
    """Describe the result of a chunk.

    Its sketch, how far encoding may have moved it in each bucket, and its length.
    """

    sketch: F32
    bounds: F64
    length: float


class _Undrawn(NamedTuple):
    """Hold what needs no draw of a chunk.

    Norms are float32 as bytes, b"" of a part that does not decode.
    """

    bounds: F64
    length: float
    own_norm: bytes
    norms: dict[int, bytes]  # of what is held, by sender


class Numbers:
    """Compute sketches, norms and bounds of own parts, of held parts and of results.

    ``own``: the encoded own parts, one for each chunk, or none. ``held``: those of others, of the
    chunks that this peer owns; all of a chunk are there when its result is.
    """

    def __init__(self, work: ReductionTerms, own: Sequence[U8], held: Parts) -> None:
        self._work, self._own, self._held = work, own, held
        size = work.grid.size(0)
        self._lock = threading.Lock()  # held by whoever computes, with this memory
        self._part: F32 = np.empty(size, np.float32)
        self._whole: F32 = np.empty(size, np.float32)
        self._zeros: F32 = np.zeros(size, np.float32)
        self._came: deque[tuple[int, U8]] = deque()  # chunks of the result that nobody looked at
        self._undrawn: dict[int, _Undrawn] = {}
        self._bits: list[U8] = []
        self._check: Check | None = None
        self._told: dict[tuple[int, int], bytes] = {}
        self._seen: list[ResultNumbers] = []

    def came(self, chunk: int, result: U8) -> None:
        """Take a chunk of the result, which has been checked.

        Safe in any thread, and none has to wait.
        """
        self._came.append((chunk, result))
        if self._lock.acquire(blocking=False):
            try:
                self._catch_up(EACH_TIME)
            finally:
                self._lock.release()

    def check(self, seed: bytes, results: Sequence[U8]) -> Check:
        """Return what this participant has to say of its own parts."""
        with self._lock:
            return self._checked(seed, results)

    def look(
        self, seed: bytes, results: Sequence[U8]
    ) -> tuple[Mapping[tuple[int, int], bytes], Sequence[ResultNumbers]]:
        """Return what senders should have told of the parts held here, and how results look.

        The first is by (sender, chunk): sketch and norm as bytes, b"" for parts that do not decode.
        """
        with self._lock:
            self._checked(seed, results)
            for chunk in range(len(self._seen), len(results)):
                values, whole = self._memory(chunk)
                self._work.codec.decode(results[chunk], whole)
                undrawn, bits = self._undrawn[chunk], self._bits[chunk]
                self._seen.append(
                    ResultNumbers(sketch(whole, bits), undrawn.bounds, undrawn.length)
                )
                for sender, norm in undrawn.norms.items():
                    decodes = norm and self._decodes(self._held[sender, chunk], values)
                    numbers = sketch(values, bits).tobytes() + norm if decodes else b""
                    self._told[sender, chunk] = numbers
            return self._told, self._seen

    def _checked(self, seed: bytes, results: Sequence[U8]) -> Check:
        if self._check is None:
            self._came.extend((c, data) for c, data in enumerate(results) if c not in self._undrawn)
            self._catch_up(len(self._came))
            sketches = []
            for chunk in range(len(results)):
                bits = sign_bits(seed, chunk, self._work.grid.size(chunk))
                self._bits.append(bits)
                if self._own:
                    values, _ = self._memory(chunk)
                    self._work.part_codec.decode(self._own[chunk], values)
                    sketches.append(sketch(values, bits).tobytes())
            norms = (self._undrawn[chunk].own_norm for chunk in range(len(results)))
            self._check = Check(seed, b"".join(sketches), b"".join(norms))
        return self._check

    def _catch_up(self, most: int) -> None:
        for _ in range(min(most, len(self._came))):
            chunk, result = self._came.popleft()
            if chunk not in self._undrawn:
                self._undrawn[chunk] = self._undrawn_of(chunk, result)

    def _undrawn_of(self, chunk: int, result: U8) -> _Undrawn:
        work, own_norm, norms = self._work, b"", dict[int, bytes]()
        values, whole = self._memory(chunk)
        work.codec.decode(result, whole)
        if self._own:
            work.part_codec.decode(self._own[chunk], values)
            own_norm = distance(values, whole).tobytes()
        for sender in work.counted:
            part = self._held.get((sender, chunk))
            if part is not None:
                decodes = self._decodes(part, values)
                norms[sender] = distance(values, whole).tobytes() if decodes else b""
        length = float(distance(whole, self._zeros[: whole.size]))
        bounds = error_bounds(work.codec, result, whole.size, whole)
        return _Undrawn(bounds, length, own_norm, norms)

    def _memory(self, chunk: int) -> tuple[F32, F32]:
        """Return memory for a part of a chunk, and for its result."""
        size = self._work.grid.size(chunk)
        return self._part[:size], self._whole[:size]

    def _decodes(self, part: U8, out: F32) -> bool:
        try:
            self._work.part_codec.decode(part, out)
        except CodecError:
            return False
        return True


# The last digits depend on the processor: sums in float64 and a few iterations. A choice of vectors
# is all or nothing, and coefficients of many peers are a sixty-fourth or more.
MATRIX_OFF: Final = 1e-4
# Chunks that are opened in an attempt: all that 16 million parameters have.
DOUBTED_MAX: Final = 64
_F32: Final = np.dtype("<f4")


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
    (``RobustParts``).
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
    """Return the digest of the result that an honest owner makes of these encoded parts.

    ``parts``: participant -> bytes. It is made with the matrix that the owner has signed; b"" where
    an honest owner would refuse the parts: then it signs nothing.
    """
    size, matrix = work.grid.size(chunk), _matrix(work, owner)
    try:
        made = recomputed(work.plan, chunk, parts, work.part_codec, work.codec, size, matrix)
    except (CodecError, PartError):
        return b""
    return strong_digest(made)


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
