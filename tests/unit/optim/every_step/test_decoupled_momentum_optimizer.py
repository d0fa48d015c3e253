"""DeMo as an optimizer: groups, schedulers, state, and what it refuses."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.decoupled_momentum import backward, batch, flat, model
from torch import nn

from atoll.collectives.errors import (
    CodecError,
    ConfigError,
    IncompatibleRunError,
)
from atoll.optim import DeMo, Swarm
from atoll.optim.swarm import SwarmSession

# ---------------------------------------------------------------- as an optimizer


def test_groups_schedulers_and_closures():
    def each(session: SwarmSession) -> torch.Tensor:
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        groups = [
            {"params": net[0].parameters(), "lr": 0.5},
            {"params": net[1].parameters(), "weight_decay": 0.5},
        ]
        optimizer = DeMo(net, session, groups, lr=0.25, decay=0.0, values="float32", topk=99)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(1.0)

        def closure() -> float:
            optimizer.zero_grad()
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            return 7.0

        assert optimizer.step(closure) == 7.0
        schedule.step()
        assert optimizer.step(closure) == 7.0
        assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.125]
        assert torch.equal(net[0].weight, torch.full((4, 3), 1.0 - 0.5 - 0.25))
        second = (1 - 0.25 * 0.5 - 0.25) * (1 - 0.125 * 0.5) - 0.125
        torch.testing.assert_close(net[1].bias.detach(), torch.full((2,), second))
        return flat(net)

    first, second = Swarm(2).run(each)
    assert torch.equal(first, second)


def test_rates_are_those_of_the_first_peer_and_others_hear_of_it(capsys):
    def each(session: SwarmSession) -> torch.Tensor:
        net = nn.Linear(4, 1)
        optimizer = DeMo(net, session, lr=0.1 * (1 + session.number))
        for _ in range(3):
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return flat(net)

    first, second = Swarm(2).run(each)
    assert torch.equal(first, second)
    said = capsys.readouterr().err
    assert said.count("at step 0 of the run the learning rates") == 1
    assert "[(0.2, 0.0)]; those of worker-0, [(0.1, 0.0)], are used" in said


def test_a_parameter_of_bfloat16_steps_in_float32():
    def each(session: SwarmSession) -> torch.Tensor:
        parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        optimizer = DeMo(nn.ParameterList([parameter]), session, lr=0.1, weight_decay=0.5)
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert optimizer.state[parameter]["momentum"].dtype == torch.float32
        expected = torch.ones(8)
        for _ in range(2):
            expected = (expected * 0.95 - 0.1).bfloat16().float()
        assert torch.equal(parameter.detach().float(), expected)
        return parameter.detach()

    assert len(Swarm(2).run(each)) == 2


def test_state_is_saved_and_loaded():
    """A run of one that is stopped in the middle goes on as one that is not."""

    def steps(
        session: SwarmSession, begin: Callable[[nn.Module, DeMo], None], first: int, last: int
    ) -> dict[str, Any]:
        net = model()
        optimizer = DeMo(net, session, lr=1e-3, decay=0.9)
        begin(net, optimizer)
        for step in range(first, last):
            optimizer.zero_grad()
            backward(net, 0, step)
            optimizer.step()
        return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}

    def nothing(net: nn.Module, optimizer: DeMo) -> None:
        assert optimizer.steps == 0

    (whole,) = Swarm(1).run(lambda session: steps(session, nothing, 0, 8))
    (half,) = Swarm(1).run(lambda session: steps(session, nothing, 0, 4))
    file = io.BytesIO()
    torch.save(half, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    def load(net: nn.Module, optimizer: DeMo) -> None:
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert optimizer.steps == 4
        with pytest.raises(ConfigError, match="not a state of DeMo"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})

    (rest,) = Swarm(1).run(lambda session: steps(session, load, 4, 8))
    assert rest["optimizer"]["steps"] == 8
    for name, values in whole["model"].items():
        assert torch.equal(rest["model"][name], values)
    for key, kept in whole["optimizer"]["state"].items():
        assert torch.equal(rest["optimizer"]["state"][key]["momentum"], kept["momentum"])


def test_gradients_that_are_not_finite_are_not_sent():
    def each(session: SwarmSession) -> None:
        net = nn.Linear(3, 2)
        optimizer = DeMo(net, session)
        backwards = net(torch.ones(1, 3)).sum()
        backwards.backward()
        net.bias.grad[1] = math.inf
        with pytest.raises(CodecError, match=r"gradients of bias \(1 parameters\) at step 0"):
            optimizer.step()
        assert not any(kept["momentum"].any() for kept in optimizer.state.values())

    Swarm(1).run(each)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lr": -1.0}, "lr -1.0"),
        ({"lr": math.nan}, "lr nan"),
        ({"weight_decay": -0.1}, "weight_decay -0.1"),
        ({"decay": 1.0}, "decay 1.0"),
        ({"values": "int8"}, "values is 'int8'"),
        ({"topk": 0}, "topk is 0"),
        ({"tile": 65}, "tile is 65"),
        ({"params": []}, "empty"),
    ],
)
def test_impossible_numbers_are_refused(options, why):
    with pytest.raises((ConfigError, ValueError), match=why):
        Swarm(1).run(lambda session: DeMo(nn.Linear(2, 1), session, **options))


def test_all_parameters_must_be_given():
    def each(session: SwarmSession) -> None:
        net = nn.Linear(2, 1)
        with pytest.raises(ConfigError, match="lack bias"):
            DeMo(net, session, [net.weight])
        with pytest.raises(ConfigError, match="not the model's"):
            DeMo(net, session, [*net.parameters(), nn.Parameter(torch.ones(1))])

    Swarm(1).run(each)


def test_other_numbers_are_refused():
    with pytest.raises(IncompatibleRunError, match="schedule: yours tile 64, topk 33"):
        Swarm(2).run(lambda session: DeMo(nn.Linear(2, 1), session, topk=32 + session.number))


# ---------------------------------------------------------------- with a GradScaler

SCALED_STEPS = 6


def scaled(
    session: SwarmSession,
    overflows: Callable[[int, int], bool] = lambda worker, step: False,
    *,
    scaler: torch.amp.GradScaler | None = None,
    unscale: bool = False,
) -> tuple[torch.Tensor, int, float, list[torch.Tensor]]:
    """Parameters, steps that counted, the scale at the end, and this peer's momentum."""
    net = model(0)
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    with DeMo(net, session, lr=1e-3, decay=0.9, weight_decay=0.1, topk=8) as optimizer:
        for step in range(SCALED_STEPS):
            optimizer.zero_grad()
            x = batch(session.number, step)
            scaler.scale((net(x) - x[:, :3].sin()).square().mean()).backward()
            if overflows(session.number, step):
                net[0].weight.grad[0, 0] = math.inf
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6)
            before = [optimizer.state[p]["momentum"].clone() for p in net.parameters()]
            scaler.step(optimizer)
            scaler.update()
            if overflows(session.number, step) and step:
                after = [optimizer.state[p]["momentum"] for p in net.parameters()]
                assert all(map(torch.equal, before, after))
        momentum = [optimizer.state[p]["momentum"].clone() for p in net.parameters()]
        return flat(net), optimizer.steps, scaler.get_scale(), momentum


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_changes_nothing(unscale: bool) -> None:
    """A scale is a power of two."""
    without = torch.amp.GradScaler("cpu", enabled=False)
    plain = Swarm(3).run(lambda session: scaled(session, scaler=without))
    found = Swarm(3).run(lambda session: scaled(session, unscale=unscale))
    for mine, other in zip(found, plain, strict=True):
        assert torch.equal(mine[0], other[0])
        assert all(map(torch.equal, mine[3], other[3]))
        assert mine[1:3] == (SCALED_STEPS, 2.0**10)


@pytest.mark.parametrize("unscale", [False, True])
def test_who_overflows_takes_the_step_of_the_others(unscale: bool) -> None:
    """Nobody waits for it; only its own scale is halved."""

    def overflows(worker: int, step: int) -> bool:
        return (worker, step) in {(1, 3), (0, 4)}

    found = Swarm(3).run(lambda session: scaled(session, overflows, unscale=unscale))
    assert all(torch.equal(found[0][0], other[0]) for other in found)
    assert [one[1:3] for one in found] == [
        (SCALED_STEPS, 2.0**9),
        (SCALED_STEPS, 2.0**9),
        (SCALED_STEPS, 2.0**10),
    ]
    plain = Swarm(3).run(scaled)
    assert not torch.equal(plain[0][0], found[0][0])  # something was left out


def test_a_step_that_all_skip_does_not_count() -> None:
    found = Swarm(2).run(lambda session: scaled(session, lambda worker, step: step == 2))
    assert torch.equal(found[0][0], found[1][0])
    assert [one[1:3] for one in found] == [(SCALED_STEPS - 1, 2.0**9)] * 2
