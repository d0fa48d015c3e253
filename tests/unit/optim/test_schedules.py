"""Schedulers that are brought to a step give the rates of one that has taken all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as lrs

from atoll.collectives.errors import ConfigError
from atoll.optim.schedules import KEEP_EVERY, Schedules

Make = Callable[[Optimizer], lrs.LRScheduler]


def warm(inner: Optimizer) -> lrs.LRScheduler:
    return lrs.LinearLR(inner, 0.1, 1.0, 7)


MAKERS: dict[str, Make] = {
    "lambda": lambda o: lrs.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.97 if n % 2 else 1.01),
    "step": lambda o: lrs.StepLR(o, 5, 0.7),
    "multi step": lambda o: lrs.MultiStepLR(o, [3, 3, 20], 0.5),
    "constant": lambda o: lrs.ConstantLR(o, 0.3, 9),
    "linear": warm,
    "exponential": lambda o: lrs.ExponentialLR(o, 0.93),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 17, 1e-3),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4, 2),
    "polynomial": lambda o: lrs.PolynomialLR(o, 30, 2.0),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 4, mode="exp_range", gamma=0.99),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=60),
    "sequential": lambda o: lrs.SequentialLR(o, [warm(o), lrs.CosineAnnealingLR(o, 20)], [7]),
    "chained": lambda o: lrs.ChainedScheduler([warm(o), lrs.ExponentialLR(o, 0.95)]),
    "chained in chained": lambda o: lrs.ChainedScheduler(
        [lrs.ChainedScheduler([warm(o), lrs.StepLR(o, 3, 0.9)]), lrs.ExponentialLR(o, 0.95)]
    ),
}


def optimizer(kind: type[Optimizer] = SGD, **options: Any) -> Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))]}]
    groups[1]["lr"] = 0.02  # type: ignore[assignment]
    if kind is SGD:
        options["momentum"] = 0.9
    return kind(groups, lr=0.05, **options)  # type: ignore[call-arg]


def rates(inner: Optimizer) -> list[Any]:
    keys = ("lr", "momentum", "betas")
    return [
        [v.item() if isinstance(v := g.get(key), torch.Tensor) else v for key in keys]
        for g in inner.param_groups
    ]


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("name", MAKERS)
def test_any_step_from_anywhere(name: str, kind: type[Optimizer]) -> None:
    inner = optimizer(kind)
    scheduler, expected = MAKERS[name](inner), []
    for _ in range(50):
        expected.append(rates(inner))
        inner.step()
        scheduler.step()
    assert len({str(e) for e in expected}) > 1

    inner, schedules = optimizer(kind), Schedules()
    scheduler = MAKERS[name](inner)
    schedules.add(scheduler, 0)
    for step in (0, 1, 30, 29, 49, 12, 12, 0, 49, 3):
        schedules.set_step(step)
        assert rates(inner) == expected[step]
    for step in range(4, 12):  # as in a training loop
        inner.step()
        scheduler.step()
        assert rates(inner) == expected[step]


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_that_has_loaded_old_rates_gets_those_of_the_step(
    name: str, kind: type[Optimizer]
) -> None:
    inner, schedules = optimizer(kind), Schedules()
    schedules.add(MAKERS[name](inner), 3)
    old = copy.deepcopy(inner.state_dict())

    inner, schedules = optimizer(kind), Schedules()
    scheduler = MAKERS[name](inner)
    schedules.add(scheduler, 20)
    expected = rates(inner)
    inner.load_state_dict(old)
    schedules.loaded()
    schedules.set_step(20)
    assert rates(inner) == expected
    other, others = optimizer(kind), Schedules()
    others.add(MAKERS[name](other), 25)
    for _ in range(5):  # as in a training loop
        inner.step()
        scheduler.step()
    assert rates(inner) == rates(other)


def test_what_the_user_has_set_stays() -> None:
    inner, schedules = (
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9),
        Schedules(),
    )
    schedules.add(lrs.CosineAnnealingLR(inner, 60), 0)
    inner.param_groups[0]["momentum"] = 0.5
    schedules.set_step(0)
    assert inner.param_groups[0]["momentum"] == 0.5


def test_an_optimizer_that_is_loaded_in_the_middle_has_the_rate_of_the_step() -> None:
    inner, schedules = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), Schedules()
    scheduler = lrs.CosineAnnealingLR(inner, 60)
    schedules.add(scheduler, 0)
    old = copy.deepcopy(inner.state_dict())
    for _ in range(14):
        inner.step()
        scheduler.step()
    (expected,) = rates(inner)
    inner.load_state_dict(old)
    schedules.loaded()
    schedules.set_step(14)
    assert rates(inner) == [expected]


def test_rates_that_are_tensors_stay_the_same_tensors() -> None:
    rate = torch.tensor(0.05)
    inner = Adam([nn.Parameter(torch.ones(1))], lr=rate, capturable=True, foreach=False)
    schedules = Schedules()
    schedules.add(lrs.ExponentialLR(inner, 0.5), 3)
    assert inner.param_groups[0]["lr"] is rate
    torch.testing.assert_close(rate, torch.tensor(0.05 / 8))
    schedules.set_step(1)
    assert inner.param_groups[0]["lr"] is rate
    torch.testing.assert_close(rate, torch.tensor(0.025))


def test_one_that_began_later_goes_back_no_further() -> None:
    inner, schedules = optimizer(), Schedules()
    scheduler = lrs.ExponentialLR(inner, 0.99)
    for _ in range(5):
        inner.step()
        scheduler.step()
    with pytest.raises(ConfigError, match="at step 5, the run at 4"):
        schedules.add(scheduler, 4)
    schedules.add(scheduler, 8)
    schedules.set_step(6)
    with pytest.raises(ConfigError, match="at step 6, the run at 2"):
        schedules.set_step(2)


def test_a_metric_or_anything_else_is_refused() -> None:
    inner = optimizer()
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        Schedules().add(lrs.ReduceLROnPlateau(inner), 0)
    with pytest.raises(ConfigError, match="SGD"):
        Schedules().add(inner, 0)  # type: ignore[arg-type]


def test_to_go_back_a_little_after_long_does_not_begin_at_the_beginning() -> None:
    inner, schedules = optimizer(), Schedules()
    taken: list[int] = []
    scheduler = lrs.LambdaLR(inner, lambda n: taken.append(n) or 1.0 / (1 + n))  # type: ignore[func-returns-value]
    schedules.add(scheduler, 0)
    for step in range(2 * KEEP_EVERY + 50):
        schedules.set_step(step)
        inner.step()
        scheduler.step()
    taken.clear()
    schedules.set_step(2 * KEEP_EVERY + 1)
    assert taken == [2 * KEEP_EVERY + 1] * 2  # of two groups, from where it was kept last
    assert rates(inner)[0][0] == 0.05 / (2 * KEEP_EVERY + 2)


def one_cycle(inner: Optimizer) -> lrs.LRScheduler:
    return lrs.OneCycleLR(inner, 0.2, total_steps=6)


ENDS: dict[str, Make] = {
    "one cycle": one_cycle,
    "sequential": lambda o: lrs.SequentialLR(o, [warm(o), one_cycle(o)], [4]),
    "chained": lambda o: lrs.ChainedScheduler([one_cycle(o), lrs.ExponentialLR(o, 0.95)]),
}


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_one_that_ends_before_the_run_stays_where_it_ended_and_says_so_once(
    name: str, loaded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    last = 9 if name == "sequential" else 5
    inner, schedules = optimizer(), Schedules()
    schedules.add(ENDS[name](inner), last)
    expected = rates(inner)

    inner, schedules = optimizer(), Schedules()
    scheduler = ENDS[name](inner)
    schedules.add(scheduler, 2)
    for step in (last + 3, last + 9, 3, last + 30):
        if loaded:
            schedules.loaded()
        schedules.set_step(step)
        assert step == 3 or rates(inner) == expected
    scheduler.step()  # as the loop does after the step in which the run has gone on
    schedules.set_step(last + 40)
    assert rates(inner) == expected
    said = capsys.readouterr().err
    assert said.count("atoll: ") == 1
    assert f"learning rates stay those of step {last}" in said


def test_one_that_is_followed_after_its_end_is_at_its_end() -> None:
    inner, schedules = optimizer(), Schedules()
    schedules.add(one_cycle(inner), 5)
    expected = rates(inner)
    inner, schedules = optimizer(), Schedules()
    schedules.add(one_cycle(inner), 50)
    assert rates(inner) == expected
