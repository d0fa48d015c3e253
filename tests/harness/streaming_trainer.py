"""A trainer with torch and StreamingDiLoCo on a small model. Arguments: home, rounds.

Every setting is written out: the specification is to stay that of the checkpoint that it once made.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import atoll
from atoll.optim import StreamingDiLoCo

STEP_S = 0.02  # a step of a larger model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.a(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    home, rounds = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    session = atoll.connect(home)
    outer = StreamingDiLoCo(
        model,
        inner,
        sync_every=12,
        peer=session,
        fragments="strided",
        blocks_per_fragment=3,
        local=0.5,
        outer_lr=0.4,
        outer_momentum=0.9,
        codec="fp4_e3m0",
    )
    while session.round < rounds:
        x = torch.randn(16, 8)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        inner.step()
        inner.zero_grad()
        time.sleep(STEP_S)
    outer.close()


if __name__ == "__main__":
    main()
