"""A swarm: workers of one run in one process, with the arithmetic of daemons."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.collectives.errors import (
    CodecError,
    CollectiveMismatchError,
    ConfigError,
    IncompatibleRunError,
    SessionError,
)
from atoll.optim import DiLoCo, LocalSGD, StreamingDiLoCo, Swarm
from atoll.optim.experimental import CO2
from atoll.optim.swarm import SwarmSession

ROUNDS, SYNC_EVERY = 3, 4


def trainer(worker: int, **options: Any) -> Callable[[Any], torch.Tensor]:
    """A loop with random numbers in it, for any session."""

    def train(session: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        inner = torch.optim.AdamW(model.parameters(), lr=0.05)
        outer = DiLoCo(model, inner, SYNC_EVERY, session, **options)
        torch.manual_seed(100 + worker)
        for _ in range(ROUNDS * SYNC_EVERY):
            features = torch.randn(16, 6)
            outer.count(1 + worker)
            (model(features) - features.sum(1, keepdim=True)).square().mean().backward()
            inner.step()
            inner.zero_grad()
        assert outer.metrics()["rounds"] == ROUNDS
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    return train


@pytest.mark.parametrize("codec", ["float32", "int8", "int4", "int4_sr"])
def test_all_end_with_the_same_bits_and_so_does_the_next_run(codec: str) -> None:
    def train() -> list[torch.Tensor]:
        swarm = Swarm(3)
        found = swarm.run(lambda session: trainer(session.number, codec=codec)(session))
        assert swarm.state.round == 1 + ROUNDS
        return found

    first, again = train(), train()
    assert all(torch.equal(first[0], other) for other in [*first, *again])


@pytest.mark.parametrize(("probation", "expected"), [(0, {1 / 3, 2 / 3}), (3, {0.5})])
def test_with_probation_workers_weigh_alike_whatever_they_count(
    probation: int, expected: set[float]
) -> None:
    shares: set[float] = set()

    def train(session: SwarmSession) -> None:
        waited = session.wait

        def wait(fragment: int = 0) -> Any:
            outcome = waited(fragment)
            shares.add(outcome.share)
            return outcome

        session.wait = wait  # type: ignore[method-assign]
        trainer(session.number, probation=probation)(session)

    Swarm(2).run(train)
    assert shares == expected


@pytest.mark.parametrize("method", [DiLoCo, StreamingDiLoCo, LocalSGD, CO2])
def test_methods_with_rounds_of_all_peers_take_probation(method: Any) -> None:
    def probation(session: SwarmSession) -> Any:
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return method(model, inner, 2, session, probation=5).spec.probation

    assert Swarm(1).run(probation) == [5]


def test_rounds_are_the_plain_arithmetic(local_run: Any) -> None:
    """Without random numbers the loops may run side by side: sessions of both kinds agree."""

    def train(number: int, session: Any) -> torch.Tensor:
        values = torch.linspace(-1, 1, 5000)
        parameter = nn.Parameter(values.clone())
        model = nn.ParameterList([parameter])
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = DiLoCo(model, inner, 2, session, codec="float32")
        for step in range(8):
            outer.count(number + 1)
            parameter.grad = (number + 1) * torch.cos(parameter.detach() * (step + 1))
            inner.step()
        return parameter.detach().clone()

    swarm = Swarm(3)
    found = swarm.run(lambda session: train(session.number, session))
    run = local_run(3)
    with ThreadPoolExecutor(3) as pool:
        others = list(pool.map(train, range(3), run.sessions))
    for mine, other in zip(found, others, strict=True):
        assert torch.equal(mine, other)
    assert swarm.state.theta.tobytes() == run.theta.tobytes()
    assert swarm.state.momentum.tobytes() == run.momentum.tobytes()


def test_one_worker_with_a_mean_is_plain_training() -> None:
    """Acceptance test 1: outer SGD of rate 1 without momentum takes the worker's parameters."""
    options = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "float32"}
    (found,) = Swarm(1).run(trainer(0, **options))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(100)
    for _ in range(ROUNDS * SYNC_EVERY):
        features = torch.randn(16, 6)
        (model(features) - features.sum(1, keepdim=True)).square().mean().backward()
        inner.step()
        inner.zero_grad()
    alone = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


