"""Train by one policy towards stragglers, whose steps take the time that a pattern says.

Arguments: home, policy, pattern, number of this peer, how many there are, when to begin (seconds of
the epoch). A student learns a teacher; the pass over a batch is a sleep, as on an accelerator,
that goes on ``SLOWED`` times as slowly while this peer is late. Prints a JSON line every second or
so: seconds since the beginning, steps, held-out loss of what the run has.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import atoll
from atoll.collectives.errors import AtollError
from atoll.optim import AsyncDiLoCo, DiLoCo, GradientAverage
from atoll.optim.experimental import CodedGradients

INPUTS, HIDDEN, OUTPUTS, BATCH = 32, 256, 8, 32
STEP_S, SYNC_EVERY = 0.1, 10
SLICE_S = 0.01  # in which a peer is late or not
WINDOW_S, LATE_SHARE, SLOWED = 2.0, 0.2, 5.0  # by turns: of each two seconds, of each peer
LR, WAIT_S = 3e-3, 60.0
PIECES = 8  # of a coded shard: after each a late peer can say that it is late


def network(seed: int, hidden: int) -> nn.Module:
    random = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, OUTPUTS))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / p.shape[-1] ** 0.5)
    return net


TEACHER = network(1, HIDDEN // 16)


def batch(seed: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, INPUTS, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, TEACHER(x)


HELD_OUT = batch(2**31, 2048)


class Peer:
    """Hold one peer: how late it is, and what it says."""

    def __init__(self, pattern: str, number: int, begin_s: float) -> None:
        self.number, self._pattern, self._begin_s = number, pattern, begin_s
        self.model = network(0, HIDDEN)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.steps = 0
        self._said_s = 0.0

    def slowdown(self) -> float:
        if self._pattern == "one":
            return SLOWED if self.number == 0 else 1.0
        window = int(time.time() / WINDOW_S)
        drawn = np.random.default_rng(
            (window - int(self._begin_s / WINDOW_S), self.number)
        ).random()
        return SLOWED if drawn < LATE_SHARE else 1.0

    def backward(self, seed: int, part: float = 1.0) -> None:
        """Make the gradients of a batch, or of a part of one, in STEP_S if it is not late."""
        left_s = STEP_S * part
        while left_s > 0:
            begun_s = time.monotonic()
            time.sleep(SLICE_S)
            left_s -= (time.monotonic() - begun_s) / self.slowdown()
        x, y = batch(seed, int(BATCH * part))
        self.model.zero_grad()
        (self.model(x) - y).square().mean().backward()

    def say(self, outer: Any, steps: int) -> None:
        now_s = time.time() - self._begin_s
        if now_s - self._said_s < 1:
            return
        self._said_s = now_s
        with outer.outer_parameters() if hasattr(outer, "outer_parameters") else nullcontext():
            with torch.no_grad():
                loss = float((self.model(HELD_OUT[0]) - HELD_OUT[1]).square().mean())
        print(json.dumps({"at_s": round(now_s, 1), "steps": steps, "loss": loss}), flush=True)


def rounds(make: Callable[[Peer, Any], Any]) -> Callable[[Peer, Any, int, float], None]:
    """Return a loop like any user's, with the method that ``make`` returns."""

    def loop(peer: Peer, session: Any, peers: int, begin_s: float) -> None:
        outer = make(peer, session)
        time.sleep(max(0.0, begin_s - time.time()))
        while True:
            peer.backward(peers * peer.steps + peer.number)
            peer.inner.step()
            peer.steps += 1
            peer.say(outer, peer.steps)

    return loop


def coded(peer: Peer, session: Any, peers: int, begin_s: float) -> None:
    """Train in a loop of its own: AdamW steps with sums that others may have computed."""
    parameters = list(peer.model.parameters())

    def gradient(point: Any, job: int, shard: int) -> Any:
        for piece in range(PIECES):
            nn.utils.vector_to_parameters(torch.from_numpy(point), parameters)
            peer.backward(PIECES * (peers * job + shard) + piece, 1 / PIECES)
            flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            yield flat.numpy() / (peers * PIECES)

    names = [name for name, _ in session.gather(at_least=peers, wait_s=WAIT_S)]
    time.sleep(max(0.0, begin_s - time.time()))
    made = CodedGradients(session, names, gradient, late=1, deadline_s=2.2 * STEP_S)
    point = nn.utils.parameters_to_vector(parameters).detach().clone()
    while True:
        whole = made.step(point.numpy())
        nn.utils.vector_to_parameters(point, parameters)
        for one in whole:
            at = 0
            for p in parameters:
                values = one.total[at : at + p.numel()].copy()
                p.grad = torch.from_numpy(values).view(p.shape)
                at += p.numel()
            peer.inner.step()
        point = nn.utils.parameters_to_vector(parameters).detach().clone()
        peer.say(None, made.steps)


POLICIES: dict[str, Callable[[Peer, Any, int, float], None]] = {
    "every step, wait": rounds(lambda p, s: GradientAverage(p.model, p.inner, s)),
    "every step, coded": coded,
    "DiLoCo, wait": rounds(lambda p, s: DiLoCo(p.model, p.inner, SYNC_EVERY, s)),
    "DiLoCo, round_s": rounds(
        lambda p, s: DiLoCo(p.model, p.inner, SYNC_EVERY, s, round_s=SYNC_EVERY * STEP_S)
    ),
    "AsyncDiLoCo": rounds(
        lambda p, s: AsyncDiLoCo(
            p.model, p.inner, SYNC_EVERY, s, outer_delay=4, round_s=SYNC_EVERY * STEP_S
        )
    ),
}


def main() -> int:
    home, policy, pattern = sys.argv[1:4]
    number, peers, begin_s = int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])
    torch.set_num_threads(1)
    session = atoll.connect(home)
    POLICIES[policy](Peer(pattern, number, begin_s), session, peers, begin_s)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AtollError as error:
        print(json.dumps({"error": error.code, "what": error.what}), flush=True)
        sys.exit(error.exit_code)
