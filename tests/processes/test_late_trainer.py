"""A trainer that comes late to real daemons: its learning rate, its buffers, its rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness.callers import callers
from harness.processes import WAIT_S, fleet
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from atoll.optim import DiLoCo

H, PEAK = 4, 0.05


def schedule(inner: torch.optim.Optimizer) -> SequentialLR:
    parts = [LinearLR(inner, 0.1, 1.0, 10), CosineAnnealingLR(inner, 200)]
    return SequentialLR(inner, parts, [10])


class Loop:
    """A model with BatchNorm, without the global generators of random numbers: real trainers share
    a process here."""

    def __init__(self, session: Any, worker: int) -> None:
        self._random = torch.Generator().manual_seed(worker)
        self.norm = nn.BatchNorm1d(30)
        net = nn.Sequential(nn.Linear(40, 30), self.norm, nn.Linear(30, 10))
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=self._random) / 8)
        self._net, self._worker = net, worker
        self._inner = torch.optim.AdamW(net.parameters(), lr=PEAK)
        self.outer = DiLoCo(net, self._inner, H, session, outer_lr="by_peers")
        self.begun = self.buffers
        self._scheduler = schedule(self._inner)
        self.outer.follow(self._scheduler)
        self.rates: dict[int, float] = {}
        self.ends: dict[int, list[torch.Tensor]] = {}  # of rounds of all

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in self._net.buffers()]

    def run(self, goes_on: Callable[[int], object]) -> Loop:
        while goes_on(self.outer.global_step):
            self.rates[self.outer.global_step] = self._inner.param_groups[0]["lr"]
            features = self._worker + torch.randn(8, 40, generator=self._random)
            (self._net(features) - features[:, :10]).square().mean().backward()
            self._inner.step()
            self._inner.zero_grad()
            self._scheduler.step()
            if self.outer.global_step % H == 0:
                self.ends[self.outer.global_step] = self.buffers
        return self


def test_a_late_trainer_is_where_the_others_are(tmp_path: Path) -> None:
    stop, last = threading.Event(), 10**9

    def together(step: int) -> bool:
        return step < last

    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            first: list[Loop] = []

            def begin() -> Loop:
                loop = Loop(trainers.sessions["a"], 1)
                first.append(loop)
                return loop.run(together)

            going = trainers.start("a", begin)
            # Its daemon may be two rounds ahead: one is open, one is not applied at the other yet.
            while not first or first[0].outer.global_step < 7 * H:
                assert not stop.wait(0.05)
            late = trainers.start("b", lambda: Loop(trainers.sessions["b"], 2)).result(WAIT_S)
            joined = late.outer.global_step
            assert joined >= 5 * H
            assert joined % H == 0
            assert int(late.begun[2]) > 0  # the counter of batches, of another trainer
            last = joined + 10 * H
            other = trainers.start("b", lambda: late.run(together)).result(WAIT_S)
            one = going.result(WAIT_S)
    inner = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=PEAK)
    scheduler = schedule(inner)
    for step in range(last):
        for loop in (one, other):
            assert loop.rates.get(step, inner.param_groups[0]["lr"]) == inner.param_groups[0]["lr"]
        inner.step()
        scheduler.step()
    ends = sorted(one.ends.keys() & other.ends.keys())
    assert len(ends) >= 8
    alike = [end for end in ends if all(map(torch.equal, one.ends[end], other.ends[end]))]
    assert len(alike) >= 5  # those of a peer that are too late, on a busy machine, are left out
