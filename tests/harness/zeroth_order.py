"""Small models under ZerothOrder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from atoll.collectives.codecs import F32
from atoll.optim import ZerothOrder
from atoll.optim.every_step.log import SCALARS, to_byte
from atoll.optim.every_step.philox import Stream, sign_bits, signed

__all__ = ["OPTIONS", "WORKERS", "all_equal", "flat", "loss_of", "model", "put", "sampled", "train"]

WORKERS = 3
OPTIONS: dict[str, Any] = {"samples": 2, "epsilon": 1e-2, "seed": 5}


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def loss_of(net: nn.Module, worker: int, step: int) -> Callable[[], torch.Tensor]:
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1000 * worker + step))
    return lambda: (net(x) - x[:, :2].sin()).square().mean()


def flat(net: nn.Module) -> torch.Tensor:
    """In the order of the run: by name."""
    return torch.cat([p.detach().flatten() for _, p in sorted(net.named_parameters())])


def put(net: nn.Module, values: F32) -> None:
    """Write what ``flat`` returned."""
    at = 0
    for _, p in sorted(net.named_parameters()):
        p.data = torch.from_numpy(values[at : at + p.numel()].copy()).view(p.shape)
        at += p.numel()


def sampled(net: nn.Module, theta: F32, step: int, workers: int) -> Iterator[tuple[float, F32]]:
    """Yield of each sample of a step the difference that its byte says, and its signs.

    The first step of a run is the first worker's alone.
    """
    epsilon, samples, seed = OPTIONS["epsilon"], OPTIONS["samples"], OPTIONS["seed"]
    for worker, sample in product(range(workers if step else 1), range(samples)):
        streams = [Stream(step, sample, worker)]
        bits = sign_bits(seed, streams, 0, theta.size, torch.device("cpu"))
        z = signed(1.0, bits[0]).numpy()
        losses = []
        for side in (epsilon, -epsilon):
            put(net, theta + np.float32(side) * z)
            losses.append(float(loss_of(net, worker, step)().detach()))
        yield float(SCALARS[to_byte((losses[0] - losses[1]) / (2 * epsilon))]), z


def train(
    session: Any, steps: int = 6, seed: int = 0, **options: Any
) -> tuple[torch.Tensor, ZerothOrder]:
    net = model(seed)
    with ZerothOrder(net, session, 0.02, **{**OPTIONS, **options}) as optimizer:
        while optimizer.steps < steps:
            optimizer.step(loss_of(net, session.number, optimizer.steps))
    return flat(net), optimizer


def all_equal(found: list[tuple[torch.Tensor, ZerothOrder]]) -> bool:
    chains = {optimizer._log.chain for _, optimizer in found}
    return len(chains) == 1 and all(torch.equal(found[0][0], other) for other, _ in found[1:])
