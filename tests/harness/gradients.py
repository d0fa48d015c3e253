"""Small models, losses that differ from worker to worker, and compressors without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from atoll.collectives.codecs import F32
from atoll.optim import Swarm
from atoll.optim.compressors import Compressor
from atoll.optim.every_step.exchange import Exchanged, Given
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.swarm import SwarmSession

__all__ = ["SessionExchange", "averages", "flat", "loss_of", "manifest_of", "model", "state_of"]

INPUTS, HIDDEN, OUTPUTS = 12, 24, 6


def model(seed: int = 0) -> nn.Module:
    """Without the global generators: real trainers share a process."""
    random = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 4)
    return net


def loss_of(net: nn.Module, worker: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(8, INPUTS, generator=random)
    return (net(x) - x[:, :OUTPUTS].sin()).square().mean()


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in net.parameters()])


def state_of(inner: torch.optim.Optimizer) -> torch.Tensor:
    """All that it keeps, in the order of its parameters and of names."""
    params = [p for group in inner.param_groups for p in group["params"]]
    kept = [v for p in params for _, v in sorted(inner.state.get(p, {}).items())]
    flat_ones = [torch.as_tensor(v, dtype=torch.float32, device="cpu").flatten() for v in kept]
    return torch.cat([torch.empty(0), *flat_ones])


# ---------------------------------------------------------------- compressors alone


@dataclass
class SessionExchange:
    """An ``Exchange`` among the workers of a swarm, without newcomers."""

    session: SwarmSession
    counts: bool = True

    def total(self, vector: F32, codec: str = "float32") -> Exchanged:
        counted = self.session.all_reduce(np.full(1, self.counts, np.float32), "sum").value
        value = vector.copy()
        if vector.size:
            given = vector * np.float32(self.counts)
            value = self.session.all_reduce(given, "sum", codec=codec).value
        return Exchanged(value, round(float(counted[0])))

    def gather(self, data: bytes) -> list[Given]:
        found = self.session.all_gather(bytes([self.counts]) + data)
        return [Given(name, text[1:], bool(text[0])) for name, text in found]


def manifest_of(*shapes: tuple[int, ...]) -> Manifest:
    return Manifest.of(Parameter(f"{n}.weight", shape) for n, shape in enumerate(shapes))


def averages(
    make: Callable[[int], Compressor],
    manifest: Manifest,
    gradients: Callable[[int, int], F32],
    steps: Sequence[int],
    workers: int = 2,
    codec: str = "float32",
    absent: Sequence[tuple[int, int]] = (),
) -> list[list[Any]]:
    """What ``gradients(worker, step)`` come to, [worker][step]. ``absent``: (worker, step) pairs
    of workers whose gradient cannot be used."""

    def work(session: SwarmSession) -> list[Any]:
        compressor = make(session.number)
        compressor.begin(manifest, codec, session.peer_name)
        found = []
        for step in steps:
            counts = (session.number, step) not in absent
            gradient = gradients(session.number, step) * np.float32(counts)
            before = gradient.copy()
            exchange = SessionExchange(session, counts)
            found.append(compressor.average(gradient, step, exchange))
            np.testing.assert_array_equal(gradient, before)
        return found

    return Swarm(workers).run(work)
