"""A round of DiLoCo as its trainers see it: from the last submission to the weights, on loopback.

    python tests/benchmarks/round.py [--parameters 10e6] [--codec int8] [--peers 2] [--rounds 7]
        [--durable rounds] [--streams sealed plain]

Two real daemons, two trainers with a torch model and `atoll.DiLoCo`, whose inner optimizer does
nothing. All trainers come to `optimizer.step()` at the same moment; *round* is how long the slower
one is in it, which is what a user waits. Beside it stand an `all_reduce` of as many values in the
same codec from a shared buffer, two copies of the weights, and what a round costs each daemon of a
processor (user and system, of /proc). Medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.processes import fleet

import atoll

NAMES = "abcdefgh"
WARM = 3  # the first parameters, and rounds whose memory is new
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
OPTIONS = {"sealed": (), "plain": ("--plain-streams",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=10e6)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--durable", default="rounds")
    parser.add_argument("--streams", nargs="+", default=["sealed"], choices=list(OPTIONS))
    chosen = parser.parse_args()
    for streams in chosen.streams:
        one(streams, chosen)


def one(streams: str, chosen: argparse.Namespace) -> None:
    names, context = NAMES[: chosen.peers], get_context("fork")
    together, told = context.Barrier(chosen.peers + 1), context.Queue()
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
        run.options = lambda name: (*OPTIONS[streams], "--durable", chosen.durable)
        run.form(names)
        daemons = [run.peers[name].pid for name in names]
        trainers = [
            context.Process(target=trainer, args=(run.peers[name].home, together, told, chosen))
            for name in names
        ]
        for process in trainers:
            process.start()
        rounds_s, cpu_s = turns(together, told, chosen, daemons)
        reduces_s, _ = turns(together, told, chosen, daemons)
        for process in trainers:
            process.join()
    copy_s = told.get()
    show(streams, chosen, rounds_s, cpu_s, reduces_s, copy_s)


def turns(
    together: Barrier, told: Queue[float], chosen: argparse.Namespace, daemons: list[int]
) -> tuple[list[float], list[float]]:
    """Return how long the slowest trainer took each time, and the mean daemon's processor time."""
    took_s, cpu_s = [], []
    for turn in range(WARM + chosen.rounds):
        before_s = [processor_s(pid) for pid in daemons]
        together.wait()
        slowest_s = max(told.get() for _ in range(chosen.peers))
        together.wait()
        if turn >= WARM:
            took_s.append(slowest_s)
            used = [processor_s(pid) - was for pid, was in zip(daemons, before_s, strict=True)]
            cpu_s.append(statistics.mean(used))
    return took_s, cpu_s


def trainer(home: Path, together: Barrier, told: Queue[float], chosen: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    count = int(chosen.parameters)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(
        torch.randn(count, generator=torch.Generator().manual_seed(1))
    )
    inner = torch.optim.SGD([model.weight], lr=0.0)
    peer = atoll.connect(home)
    peers, codec = chosen.peers, chosen.codec
    atoll.DiLoCo(model, inner, sync_every=1, peer=peer, codec=codec, min_trainers=peers)
    change = torch.randn(count) * 1e-3
    model.weight.grad = torch.zeros(count)
    buffer = None

    def reduce() -> None:
        peer.all_reduce(buffer, codec=chosen.codec)

    for work in (inner.step, reduce):  # the outer step hangs on the inner one's
        if work is reduce:
            buffer = peer.buffer(count)
            buffer.copy_(change)
        for _ in range(WARM + chosen.rounds):
            with torch.no_grad():
                model.weight.add_(change)
            together.wait()
            begun_s = time.perf_counter()
            work()
            told.put(time.perf_counter() - begun_s)
            together.wait()
    target = torch.empty(count)
    begun_s = time.perf_counter()
    for _ in range(4):
        target.copy_(change)
    copy_s = (time.perf_counter() - begun_s) / 2
    if home.name == NAMES[0]:
        told.put(copy_s)
    told.close()
    told.join_thread()
    os._exit(0)


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def show(
    streams: str,
    chosen: argparse.Namespace,
    rounds_s: list[float],
    cpu_s: list[float],
    reduces_s: list[float],
    copy_s: float,
) -> None:
    round_s, reduce_s = statistics.median(rounds_s), statistics.median(reduces_s)
    cpu = statistics.mean(cpu_s)
    print(
        f"{chosen.peers} peers  {chosen.parameters / 1e6:g}M  {streams} {chosen.codec}"
        f"  durable {chosen.durable}:  round {round_s * 1e3:.1f} ms (worst"
        f" {max(rounds_s) * 1e3:.1f}), all_reduce {reduce_s * 1e3:.1f} ms, two copies"
        f" {copy_s * 1e3:.1f} ms: {round_s / (reduce_s + copy_s):.2f} x; a daemon's processor"
        f" {cpu * 1e3:.1f} ms",
        flush=True,
    )
    figure = f"{chosen.peers}/{chosen.parameters:g}/{streams}/{chosen.codec}"
    results.say(f"{figure}/round", round_s * 1e3, "ms")
    results.say(f"{figure}/daemon_cpu", cpu * 1e3, "ms")


if __name__ == "__main__":
    main()
