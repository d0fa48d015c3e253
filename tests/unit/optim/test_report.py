"""What all methods say of their rounds and let trainers say of themselves, and what they take to
train together.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import atoll.optim
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim import DiLoCo, GradientAverage, LocalSGD, NoLoCo, Population, Swarm
from atoll.optim.experimental import CO2
from atoll.optim.run_spec import RunSpec
from atoll.optim.swarm import SwarmSession

METHODS = (
    "AsyncDiLoCo",
    "DeMo",
    "DiLoCo",
    "GradientAverage",
    "LocalSGD",
    "NoLoCo",
    "Population",
    "SparseLoCo",
    "StreamingDiLoCo",
    "ZerothOrder",
)


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, inner: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.ones(2, 8)).square().mean()
    inner.zero_grad()
    loss.backward()
    inner.step()
    return loss


@pytest.mark.parametrize("method", [CO2, *(getattr(atoll.optim, name) for name in METHODS)])
def test_every_method_takes_min_trainers(method: Any) -> None:
    parameters = inspect.signature(method.__init__).parameters
    assert parameters["min_trainers"].default == 1
    assert parameters["min_trainers"].kind is inspect.Parameter.KEYWORD_ONLY


def make(name: str, model: Any, inner: Any, peer: SwarmSession) -> Any:
    if name == "population":
        return Population(model, inner, peer, lambda: 1.0, 1, {"lr": (1e-3, 1.0)})
    if name == "every step":
        return GradientAverage(model, inner, peer)
    if name == "noloco":
        return NoLoCo(model, inner, 1, peer)
    return DiLoCo(model, inner, 1, peer)


@pytest.mark.parametrize("name", ["diloco", "every step", "population", "noloco"])
@pytest.mark.parametrize("workers", [1, 2])
def test_metrics_say_who_was_there(name: str, workers: int) -> None:
    def train(peer: SwarmSession) -> dict[str, float]:
        model, inner = parts()
        with make(name, model, inner, peer) as outer:
            before = outer.metrics()
            assert (before["peers"], before["rounds_alone"]) == (0, 0)
            for _ in range(3):
                step(model, inner)
            return dict(outer.metrics())

    for found in Swarm(workers).run(train):
        assert found["peers"] == workers
        assert found["rounds_alone"] == (3 if workers == 1 else 0)


def test_a_saved_state_is_that_of_the_version_before() -> None:
    """What counts for one life of a trainer is not in it."""

    def train(peer: SwarmSession) -> set[str]:
        model, inner = parts()
        with LocalSGD(model, inner, 2, peer) as outer:
            step(model, inner)
            return set(outer.state_dict())

    (names,) = Swarm(1).run(train)
    assert not names & {"peers", "rounds_alone"}


def test_a_swarm_of_too_few_is_an_error() -> None:
    def train(peer: SwarmSession) -> None:
        model, inner = parts()
        DiLoCo(model, inner, 1, peer, min_trainers=3)

    with pytest.raises(ConfigError, match="min_trainers is 3, and the swarm has 2"):
        Swarm(2).run(train)


def test_what_a_closure_returns_is_reported() -> None:
    """The first value of a step, which step() returns: LBFGS asks several times."""

    def train(peer: SwarmSession) -> tuple[float, float]:
        model, _ = parts()
        inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        calls = []
        with DiLoCo(model, inner, 1, peer) as outer:

            def closure() -> torch.Tensor:
                inner.zero_grad()
                loss = model(torch.ones(2, 8)).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                calls.append(loss.item())
                return loss

            returned = inner.step(closure).item()  # type: ignore[arg-type, attr-defined]
            assert len(calls) > 1
            first = peer.reported["loss"]
            step(model, torch.optim.SGD(model.parameters(), lr=0.1))  # nobody's closure
            inner.step(closure=closure)
            assert peer.reported["loss"] != first
            outer.report(loss=torch.tensor(5.0), accuracy=0.5)
            assert peer.reported == {"loss": 5.0, "accuracy": 0.5, "steps": 2.0}
            return first, returned

    ((first, returned),) = Swarm(1).run(train)
    assert first == returned


def test_min_trainers_is_part_of_what_all_agree_on() -> None:
    here = RunSpec(sync_every=1, min_trainers=2)
    assert here.differences(RunSpec(sync_every=1)) == ["min_trainers: yours 2, run 1"]
    before = {name: v for name, v in here.to_wire().items() if name != "min_trainers"}
    assert RunSpec.from_wire(before).min_trainers == 1  # of a run that was founded earlier
    for count in (0, -1, 1025):
        with pytest.raises(ConfigError, match="min_trainers"):
            RunSpec(sync_every=1, min_trainers=count)
    with pytest.raises(RemoteProtocolError):
        RunSpec.from_wire({"sync_every": 1, "min_trainers": 2.0})
    with pytest.raises(ConfigError, match="min_trainers must be 1 to 64"):
        RunSpec(sync_every=1, min_trainers=65, audit=True)
