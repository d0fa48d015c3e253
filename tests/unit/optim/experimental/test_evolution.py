"""Test that evolution strategies step by ranks, with the same bits on all peers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness.zeroth_order import OPTIONS, flat, loss_of, model, put, sampled
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import IncompatibleRunError
from atoll.optim import Swarm, ZerothOrder
from atoll.optim.experimental import EvolutionStrategy
from atoll.optim.experimental.evolution import utilities

LR = 0.05


def ranked(found: list[float]) -> list[float]:
    """Return the utilities by counting, as the formula says."""
    both = [*found, *(-x for x in found)]
    last = len(both) - 1
    ranks = [
        sum(other < x for other in both) + (sum(other == x for other in both) - 1) / 2
        for x in found
    ]
    return [(2 * rank - last) / last for rank in ranks]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30))
def test_utilities_are_mean_ranks_with_the_sign_of_the_difference(found: list[float]) -> None:
    got = utilities(np.array(found, np.float32))
    np.testing.assert_allclose(got, ranked(found), atol=1e-6)
    assert (np.sign(got) == np.sign(np.array(found, np.float32))).all()
    opposite = utilities(-np.array(found, np.float32))
    assert (got == -opposite).all()


def test_an_enormous_difference_counts_no_more_than_the_next() -> None:
    got = utilities(np.array([1e-3, 2e-3, 1e6], np.float32))
    assert got.tolist() == pytest.approx([0.2, 0.6, 1.0])


def train(session: Any, steps: int, kind: type[ZerothOrder] = EvolutionStrategy) -> torch.Tensor:
    net = model()
    with kind(net, session, LR, **OPTIONS) as optimizer:
        while optimizer.steps < steps:
            optimizer.step(loss_of(net, session.number, optimizer.steps))
    return flat(net)


def test_steps_are_those_of_the_formula() -> None:
    """Compute them with numpy from the definition: the first step is the first peer's alone."""
    found = Swarm(2).run(lambda session: train(session, 3))
    net = model()
    theta = flat(net).numpy()
    for step in range(3):
        differences, directions = zip(*sampled(net, theta, step, 2), strict=True)
        weighted = zip(ranked(list(differences)), directions, strict=True)
        total = sum(u * z.astype(np.float64) for u, z in weighted)
        theta = (theta - LR / len(directions) * total).astype(np.float32)
    np.testing.assert_allclose(found[0].numpy(), theta, atol=1e-5)
    assert torch.equal(found[0], found[1])


def test_it_learns() -> None:
    def loss(values: torch.Tensor) -> float:
        net = model()
        put(net, values.numpy())
        return float(loss_of(net, 7, 7)().detach())

    after = Swarm(3).run(lambda session: train(session, 150))[0]
    assert loss(after) < 0.6 * loss(flat(model()))


def test_a_run_of_ranks_takes_no_zeroth_order_trainer() -> None:
    kinds = (EvolutionStrategy, ZerothOrder)
    with pytest.raises(IncompatibleRunError, match="schedule: yours seed 5, run ranks, seed 5"):
        Swarm(2).run(lambda session: train(session, 2, kinds[session.number]))
