"""CO2 (acceptance test 5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim import Swarm
from atoll.optim.experimental import CO2, GapAware
from atoll.optim.outer_step import outer_step

WORKERS, H, LR, ROUNDS = 3, 4, 0.1, 6


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    return net, torch.optim.SGD(net.parameters(), lr=LR, momentum=0.5)


def gradient_step(net: nn.Module, inner: torch.optim.Optimizer, worker: int, step: int) -> None:
    random = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(8, 5, generator=random)
    inner.zero_grad()
    (net(x) - x[:, :2].sin()).square().mean().backward()
    inner.step()


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def load(net: nn.Module, values: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(values.clone(), net.parameters())


def train(session: Any, steps: int = ROUNDS * H, **options: Any) -> torch.Tensor:
    net, inner = fresh()
    with CO2(net, inner, H, session, **{"codec": "float32"} | options):
        for step in range(steps):
            gradient_step(net, inner, session.number, step)
    return flat(net)


@pytest.mark.parametrize("clip", [None, 0.02])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_5_it_is_heavy_ball_diloco_one_round_late(mu: float, clip: float | None) -> None:
    """Without a penalty; and clipping clips."""
    options = {"penalty": None, "outer_lr": 0.8, "outer_momentum": mu, "clip": clip}
    found = Swarm(WORKERS).run(lambda session: train(session, **options))
    workers = [fresh() for _ in range(WORKERS)]
    theta = flat(workers[0][0])
    anchor, momentum, late = theta.clone(), torch.zeros_like(theta), None
    for round_number in range(ROUNDS):
        for worker, (net, inner) in enumerate(workers):
            for step in range(H):
                gradient_step(net, inner, worker, round_number * H + step)
        delta = sum(anchor - flat(net) for net, _ in workers) / WORKERS
        if late is not None:
            momentum = mu * momentum + late
            if clip is not None:
                assert momentum.abs().max() > clip
                momentum = momentum.clamp(-clip, clip)
            theta = theta - 0.8 * momentum
        late, anchor = delta, theta
        for net, _ in workers:
            load(net, theta)
    for mine in found:
        torch.testing.assert_close(mine, theta, rtol=0, atol=2e-6)


def test_a_clip_bounds_every_element_of_the_momentum() -> None:
    theta, momentum, delta, scratch = np.random.default_rng(0).standard_normal((4, 1000))
    before, mu, lr = theta.copy(), 0.9, 0.5
    expected = np.clip(mu * momentum + delta, -0.3, 0.3)
    outer_step(
        "heavy_ball",
        theta,
        momentum,
        delta,
        lr=lr,
        mu=mu,
        clip=0.3,
        out_theta=theta,
        out_momentum=momentum,
        scratch=scratch,
    )
    np.testing.assert_array_equal(momentum, expected)
    np.testing.assert_allclose(theta, before - lr * expected, rtol=0, atol=1e-15)


def test_the_penalty_shrinks_what_comes_late_and_is_asked_in_every_round() -> None:
    asked: list[tuple[float, float]] = []

    def half(gap: float, moved: float) -> float:
        asked.append((gap, moved))
        return 2.0

    plain = Swarm(1).run(lambda s: train(s, 3 * H, penalty=None))
    shrunk = Swarm(1).run(lambda s: train(s, 3 * H, penalty=half))
    start = flat(fresh()[0])
    # In three rounds two deltas have arrived, the first of them from the same start.
    assert len(asked) == 3
    assert asked[0][0] == 0.0  # nothing has been committed before the first
    assert asked[1][0] > 0
    assert all(moved > 0 for _, moved in asked)
    assert 0 < (shrunk[0] - start).norm() < (plain[0] - start).norm()


def test_gap_aware_compares_with_the_usual_movement() -> None:
    penalty = GapAware()
    assert penalty(0.0, 2.0) == 1.0
    assert penalty(2.0, 2.0) == 2.0
    assert 2.0 < penalty(2.0, 1.0) < 3.0
    assert GapAware()(1.0, 0.0) == 1.0  # nobody has moved yet


def test_what_a_round_has_missed_is_sent_with_the_next(local_run: Any, in_threads: Any) -> None:
    """The first submission of peer 0 comes too late; its second carries both."""
    seen: dict[bool, list[np.ndarray[Any, Any]]] = {}
    for late in (False, True):
        run = local_run(2, [(0, 1)] if late else [])
        given = seen[late] = []
        commit = run.commit

        def watched(run: Any = run, given: Any = given, commit: Any = commit) -> None:
            given.append(run.submitted[0][0].copy())
            commit()

        run.commit = watched

        def work(number: int, run: Any = run, late: bool = late) -> None:
            torch.manual_seed(0)
            net = nn.Linear(5, 2)
            inner = torch.optim.SGD(net.parameters(), lr=LR)
            options: dict[str, Any] = {"penalty": None, "codec": "float32"}
            outer = CO2(net, inner, H, run.sessions[number], **options)
            for _ in range(2 * H):
                for p in net.parameters():
                    p.grad = torch.full_like(p, 1.0 + number)
                inner.step()
            assert outer.metrics()["missed"] == (late and number == 0)

        in_threads([lambda n=n: work(n) for n in range(2)])
        first = {0: 4.0, 1: 4.0} if not late else {1: 4.0}
        assert run.weights == [first, {0: 8.0 if late else 4.0, 1: 4.0}]
    np.testing.assert_allclose(seen[True][1], 2 * seen[False][1], rtol=1e-6)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_a_clip_is_positive(clip: float) -> None:
    with pytest.raises(ConfigError, match="clip"):
        Swarm(1).run(lambda session: train(session, 1, clip=clip))
