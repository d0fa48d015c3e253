"""What is recomputed of the parts is what the engine made of them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness.roundtrip import decoded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.collectives import pairwise_plan
from atoll.collectives.audit.recompute import coefficients, is_linear, recomputed
from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.engine.parts import PartError
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.robust import get_rule
from atoll.collectives.robust.gram import Matrix, add_gram
from atoll.collectives.schedule.plan import butterfly_plan

MakeGroup = Callable[..., Any]
WHOLE_VECTORS = ["krum(f=1)", "gm(f=1)", "nnm+trimmed(f=1)", "bulyan(f=1)", "nnm+multi_krum(f=1)"]
BY_COORDINATE = ["trimmed(f=1)", "median(f=1)", "meamed(f=1)", "bucketing(s=2)+median(f=1)"]
LINEAR = ["krum(f=1)", "multi_krum(f=1)", "mda(f=1)", "caf(f=1)", "gm(f=1)", "nnm+gm(f=1)"]
LINEAR += ["centered_clip(f=1)", "flag(f=1)", "arc+krum(f=1)", "bucketing(s=2)+gm(f=1)"]


def part_values(group: Any) -> F32:
    """What all who count have sent, decoded: float32[n, total]."""
    counted = [p for p in group.everyone if group.plan.weights[p] > 0]
    rows: F32 = np.empty((len(counted), group.grid.total), np.float32)
    for row, p in zip(rows, counted, strict=True):
        for chunk in range(group.grid.count):
            where = slice(*group.grid.bounds(chunk))
            data = np.frombuffer(group.encoded(p, chunk), np.uint8)
            row[where] = decoded(group.codec, data, row[where].size)
    return rows


def gram_of(group: Any) -> Matrix:
    """As the owners add it up: chunk by chunk, then owner by owner."""
    rows, plan = part_values(group), group.plan
    total: Matrix = np.zeros((len(rows), len(rows)))
    for owner in sorted(set(plan.owners)):
        shard = np.zeros_like(total)
        for chunk in (c for c in range(group.grid.count) if plan.owners[c] == owner):
            one = np.zeros_like(total)
            add_gram(rows[:, slice(*group.grid.bounds(chunk))], one)
            shard += one
        total += shard
    return total


def check(group: Any) -> None:
    """Every chunk, from the very bytes that were sent."""
    group.start()
    group.wait_done()
    plan, grid, result = group.plan, group.grid, group.rounds[0]
    counted = [p for p in group.everyone if plan.weights[p] > 0]
    matrix = None
    if plan.rule is not None and plan.rule.needs_gram:
        matrix = plan.rule.matrix(gram_of(group), len(counted), plan.key)
    for chunk in range(grid.count):
        parts = {p: group.encoded(p, chunk) for p in counted}
        more = group.codec, group.result_codec, grid.size(chunk), matrix
        assert recomputed(plan, chunk, parts, *more) == result.view(chunk).tobytes()


@pytest.mark.parametrize("result_name", ["", "float32", "int8"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4", "fp4_e3m0", "topk"])
def test_of_the_mean(make_group: MakeGroup, name: str, result_name: str) -> None:
    result_codec = get_codec(result_name) if result_name else None
    more = {"weights": [1.0] * 4, "total": 5003, "result_codec": result_codec}
    check(make_group(get_codec(name), **more))


@pytest.mark.parametrize("name", ["float32", "int8", "topk"])
@pytest.mark.parametrize("rule", WHOLE_VECTORS + BY_COORDINATE)
def test_of_a_rule(make_group: MakeGroup, name: str, rule: str) -> None:
    more = {"total": 3001, "result_codec": get_codec("int8")}
    check(make_group(get_codec(name), weights=[1.0, 1.0, 0.0, *[1.0] * 6], rule=rule, **more))


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    weights=st.lists(st.sampled_from([0.0, 1.0, 0.3]), min_size=1, max_size=7).filter(any),
    total=st.integers(1, 4000),
    blocks=st.integers(1, 4),
    fold=st.sampled_from(["mean", "sum", "max"]),
)
def test_of_any_sizes_and_weights(
    make_group: MakeGroup, weights: list[float], total: int, blocks: int, fold: str
) -> None:
    codec = get_codec("int8")
    more = {"total": total, "chunk_elements": 256 * blocks, "fold": fold}
    check(make_group(codec, weights=weights, result_codec=get_codec("bfloat16"), **more))


def test_whose_part_is_missing_or_malformed_is_named(make_group: MakeGroup) -> None:
    for name, rule in (("int8", ""), ("float32", ""), ("int8", "median(f=1)")):
        codec = get_codec(name)
        group = make_group(codec, weights=[1.0] * 3, total=256, rule=rule)
        parts = {p: group.encoded(p, 0) for p in range(3)}
        for bad in (parts[1][:-1], parts[1] + b"\0", b"\xff" * len(parts[1]), b""):
            with pytest.raises(PartError) as found:
                recomputed(group.plan, 0, {**parts, 1: bad}, codec, codec, 256)
            assert found.value.participant == 1
        with pytest.raises(PartError) as found:
            recomputed(group.plan, 0, {0: parts[0], 1: parts[1]}, codec, codec, 256)
        assert found.value.participant == 2


def test_of_what_cannot_be_recomputed(make_group: MakeGroup) -> None:
    codec = get_codec("float32")
    group = make_group(codec, weights=[1.0] * 5, total=256, rule="krum(f=1)")
    parts = {p: group.encoded(p, 0) for p in range(5)}
    with pytest.raises(LocalProtocolError, match="needs a matrix"):
        recomputed(group.plan, 0, parts, codec, codec, 256)
    pair = pairwise_plan([b"a", b"b"], [1.0, 1.0], group.grid)
    with pytest.raises(LocalProtocolError, match="butterfly"):
        recomputed(pair, 0, parts, codec, codec, 256)


# ---------------------------------------------------------------- linear rules


def test_which_rules_are_linear() -> None:
    assert is_linear(None)
    assert all(is_linear(get_rule(text)) for text in LINEAR)
    assert all(is_linear(get_rule(text)) for text in ("trimmed(f=0)", "mean(f=0)"))
    assert not any(
        map(is_linear, map(get_rule, [*BY_COORDINATE, "bulyan(f=1)", "nnm+median(f=1)"]))
    )
    with pytest.raises(LocalProtocolError, match="not linear"):
        coefficients(get_rule("median(f=1)"), None, 5, 0)


@pytest.mark.parametrize("text", [*LINEAR, "mean(f=0)", "median(f=0)", ""])
def test_coefficients_give_what_the_rule_gives(text: str) -> None:
    rule = get_rule(text) if text else None
    rows = np.random.default_rng(3).standard_normal((9, 500)).astype(np.float32)
    gram: Matrix = np.zeros((9, 9))
    add_gram(rows, gram)
    found = coefficients(rule, gram, 9, 5)
    assert found.shape == (9,)
    assert (found == found.astype(np.float32)).all()
    want = rule.aggregate(rows, rule.matrix(gram, 9, 5)) if rule is not None else rows.mean(axis=0)
    assert np.allclose(found @ rows.astype(np.float64), want, atol=1e-5)


def test_the_mean_has_the_factors_of_a_plan() -> None:
    for count in range(1, 20):
        names = [bytes([p]) for p in range(count)]
        plan = butterfly_plan(names, [1.0] * count, ChunkGrid(1, 256))
        assert coefficients(None, None, count, 0).tolist() == list(plan.factors())
