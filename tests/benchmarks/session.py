"""`session.all_reduce` over real daemons on loopback, beside torch.distributed's Gloo, in one run.

    python tests/benchmarks/session.py [--mib 64] [--peers 2 4] [--times 5]
        [--codecs float32 int8] [--streams sealed plain]

Each trainer is a process with a session of its own, and with a rank of Gloo's. Both sides take
turns; the figure is the time from a barrier until the slowest trainer has the result, the median
of ``--times``. That is what users get: with copies through shared memory, the round's agreement and
its commit. Gloo works in place, over plain TCP; a session leaves its input alone. "buffer": the
vector lies in memory that the daemon shares (`session.buffer`), so nothing is copied.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.processes import fleet

import atoll

WARM = 2
NAMES = "abcdefgh"
OPTIONS = {"sealed": (), "plain": ("--plain-streams",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=64.0)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--codecs", nargs="+", default=["float32", "int8"])
    parser.add_argument("--streams", nargs="+", default=["sealed"], choices=list(OPTIONS))
    chosen = parser.parse_args()
    for count in chosen.peers:
        for streams in chosen.streams:
            with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
                run.options = lambda name, streams=streams: OPTIONS[streams]
                names = NAMES[:count]
                run.form(names)
                trainers([run.peers[name].home for name in names], streams, chosen)


def trainers(homes: list[Path], streams: str, chosen: argparse.Namespace) -> None:
    """One process for each home; if one fails, the others would wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = get_context("fork")
    processes = [
        context.Process(target=trainer, args=(rank, homes, port, streams, chosen))
        for rank in range(len(homes))
    ]
    for process in processes:
        process.start()
    left: list[BaseProcess] = [*processes]
    while left and not any(process.exitcode for process in processes):
        wait([process.sentinel for process in left])
        left = [process for process in left if process.exitcode is None]
    for process in left:
        process.kill()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def trainer(
    rank: int, homes: list[Path], port: int, streams: str, chosen: argparse.Namespace
) -> None:
    torch.set_num_threads(1)
    count = len(homes)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    values = np.random.default_rng(rank).standard_normal(int(chosen.mib * 2**18), np.float32)
    tensor = torch.from_numpy(values.copy())
    session = atoll.connect(homes[rank])
    while len(session.barrier()) < count:
        pass  # until all are attached
    sides: dict[str, Callable[[], object]] = {"gloo float32": lambda: dist.all_reduce(tensor)}
    buffer = session.buffer(len(values)).copy_(tensor)
    for codec in chosen.codecs:
        for kind, vector in (("", values), (" buffer", buffer)):
            sides[f"session {streams} {codec}{kind}"] = partial(
                session.all_reduce, vector, codec=codec
            )
    took: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(WARM + chosen.times):
        for name, side in sides.items():
            dist.barrier()
            begun_s = time.perf_counter()
            side()
            dist.barrier()
            if turn >= WARM:
                took[name].append(time.perf_counter() - begun_s)
    if rank == 0:
        show(count, chosen, took)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads and the session's sockets end with the process


def show(count: int, chosen: argparse.Namespace, took: dict[str, list[float]]) -> None:
    gloo_s = statistics.median(took["gloo float32"])
    for name, each_s in took.items():
        median_s = statistics.median(each_s)
        print(
            f"{count} peers  {chosen.mib:g} MiB  {name:<29} {median_s * 1e3:8.1f} ms"
            f"   {gloo_s / median_s:5.2f} x Gloo   (worst {max(each_s) * 1e3:.1f} ms)",
            flush=True,
        )
        side, *rest = name.split()
        if side == "session":
            figure = "/".join((str(count), *rest))
            results.say(f"{figure}/median", median_s * 1e3, "ms")
            results.say(f"{figure}/over_gloo", gloo_s / median_s, "x")


if __name__ == "__main__":
    main()
