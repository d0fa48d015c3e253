"""Audited rounds: what participants commit to, what they tell of it, and how that is checked."""

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
