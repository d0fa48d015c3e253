"""Local SGD and the quadratic synchronization rule (acceptance test 9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError, IncompatibleRunError
from atoll.optim import QSR, LocalSGD, Swarm

RULE = QSR(a=0.0175, peak_lr=0.008, base=4)


def train(session: Any, sync_every: int | QSR, lrs: list[float]) -> tuple[list[int], torch.Tensor]:
    """After how many steps each round ended, and the parameters after the last."""
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=lrs[0])
    ends = []
    with LocalSGD(model, inner, sync_every, session, codec="float32") as outer:
        for step, lr in enumerate(lrs):
            inner.param_groups[0]["lr"] = lr
            before = outer.metrics()["rounds"]
            inner.zero_grad()
            (model(torch.full((4, 3), 1.0 + session.number)) - step).square().mean().backward()
            inner.step()
            if outer.metrics()["rounds"] > before:
                ends.append(step + 1)
        return ends, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_9_the_values_of_the_paper():
    rates = {0.008: 4, 0.004: 19, 0.002: 76, 0.001: 306}
    assert {lr: RULE.sync_every(10_000, lr) for lr in rates} == rates


def test_9_warm_up_has_the_steps_of_the_peak():
    rule = QSR(a=0.0175, peak_lr=0.004, base=4, warmup_steps=100)
    assert {rule.sync_every(step, 1e-5) for step in (0, 50, 99)} == {19}
    assert rule.sync_every(100, 0.002) == 76


@pytest.mark.parametrize("lr", [0.0, 1e-300, 1e-9])
def test_9_a_rate_near_zero_is_capped(lr):
    assert RULE.sync_every(0, lr) == 500


def test_9_the_last_round_is_cut_short_and_none_is_empty():
    rule = QSR(a=0.0175, peak_lr=0.008, base=4, total_steps=100)
    assert [rule.sync_every(step, 0.004) for step in (0, 81, 90, 99)] == [19, 19, 10, 1]
    assert rule.sync_every(100, 0.004) == 19  # who goes on all the same


def test_a_of_zero_is_a_constant():
    rule = QSR(a=0.0, peak_lr=0.1, base=7)
    assert {rule.sync_every(step, 10.0**-step) for step in range(9)} == {7}
    assert rule.sync_every(9, 0.0) == 7


@pytest.mark.parametrize(
    "numbers",
    [
        {"a": -1.0, "peak_lr": 0.1},
        {"a": float("nan"), "peak_lr": 0.1},
        {"a": 1.0, "peak_lr": 0.0},
        {"a": 1.0, "peak_lr": 0.1, "base": 0},
        {"a": 1.0, "peak_lr": 0.1, "base": 600},
        {"a": 1.0, "peak_lr": 0.1, "warmup_steps": -1},
        {"a": 1.0, "peak_lr": 0.1, "total_steps": -1},
    ],
)
def test_impossible_rules_are_refused(numbers):
    with pytest.raises(ConfigError, match="QSR"):
        QSR(**numbers)


def test_9_steps_change_only_between_rounds():
    """The rate falls in the middle of rounds; each keeps the length that it began with."""
    rule = QSR(a=0.2, peak_lr=0.1, base=2, most=9)
    lrs = [0.1] * 6 + [0.05] * 21
    found = Swarm(2).run(lambda session: train(session, rule, lrs)[0])
    assert found == [[4, 8, 17, 26]] * 2


def ends_by_the_paper(rule: QSR, lrs: list[float]) -> list[int]:
    """Algorithm 2 of arXiv 2310.14423: H of a round is of the rate of its first step."""
    ends, step = [], 0
    while step < len(lrs):
        step += max(rule.base, int((rule.a / lrs[step]) ** 2))
        ends.append(step)
    return [end for end in ends if end <= len(lrs)]


@pytest.mark.parametrize("after", [False, True], ids=["set before a step", "scheduler after it"])
def test_9_the_rate_is_that_of_a_rounds_first_step(after: bool) -> None:
    rule = QSR(a=0.0175, peak_lr=0.008, base=4)
    lrs = [0.008] * 4 + [0.005] + [0.0045] * 11 + [0.004] * 19 + [0.002]

    def by_scheduler(session: Any) -> list[int]:
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: [*lrs, 1.0][step])
        ends = []
        with LocalSGD(model, inner, rule, session, codec="float32") as outer:
            for step in range(len(lrs)):
                before = outer.metrics()["rounds"]
                model(torch.ones(4, 3)).square().mean().backward()
                inner.step()
                scheduler.step()
                if outer.metrics()["rounds"] > before:
                    ends.append(step + 1)
        return ends

    work = by_scheduler if after else lambda session: train(session, rule, lrs)[0]
    assert ends_by_the_paper(rule, lrs) == [4, 16, 35]
    assert Swarm(2).run(work) == [ends_by_the_paper(rule, lrs)] * 2


def test_a_round_is_the_mean_of_the_peers():
    torch.manual_seed(3)
    start = [p.detach().clone() for p in nn.Linear(3, 2).parameters()]
    torch.manual_seed(3)
    (_, mean), (_, other) = Swarm(2).run(lambda session: train(session, 3, [0.05] * 3))
    assert torch.equal(mean, other)
    alone = []
    for number in range(2):
        weight, bias = (p.clone().requires_grad_() for p in start)
        for step in range(3):
            x = torch.full((4, 3), 1.0 + number)
            loss = (nn.functional.linear(x, weight, bias) - step).square().mean()
            for p, gradient in zip(
                (weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True
            ):
                p.data -= 0.05 * gradient
        alone.append(torch.cat([weight.detach().flatten(), bias.detach()]))
    torch.testing.assert_close(mean, (alone[0] + alone[1]) / 2, rtol=0, atol=2e-7)


def test_another_rule_is_another_run():
    def each(session: Any) -> None:
        train(session, QSR(a=0.1 + session.number, peak_lr=0.1), [0.1])

    with pytest.raises(IncompatibleRunError, match="schedule"):
        Swarm(2).run(each)
