"""DeMo in a swarm: the same bits on all peers, the arithmetic of the paper, and its bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.decoupled_momentum import WORKERS, backward, flat, model, train
from harness.losing import Losing
from torch import nn

from atoll.collectives.errors import (
    ConfigError,
    RemoteProtocolError,
)
from atoll.optim import DeMo, Swarm
from atoll.optim.every_step.grad_scaling import Scale
from atoll.optim.swarm import SwarmSession

# ---------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("values", ["float32", "bfloat16", "sign"])
@pytest.mark.parametrize("topk", [1, 32])
def test_all_peers_have_the_same_bits_and_so_has_the_next_run(values, topk):
    first = Swarm(WORKERS).run(lambda s: train(s, values=values, topk=topk, weight_decay=0.1))
    again = Swarm(WORKERS).run(lambda s: train(s, values=values, topk=topk, weight_decay=0.1))
    assert all(torch.equal(first[0], other) for other in [*first, *again])


def test_8_everything_sent_and_nothing_kept_is_sign_descent():
    """On the mean gradient of all peers; the first step is the first peer's alone."""
    lr, weight_decay, steps = 0.01, 0.1, 5

    def demo(session: SwarmSession) -> torch.Tensor:
        return train(
            session,
            steps,
            lr=lr,
            weight_decay=weight_decay,
            decay=0.0,
            topk=4096,
            values="float32",
        )

    found = Swarm(WORKERS).run(demo)
    net = model(0)
    for step in range(steps):
        net.zero_grad()
        for worker in range(WORKERS if step else 1):
            backward(net, worker, step)
        for p in net.parameters():
            p.data = p.data * (1 - lr * weight_decay) - lr * p.grad.sign()
    assert torch.equal(found[0], flat(net))


def test_one_peer_step_by_step():
    """δ and θ of a vector of one tile, with a cosine transform written down as it is defined."""
    n, lr, decay, topk = 8, 0.1, 0.5, 2
    matrix = torch.tensor(
        [
            [
                math.sqrt((2 if k else 1) / n) * math.cos(math.pi * (2 * i + 1) * k / (2 * n))
                for i in range(n)
            ]
            for k in range(n)
        ]
    )
    gradients = torch.randn(4, n)
    parameter = nn.Parameter(torch.zeros(n))
    momentum, theta = torch.zeros(n), torch.zeros(n)

    def each(session: SwarmSession) -> None:
        nonlocal momentum, theta
        net = nn.ParameterList([parameter])
        optimizer = DeMo(net, session, lr=lr, decay=decay, topk=topk, values="float32")
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
            momentum = decay * momentum + lr * gradient
            coefficients = matrix @ momentum
            kept = torch.zeros(n)
            largest = coefficients.abs().topk(topk).indices
            kept[largest] = coefficients[largest]
            momentum = momentum - matrix.T @ kept
            theta = theta - lr * (matrix.T @ kept).sign()
            torch.testing.assert_close(optimizer.state[parameter]["momentum"], momentum)
            torch.testing.assert_close(parameter.detach(), theta)

    Swarm(1).run(each)


def test_a_coefficient_is_the_mean_over_those_who_sent_it():
    """Two peers send the constant of a tile, one something else: 3 is the mean of 2 and 4."""
    n = 16
    wave = torch.cos(math.pi * (2 * torch.arange(n) + 1) * 3 / (2 * n))
    sent = [torch.full((n,), 2.0), torch.full((n,), 4.0), wave * 2.9]

    def each(session: SwarmSession) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(n))
        optimizer = DeMo(
            nn.ParameterList([parameter]), session, lr=1.0, decay=0.0, topk=1, values="float32"
        )
        optimizer.step()  # all zeros: nothing is sent
        assert not parameter.detach().any()
        parameter.grad = sent[session.number]
        optimizer.step()
        return parameter.detach()

    found = Swarm(WORKERS).run(each)
    # 3 + 2.9 cos is positive everywhere; with the mean over all peers it would be 2 + 0.97 cos, and
    # with a sum over them 6 + 2.9 cos: so a second peer tells them apart.
    assert torch.equal(found[0], -torch.ones(n))

    sent[0], sent[1], sent[2] = torch.full((n,), 2.0), torch.full((n,), 2.0), wave * 3.0
    found = Swarm(WORKERS).run(each)
    assert torch.equal(found[0], -(2 + wave * 3.0).sign())
    assert (found[0] > 0).any()


def test_what_cancels_has_no_sign():
    def each(session: SwarmSession) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(6, 5))
        optimizer = DeMo(nn.ParameterList([parameter]), session, lr=1.0, values="sign", topk=1)
        optimizer.step()
        parameter.grad = torch.full((6, 5), 1.0 - 2 * session.number)
        optimizer.step()
        return parameter.detach()

    assert not any(found.any() for found in Swarm(2).run(each))


