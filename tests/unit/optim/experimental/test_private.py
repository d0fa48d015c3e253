"""Test what a private run releases, what it counts, and what an attacker makes of it."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim import DiLoCo, Swarm
from atoll.optim.experimental import PrivateDiLoCo

INPUTS, RECORDS = 40, 30


def released(noise: float, clip: float, rate: float, rounds: int = 1) -> tuple[Any, Any, Any]:
    """Return the run's parameters before and after rounds of a single peer, and its method."""
    found: list[Any] = []

    def train(session: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(50, 20)
        inner = torch.optim.SGD(model.parameters(), lr=rate)
        outer = PrivateDiLoCo(
            model, inner, 1, session, clip=clip, noise=noise, codec="float32", outer_momentum=0.0,
            outer_lr=1.0,
        )  # fmt: skip
        found.append(swarm.state.theta.copy())
        for _ in range(rounds):
            model(torch.ones(4, 50)).square().sum().backward()
            inner.step()
            inner.zero_grad()
        found.append(outer)

    swarm = Swarm(1)
    swarm.run(train)
    before, outer = found
    return before, swarm.state.theta.copy(), outer


def test_what_is_larger_than_the_clip_is_released_with_its_norm() -> None:
    before, after, _ = released(noise=1e-9, clip=0.5, rate=10.0)
    assert np.linalg.norm(before - after) == pytest.approx(0.5, rel=1e-4)


def test_what_is_smaller_is_released_as_it_is() -> None:
    before, after, _ = released(noise=1e-15, clip=1e6, rate=1e-3)
    torch.manual_seed(0)
    model = nn.Linear(50, 20)
    model(torch.ones(4, 50)).square().sum().backward()
    steps = [1e-3 * p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None]
    expected = torch.cat([step.flatten() for step in steps]).numpy()
    np.testing.assert_allclose((before - after)[: expected.size], expected, atol=1e-6)


def test_the_noise_has_the_deviation_that_is_promised() -> None:
    before, after, _ = released(noise=2.0, clip=0.25, rate=0.0)
    noise = (before - after)[: 50 * 20 + 20]
    assert noise.std() == pytest.approx(0.5, rel=0.1)
    assert abs(noise.mean()) < 5 * 0.5 / math.sqrt(noise.size)
    again, later, _ = released(noise=2.0, clip=0.25, rate=0.0)
    assert (before - after).tobytes() != (again - later).tobytes(), "nobody knows the seed"


def test_epsilon_is_that_of_so_many_gaussian_releases() -> None:
    """Compare with Renyi accounting by hand: T alpha / (2 sigma^2), converted as in 2004.00010."""
    _, _, outer = released(noise=4.0, clip=1.0, rate=0.1, rounds=12)
    assert outer.releases == 12
    delta = 1e-5

    def converted(alpha: float) -> float:
        spent = outer.releases * alpha / (2 * 4.0**2)
        return spent + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1)

    by_hand = min(converted(1 + n / 10) for n in range(1, 1000))
    assert outer.epsilon(delta) == pytest.approx(by_hand, rel=0.02)
    assert outer.epsilon(1e-7) > outer.epsilon(delta)


def test_nothing_is_spent_before_the_first_release() -> None:
    _, _, outer = released(noise=1.0, clip=1.0, rate=0.1, rounds=0)
    assert outer.epsilon(1e-5) == 0.0


def test_a_saved_state_carries_on_what_was_spent() -> None:
    """Load a state of much noise into a run of little: each release counts with its own."""
    _, _, outer = released(noise=4.0, clip=1.0, rate=0.1, rounds=3)
    state = outer.state_dict()
    _, _, alone = released(noise=1.0, clip=1.0, rate=0.1, rounds=2)
    _, _, again = released(noise=1.0, clip=1.0, rate=0.1, rounds=2)
    again._restore_anywhere(state["place"])
    assert again.releases == 5
    assert alone.epsilon(1e-5) < again.epsilon(1e-5) < 1.3 * alone.epsilon(1e-5)


def test_without_opacus_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, outer = released(noise=1.0, clip=1.0, rate=0.1)
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(ConfigError, match=r"atoll\[privacy\]"):
        outer.epsilon(1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.0, "noise": 1.0},
        {"clip": 1.0, "noise": 0.0},
        {"validators": 1},
        {"buffers": True},
    ],
)
def test_what_would_promise_nothing_is_refused(options: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError):
        Swarm(1).run(
            lambda session: PrivateDiLoCo(
                model, inner, 2, session, **{"clip": 1.0, "noise": 1.0, **options}
            )
        )


# ---------------------------------------------------------------- membership inference


def attacked(noise: float) -> tuple[float, float]:
    """Return the AUC of an attacker who takes whoever has the smaller loss for a member.

    And with what part of the members' labels the model agrees. 0: the run is not private.

    Labels are random, so that only who has seen a record knows its label.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * RECORDS, INPUTS, generator=generator)
    labels = torch.randint(0, 2, (2 * RECORDS,), generator=generator)

    def train(session: Any) -> tuple[torch.Tensor, float]:
        torch.manual_seed(0)
        model = nn.Linear(INPUTS, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        made: Any = DiLoCo
        options: dict[str, Any] = {"codec": "float32"}
        if noise:
            made, options = PrivateDiLoCo, options | {"clip": 0.5, "noise": noise}
        outer = made(model, inner, 5, session, **options)
        if noise:
            outer._random = np.random.default_rng(3)  # the same in each run of this test
        for _ in range(30):
            loss = nn.functional.cross_entropy(model(inputs[:RECORDS]), labels[:RECORDS])
            loss.backward()
            inner.step()
            inner.zero_grad()
        with torch.no_grad():
            logits = model(inputs)
            right = (logits.argmax(1) == labels)[:RECORDS].float().mean()
            return nn.functional.cross_entropy(logits, labels, reduction="none"), float(right)

    found, right = Swarm(1).run(train)[0]
    losses = found.numpy()
    members, others = losses[:RECORDS], losses[RECORDS:]
    return float((members[:, None] < others[None, :]).mean()), right


def test_a_membership_attack_fails_where_the_run_is_private() -> None:
    """Try it without noise, with some, and with enough for an epsilon of 3 in six rounds."""
    auc, right = attacked(0.0)
    assert auc > 0.75
    assert right > 0.9
    some, still_right = attacked(0.2)
    assert still_right > 0.6, "it has learnt something"
    assert some < auc
    assert attacked(4.0)[0] < 0.6
