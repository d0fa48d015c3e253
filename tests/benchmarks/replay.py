"""How far replays on other machines come from a trainer's steps, and how far cheats do.

    PYTHONPATH=tests python -m benchmarks.replay [--size small] [--warm 10] [--along]

Relative differences (optim/replay/difference.py) of the group that differs most, and of the tensor
that does, for 1, 5 and 20 steps of a byte transformer. What a way to compute gives must lie below
the tolerances, what a cheat gives above one of them. ``--along``: the largest of all segments of
200 steps, by their length, because what rounding changes grows from step to step.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from harness.replay_elsewhere import replayed_elsewhere
from harness.replay_ways import CHEATS, MIXED, MIXED_WAYS, WAYS, Change, segment, segments
from harness.replaying import OPTIMIZERS, Loop, Optimizers, text_model

from atoll.optim.replay.difference import ReplayVerdict
from atoll.optim.replay.replaying import replay
from atoll.optim.replay.step_disclosure import Opened

STEPS = (1, 5, 20)
LENGTHS = (1, 5, 10, 20, 50, 200)
SIZES = {
    "small": {},
    "demo": {"width": 128, "depth": 2, "heads": 4, "context": 16},
}


def again(
    opened: Opened, optimizer: Optimizers, way: Change, sizes: dict[str, int]
) -> ReplayVerdict:
    model = text_model(**sizes)
    loop = Loop(model, optimizer(model))
    way(loop)
    return replay(opened, loop.task())


def show(what: str, found: Callable[[int], ReplayVerdict]) -> None:
    """A row: what ``found`` says of so many steps."""
    cells = []
    for verdict in map(found, STEPS):
        end = "passed" if verdict.passed else "found"
        cells.append(f"{verdict.difference:8.1e} {verdict.worst_difference:8.1e} {end:6}")
    print(f"{what:24} | {' | '.join(cells)}", flush=True)


def table(name: str, warm: int, sizes: dict[str, int]) -> None:
    optimizer, same = OPTIMIZERS[name], WAYS["the same machine"]

    def made(steps: int, **changes: Change) -> Opened:
        return segment(optimizer, steps, warm=warm, **changes, **sizes)

    print(f"\n{name:24}" + "".join(f" | {f'{k} steps: group, tensor':24}" for k in STEPS))
    for what, way in WAYS.items():
        show(what, lambda k, way=way: again(made(k), optimizer, way, sizes))
    with tempfile.TemporaryDirectory() as folder:
        show("another CPU", lambda k: replayed_elsewhere(made(k), name, Path(folder), **sizes))
    for what, way in MIXED_WAYS.items():
        show(what, lambda k, way=way: again(made(k, way=MIXED), optimizer, way, sizes))
    for what, cheat in CHEATS.items():
        show(what, lambda k, cheat=cheat: again(made(k, cheat=cheat), optimizer, same, sizes))


def along(name: str, sizes: dict[str, int]) -> None:
    optimizer, orders = OPTIMIZERS[name], "halves of the batch"
    print(f"\n{name:8} segments of | " + " | ".join(f"{k:17}" for k in LENGTHS))
    for what, way, mine in (
        ("float32", None, WAYS[orders]),
        ("bfloat16", MIXED, MIXED_WAYS[f"... {orders}"]),
    ):
        cells = []
        for length in LENGTHS:
            made = segments(optimizer, length, max(LENGTHS), way=way, **sizes)
            verdicts = [again(opened, optimizer, mine, sizes) for opened in made]
            group = max(verdict.difference for verdict in verdicts)
            cells.append(f"{group:8.1e} {max(v.worst_difference for v in verdicts):8.1e}")
        print(f"{what:20} | {' | '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--warm", type=int, default=10, help="steps before the segment")
    parser.add_argument("--along", action="store_true", help="by the length of segments")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        if options.along:
            along(name, SIZES[options.size])
        else:
            table(name, options.warm, SIZES[options.size])


if __name__ == "__main__":
    main()
