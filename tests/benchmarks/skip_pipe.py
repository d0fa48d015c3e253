"""Pipeline stages over slow links, and what skipping them costs: a prototype of SkipPipe.

    python tests/benchmarks/skip_pipe.py [--networks 5] [--steps 800]

First the time of an iteration, by a calculation: stages with replicas on nodes of a random network
of three sites, whose uplinks carry one activation after the other. Microbatches go through all
stages, or skip some, along fixed chains of nodes or along paths that are chosen one after the other
by when they end. Then what that does to learning: the demo's transformer, whose stages are skipped
in training as the paths do it, with its held-out loss whole and without a stage. Five minutes of a
core. docs/studies/skippipe.md says what it means.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from atoll.optim import ByteTransformer, TextBatches
from atoll.peer.demo.text import Text, load_text

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.flex_olmo import held_out

STAGES, REPLICAS, MICROBATCHES = 6, 3, 12
FORWARD_S, BACKWARD = 0.4, 2.0  # of a stage; the backward pass takes so many times as long
ACTIVATION_BITS = 8 * 2 * 4 * 1024 * 2048.0  # bf16 of 4 sequences of 1,024 tokens, 2,048 channels
NEAR, FAR = (1e9, 0.001), (1e8, 0.06)  # bits a second and seconds, within a site and between two
SITES = 3

Path = tuple[tuple[int, int], ...]  # stages in the order of the visit, and the node of each


@dataclass
class Network:
    """Hold which node has which stage, and how fast they reach each other."""

    site: list[int]

    @classmethod
    def drawn(cls, seed: int) -> Network:
        drawn = np.random.default_rng(seed).integers(SITES, size=STAGES * REPLICAS)
        return cls([int(one) for one in drawn])

    def nodes(self, stage: int) -> range:
        return range(stage * REPLICAS, (stage + 1) * REPLICAS)

    def link(self, a: int, b: int) -> tuple[float, float]:
        """Return the seconds in which ``a`` sends an activation to ``b``, and its way."""
        rate, delay_s = NEAR if self.site[a] == self.site[b] else FAR
        return ACTIVATION_BITS / rate, delay_s


@dataclass
class Schedule:
    """Hold when nodes compute and send; what is added goes to the end of their queues."""

    network: Network
    computes_s: dict[int, float] = field(default_factory=dict)
    sends_s: dict[int, float] = field(default_factory=dict)

    def arrives_s(self, ready_s: float, a: int, b: int, sends_s: dict[int, float]) -> float:
        took_s, delay_s = self.network.link(a, b)
        sends_s[a] = max(ready_s, sends_s.get(a, 0.0)) + took_s
        return sends_s[a] + delay_s

    def forward(self, path: Path) -> tuple[float, dict[int, float], dict[int, float]]:
        """Return when a microbatch has come through ``path``, and the queues after it."""
        computes_s, sends_s = dict(self.computes_s), dict(self.sends_s)
        now_s, before = 0.0, -1
        for _, node in path:
            if before >= 0:
                now_s = self.arrives_s(now_s, before, node, sends_s)
            now_s = max(now_s, computes_s.get(node, 0.0)) + FORWARD_S
            computes_s[node] = now_s
            before = node
        return now_s, computes_s, sends_s

    def add(self, path: Path) -> None:
        _, self.computes_s, self.sends_s = self.forward(path)


def iteration_s(network: Network, paths: Sequence[Path]) -> float:
    """Return when all microbatches are through and back; whoever is ready first goes first."""
    computes_s: dict[int, float] = {}
    sends_s: dict[int, float] = {}
    schedule = Schedule(network)
    ways = [[*path, *reversed(path)] for path in paths]
    ready = [(0.0, number, 0) for number in range(len(paths))]  # when, which, its place on the way
    ends_s = 0.0
    while ready:
        now_s, number, place = min(ready)
        ready.remove((now_s, number, place))
        way = ways[number]
        node = way[place][1]
        takes_s = FORWARD_S * (1 if 2 * place < len(way) else BACKWARD)
        now_s = max(now_s, computes_s.get(node, 0.0)) + takes_s
        computes_s[node] = now_s
        ends_s = max(ends_s, now_s)
        if place + 1 < len(way):
            after = way[place + 1][1]
            if after != node:
                now_s = schedule.arrives_s(now_s, node, after, sends_s)
            ready.append((now_s, number, place + 1))
    return ends_s


def chains(network: Network, skipped: int) -> list[Path]:
    """Return paths along fixed chains of nodes, each stage but the first skipped in turn."""
    rest = list(itertools.combinations(range(1, STAGES), skipped))
    return [
        tuple(
            (stage, network.nodes(stage)[number % REPLICAS])
            for stage in range(STAGES)
            if stage not in rest[number % len(rest)]
        )
        for number in range(MICROBATCHES)
    ]


def planned(network: Network, skipped: int, *, swaps: bool) -> list[Path]:
    """Return paths that are chosen one after the other, by which ends first.

    Each stage is skipped as often as any other, or once more. With ``swaps`` two neighbours may
    change places. The head that makes a loss of the last activations is taken to be on every node.
    """
    schedule, paths = Schedule(network), list[Path]()
    share, more = divmod(MICROBATCHES * skipped, STAGES - 1)
    left = {stage: share + (stage <= more) for stage in range(1, STAGES)}
    for _ in range(MICROBATCHES):
        best = min(
            (_fastest(schedule, order) for order in _orders(left, skipped, swaps=swaps)),
            key=lambda path: schedule.forward(path)[0],
        )
        schedule.add(best)
        paths.append(best)
        for stage in left.keys() - {stage for stage, _ in best}:
            left[stage] -= 1
    return paths


def _orders(left: dict[int, int], skipped: int, *, swaps: bool) -> Iterator[tuple[int, ...]]:
    usable = [s for s in left if left[s] > 0]
    rounds = sum(left.values()) // max(1, skipped)
    forced = {s for s in usable if left[s] >= rounds} if skipped else set()  # else some remain
    for without in itertools.combinations(usable, skipped):
        if not forced <= {*without}:
            continue
        order = tuple(stage for stage in range(STAGES) if stage not in without)
        yield order
        for at in range(1, len(order) - 1) if swaps else ():
            yield (*order[:at], order[at + 1], order[at], *order[at + 2 :])


def _fastest(schedule: Schedule, order: Sequence[int]) -> Path:
    """Return nodes for these stages, each the one that has the microbatch done first."""
    path: Path = ()
    for stage in order:
        ends = [((*path, (stage, node))) for node in schedule.network.nodes(stage)]
        path = min(ends, key=lambda one: schedule.forward(one)[0])
    return path


# ---------------------------------------------------------------- learning


class Staged(nn.Module):
    """Run a transformer's blocks as stages, in an order that may leave some out."""

    def __init__(self, model: ByteTransformer, stages: int) -> None:
        super().__init__()
        self.model = model
        size = len(model.blocks) // stages
        blocks = list(model.blocks)
        self.stages = [nn.Sequential(*blocks[k * size : (k + 1) * size]) for k in range(stages)]

    def loss(self, bytes_BT: Tensor, next_BT: Tensor, order: Sequence[int]) -> Tensor:
        return self.in_order(order)(bytes_BT, next_BT)

    def in_order(self, order: Sequence[int]) -> Callable[[Tensor, Tensor], Tensor]:
        self.model.blocks = nn.Sequential(*(self.stages[k] for k in order))
        return self.model.loss


