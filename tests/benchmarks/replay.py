"""How far replays on other machines come from a trainer's steps, and how far cheats do.

    PYTHONPATH=tests python -m benchmarks.replay [--size small] [--warm 10]

Relative differences (optim/replay/difference.py) of the group that differs most, and of the tensor
that does, for 1, 5 and 20 steps of a byte transformer. What a way to compute gives must lie below
the tolerances, what a cheat gives above one of them.
"""

from __future__ import annotations

import argparse

import torch
from harness.replay_ways import CHEATS, MIXED, MIXED_WAYS, WAYS, Change, segment
from harness.replaying import OPTIMIZERS, Loop, Optimizers, text_model

from atoll.optim.replay.difference import Verdict
from atoll.optim.replay.opening import Opened
from atoll.optim.replay.replaying import replay

STEPS = (1, 5, 20)
SIZES = {
    "small": {},
    "demo": {"width": 128, "depth": 2, "heads": 4, "context": 16},
}


def replayed(opened: Opened, optimizer: Optimizers, way: Change, sizes: dict[str, int]) -> Verdict:
    model = text_model(**sizes)
    loop = Loop(model, optimizer(model))
    way(loop)
    return replay(opened, loop.task())


def shown(verdict: Verdict) -> str:
    found = "passed" if verdict.passed else "found"
    return f"{verdict.difference:8.1e} {verdict.worst_difference:8.1e} {found:6}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--warm", type=int, default=10, help="steps before the segment")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = SIZES[options.size]
    heads = "".join(f" | {f'{k} steps: group, tensor':26}" for k in STEPS)
    for name, optimizer in OPTIMIZERS.items():
        print(f"\n{name:28}{heads}")
        for what, way in WAYS.items():
            row = []
            for steps in STEPS:
                honest = segment(optimizer, steps, warm=options.warm, **sizes)
                row.append(shown(replayed(honest, optimizer, way, sizes)))
            print(f"{what:28} | {' | '.join(row)}", flush=True)
        for what, way in MIXED_WAYS.items():
            row = []
            for steps in STEPS:
                honest = segment(optimizer, steps, warm=options.warm, way=MIXED, **sizes)
                row.append(shown(replayed(honest, optimizer, way, sizes)))
            print(f"{what:28} | {' | '.join(row)}", flush=True)
        for what, cheat in CHEATS.items():
            row = []
            for steps in STEPS:
                lie = segment(optimizer, steps, warm=options.warm, cheat=cheat, **sizes)
                row.append(shown(replayed(lie, optimizer, WAYS["the same machine"], sizes)))
            print(f"{what:28} | {' | '.join(row)}", flush=True)


if __name__ == "__main__":
    main()
