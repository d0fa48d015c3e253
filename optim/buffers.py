"""Write a model's buffers (BatchNorm statistics and the like) as vectors, and merge them.

Float buffers become the weighted mean over those who trained them, integers the maximum: a counter
of batches is to go on, not to be an average. No paper on methods with local steps says what to do
with them; most reference code leaves them alone, and then no two replicas evaluate alike.

A vector is float32: the weight, the float buffers end to end, then each integer in three pieces
that float32 holds exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32
from atoll.collectives.errors import RemoteProtocolError

I64 = NDArray[np.int64]
PIECES = 3
BITS = 22  # of a piece: float32 holds whole numbers of up to 24; three make 64 with the sign
PIECE = 1 << BITS


def split(whole: I64) -> F32:
    """Split int64[n] into float32[3 n], which holds every number exactly.

    The highest pieces come first; only those have a sign.
    """
    high, middle = whole >> (2 * BITS), whole >> BITS & (PIECE - 1)
    return np.concatenate([high, middle, whole & (PIECE - 1)]).astype(np.float32)


def join(pieces: F32) -> I64:
    """Join the pieces that ``split`` made; raise RemoteProtocolError for anything else."""
    high, middle, low = pieces.reshape(PIECES, -1)
    limit = 1 << (63 - 2 * BITS)
    in_range = np.abs(high + 0.5) <= limit
    in_range &= (middle >= 0) & (middle < PIECE) & (low >= 0) & (low < PIECE)
    if not in_range.all() or not (np.trunc(pieces) == pieces).all():
        raise RemoteProtocolError("what came of buffers are no whole numbers")
    whole = [piece.astype(np.int64) for piece in (high, middle, low)]
    found: I64 = (whole[0] << (2 * BITS)) + (whole[1] << BITS) + whole[2]
    return found


def merged(parts: Sequence[F32], floats: int) -> F32:
    """Merge the vectors of several trainers: float buffers by weighted mean, integers by maximum.

    ``parts`` come in one order everywhere; ``floats``: how many elements of each are float buffers.
    The weight of the result is the sum. Raise RemoteProtocolError for what is no such vector.
    """
    weights = [float(part[0]) for part in parts]
    if not all(np.isfinite(part).all() for part in parts) or not all(w > 0 for w in weights):
        raise RemoteProtocolError("what came of buffers has a weight or a value that cannot be")
    total = sum(weights)
    mean: F32 = np.zeros(floats, np.float32)
    for part, weight in zip(parts, weights, strict=True):
        mean += np.float32(weight / total) * part[1 : 1 + floats]
    whole = np.max([join(part[1 + floats :]) for part in parts], axis=0)
    return np.concatenate([np.array([total], np.float32), mean, split(whole)])


def moved(now: F32, then: F32, mean: F32, floats: int) -> F32:
    """Return ``mean``, to which ``then`` has contributed, with the changes made here since.

    All are vectors, ``now`` the one of the present; ``floats`` as for ``merged``. Float buffers
    move by ``now - then``, of integers the larger one counts.
    """
    changed = mean.copy()
    part = slice(1, 1 + floats)
    changed[part] += now[part] - then[part]
    changed[1 + floats :] = split(np.maximum(join(now[1 + floats :]), join(mean[1 + floats :])))
    return changed
