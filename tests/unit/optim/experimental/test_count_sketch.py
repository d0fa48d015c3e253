"""Test that sketches add up, show what is large, and keep the rest for later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import gradients
from harness.gradients import averages, manifest_of

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError
from atoll.optim import GradientAverage, Swarm
from atoll.optim.experimental import CountSketch
from atoll.optim.experimental.count_sketch import places

SHAPE = (40, 50)
SIZE = 40 * 50
ONE = manifest_of(SHAPE)


def begun(**options: Any) -> CountSketch:
    sketch = CountSketch(**options)
    sketch.begin(ONE, "float32", "a")
    return sketch


def normal(n: int, s: int) -> F32:
    return np.random.default_rng((n, s)).standard_normal(SIZE).astype(np.float32)


def splitmix(value: int) -> int:
    """Return one output, in Python's own integers."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def test_a_sketch_is_that_of_the_definition() -> None:
    sketch, values = begun(rows=3, width=0.01), normal(0, 0)
    cells = 20
    expected = np.zeros((3, cells))
    for row in range(3):
        for i, value in enumerate(values):
            start = row * 0x9E3779B97F4A7C15 * (SIZE | 1)
            hashed = splitmix((i + start) & (2**64 - 1))
            sign = 1 if hashed >> 63 else -1
            expected[row, (hashed & (2**62 - 1)) % cells] += sign * float(value)
    np.testing.assert_allclose(sketch._sketch(values), expected, rtol=1e-5, atol=1e-5)


def test_sketches_of_several_add_up_to_that_of_their_sum() -> None:
    sketch = begun()
    parts = [normal(n, 0) for n in range(4)]
    total = sketch._sketch(np.sum(parts, axis=0))
    np.testing.assert_allclose(sum(map(sketch._sketch, parts)), total, atol=1e-4)


def test_cells_and_signs_are_spread_evenly_and_rows_differ() -> None:
    found = [places(row, 100_000, 64) for row in range(2)]
    for cells, signs in found:
        assert np.bincount(cells, minlength=64).std() < 3 * (100_000 / 64) ** 0.5
        assert abs(signs.mean()) < 0.02
    assert (found[0][0] == found[1][0]).mean() < 0.03


def test_what_is_large_comes_out_whole_on_all_trainers() -> None:
    large = np.random.default_rng(5).choice(SIZE, 10, replace=False)

    def gradient(n: int, s: int) -> F32:
        values = 0.001 * normal(n, s)
        values[large] += 10.0 + np.arange(10)
        return values

    found = averages(lambda n: CountSketch(width=0.1), ONE, gradient, range(1), 3)
    assert all(each[0].tobytes() == found[0][0].tobytes() for each in found)
    assert set(np.flatnonzero(found[0][0])) == set(large)
    np.testing.assert_allclose(found[0][0][large], 10.0 + np.arange(10), atol=0.1)


def test_what_was_sent_and_what_is_left_is_what_came_in() -> None:
    """Compare sketches, as these are what is kept."""
    workers = [CountSketch() for _ in range(2)]
    found = averages(lambda n: workers[n], ONE, normal, range(8), 2)
    came = np.mean([[normal(n, s) for s in range(8)] for n in range(2)], axis=0).sum(0)
    went = np.sum(found[0], axis=0)
    left = workers[0]._sketch(came.astype(np.float32)) - workers[0]._sketch(went)
    np.testing.assert_allclose(workers[0].shared[0], left.reshape(-1), atol=1e-3)
    assert workers[0].shared[0].tobytes() == workers[1].shared[0].tobytes()


def test_it_trains() -> None:
    def train(session: Any) -> torch.Tensor:
        net = gradients.model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with GradientAverage(net, inner, session, compressor=CountSketch(width=0.2, keep=0.05)):
            for step in range(150):
                inner.zero_grad()
                gradients.loss_of(net, session.number, step).backward()
                inner.step()
        return gradients.flat(net)

    def loss(flat_: torch.Tensor) -> float:
        net, at = gradients.model(), 0
        for p in net.parameters():
            p.data = flat_[at : at + p.numel()].view(p.shape)
            at += p.numel()
        return float(gradients.loss_of(net, 9, 9).detach())

    found = Swarm(3).run(train)
    assert all(torch.equal(found[0], other) for other in found)
    assert loss(found[0]) < 0.6 * loss(gradients.flat(gradients.model()))


@pytest.mark.parametrize("options", [{"rows": 2}, {"rows": 17}, {"width": 0.0}, {"keep": 2.0}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CountSketch(**options)