def trained(text: Text, orders: Sequence[Sequence[int]], steps: int, seed: int) -> Staged:
    """Return a model of six stages of a block each, trained along these orders by turns."""
    torch.manual_seed(seed)
    staged = Staged(ByteTransformer(width=128, depth=STAGES, heads=4, context=64), STAGES)
    parameters = list(staged.model.parameters())
    inner = torch.optim.AdamW(parameters, lr=4e-3)
    batches = TextBatches(text, context=64, batch=8, seed=seed)
    random = np.random.default_rng(seed)
    for step in range(steps):
        for group in inner.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 50, 0.05 + (steps - step) / steps)
        order = orders[int(random.integers(len(orders)))]
        staged.loss(*batches.next(), order).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        inner.step()
        inner.zero_grad()  # so a stage that was skipped has no gradient, and AdamW leaves it alone
    return staged


def losses(staged: Staged, text: Text) -> tuple[float, float]:
    """Return the loss of the whole model, and in the mean without one stage but the first."""
    staged.in_order(range(STAGES))
    whole = held_out(staged.model, text)
    without = []
    for gone in range(1, STAGES):
        staged.in_order([stage for stage in range(STAGES) if stage != gone])
        without.append(held_out(staged.model, text))
    return whole, statistics.mean(without)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    networks = [Network.drawn(seed) for seed in range(chosen.networks)]
    ways: dict[str, Callable[[Network], list[Path]]] = {
        "all stages, fixed chains": lambda n: chains(n, 0),
        "all stages, planned": lambda n: planned(n, 0, swaps=False),
        "one of six skipped, chains": lambda n: chains(n, 1),
        "one of six skipped, planned": lambda n: planned(n, 1, swaps=False),
        "... and swapped": lambda n: planned(n, 1, swaps=True),
        "two of six skipped, planned": lambda n: planned(n, 2, swaps=False),
    }
    first = [iteration_s(n, chains(n, 0)) for n in networks]
    for name, make in ways.items():
        found = [iteration_s(n, make(n)) for n in networks]
        share = statistics.mean(s / f for s, f in zip(found, first, strict=True))
        print(f"{name:<28} {statistics.mean(found):6.1f} s an iteration  {share:5.0%}", flush=True)
    text = load_text(log=lambda _line: None)
    whole = tuple(range(STAGES))
    one = [tuple(s for s in whole if s != gone) for gone in whole[1:]]
    two = [
        tuple(s for s in whole if s not in pair) for pair in itertools.combinations(whole[1:], 2)
    ]
    for name, orders in {
        "all stages": [whole],
        "one of six skipped": one,
        "two of six skipped": two,
    }.items():
        for seed in range(chosen.seeds):
            loss, without = losses(trained(text, orders, chosen.steps, seed), text)
            print(
                f"{name:<28} seed {seed}: loss {loss:.3f}, without a stage {without:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
