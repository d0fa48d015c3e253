"""Sums and extremes beside means: in every shape, with lossy codecs, with kernels and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.collectives import Contribution, RoundResult, encoded_layout, get_codec, grid_for
from atoll.collectives.codecs import F32
from atoll.collectives.engine import parts as parts_module
from atoll.collectives.errors import CodecError, ConfigError
from atoll.collectives.schedule.plan import FOLDS, ReducePlan, pairwise_plan
from atoll.collectives.schedule.routes import Routes, hierarchical, ring, tree

MakeGroup = Callable[..., Any]
SHAPES: dict[str, Routes | None] = {
    "butterfly": None,
    "ring": ring([3, 1, 4, 0, 2]),
    "tree": tree(5, 2),
    "sites": hierarchical([0, 1, 0, 1, 1]),
}
BY_HAND: dict[str, Callable[..., Any]] = {
    "mean": np.mean,
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
}


def decoded(group: Any) -> F32:
    values = np.empty(group.grid.total, np.float32)
    layout = encoded_layout(group.grid, group.result_codec)
    for chunk in range(group.grid.count):
        (lo, hi), (first, end) = group.grid.bounds(chunk), layout.slice(chunk)
        group.result_codec.decode(group.results[0][first:end], values[lo:hi])
    return values


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_fold_in_every_shape(
    make_group: MakeGroup, shape: str, fold: str, codec: str
) -> None:
    group = make_group(get_codec(codec), weights=[1.0] * 5, shape=SHAPES[shape], fold=fold)
    group.start()
    group.wait_done()
    first = group.results[0].tobytes()
    assert all(group.results[me].tobytes() == first for me in group.everyone)
    assert group.failed == [[] for _ in group.everyone]
    expected = BY_HAND[fold](np.array(group.vectors, np.float64), axis=0)
    error = np.abs(decoded(group) - expected).max()
    assert error <= {"float32": 1e-5, "bfloat16": 0.1, "int8": 0.4}[codec]
    if codec == "float32" and fold in ("max", "min"):
        assert error == 0


@pytest.mark.parametrize("fold", FOLDS)
def test_two_in_a_pair(make_group: MakeGroup, fold: str) -> None:
    codec = get_codec("float32")
    group = make_group(codec, weights=[1.0] * 2, planned=pairwise_plan, fold=fold)
    group.start()
    group.wait_done()
    assert group.results[0].tobytes() == group.results[1].tobytes()
    expected = BY_HAND[fold](np.array(group.vectors), axis=0)
    np.testing.assert_allclose(decoded(group), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fold", FOLDS)
def test_one_alone_gets_its_own_back(make_group: MakeGroup, fold: str) -> None:
    group = make_group(get_codec("float32"), weights=[1.0], fold=fold)
    group.start()
    group.wait_done()
    assert decoded(group).tobytes() == group.vectors[0].tobytes()


def test_weights_count_for_the_mean_only() -> None:
    plan = ReducePlan((b"a", b"b"), (1.0, 3.0), (0,))
    assert plan.factors() == (0.25, 0.75)
    for fold in FOLDS[1:]:
        assert ReducePlan((b"a", b"b"), (1.0, 3.0), (0,), fold=fold).factors() == (1.0, 1.0)
    with pytest.raises(ConfigError, match="one of mean, sum, max, min"):
        ReducePlan((b"a",), (1.0,), (0,), fold="median")


# ---------------------------------------------------------------- the arithmetic


def bench(codec: str, fold: str, own: F32) -> tuple[parts_module.MeanParts, RoundResult]:
    result = RoundResult(get_codec(codec), grid_for(own.size))

    def fill(chunk: int, out: F32) -> None:
        out[:] = own

    made = parts_module.MeanParts(
        result, result.codec, (1.0, 1.0), lambda chunk: True, Contribution(fill), fold
    )
    return made, result


def add(made: parts_module.MeanParts, result: RoundResult, values: F32) -> None:
    buffer = made.encoded.take()
    size = result.layout.size(0)
    result.codec.encode(values, buffer[:size])
    made.add(0, 1, buffer)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_kernels_and_numpy_pick_alike(
    codec: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(parts_module, "KERNELS", None)
    ones, others = np.full(500, -2, np.float32), np.linspace(-4, 4, 500, dtype=np.float32)
    made, result = bench(codec, "max", ones)
    made.add_own(0, 0, coded=True)
    add(made, result, others)
    made.encode(0, result.view(0))
    values = np.empty(500, np.float32)
    result.codec.decode(result.view(0), values)
    np.testing.assert_allclose(values, np.maximum(ones, others), atol=0.05)


@pytest.mark.parametrize("fold", ["max", "min"])
@pytest.mark.parametrize("turn", [0, 1])
def test_what_is_not_finite_is_refused(fold: str, turn: int) -> None:
    """Also where it comes first, and nothing is compared with it."""
    bad = np.array([1, np.nan, 2], np.float32)
    made, result = bench("float32", fold, bad if turn == 0 else np.ones(3, np.float32))
    buffer = made.encoded.take()
    buffer[: result.layout.size(0)] = bad.view(np.uint8)
    if turn:
        made.add_own(0, 0, coded=True)
    with pytest.raises(CodecError, match="NaN or infinity"):
        made.add(0, 1, buffer)
    if not turn:
        with pytest.raises(CodecError, match="NaN or infinity"):
            made.add_own(0, 0, coded=True)
