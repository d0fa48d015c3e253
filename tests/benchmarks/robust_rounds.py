"""What robust rules cost: rounds of the engine beside those of the plain mean, in one run.

    python tests/benchmarks/robust_rounds.py [--peers 16] [--elements 10e6] [--times 5]
                                             [--codec int8] [--streams sealed]
                                             [--rules "trimmed(f=3)" ...]

Every peer is a process, joined with all others by data streams on loopback; sides take turns. The
figure is the time from a barrier until the slowest peer has the result, the median of ``--times``,
and how much longer than the mean's that is. All processes share the cores of one machine, as their
aggregating does: on machines of their own, which are as far apart as peers are, it would take a
smaller part of the time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in daemons (peer/cli/main.py)

import argparse
import gc
import multiprocessing
import resource
import socket
import statistics
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.mesh import PATIENCE_S, Mesh, all_reducer

WARM = 1
RULES = (
    "trimmed(f=3)",
    "median(f=3)",
    "meamed(f=3)",
    "multi_krum(f=3)",
    "gm(f=3)",
    "nnm+trimmed(f=3)",
    "bulyan(f=3)",
)


def peer(
    me: int,
    addresses: list[tuple[str, int]],
    listener: socket.socket,
    together: Barrier,
    chosen: argparse.Namespace,
) -> None:
    mesh = Mesh(me, addresses, listener, chosen.streams)
    elements = int(chosen.elements)
    dice = np.random.default_rng(me)
    values = dice.standard_normal(elements, np.float32) + np.float32(0.5)
    gc.freeze()
    took: dict[str, list[float]] = {name: [] for name in ("", *chosen.rules)}
    for turn in range(WARM + chosen.times):
        for rule in took:
            once = all_reducer(mesh, chosen.codec, elements, rule=rule)
            together.wait(PATIENCE_S)
            begun_s = time.perf_counter()
            once(values)
            together.wait(PATIENCE_S)
            if turn >= WARM:
                took[rule].append(time.perf_counter() - begun_s)
    if me == 0:
        mean_s = statistics.median(took[""])
        for rule, each_s in took.items():
            median_s = statistics.median(each_s)
            more = 100 * (median_s / mean_s - 1)
            print(
                f"{len(addresses)} peers  {elements / 1e6:g} M  {chosen.codec} {chosen.streams}"
                f"  {rule or 'mean':<20} {median_s * 1e3:8.0f} ms"
                f"  ({min(each_s) * 1e3:.0f} to {max(each_s) * 1e3:.0f})  {more:+6.1f} %"
                f"  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB at most",
                flush=True,
            )
            if rule:
                results.say(f"{chosen.codec}/{rule}/over_mean", more, "%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--elements", type=float, default=10e6)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--streams", default="sealed")
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    chosen = parser.parse_args()
    fork = multiprocessing.get_context("fork")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(chosen.peers)]
    addresses = [("127.0.0.1", listener.getsockname()[1]) for listener in listeners]
    together = fork.Barrier(chosen.peers)
    children = [
        fork.Process(target=peer, args=(me, addresses, listeners[me], together, chosen))
        for me in range(chosen.peers)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise SystemExit("a peer has failed")


if __name__ == "__main__":
    main()
