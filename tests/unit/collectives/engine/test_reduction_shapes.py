"""The engine in every shape: equal bytes for everyone, near the plain mean, few neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.collectives.codecs import get_codec
from atoll.collectives.schedule.routes import Routes, hierarchical, ring, tree

MakeGroup = Callable[..., Any]
SHAPES: dict[str, Callable[[int], Routes]] = {
    "ring": lambda count: ring([(3 * p + 1) % count for p in range(count)]),
    "binary tree": lambda count: tree(count, 2),
    "chain": lambda count: tree(count, 1),
    "sites": lambda count: hierarchical([p % 3 for p in range(count)]),
}


def decoded(group: Any, me: int) -> np.ndarray:
    values = np.empty(group.grid.total, np.float32)
    layout = group.reductions[me]._layout
    for chunk in range(group.grid.count):
        (lo, hi), (first, end) = group.grid.bounds(chunk), layout.slice(chunk)
        group.codec.decode(group.results[me][first:end], values[lo:hi])
    return values


@pytest.mark.parametrize("streams", ["memory", "sockets"])
@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("weights", [[1.0] * 5, [2.0, 0.0, 1.0, 0.5, 0.0, 1.0, 1.0]], ids=len)
@pytest.mark.parametrize("shape", SHAPES)
def test_everyone_ends_with_the_same_bytes_near_the_mean(
    make_group: MakeGroup, shape: str, weights: list[float], codec: str, streams: str
) -> None:
    routes = SHAPES[shape](len(weights))
    group = make_group(get_codec(codec), weights=weights, total=256 * 45 + 7, shape=routes)
    group.start(streams)
    group.wait_done()
    first = group.results[0].tobytes()
    assert all(group.results[me].tobytes() == first for me in group.everyone)
    assert len({tuple(digests[0]) for digests in group.done}) == 1
    assert group.failed == [[] for _ in weights]
    mean = np.average(np.array(group.vectors, np.float64), axis=0, weights=weights)
    error = np.abs(decoded(group, 0) - mean).max()
    assert error < {"float32": 1e-6, "int8": 0.15}[codec]


def test_in_a_ring_everyone_sends_to_the_next_alone(make_group: MakeGroup) -> None:
    group = make_group(get_codec("float32"), weights=[1.0] * 6, shape=ring(range(6)))
    assert [sorted(r.destinations) for r in group.reductions] == [[1], [2], [3], [4], [5], [0]]


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_stays_within_the_budget(make_group: MakeGroup, shape: str) -> None:
    group = make_group(
        get_codec("float32"), weights=[1.0] * 5, total=256 * 400, shape=SHAPES[shape](5)
    )
    group.start("sockets")
    group.wait_done()
    for reduction in group.reductions:
        assert reduction.buffer_bytes < group.results[0].nbytes
