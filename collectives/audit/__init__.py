"""The arithmetic of audited rounds: pure functions on arrays and bytes.

Before anybody sends, everybody commits to its encoded parts (commitment.py), and owners commit to
their results. Only then a common seed is drawn. From it everybody computes a few numbers of its own
part (sketch.py); owners, who have the parts, look whether they are right to the bit, and everybody
checks the results by them (checks.py), with room for what an honest encoding does (bounds.py). What
fails a check is computed again from the parts themselves (recompute.py).

After BTARD (Gorbunov, Borzunov, Diskin, Ryabinin 2022), with signs instead of a unit vector, eight
numbers instead of one, and results that are encoded.
"""

from __future__ import annotations

from atoll.collectives.audit.bounds import check_codec, error_bounds, widened
from atoll.collectives.audit.checks import (
    gram_is_plausible,
    identity_holds,
    shard_identity_holds,
    suspicious,
)
from atoll.collectives.audit.commitment import opening, opens, shard_roots
from atoll.collectives.audit.recompute import coefficients, is_linear, recomputed
from atoll.collectives.audit.sketch import SKETCH_WIDTH, distance, sign_bits, sketch

__all__ = [
    "SKETCH_WIDTH",
    "check_codec",
    "coefficients",
    "distance",
    "error_bounds",
    "gram_is_plausible",
    "identity_holds",
    "is_linear",
    "opening",
    "opens",
    "recomputed",
    "shard_identity_holds",
    "shard_roots",
    "sign_bits",
    "sketch",
    "suspicious",
    "widened",
]
