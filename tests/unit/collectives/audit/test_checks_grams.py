"""Inner products that owners tell: which chunks are opened, and when they are right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.audit.checks import (
    OPENED_OF_SUM,
    gram_holds,
    implausible_grams,
    unlike_norms,
)
from atoll.collectives.audit.sketch import distance, sign_bits, sketch
from atoll.collectives.codecs import F32
from atoll.collectives.robust.gram import Matrix, add_gram

SIZE = 256
PEERS = 8
# docs/audit.md: of a shard of so many chunks, how much too small and too large squares may be.
FACTORS = {1: (7.0, 140.0), 8: (2.4, 3.6), 20: (1.9, 2.2), 100: (1.4, 1.4)}


def shard(n: int, chunks: int, seed: int, vectors: F32 | None = None) -> tuple[Matrix, F32, F32]:
    """Inner products, sketches and vectors, float32[chunks, n, SIZE]."""
    dice = np.random.default_rng(seed)
    if vectors is None:
        vectors = dice.standard_normal((chunks, n, SIZE)).astype(np.float32)
    grams: Matrix = np.zeros((chunks, n, n))
    found = np.empty((chunks, n, 8), np.float32)
    for number, chunk in enumerate(vectors):
        add_gram(chunk, grams[number])
        bits = sign_bits(seed.to_bytes(32, "big"), number, SIZE)
        found[number] = [sketch(part, bits) for part in chunk]
    return grams, found, vectors


@pytest.mark.parametrize(("n", "chunks"), [(1, 1), (5, 1), (5, 6), (16, 1), (16, 3), (5, 40)])
def test_honest_inner_products_are_plausible(n: int, chunks: int) -> None:
    for seed in range(60):
        vectors = np.random.default_rng(seed).standard_normal((chunks, n, SIZE)).astype(np.float32)
        vectors[:, 0] = 0.0
        if n > 3:
            vectors[:, 1] = vectors[:, 2]
            vectors[:, 3] *= np.float32(1e3)
            vectors[0] *= np.float32(1e-12)  # chunks may have any lengths
        grams, sketches, _ = shard(n, chunks, seed, vectors)
        assert implausible_grams(grams, sketches) == []


@pytest.mark.parametrize("where", ["a bucket", "a coordinate", "half"])
def test_of_vectors_that_are_unlike_in_a_few_elements_too(where: str) -> None:
    """A column of a matrix whose width is a multiple of 8, or one outlier: few alarms, no more."""
    alarms = 0
    for seed in range(100):
        dice = np.random.default_rng(seed)
        vectors = dice.standard_normal((5, PEERS, SIZE)).astype(np.float32)
        at = {"a bucket": slice(3, None, 8), "a coordinate": slice(3, 4), "half": slice(128)}[where]
        vectors[:, :, at] *= np.float32(1e3)
        grams, sketches, _ = shard(PEERS, 5, seed, vectors)
        alarms += bool(implausible_grams(grams, sketches))
    assert alarms <= 2


@pytest.mark.parametrize("chunks", sorted(FACTORS))
def test_what_is_told_may_be_off_by_so_much_and_no_more(chunks: int) -> None:
    """Of all chunks alike, by twice the factor that is documented."""
    small, large = FACTORS[chunks]
    for seed in range(30):
        grams, sketches, _ = shard(PEERS, chunks, seed)
        for factor in (1 / (2 * small), 2 * large):
            found = implausible_grams(grams * factor, sketches)
            assert 0 < len(found) <= chunks


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_the_chunk_that_is_wrong_is_among_those_opened(factor: float) -> None:
    for seed in range(30):
        grams, sketches, _ = shard(PEERS, 12, seed)
        grams[seed % 12] *= factor
        assert seed % 12 in implausible_grams(grams, sketches)


def test_where_the_sum_alone_is_off_a_few_chunks_are_opened() -> None:
    for seed in range(30):
        grams, sketches, _ = shard(PEERS, 40, seed)
        grams[::2] *= 4.0
        found = implausible_grams(grams, sketches)
        assert len(found) == OPENED_OF_SUM
        assert any(chunk % 2 == 0 for chunk in found)


@pytest.mark.parametrize("chunks", [1, 6])
def test_one_vector_is_moved(chunks: int) -> None:
    """Onto another one, or far away from all."""
    for seed in range(60):
        grams, sketches, _ = shard(6, chunks, seed)
        for share in (1.0, 0.99, -1e3):  # of the way to the other one
            mixing = np.eye(6)
            mixing[5, 5], mixing[5, 4] = 1 - share, share
            moved = mixing @ grams @ mixing.T
            assert implausible_grams(moved, sketches)


def test_sketches_that_are_not_finite_make_nothing_plausible() -> None:
    grams, sketches, _ = shard(5, 2, 0)
    sketches[1, 2, 3] = np.nan
    assert implausible_grams(grams, sketches) == [0, 1]


@pytest.mark.parametrize("weights", [[0, 0, 1.0, 0, 0, 0], [1 / 6] * 6, [0.1, 0.4, 0, 0, 0.3, 0]])
def test_distances_from_the_result_are_those_that_inner_products_give(weights: list[float]) -> None:
    for seed in range(20):
        grams, _, vectors = shard(6, 4, seed)
        coefficients = np.array(weights, np.float32).astype(np.float64)
        results = np.einsum("n,cnk->ck", coefficients, vectors).astype(np.float32)
        dice = np.random.default_rng(seed)
        errors = np.array([0.0, 1e-6, 1e-2, 1.0])
        moved = dice.standard_normal(results.shape)
        moved *= (errors / np.linalg.norm(moved, axis=1))[:, None]
        results = (results + moved).astype(np.float32)
        pairs = zip(vectors, results, strict=True)
        norms = np.array([[distance(part, result) for part in row] for row, result in pairs])
        room = errors + 1e-5  # results are float32 here
        assert unlike_norms(grams, coefficients, norms, room) == []
        for factor in (0.5, 1.5):
            wrong = grams.copy()
            wrong[1] *= factor
            assert unlike_norms(wrong, coefficients, norms, room) == [1]
        norms[2, 5] += np.float32(0.1)
        assert unlike_norms(grams, coefficients, norms, room) == [2]


@given(st.integers(0, 1 << 30), st.sampled_from([1e-30, 1e-3, 1.0, 1e15]), st.booleans())
def test_sums_in_any_order_hold_and_other_numbers_do_not(
    seed: int, scale: float, turned: bool
) -> None:
    dice = np.random.default_rng(seed)
    rows = (dice.standard_normal((5, 3000)) * scale).astype(np.float32)
    rows[1], rows[2] = rows[0], 0
    true, other = np.zeros((5, 5)), np.zeros((5, 5))
    add_gram(rows, true)
    add_gram(rows[:, dice.permutation(3000)], other)
    assert gram_holds(other, true)
    i, j = (0, 3) if turned else (4, 4)
    other[i, j] += 1e-7 * np.sqrt(true[i, i] * true[j, j])
    assert not gram_holds(other, true)
    other = true.copy()
    other[2, 2] = 1e-300
    assert not gram_holds(other, true)
