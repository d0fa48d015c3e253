"""What is checked of results: honest owners pass, and what each check finds for sure is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from harness.roundtrip import decoded, encoded

from atoll.collectives.audit.checks import (
    identity_holds,
    shard_identity_holds,
    suspicious,
)
from atoll.collectives.audit.recompute import coefficients
from atoll.collectives.audit.sketch import F64, distance, error_bounds, sign_bits, sketch, widened
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.robust import get_rule
from atoll.collectives.robust.gram import Matrix, add_gram

SIZE = 256
DRAWS = 1500
bounded_codecs = pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "float16", "int8", "int4", "int4_sr", "fp4_e3m0"]
)
Shift = Callable[[np.random.Generator, F64], F32]


class Chunk(NamedTuple):
    """What is fixed of a chunk before signs are drawn."""

    parts: F32
    factors: F64
    result: F32
    bounds: F64

    def drawn(self, seed: int, number: int = 0) -> tuple[F32, F32]:
        """The sketches of the parts and of the result, with the signs of a seed."""
        bits = sign_bits(seed.to_bytes(32, "big"), number, self.result.size)
        return np.array([sketch(row, bits) for row in self.parts]), sketch(self.result, bits)


def honest(name: str, parts: F32, factors: F64, shift: Shift | None = None) -> Chunk:
    """A mean as engines compute it; with a ``shift`` (made to the bounds) before it is encoded."""
    codec = get_codec(name)
    total = np.zeros(parts.shape[1], np.float32)
    for factor, part in zip(factors.astype(np.float32), parts, strict=True):
        total += factor * part

    def chunk(values: F32) -> Chunk:
        data = encoded(codec, values)
        result = decoded(codec, data, values.size)
        norms = np.array([distance(part, result) for part in parts])
        length = float(distance(result, np.zeros_like(result)))
        bounds = error_bounds(codec, data, values.size)
        return Chunk(parts, factors, result, widened(bounds, factors, norms, length, values.size))

    found = chunk(total)
    if shift is None:
        return found
    away = shift(np.random.default_rng(1), found.bounds)
    return chunk(total + away)


def parts_of(kind: str, n: int, seed: int) -> F32:
    dice = np.random.default_rng(seed)
    if kind == "alike":
        return np.tile(dice.standard_normal(SIZE), (n, 1)).astype(np.float32)
    if kind == "sparse":
        parts = np.zeros((n, SIZE), np.float32)
        parts[:, :2] = 1.0  # of two equal elements all is lost in every second draw
        parts[:, 8] = -1.0
        return parts
    parts = dice.standard_normal((n, SIZE)).astype(np.float32)
    if kind == "cancelling":  # all that is left of it is what rounding did
        parts[0] *= np.float32(1e6)
        parts[1] = -parts[0]
    if kind == "tails":
        parts = dice.standard_t(2, (n, SIZE)).astype(np.float32)
    return parts


# ---------------------------------------------------------------- the identity


@bounded_codecs
@pytest.mark.parametrize("kind", ["normal", "tails", "alike", "sparse", "cancelling"])
def test_an_honest_mean_never_fails(name: str, kind: str) -> None:
    """2 exp(-32) in each bucket: none in any number of draws that a test can make."""
    factors = coefficients(None, None, 5, 0)
    chunk = honest(name, parts_of(kind, 5, 3), factors)
    bounds = np.stack([chunk.bounds, chunk.bounds])
    for seed in range(200):
        sketches, result = chunk.drawn(seed)
        assert identity_holds(factors, sketches, result, chunk.bounds)
        other, other_result = chunk.drawn(seed, 1)
        both = np.stack([sketches, other]), np.stack([result, other_result])
        assert shard_identity_holds(factors, *both, bounds)


def test_the_worst_errors_never_fail_either() -> None:
    """Every element of an honest result is off by half a step, with any signs."""
    values = np.full(SIZE, 0.5, np.float32)
    values[0] = 127
    chunk = honest("int8", values[None], np.ones(1))
    assert np.abs(chunk.result - values)[1:].min() == 0.5
    gaps = []
    for seed in range(DRAWS):
        sketches, result = chunk.drawn(seed)
        assert identity_holds(np.ones(1), sketches, result, chunk.bounds)
        assert shard_identity_holds(np.ones(1), sketches[None], result[None], chunk.bounds[None])
        gaps.append(((sketches[0] - result) ** 2 / chunk.bounds).mean())
    assert 0.9 < np.mean(gaps) < 1.01  # the bounds are the variance: no check has any to spare


def test_without_the_widening_what_cancels_out_would_be_held_against_the_owner() -> None:
    """Two participants can make an honest sum lose digits, and signs may hide by how much."""
    factors = coefficients(None, None, 5, 0)
    parts = parts_of("normal", 5, 3)
    parts[0, [0, 8]], parts[4, [0, 8]] = 1e7, -1e7
    chunk, failed = honest("float32", parts, factors), 0
    for seed in range(200):
        drawn = chunk.drawn(seed)
        assert identity_holds(factors, *drawn, chunk.bounds)
        failed += not identity_holds(factors, *drawn, np.zeros(8))
    assert failed > 50


def dense(times: float) -> Shift:
    """A shift in proportion to the bounds, with random signs, so many times as long as they."""

    def made(dice: np.random.Generator, bounds: F64) -> F32:
        each = np.sqrt(np.tile(bounds, SIZE // 8) / (SIZE // 8))
        return (times * each * dice.choice([-1.0, 1.0], SIZE)).astype(np.float32)

    return made


def misses(name: str, times: float, chunks: int, draws: int = DRAWS) -> tuple[float, float]:
    """How often a shift goes through: by the first chunk's own check, by that of the shard."""
    factors = coefficients(None, None, 4, 0)
    made = [honest(name, parts_of("normal", 4, c), factors, dense(times)) for c in range(chunks)]
    bounds = np.stack([chunk.bounds for chunk in made])
    alone = together = 0
    for seed in range(draws):
        drawn = [chunk.drawn(seed, number) for number, chunk in enumerate(made)]
        sketches, results = np.stack([d[0] for d in drawn]), np.stack([d[1] for d in drawn])
        alone += identity_holds(factors, sketches[0], results[0], bounds[0])
        together += shard_identity_holds(factors, sketches, results, bounds)
    return alone / draws, together / draws


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_a_dense_shift_is_found_in_one_chunk(name: str) -> None:
    """Of 1,500 draws one at most lets it through."""
    assert misses(name, 16.0, 1)[0] <= 0.001
    assert misses(name, 11.0, 1)[1] <= 0.001


