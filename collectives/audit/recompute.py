"""Make the bytes that an honest owner sends for one chunk from all parts that it was sent.

Not a second copy of that arithmetic: ``MeanParts`` and ``RobustParts`` add up the parts, as they do
in the engine, in the order of the participants. With a result in float32 the owner's own part is
exact anyway; with any other codec a butterfly takes it through the codec like all others
(engine/accumulate.py), so what its owner has committed to is what is in the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from atoll.collectives.audit.sketch import F64
from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import BLOCK_ELEMENTS, F32, U8, Codec, Decoder, factors_of
from atoll.collectives.engine.parts import Contribution, PartError, parts_for
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.errors import CodecError, LocalProtocolError
from atoll.collectives.robust import RobustRule
from atoll.collectives.robust.columns import Columns
from atoll.collectives.robust.gram import Matrix, add_gram
from atoll.collectives.schedule.plan import ReducePlan


def recomputed(
    plan: ReducePlan,
    chunk: int,
    parts: Mapping[int, bytes],
    part_codec: Codec,
    result_codec: Decoder,
    size: int,
    matrix: Matrix | None = None,
) -> bytes:
    """Return the encoded result of a chunk of ``size`` elements.

    ``parts`` are the encoded ones of all who have positive weight; others are not looked at.
    ``matrix`` is what the plan's rule gave (``RobustRule.matrix``), where it needs the inner
    products of whole vectors.

    Raises PartError, which names whose part is missing or malformed, and CodecError if the result
    cannot be encoded.
    """
    if plan.shape is not None or plan.is_pairwise:
        raise LocalProtocolError("only the results of a butterfly are made of parts alone")
    if plan.rule is not None and plan.rule.needs_gram and matrix is None:
        raise LocalProtocolError(f"{plan.rule.text} needs a matrix from whole vectors")
    grid = ChunkGrid(size, -(-size // BLOCK_ELEMENTS) * BLOCK_ELEMENTS)
    result = RoundResult(result_codec, grid)
    alone = replace(plan, owners=(plan.owners[chunk],))
    adding = parts_for(alone, result, part_codec, lambda _: True, _NOTHING, matrix)
    length = part_codec.encoded_bytes(size)
    for participant, weight in enumerate(plan.weights):
        if weight <= 0:
            continue
        part = parts.get(participant, b"")
        if len(part) != length:
            raise PartError(participant, f"its part of chunk {chunk} has {len(part)} bytes")
        buffer = adding.encoded.take()
        buffer[:length] = np.frombuffer(part, np.uint8)
        try:
            adding.add(0, participant, buffer)
        except CodecError as error:
            raise PartError(participant, f"its part of chunk {chunk}: {error.what}") from error
    adding.encode(0, result.view(0))
    return result.array.tobytes()


def chunk_gram(parts: Sequence[bytes | U8], codec: Codec, size: int) -> Matrix:
    """Return the inner products over a chunk of all who have positive weight.

    They are computed from their encoded parts in order, each of ``size`` elements, as an owner
    computes them (``RobustParts``). Raises CodecError.
    """
    stack = [np.frombuffer(part, np.uint8) for part in parts]
    for part in stack:
        codec.check(part, size)
    gram: Matrix = np.zeros((len(parts), len(parts)))
    for block in Columns(codec).of(stack, size):
        add_gram(block, gram)
    return gram


def _no_source(chunk: int, out: F32) -> None:
    raise LocalProtocolError(f"nobody adds an own part to chunk {chunk}")


_NOTHING: Final = Contribution(_no_source)


def is_linear(rule: RobustRule | None) -> bool:
    """Return whether a rule's result is a sum of the vectors, times coefficients.

    These are the same for all coordinates. That holds for the mean, and for rules that end with one
    combination of whole vectors.
    """
    return rule is None or rule.is_mean or rule.is_combination


def coefficients(rule: RobustRule | None, gram: Matrix | None, count: int, key: int) -> F64:
    """Return what owners multiply parts with by a linear rule, float64[count].

    The parts are those of positive weight, which count alike, in their order; coefficients are
    rounded to float32 as owners round them. Arguments as of ``RobustRule.matrix``. Raises
    LocalProtocolError for a rule that is not linear.
    """
    if rule is None or rule.is_mean:
        return np.array(factors_of((1.0,) * count))
    if not rule.is_combination:
        raise LocalProtocolError(f"{rule.text} has no coefficients: it is not linear")
    matrix = rule.matrix(gram, count, key)
    assert matrix is not None
    row: F64 = matrix.astype(np.float32)[0].astype(np.float64)
    return row
