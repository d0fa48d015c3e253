"""The outer learning rate by the number of peers: the table, and rounds of which peers are gone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim import DiLoCo, StreamingDiLoCo, Swarm
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.outer_step import BEST, factor_of, outer_rate, outer_step
from atoll.optim.run_spec import RunSpec
from atoll.optim.swarm import SwarmSession
from atoll.optim.swarm_state import SwarmState, SwarmSubmission


@pytest.mark.parametrize(
    ("peers", "rate"), [(1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8), (9, 0.8), (1000, 0.8)]
)
def test_the_published_rates_and_constant_beyond(peers: int, rate: float) -> None:
    assert outer_rate(peers) == rate


def test_between_them_it_is_linear_in_the_logarithm() -> None:
    assert outer_rate(3) == 0.6
    for peers in (5, 6, 7):
        expected = 0.6 + 0.2 * (math.log2(peers) - 2)
        assert outer_rate(peers) == pytest.approx(expected, abs=1e-6)
        assert outer_rate(peers) == float(f"{outer_rate(peers):.6f}")
    rates = [outer_rate(peers) for peers in range(1, 12)]
    assert rates == sorted(rates)
    assert set(BEST.values()) <= set(rates)


def test_what_people_give() -> None:
    assert factor_of(0.3) == (0.3, False)
    assert factor_of("by_peers") == (1.0, True)
    with pytest.raises(ConfigError, match="by_peer'"):
        factor_of("by_peer")  # type: ignore[arg-type]
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="eager"):
        StreamingDiLoCo(model, inner, 4, Swarm(1).sessions[0], eager=True, outer_lr="by_peers")


def test_a_swarm_takes_smaller_steps_as_its_workers_leave() -> None:
    """Worker n stays for n + 1 rounds, and moves all parameters by n + 1 in each."""
    workers = 6

    def train(session: SwarmSession) -> None:
        model = nn.Linear(7, 3)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        DiLoCo(model, inner, 1, session, outer_lr="by_peers", codec="float32")
        for _ in range(session.number + 1):
            for p in model.parameters():
                p.grad = torch.full_like(p, session.number + 1.0)
            inner.step()

    swarm = Swarm(workers)
    swarm.run(train)
    theta, momentum, scratch = np.zeros((3, 24), np.float32)
    for gone in range(workers):
        moves = [float(n + 1) for n in range(gone, workers)]
        delta = np.full_like(theta, sum(moves) / len(moves))
        outer_step(
            "nesterov",
            theta,
            momentum,
            delta,
            lr=outer_rate(len(moves)),
            mu=0.9,
            out_theta=theta,
            out_momentum=momentum,
            scratch=scratch,
        )
    np.testing.assert_allclose(swarm.state.theta, theta, rtol=1e-5)
    np.testing.assert_allclose(swarm.state.momentum.view(np.float32), momentum, rtol=1e-5)


def test_who_gives_nothing_is_not_counted() -> None:
    """Of five whose steps are equal only one has a weight."""
    spec = RunSpec(sync_every=1, outer="sgd", outer_lr_by_peers=True, codec="float32")
    manifest = Manifest.of([Parameter("w", (5,))])
    state = SwarmState(spec, manifest, lambda flat: flat.fill(1.0))
    moved = np.zeros(5, np.float32)
    state.commit([SwarmSubmission(n, moved, float(n == 3)) for n in range(5)])
    np.testing.assert_allclose(1.0 - state.theta, outer_rate(1) * spec.outer_lr, rtol=1e-6)
