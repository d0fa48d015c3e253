"""The numbers of an audited attempt: what each participant has to say, and what follows from what
all have said. Pure functions of bytes, over collectives/audit/.

Arrays travel as little-endian float32. They are compared as bytes: whoever computes them from the
same part, result and seed gets the same bits, on any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.audit import (
    SKETCH_WIDTH,
    coefficients,
    distance,
    error_bounds,
    gram_is_plausible,
    identity_holds,
    is_linear,
    recomputed,
    shard_holds,
    sign_bits,
    sketch,
    suspicious,
)
from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.errors import CodecError
from atoll.collectives.parts import PartError
from atoll.collectives.robust.gram import Matrix, unpacked_gram
from atoll.peer.audit.statements import (
    Check,
    Commitment,
    Resultant,
    Statement,
    body_of,
)
from atoll.peer.audit.terms import Terms, Work

__all__ = [
    "body_fits",
    "doubted",
    "gram_of",
    "matrix_of",
    "own_check",
    "part_numbers",
    "recomputed_digest",
    "seed_of",
    "told_numbers",
]

DOUBTED_MAX: Final = 4  # chunks that are opened at a time: one is enough to convict somebody
_F32: Final = np.dtype("<f4")
_DIGEST_BYTES: Final = 32


def seed_of(terms: Terms, secrets: Mapping[bytes, bytes]) -> bytes:
    """The common draw. No participant can choose it: all secrets were committed to before any was
    revealed, and one honest secret is enough."""
    hashed = hashlib.sha256(b"atoll audit seed 1\0" + terms.digest)
    for peer in sorted(secrets):
        hashed.update(peer + secrets[peer])
    return hashed.digest()


def body_fits(terms: Terms, index: int, statement: Statement) -> str:
    """What is wrong with what this participant says in these terms; "" if nothing is.
    RemoteProtocolError if it cannot be read."""
    body, work, counts = body_of(statement), terms.work, terms.counted[index]
    if isinstance(body, Commitment):
        wanted = len(terms.participants) if counts else 0
        return "" if len(body.roots) == wanted else f"{len(body.roots)} roots, not {wanted}"
    if isinstance(body, Check):
        return _check_fits(body, work.grid.count if counts else 0)
    if isinstance(body, Resultant):
        return _resultant_fits(body, work, index)
    return ""


def _check_fits(body: Check, chunks: int) -> str:
    lengths = (len(body.sketches), len(body.norms))
    if lengths != (4 * SKETCH_WIDTH * chunks, 4 * chunks):
        return f"numbers of {lengths} bytes for {chunks} chunks"
    finite = (np.isfinite(np.frombuffer(d, _F32)).all() for d in (body.sketches, body.norms))
    return "" if all(finite) else "numbers that are not finite"


def _resultant_fits(body: Resultant, work: Work, index: int) -> str:
    owned, count = len(work.shards.get(index, ())), len(work.counted)
    if len(body.digests) != _DIGEST_BYTES * owned:
        return f"{len(body.digests)} bytes of digests for {owned} chunks"
    needed = work.rule is not None and work.rule.needs_gram and owned > 0
    if len(body.gram) != (4 * count * (count + 1) if needed else 0):
        return f"inner products of {len(body.gram)} bytes"
    try:
        if needed:
            unpacked_gram(body.gram, count)
    except ValueError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------- numbers of one part


def part_numbers(work: Work, seed: bytes, chunk: int, part: bytes | U8, result: bytes | U8) -> bytes:
    """Sketch and norm, float32[9], of an encoded part of a chunk and the encoded result; b"" for
    bytes that do not decode."""
    size = work.grid.size(chunk)
    try:
        values, whole = _decoded(work.part_codec, part, size), _decoded(work.codec, result, size)
    except CodecError:
        return b""
    numbers = np.empty(SKETCH_WIDTH + 1, _F32)
    numbers[:SKETCH_WIDTH] = sketch(values, sign_bits(seed, chunk, size))
    numbers[SKETCH_WIDTH] = distance(values, whole)
    return numbers.tobytes()


def told_numbers(work: Work, check: Check, chunk: int) -> bytes:
    """The same, as a participant has said it."""
    width = 4 * SKETCH_WIDTH
    return check.sketches[width * chunk : width * (chunk + 1)] + check.norms[
        4 * chunk : 4 * (chunk + 1)
    ]


def own_check(work: Work, seed: bytes, parts: Sequence[U8], results: Sequence[U8]) -> Check:
    """What a participant that counts has to say of its own parts, one for each chunk."""
    told = [
        part_numbers(work, seed, chunk, part, result)
        for chunk, (part, result) in enumerate(zip(parts, results, strict=True))
    ]
    width = 4 * SKETCH_WIDTH
    return Check(seed, b"".join(n[:width] for n in told), b"".join(n[width:] for n in told))


# ---------------------------------------------------------------- what all have said together


def gram_of(work: Work, grams: Mapping[int, bytes]) -> Matrix | None:
    """The inner products over all shards, of what each owner has said (participant -> packed); None
    where the rule needs none. Summed as owners sum them (collectives/stacks.py)."""
    if work.rule is None or not work.rule.needs_gram:
        return None
    count = len(work.counted)
    heard = (unpacked_gram(grams[owner], count) for owner in sorted(work.shards))
    return sum(heard, np.zeros((count, count)))


def matrix_of(work: Work, grams: Mapping[int, bytes]) -> Matrix | None:
    """What the rule makes of the inner products; None where there is nothing to mix."""
    if work.rule is None:
        return None
    gram, count = gram_of(work, grams), len(work.counted)
    matrix = work.rule.matrix(gram, count, work.plan.key)
    return np.eye(count) if matrix is None and gram is not None else matrix


def doubted(
    work: Work, checks: Mapping[int, Check], grams: Mapping[int, bytes], results: Sequence[U8]
) -> list[int]:
    """The chunks whose result does not fit what those who count have said of their parts; all
    participants come to the same. An owner is doubted by its worst chunk."""
    sketches = np.stack(
        [np.frombuffer(checks[i].sketches, _F32).reshape(-1, SKETCH_WIDTH) for i in work.counted],
        axis=1,
    )  # [chunks, n, width]
    norms = np.stack([np.frombuffer(checks[i].norms, _F32) for i in work.counted], axis=1)
    seed = checks[work.counted[0]].seed
    weights = _weights(work, grams)
    found: list[int] = []
    for owner in sorted(work.shards):
        chunks = work.shards[owner]
        told = [_result_numbers(work, seed, chunk, results[chunk]) for chunk in chunks]
        totals, bounds = np.stack([t for t, _ in told]), np.stack([b for _, b in told])
        wrong = [
            chunk
            for chunk, total, bound in zip(chunks, totals, bounds, strict=True)
            if suspicious(norms[chunk], sketches[chunk], bound)
            or (weights is not None and not identity_holds(weights, sketches[chunk], total, bound))
        ]
        if not wrong and weights is not None:
            mine = sketches[chunks]
            if not shard_holds(weights, mine, totals, bounds):
                wrong = [_worst(weights, mine, totals, chunks)]
        if not wrong and owner in grams and grams[owner]:
            gram = unpacked_gram(grams[owner], len(work.counted))
            if not gram_is_plausible(gram, sketches[chunks]):
                wrong = list(chunks)
        found += wrong
    return found[:DOUBTED_MAX]


def recomputed_digest(
    work: Work, chunk: int, parts: Mapping[int, bytes], grams: Mapping[int, bytes]
) -> bytes:
    """The SHA-256 of what an honest owner makes of these encoded parts (participant -> bytes); b""
    where it would refuse them: then it signs nothing."""
    size, matrix = work.grid.size(chunk), matrix_of(work, grams)
    try:
        made = recomputed(work.plan, chunk, parts, work.part_codec, work.codec, size, matrix)
    except (CodecError, PartError):
        return b""
    return hashlib.sha256(made).digest()


def _weights(work: Work, grams: Mapping[int, bytes]) -> NDArray[np.float64] | None:
    """Of each part in the result, where it is a linear function of the parts."""
    if not is_linear(work.rule):
        return None
    return coefficients(work.rule, gram_of(work, grams), len(work.counted), work.plan.key)


def _result_numbers(
    work: Work, seed: bytes, chunk: int, result: U8
) -> tuple[F32, NDArray[np.float64]]:
    size = work.grid.size(chunk)
    values = _decoded(work.codec, result, size)
    return sketch(values, sign_bits(seed, chunk, size)), error_bounds(work.codec, result, size)


def _worst(
    weights: NDArray[np.float64], sketches: F32, totals: F32, chunks: Sequence[int]
) -> int:
    gaps = np.einsum("n,cnb->cb", weights, sketches.astype(np.float64)) - totals
    return chunks[int(np.argmax(np.square(gaps).sum(axis=1)))]


def _decoded(codec: Codec, data: bytes | U8, size: int) -> F32:
    values = np.empty(size, np.float32)
    codec.decode(np.frombuffer(data, np.uint8), values)
    return values