@pytest.mark.parametrize("values", ["bfloat16", "sign"])
def test_it_learns(values):
    losses: dict[int, list[float]] = {0: [], 1: []}

    def each(session: SwarmSession) -> None:
        net = model()
        optimizer = DeMo(net, session, lr=3e-3, decay=0.9, topk=8, values=values)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
        for step in range(120):
            optimizer.zero_grad()
            losses[session.number].append(backward(net, session.number, step))
            optimizer.step()
            schedule.step()

    Swarm(2).run(each)
    for series in losses.values():
        assert sum(series[-5:]) < 0.2 * sum(series[:5])


# ---------------------------------------------------------------- peers come and go


def test_a_joiner_ends_with_the_same_parameters_and_begins_without_momentum():
    def each(session: SwarmSession) -> torch.Tensor:
        net = model(session.number)
        optimizer = DeMo(net, session, lr=1e-3, decay=0.9, topk=2)
        while optimizer.steps < 9:
            if session.number == 1 and optimizer.steps == 5:
                net = model(77)
                optimizer = DeMo(net, session, lr=1e-3, decay=0.9, topk=2)
            optimizer.zero_grad()
            backward(net, session.number, optimizer.steps)
            optimizer.step()
            if session.number == 1 and optimizer.steps == 6:
                assert not any(kept["momentum"].any() for kept in optimizer.state.values())
        assert all(kept["momentum"].any() for kept in optimizer.state.values())
        return flat(net)

    found = Swarm(WORKERS).run(each)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_who_misses_steps_comes_back():
    def each(session: SwarmSession) -> torch.Tensor:
        lossy: Any = Losing(session, {5, 11} if session.number == 2 else ())
        return train(lossy)

    found = Swarm(WORKERS).run(each)
    assert all(torch.equal(found[0], other) for other in found[1:])


# ---------------------------------------------------------------- bytes


def test_14_bytes_of_a_step():
    """28 bits for each of 32 of 4096 parameters, to each of the others."""
    swarm, sent = Swarm(2), []

    def each(session: SwarmSession) -> int:
        net = nn.Linear(512, 512, bias=False)
        optimizer = DeMo(net, session, decay=0.0)
        optimizer.step()  # the first one hands over the state, and has nothing to send
        for gradient in (torch.randn_like(net.weight), None):
            net.weight.grad = gradient
            before = swarm.encoded_bytes
            optimizer.step()
            sent.append(swarm.encoded_bytes - before)
        return optimizer.message_bytes

    found = swarm.run(each)
    expected = 28 * 32 / 4096 / 8 * 512 * 512
    assert found == [pytest.approx(expected, rel=0.02)] * 2
    assert sent[0] == pytest.approx(2 * expected, rel=0.02)
    assert sent[-1] == 2 * (16 + 8 + 6)  # of zeros: rates, a bit for each tile, and a head


def test_more_than_a_step_takes_is_refused_at_once():
    options = {"topk": 4096, "values": "float32"}
    with pytest.raises(ConfigError, match="16,777,216 fit"):
        Swarm(1).run(lambda session: DeMo(nn.Linear(2048, 2048, bias=False), session, **options))


def test_what_is_longer_than_an_object_of_a_gather_takes_several():
    """One of two steps, in the second of which both count."""
    swarm = Swarm(2)

    def each(session: SwarmSession) -> tuple[torch.Tensor, int, int]:
        net = nn.Linear(1600, 1600, bias=False)
        with torch.no_grad():
            net.weight.fill_(0.0)
        with DeMo(net, session, lr=0.5, decay=0.0) as optimizer:
            optimizer.step()
            random = torch.Generator().manual_seed(session.number)
            net.weight.grad = torch.randn(net.weight.shape, generator=random)
            before = session.operations
            optimizer.step()
            return flat(net), optimizer.message_bytes, session.operations - before

    (first, length, calls), second = swarm.run(each)
    assert torch.equal(first, second[0])
    assert 0.9 < float(first.abs().mean()) / 0.5 < 1.0001  # wherever a sign is not 0
    assert length > 64 * 1024
    assert calls == -(-length // (64 * 1024 - 6)) == 2


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:-1], "too few"),
        (lambda data: data + b"x", "1 bytes too many"),
        (lambda data: data[:3], "too few"),
        (lambda data: b"\xff" * 8 + data[8:], "learning rate"),
        (lambda data: data[:-2] + b"\xc0\x7f", "NaN or infinity"),
    ],
)
def test_malformed_bytes_are_refused_and_named(spoil, why):
    class Spoiling(DeMo):
        def _message(self, scale: Scale) -> bytes:
            data = super()._message(scale)
            return spoil(data) if self.peer.peer_name == "worker-1" and self.steps == 2 else data

    def each(session: SwarmSession) -> None:
        net = model()
        optimizer = Spoiling(net, session)
        for step in range(4):
            optimizer.zero_grad()
            backward(net, session.number, step)
            optimizer.step()

    with pytest.raises(RemoteProtocolError, match=why) as caught:
        Swarm(2).run(each)
    assert "what worker-1 sent at step 2 is malformed" in str(caught.value)
