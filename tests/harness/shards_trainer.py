"""A trainer that prints which samples it has used: arguments are home, samples and seconds a step.

A line for each step, {"step": indices}, and {"committed": number of steps} once they are in a
round. Ends when the data end.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

import atoll
from atoll.data import Shards

BATCH, SYNC_EVERY = 8, 5


class Printing:
    """Says what became of each round, before the samples are dealt anew."""

    def __init__(self) -> None:
        self.steps = 0

    def submitted(self) -> None:
        self.steps_in_round = self.steps

    def round_over(self, kind: str, *, counted: bool, leaves: bool) -> None:
        line = {kind: self.steps_in_round, "counted": counted, "leaves": leaves}
        print(json.dumps(line), flush=True)

    def dropped(self) -> None:
        """Say nothing: here no round is given up."""


def main() -> None:
    home, samples, step_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    net = nn.Linear(4, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    outer = atoll.DiLoCo(net, inner, SYNC_EVERY, atoll.connect(home))
    printing = Printing()
    outer.watch_rounds(printing)
    shards = Shards(samples, outer, epochs=1)
    with outer:
        for batch in shards.loader(range(samples), BATCH):  # type: ignore[arg-type]
            printing.steps += 1
            print(json.dumps({"step": batch.tolist()}), flush=True)
            time.sleep(step_s)
            net(torch.ones(1, 4)).sum().backward()
            inner.step()
            inner.zero_grad()
        print(json.dumps({"deals": shards.deals, "over": shards.is_over}), flush=True)


if __name__ == "__main__":
    main()
