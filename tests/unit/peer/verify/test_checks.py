"""Which chunks are opened, and what nobody can excuse by a number of its own."""

from __future__ import annotations

import numpy as np

from atoll.collectives.audit.checks import suspicious
from atoll.peer.verify.checks import DOUBTED_MAX, ResultNumbers, _chosen, _Told
from atoll.peer.verify.statement import Check, Resultant
from atoll.peer.verify.terms import AuditTerms

PEERS = tuple(bytes([i]) * 32 for i in range(1, 6))
SEED = b"s" * 32


def test_no_owner_hides_behind_the_chunks_of_others() -> None:
    by_owner = [list(range(0, 100)), list(range(100, 200)), [200]]
    chosen = _chosen(by_owner, SEED)
    assert len(chosen) == DOUBTED_MAX
    assert 200 in chosen
    assert abs(sum(c < 100 for c in chosen) - sum(100 <= c < 200 for c in chosen)) <= 1
    assert chosen != _chosen(by_owner, b"t" * 32)
    assert _chosen([[], [3]], SEED) == [3]


def test_a_norm_that_one_alone_tells_excuses_no_result_that_is_far_from_all() -> None:
    """With a rule that combines vectors a huge norm makes room for rounding errors without end."""
    terms = AuditTerms(
        b"L" * 32, 1, 7, 1, 0, PEERS, (True,) * 5, (1,) * 5, "gm(f=1)", "int8", 5 * 256, 256
    )
    rng = np.random.default_rng(1)
    sketches = rng.standard_normal((5, 8)).astype(np.float32)
    norms = np.full(5, 500.0, np.float32)
    norms[4] = np.finfo(np.float32).max
    assert suspicious(norms, sketches, 0.0)
    told_by = [np.tile(each, 5).tobytes() for each in sketches]
    checks = {i: Check(SEED, told_by[i], np.repeat(norms[i], 5).tobytes()) for i in range(5)}
    owner = Resultant(b"", b"", np.full(5, 0.2, "<f4").tobytes())
    told = _Told(terms.work, checks, owner)
    seen = ResultNumbers(sketches.mean(axis=0), np.full(8, 1e-3), 500.0)
    assert told.is_wrong(0, told.result(0, seen))