@pytest.mark.parametrize(
    ("name", "chunks", "times"), [("int8", 8, 3.0), ("int8", 40, 2.0), ("int4", 40, 2.5)]
)
def test_smaller_shifts_are_found_in_a_shard(name: str, chunks: int, times: float) -> None:
    """With 4 bits a shift makes the steps wider, too: it has to be longer by that."""
    alone, together = misses(name, times, chunks, draws=200)
    assert together == 0.0
    assert alone > 0.5


def test_what_is_not_finite_or_too_large_never_holds() -> None:
    factors = coefficients(None, None, 5, 0)
    chunk = honest("int8", parts_of("normal", 5, 3), factors)
    sketches, result = chunk.drawn(0)
    for bad in (np.nan, np.inf, -np.inf):
        wrong = sketches.copy()
        wrong[2, 5] = bad
        assert not identity_holds(factors, wrong, result, chunk.bounds)
        assert not shard_identity_holds(factors, wrong[None], result[None], chunk.bounds[None])
        told = result.copy()
        told[0] = bad
        assert not identity_holds(factors, sketches, told, chunk.bounds)
        assert not shard_identity_holds(factors, sketches[None], told[None], chunk.bounds[None])


@pytest.mark.parametrize("text", ["krum(f=1)", "gm(f=1)", "nnm+multi_krum(f=1)", "mda(f=1)"])
@pytest.mark.parametrize("name", ["float32", "int8"])
def test_the_identity_of_linear_rules(text: str, name: str) -> None:
    rule, codec, parts = get_rule(text), get_codec(name), parts_of("normal", 7, 11)
    gram: Matrix = np.zeros((7, 7))
    add_gram(parts, gram)
    factors = coefficients(rule, gram, 7, 1)
    data = encoded(codec, rule.aggregate(parts, rule.matrix(gram, 7, 1)))
    result = decoded(codec, data, SIZE)
    norms = np.array([distance(part, result) for part in parts])
    length = float(distance(result, np.zeros_like(result)))
    bounds = widened(error_bounds(codec, data, SIZE), factors, norms, length, SIZE)
    chunk = Chunk(parts, factors, result, bounds)
    other = chunk._replace(result=parts[0] * 2)
    for seed in range(200):
        assert identity_holds(factors, *chunk.drawn(seed), bounds)
        assert not identity_holds(factors, *other.drawn(seed), bounds)


