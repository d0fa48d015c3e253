"""Two FSDP2 ranks, each with a clock of its own, as the only peer of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.optim import AsyncDiLoCo, RankSession, StreamingDiLoCo, Swarm
from atoll.optim.methods import streaming
from harness.rank_methods import Net, sharded
from harness.rank_model import BATCH, SYNC_EVERY, loss_of, model

__all__ = ["STEPS", "STEP_S", "by_speed", "ranks_by_speed", "ranks_that_wait", "that_waits"]

STEPS = 14
STEP_S = (1.0, 100.0)  # by the clock of each rank
WAITED_S = 0.05  # a part of a step that is too large by the first clock, and not by the second

Found = tuple[list[int], list[float]]


def by_speed(net: nn.Module, session: Any, rank: int | None, step_s: float) -> list[int]:
    """After which steps the rounds of five seconds ended."""
    now_s, ends = [0.0], []
    options = {"outer_delay": 2, "codec": "float32", "round_s": 5.0, "clock": lambda: now_s[0]}
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    outer = AsyncDiLoCo(net, inner, SYNC_EVERY, session, **options)
    for step in range(STEPS):
        outer.count(BATCH)
        loss_of(net, 0, step, rank).backward()
        now_s[0] += step_s
        before = outer.metrics()["rounds"]
        inner.step()
        inner.zero_grad()
        if outer.metrics()["rounds"] > before:
            ends.append(step + 1)
    return ends


def that_waits(net: nn.Module, session: Any, step_s: float) -> list[int]:
    """The delay after each step. Every round is waited for."""
    now_s, delays = [0.0], []
    streaming.time = SimpleNamespace(monotonic=lambda: now_s[0])  # type: ignore[attr-defined]
    wait = session.wait
    session.wait = lambda fragment=0: replace(wait(fragment), waited_s=WAITED_S)
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    outer = StreamingDiLoCo(net, inner, 5, session, blocks_per_fragment=1, codec="float32")
    for step in range(STEPS):
        x = torch.randn(8, 9, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        now_s[0] += step_s
        inner.step()
        inner.zero_grad()
        delays.append(outer._delay)
    return delays


def ranks_by_speed(rank: int) -> Found:
    return _ranks(rank, model, lambda net, s: by_speed(net, s, rank, STEP_S[rank]))


def ranks_that_wait(rank: int) -> Found:
    return _ranks(rank, Net, lambda net, s: that_waits(net, s, STEP_S[rank]))


def _ranks(
    rank: int, make: Callable[[], nn.Module], train: Callable[[nn.Module, Any], list[int]]
) -> Found:
    net = sharded("fsdp2", make())
    if rank == 0:  # the run of a single peer, in this process
        (found,) = Swarm(1).run(lambda session: train(net, RankSession(session)))
    else:
        found = train(net, RankSession(None))
    parameters: list[Any] = list(net.parameters())
    whole: list[Tensor] = [p.full_tensor().detach().flatten() for p in parameters]
    return found, torch.cat(whole).tolist()
