"""Show that what inner optimizers hold beside the model is said, and steps that nobody sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.optim import DiLoCo, GradientAverage, Swarm
from atoll.optim.swarm import SwarmSession

STRANGE = "outside of the model"
UNSEEN = "its step() was never seen"


def alone(work: Callable[[SwarmSession], None]) -> None:
    Swarm(1).run(work)


def step(model: nn.Module, inner: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    inner.step()
    inner.zero_grad()


@pytest.mark.parametrize("make", [lambda *a: DiLoCo(*a[:2], 2, a[2]), GradientAverage])
def test_parameters_outside_of_the_model_are_said_once(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(session: SwarmSession) -> None:
        model, criterion = nn.Linear(3, 1), nn.Linear(1, 1)
        inner = torch.optim.AdamW([*model.parameters(), *criterion.parameters()])
        make(model, inner, session)
        for _ in range(5):
            step(model, inner)

    alone(work)
    said = capsys.readouterr().err
    assert said.count(STRANGE) == 1
    assert "the inner AdamW also trains 2 parameters outside of the model (of 4)" in said


def test_a_group_that_is_added_later_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    def work(session: SwarmSession) -> None:
        model = nn.Linear(3, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DiLoCo(model, inner, 2, session)
        step(model, inner)
        assert STRANGE not in capsys.readouterr().err
        inner.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        step(model, inner)
        assert "the inner SGD also trains 1 parameter outside" in capsys.readouterr().err
        step(model, inner)
        assert STRANGE not in capsys.readouterr().err

    alone(work)


def test_frozen_parameters_and_those_of_several_optimizers_are_no_strangers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(session: SwarmSession) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        model[0].bias.requires_grad = False
        inners = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        DiLoCo(model, inners, 2, session)
        for inner in inners:
            step(model, inner)

    alone(work)
    assert STRANGE not in capsys.readouterr().err


class Sharpness(torch.optim.Optimizer):
    """Use it as SAM is used where gradients are accumulated: its own step() is never called."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.detach().clone()

    def second_step(self) -> None:
        self.base.step()


@pytest.mark.parametrize("call", ["save", "finish", "close"])
def test_an_optimizer_that_works_without_its_step_is_said(
    call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(session: SwarmSession) -> None:
        model = nn.Linear(3, 1)
        inner = Sharpness(model.parameters())
        outer = DiLoCo(model, inner, 2, session)
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            inner.first_step()
            inner.second_step()
        assert UNSEEN not in capsys.readouterr().err
        getattr(outer, call)(*[tmp_path] * (call == "save"))
        assert f"the inner Sharpness has changed its state, but {UNSEEN}" in capsys.readouterr().err
        outer.close()
        assert UNSEEN not in capsys.readouterr().err

    alone(work)


def test_who_takes_steps_or_none_at_all_hears_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(session: SwarmSession) -> None:
        for steps in (0, 3, 0):  # the last one has a state that was loaded
            model = nn.Linear(3, 1)
            inner = torch.optim.AdamW(model.parameters())
            outer = DiLoCo(model, inner, 2, session)
            if steps == 0:
                outer.load(tmp_path)
            for _ in range(steps):
                step(model, inner)
            outer.save(tmp_path)
            outer.finish()
            outer.close()

    alone(work)
    assert UNSEEN not in capsys.readouterr().err
