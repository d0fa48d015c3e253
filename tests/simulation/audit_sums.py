"""What owners compute of whole vectors in an audited attempt, as stacks.py does it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from atoll.collectives.robust.gram import Matrix, add_gram, packed_gram, unpacked_gram
from atoll.peer.audit.terms import Work

__all__ = ["gram_of", "matrix_of"]


def gram_of(work: Work, parts: Mapping[tuple[int, int], bytes], chunks: list[int]) -> bytes:
    """As stacks.py sums them: chunk by chunk. ``parts``: (sender, chunk) -> encoded."""
    count = len(work.counted)
    total = np.zeros((count, count))
    for chunk in chunks:
        size = work.grid.size(chunk)
        rows = np.empty((count, size), np.float32)
        for row, sender in enumerate(work.counted):
            part = np.frombuffer(parts[sender, chunk], np.uint8)
            work.part_codec.decode(part, rows[row])
        gram = np.zeros((count, count))
        add_gram(rows, gram)
        total = total + gram
    return packed_gram(total)


def matrix_of(work: Work, grams: dict[int, bytes]) -> Matrix | None:
    """As stacks.py makes it."""
    count, rule = len(work.counted), work.rule
    if rule is None:
        return None
    if not rule.needs_gram:
        return rule.matrix(None, count, work.plan.key)
    told = (unpacked_gram(grams[owner], count) for owner in sorted(work.shards))
    made = rule.matrix(sum(told, np.zeros((count, count))), count, work.plan.key)
    return np.eye(count) if made is None else made
