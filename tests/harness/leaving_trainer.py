"""A training script for `atoll run`, of which anybody can see which local steps have counted.

Arguments: method, local steps of a round, seconds of a step, rounds after which it is done (0:
never). Each parameter goes down by 1 in each local step, so a round moves it by the mean of what
the peers have done, each weighed by its steps. Prints a JSON line per step: how many since the last
round, the run's round, and where the parameters are. Options after that: "own" has a handler of its
own for SIGTERM, "stays" calls ``leave_on_signal(exits=False)`` and says goodbye itself, "hurries"
does so too, and waits for a round no longer than a second; "saves" loads what it has saved when it
left the last time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll
from atoll.collectives.errors import AtollError
from atoll.optim import AsyncDiLoCo, DiLoCo, NoLoCo, StreamingDiLoCo
from atoll.optim.experimental import CO2
from atoll.optim.method import Method


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 100)
        self.blocks = nn.ModuleList(nn.Linear(50, 10, bias=False) for _ in range(3))
        for p in self.parameters():
            nn.init.zeros_(p)


def method_of(name: str, model: nn.Module, inner: Any, sync_every: int, peer: Any) -> Method:
    how = {"codec": "float32"}
    if name == "diloco":
        return DiLoCo(model, inner, sync_every, peer, outer_lr=1.0, outer_momentum=0.0, **how)
    if name in ("streaming", "eager"):
        eager = name == "eager"
        return StreamingDiLoCo(model, inner, sync_every, peer, eager=eager, delay=1, **how)
    if name == "co2":
        return CO2(model, inner, sync_every, peer, **how)
    if name == "async":
        return AsyncDiLoCo(model, inner, sync_every, peer, outer_delay=2, **how)
    return NoLoCo(model, inner, sync_every, peer, **how)


def say(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def main() -> int:
    name, sync_every, step_s, rounds = sys.argv[1], *map(float, sys.argv[2:5])
    options = sys.argv[5:]
    torch.set_num_threads(1)
    if "own" in options:
        signal.signal(signal.SIGTERM, lambda *_: (say(own=True), sys.exit(7)))
    peer = atoll.attach()
    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = method_of(name, model, inner, int(sync_every), peer)
    if "stays" in options:
        outer.leave_on_signal(exits=False)
    saved = Path(os.environ["ATOLL_HOME"]) / "saved"
    if "saves" in options:
        outer.leave_on_signal(exits=False)
        outer.load(saved)
    if "hurries" in options:
        outer.leave_on_signal(exits=False, wait_s=1.0)

    def at() -> float:
        return model.embedding.weight.mean().item()

    say(attached=peer.round, at=at(), pid=os.getpid())
    since, last = 0, peer.round
    while rounds == 0 or peer.round < rounds:
        time.sleep(step_s)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        inner.step()
        since, last = (since + 1 if peer.round == last else 0), peer.round
        say(since=since, round=last, at=at(), unix_s=time.time())
        if outer.has_left:
            if "saves" in options:
                outer.save(saved)
            say(left=True, at=at())
            break
    outer.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AtollError as error:
        say(error=error.code, what=error.what)
        sys.exit(error.exit_code)