# ---------------------------------------------------------------- how far a result lies

RULES = ["median(f=1)", "trimmed(f=1)", "meamed(f=1)", "bulyan(f=1)", "nnm+trimmed(f=1)"]
RULES += ["krum(f=1)", "gm(f=1)", "bucketing(s=2)+median(f=1)"]


def attacked(kind: str, n: int, dice: np.random.Generator) -> F32:
    """Honest vectors and a liar's, around a common one."""
    parts = dice.standard_normal((n, SIZE)) + 3 * dice.standard_normal(SIZE)
    if kind == "far":
        parts[0] += 1e4
    if kind == "between":
        parts[0] = parts[1:].mean(axis=0)
    if kind == "twin":
        parts[0] = parts[1]
    return parts.astype(np.float32)


def judged(parts: F32, result: F32, seed: int) -> bool:
    bits = sign_bits(seed.to_bytes(32, "big"), 0, SIZE)
    norms = np.array([distance(part, result) for part in parts])
    return suspicious(norms, np.array([sketch(part, bits) for part in parts]), 0.0)


@pytest.mark.parametrize("kind", ["none", "far", "between", "twin"])
@pytest.mark.parametrize("text", RULES)
def test_honest_results_are_not_suspicious_and_distant_ones_are(text: str, kind: str) -> None:
    rule, dice, seed, alarms, found, tried = get_rule(text), np.random.default_rng(5), 0, 0, 0, 0
    for n in (5, 7, 11, 16):
        if rule.least > n:
            continue
        for _ in range(20):
            seed += 1
            parts = attacked(kind, n, dice)
            gram: Matrix = np.zeros((n, n))
            add_gram(parts, gram)
            result = rule.aggregate(parts, rule.matrix(gram, n, seed))
            alarms += judged(parts, result, seed)
            away = np.median([distance(part, result) for part in parts])
            step = dice.standard_normal(SIZE) * 12 * away / np.sqrt(SIZE)
            found += judged(parts, (result + step).astype(np.float32), seed)
            tried += 1
    assert tried >= 40
    assert (alarms, found) == (0, tried)


def test_with_few_participants_a_liar_neither_hides_nor_raises_an_alarm() -> None:
    """Of three, two of three distances are the liar's."""
    rule, dice, alarms, found = get_rule("median(f=1)"), np.random.default_rng(6), 0, 0
    for seed in range(300):
        parts = attacked("far", 3, dice)
        result = rule.aggregate(parts, None)
        alarms += judged(parts, result, seed)
        found += judged(parts, result + np.float32(20), seed)
    assert alarms == 0
    assert found == 300


def test_of_equal_vectors_the_bound_of_encoding_counts() -> None:
    codec, part = get_codec("int8"), parts_of("normal", 1, 2)[0]
    data = encoded(codec, part)
    result = decoded(codec, data, SIZE)
    sketches = np.tile(sketch(part, sign_bits(bytes(32), 0, SIZE)), (5, 1))
    error = float(np.sqrt(error_bounds(codec, data, SIZE).sum()))
    norms = np.full(5, distance(part, result))
    assert norms[0] > 0
    assert not suspicious(norms, sketches, error)
    assert suspicious(norms, sketches, float(norms[0]) / 2)
    assert not suspicious(norms[:1], sketches[:1], error)
    assert suspicious(norms[:1] * 4, sketches[:1], error)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_suspicious(bad: float) -> None:
    norms, sketches = np.zeros(5, np.float32), np.zeros((5, 8), np.float32)
    assert not suspicious(norms, sketches, 0.0)
    norms[3] = bad
    assert suspicious(norms, sketches, 0.0)
    norms[3], sketches[1, 2] = 0.0, bad
    assert suspicious(norms, sketches, 0.0)
