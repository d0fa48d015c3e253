"""Bytes of all trainers at every step: who counts, and what is for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.adding import Adding, names
from harness.losing import Losing
from harness.troubled_swarm import TroubledSwarm
from torch import nn

from atoll.collectives.errors import (
    ConfigError,
    IncompatibleRunError,
    StateError,
)
from atoll.optim import GradientAverage, Swarm
from atoll.optim.every_step.exchange import PART_BYTES_MAX
from atoll.optim.swarm import SwarmSession

STEPS, WORKERS = 6, 3


def test_all_take_the_first_ones_state_and_its_part_counts_alone():
    def train(session: SwarmSession) -> tuple[list[list[str]], float, int]:
        method = Adding(session)
        counted = [method.step() for _ in range(3)]
        assert method.present == tuple(names(0, 1, 2))
        return counted, float(method.weight.detach()[0]), method.forgotten

    found = Swarm(WORKERS).run(train)
    counted = [names(0), names(0, 1, 2), names(0, 1, 2)]
    assert [each[0] for each in found] == [counted] * WORKERS
    assert {each[1] for each in found} == {1.0 + 3 * 2 + 3 * 3}
    assert [each[2] for each in found] == [0, 1, 1]


def test_a_joiner_takes_over_parameters_and_steps():
    """Worker 1 begins anew in the middle, as another trainer would."""

    def train(session: SwarmSession) -> tuple[float, list[str]]:
        method = Adding(session)
        for step in range(STEPS):
            if session.number == 1 and step == 3:
                method = Adding(session)
            counted = method.step()
            if step == 3:
                assert counted == names(0, 2)
        assert method.steps == STEPS
        return float(method.weight.detach()[0]), counted

    found = Swarm(WORKERS).run(train)
    assert found == [(1.0 + 3 * (2 + 3 + 5 + 6) + 2 * 4, names(0, 1, 2))] * WORKERS


@pytest.mark.parametrize("check_every", [2, 3, 100])
def test_a_joiner_compares_when_the_others_do(check_every):
    def train(session: SwarmSession) -> float:
        method = Adding(session, check_every)
        while method.steps < 9:
            if session.number == 0 and method.steps == 4:
                method = Adding(session, check_every)
            method.step()
        assert method.metrics()["missed"] == 0
        return float(method.weight.detach()[0])

    assert len(set(Swarm(WORKERS).run(train))) == 1


def test_gradients_have_joiners_that_compare_when_the_others_do():
    """The same of the sibling with vectors."""

    def train(session: SwarmSession) -> torch.Tensor:
        def begin() -> tuple[nn.Module, torch.optim.Optimizer, GradientAverage]:
            net = nn.Linear(3, 1)
            inner = torch.optim.SGD(net.parameters(), lr=0.1)
            outer = GradientAverage(net, inner, session, check_every=3)
            return net, inner, outer

        torch.manual_seed(session.number)
        net, inner, outer = begin()
        while outer.steps < 9:
            if session.number == 1 and outer.steps == 4:
                for hook in outer._hooks:
                    hook.remove()
                net, inner, outer = begin()
            inner.zero_grad()
            net(torch.ones(1, 3)).sum().backward()
            inner.step()
        return net.weight.detach().clone()

    first, second = Swarm(2).run(train)
    assert torch.equal(first, second)


def test_who_differs_takes_what_most_have():
    def train(session: SwarmSession) -> float:
        method = Adding(session, check_every=2)
        for step in range(STEPS):
            if session.number == 0 and step == 3:
                with torch.no_grad():
                    method.weight[1] += 1e-3  # a memory error
            method.step()
        assert method.forgotten == 1
        return float(method.weight.detach().sum())

    found = Swarm(WORKERS).run(train)
    assert len(set(found)) == 1


@pytest.mark.parametrize("lost", [6, 7, 10])
def test_who_misses_an_exchange_comes_back(lost):
    """The answers of steps: six at the beginning, then one for each step."""

    def train(session: SwarmSession) -> tuple[float, int]:
        lossy: Any = Losing(session, {lost} if session.number == 2 else ())
        method = Adding(lossy)
        while method.steps < STEPS:
            method.step()
        assert method.metrics()["missed"] == (session.number == 2)
        return float(method.weight.detach()[0]), method.steps

    found = Swarm(WORKERS).run(train)
    assert len(set(found)) == 1


@pytest.mark.parametrize("lost", range(1, 13))
def test_whatever_call_is_missed_all_come_together(lost):
    """Those of the beginning too, in which the others then make another call."""

    def train(session: SwarmSession) -> tuple[float, int]:
        method = Adding(session)
        while method.steps < STEPS:
            method.step()
        return float(method.weight.detach()[0]), method.steps

    found = TroubledSwarm(WORKERS, {(2, lost)}).run(train)
    assert len(set(found)) == 1


def test_an_exchange_that_never_comes_about_is_an_error():
    def train(session: SwarmSession) -> None:
        lossy: Any = Losing(session, range(1000))
        Adding(lossy).step()

    with pytest.raises(StateError, match="50 tries"):
        Swarm(2).run(train)


def test_other_models_are_refused():
    with pytest.raises(IncompatibleRunError, match="names, shapes"):
        Swarm(2).run(lambda session: Adding(session, size=3 + session.number).step())


def test_too_many_bytes_are_refused():
    def train(session: SwarmSession) -> None:
        Adding(session)._gather_step(bytes(PART_BYTES_MAX + 1))

    with pytest.raises(ConfigError, match="16,777,217 bytes from each trainer at every step"):
        Swarm(1).run(train)


def test_who_gathers_for_something_else_takes_no_step_without_the_others():
    """As if it compared after other numbers of steps."""

    def train(session: SwarmSession) -> tuple[float, list[list[str]]]:
        method = Adding(session)
        counted = []
        while method.steps < STEPS:
            if session.number == 1 and method.steps == 3:
                method._unchecked = 100
            counted.append(method.step())
        assert method.metrics()["missed"] == 0
        return float(method.weight.detach()[0]), counted

    found = Swarm(WORKERS).run(train)
    assert found == [(found[0][0], [names(0)] + [names(0, 1, 2)] * (STEPS - 1))] * WORKERS


def test_who_always_gathers_for_something_else_ends_with_the_reason():
    def train(session: SwarmSession) -> None:
        method = Adding(session)
        for _ in range(60):
            method.step()
            if session.number:
                method._gathered = lambda *_: method._gather(ord("?"), b"")  # type: ignore[method-assign]

    with pytest.raises(StateError, match="in 50 tries: trainers gather for different things"):
        Swarm(2).run(train)
