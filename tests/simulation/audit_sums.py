"""Compute what owners need of whole vectors in an audited attempt, as ``RobustParts`` does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from atoll.collectives.audit.recompute import chunk_gram
from atoll.collectives.robust.gram import Matrix, packed_gram, unpacked_gram
from atoll.peer.verify.terms import ReductionTerms

__all__ = ["gram_of", "matrix_of"]


def gram_of(
    work: ReductionTerms, parts: Mapping[tuple[int, int], bytes], chunks: list[int]
) -> bytes:
    """Of each chunk, packed and end to end. ``parts``: (sender, chunk) -> encoded."""
    found = []
    for chunk in chunks:
        counted = [parts[sender, chunk] for sender in work.counted]
        found.append(packed_gram(chunk_gram(counted, work.part_codec, work.grid.size(chunk))))
    return b"".join(found)


def matrix_of(work: ReductionTerms, grams: dict[int, bytes]) -> Matrix | None:
    """As ``RobustParts`` makes it."""
    count, rule = len(work.counted), work.rule
    if rule is None:
        return None
    if not rule.needs_gram:
        return rule.matrix(None, count, work.plan.key)
    told = (unpacked_gram(grams[owner], count) for owner in sorted(work.shards))
    made = rule.matrix(sum(told, np.zeros((count, count))), count, work.plan.key)
    return np.eye(count) if made is None else made