def test_bytes_are_those_of_a_butterfly() -> None:
    swarm = Swarm(4)
    swarm.run(lambda s: trainer(s.number, codec="float32")(s))
    elements = swarm.state.theta.size
    assert swarm.encoded_bytes == ROUNDS * 2 * 3 * 4 * elements


def test_who_ends_early_is_not_in_later_rounds() -> None:
    counted: list[int] = []

    def train(session: SwarmSession) -> None:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DiLoCo(model, inner, 1, session, codec="float32")
        for _ in range(2 + session.number):
            model(torch.ones(1, 2)).sum().backward()
            inner.step()
            counted.append(session.number)

    swarm = Swarm(2)
    swarm.run(train)
    assert swarm.state.round == 1 + 3
    assert counted == [0, 1, 0, 1, 1]


def test_wrong_use_is_an_error() -> None:
    with pytest.raises(ConfigError, match="swarm of 0 workers"):
        Swarm(0)
    swarm = Swarm(2)
    with pytest.raises(SessionError, match="no worker has attached"):
        _ = swarm.state

    def differs(session: SwarmSession) -> None:
        model = nn.Linear(2, 1 + session.number)
        DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, session)

    with pytest.raises(IncompatibleRunError, match="weight"):
        swarm.run(differs)

    def diverges(session: SwarmSession) -> None:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DiLoCo(model, inner, 1, session)
        for p in model.parameters():
            p.grad = torch.full_like(p, np.inf if session.number else 1.0)
        inner.step()

    with pytest.raises(CodecError, match="NaN or Inf"):
        Swarm(2).run(diverges)
    with pytest.raises(SessionError, match="before attach"):
        Swarm(1).run(lambda session: session.submit(lambda out, lo: None, 1.0))


# ---------------------------------------------------------------- collectives of one's own


@pytest.mark.parametrize(
    ("op", "expected"), [("mean", 1.0), ("sum", 3.0), ("max", 2.0), ("min", 0.0)]
)
def test_all_reduce_of_arrays_and_tensors(op: str, expected: float) -> None:
    def each(session: SwarmSession) -> None:
        array = session.all_reduce(np.full((2, 3), session.number, np.float16), op)
        assert array.value.dtype == np.float16
        assert array.value.shape == (2, 3)
        assert (array.value == expected).all()
        tensor = session.all_reduce(torch.full((5000,), float(session.number)), op, codec="int8")
        torch.testing.assert_close(tensor.value, torch.full((5000,), expected), rtol=1e-2, atol=0)
        assert tensor.peers == ("worker-0", "worker-1", "worker-2")
        assert tensor.round == array.round + 1

    Swarm(3).run(each)


def test_objects_that_are_too_much_together_are_refused_as_by_daemons() -> None:
    fits = [2**16 - 4] * 8
    for more in (0, 1):
        swarm = Swarm(8)

        def gather(session: SwarmSession, more: int = more) -> int:
            extra = more if session.number == 7 else 0
            return len(session.all_gather(bytes(fits[session.number] + extra)))

        if more:
            with pytest.raises(ConfigError, match="the objects of 8 trainers have 524,289 bytes"):
                swarm.run(gather)
        else:
            assert swarm.run(gather) == [8] * 8


def test_all_gather_and_barrier() -> None:
    swarm = Swarm(3)
    gathered = swarm.run(lambda session: session.all_gather(b"x" * session.number))
    assert gathered == [[("worker-0", b""), ("worker-1", b"x"), ("worker-2", b"xx")]] * 3
    assert swarm.encoded_bytes == 2 * 3
    assert Swarm(2).run(lambda session: session.barrier()) == [("worker-0", "worker-1")] * 2


def test_different_calls_are_an_error() -> None:
    calls = [
        lambda session: session.barrier(),
        lambda session: session.all_gather(b""),
        lambda session: session.all_reduce(np.ones(3, np.float32)),
        lambda session: session.all_reduce(np.ones(4, np.float32)),
        lambda session: session.all_reduce(np.ones(4, np.float32), "sum"),
    ]
    for number, call in enumerate(calls[:-1]):
        with pytest.raises(CollectiveMismatchError, match="and"):
            Swarm(2).run(
                lambda session, both=(call, calls[number + 1]): both[session.number](session)
            )
