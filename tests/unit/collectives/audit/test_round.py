"""All checks of a whole round, on what the engine has really sent and made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from harness.roundtrip import decoded

from atoll.collectives.audit.checks import (
    identity_holds,
    implausible_grams,
    shard_identity_holds,
    suspicious,
)
from atoll.collectives.audit.recompute import coefficients, is_linear
from atoll.collectives.audit.sketch import F64, distance, error_bounds, sign_bits, sketch, widened
from atoll.collectives.codecs import F32, U8, get_codec
from atoll.collectives.robust.gram import Matrix, add_gram

MakeGroup = Callable[..., Any]
SEED = b"\x07" * 32
COUNT, TOTAL = 7, 7 * 6 * 256


class Told(NamedTuple):
    """What is public of one chunk: everybody's sketch and norm, and those of the result."""

    sketches: F32
    norms: F32
    result: F32
    result_norm: float
    bounds: F64


def told_of(group: Any, chunk: int, data: U8) -> Told:
    """``data`` is the result of the chunk, as its owner has sent it."""
    size = group.grid.size(chunk)
    bits = sign_bits(SEED, chunk, size)
    parts = [np.frombuffer(group.encoded(p, chunk), np.uint8) for p in group.everyone]
    values = [decoded(group.codec, part, size) for part in parts]
    result = decoded(group.result_codec, data, size)
    return Told(
        np.array([sketch(part, bits) for part in values]),
        np.array([distance(part, result) for part in values]),
        sketch(result, bits),
        float(distance(result, np.zeros_like(result))),
        error_bounds(group.result_codec, data, size),
    )


def grams_of(group: Any, owner: int) -> Matrix:
    """Of each chunk."""
    rows: F32 = np.stack(group.vectors)
    chunks = [c for c in range(group.grid.count) if owner == group.plan.owners[c]]
    found: Matrix = np.zeros((len(chunks), COUNT, COUNT))
    for gram, chunk in zip(found, chunks, strict=True):
        add_gram(rows[:, slice(*group.grid.bounds(chunk))], gram)
    return found


def judged(group: Any, owner: int, results: list[U8]) -> dict[str, bool]:
    """Each check of a shard: whether all is well."""
    rule, plan = group.plan.rule, group.plan
    chunks = [c for c in range(group.grid.count) if plan.owners[c] == owner]
    told = [told_of(group, chunk, results[chunk]) for chunk in chunks]
    sketches = np.stack([of.sketches for of in told])
    whole: Matrix = np.zeros((COUNT, COUNT))
    for other in group.everyone:
        whole += grams_of(group, other).sum(axis=0)
    found = {"gram": not implausible_grams(grams_of(group, owner), sketches)}
    ones = np.full(COUNT, 1 / COUNT)
    factors = coefficients(rule, whole, COUNT, plan.key) if is_linear(rule) else ones
    bounds = np.stack(
        [
            widened(of.bounds, factors, of.norms, of.result_norm, group.grid.size(chunk))
            for of, chunk in zip(told, chunks, strict=True)
        ]
    )
    norms = np.sqrt(sum(of.norms.astype(np.float64) ** 2 for of in told)).astype(np.float32)
    beside = np.concatenate([of.sketches for of in told], axis=1)
    found["distance"] = not suspicious(norms, beside, float(np.sqrt(bounds.sum())))
    if is_linear(rule):
        one_by_one = zip(told, bounds, strict=True)
        found["chunks"] = all(
            identity_holds(factors, o.sketches, o.result, b) for o, b in one_by_one
        )
        marks = np.stack([of.result for of in told])
        found["shard"] = shard_identity_holds(factors, sketches, marks, bounds)
    return found


def run(make_group: MakeGroup, name: str, result_name: str, rule: str) -> Any:
    more = {"total": TOTAL, "rule": rule, "result_codec": get_codec(result_name)}
    group = make_group(get_codec(name), weights=[1.0] * COUNT, **more)
    group.start()
    group.wait_done()
    return group


@pytest.mark.parametrize("rule", ["", "krum(f=1)", "nnm+gm(f=1)", "trimmed(f=1)", "median(f=1)"])
@pytest.mark.parametrize("name", ["float32", "int8", "int4"])
def test_of_honest_owners_nobody_fails(make_group: MakeGroup, name: str, rule: str) -> None:
    group = run(make_group, "float32", name, rule)
    results = [group.rounds[0].view(chunk) for chunk in range(group.grid.count)]
    for owner in group.everyone:
        assert all(judged(group, owner, results).values())


@pytest.mark.parametrize("rule", ["", "krum(f=1)"])
@pytest.mark.parametrize("name", ["float32", "int8", "int4"])
def test_an_owner_that_adds_to_its_shard_fails(make_group: MakeGroup, name: str, rule: str) -> None:
    """A half of the values' size; nobody else fails."""
    group = run(make_group, "float32", name, rule)
    codec, results, cheat = get_codec(name), [], 3
    for chunk in range(group.grid.count):
        data = group.rounds[0].view(chunk).copy()
        if group.plan.owners[chunk] == cheat:
            values = decoded(codec, data, group.grid.size(chunk))
            codec.encode(values + np.float32(0.5), data)
        results.append(data)
    for owner in group.everyone:
        found = judged(group, owner, results)
        assert found["shard"] == (owner != cheat)
        assert found["chunks"] or owner == cheat


@pytest.mark.parametrize("rule", ["trimmed(f=1)", "nnm+trimmed(f=1)"])
def test_an_owner_that_replaces_its_shard_is_suspicious(make_group: MakeGroup, rule: str) -> None:
    group = run(make_group, "int8", "int8", rule)
    codec, results = get_codec("int8"), []
    for chunk in range(group.grid.count):
        data = group.rounds[0].view(chunk).copy()
        if group.plan.owners[chunk] == 5:
            codec.encode(np.full(group.grid.size(chunk), 20, np.float32), data)
        results.append(data)
    for owner in group.everyone:
        assert judged(group, owner, results)["distance"] == (owner != 5)
