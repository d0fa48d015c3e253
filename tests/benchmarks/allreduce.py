"""All-reduce of float32 on loopback: atoll's engine beside torch.distributed's Gloo, in one run.

    python tests/benchmarks/allreduce.py [--mib 64] [--peers 2 4] [--times 7] [--streams plain]

Every peer is a process. All sides have the same data and take turns; Gloo uses plain TCP, atoll its
own data streams, plain or sealed (AES-256-GCM). The figure is the time from a barrier until the
slowest peer has the result, the median of ``--times``; beside it, how many times as fast as Gloo
that is, and as atoll's own float32 on the same streams. Gloo works in place; atoll leaves its input
alone, as rounds need it.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.mesh import Mesh, all_reducer

WARM = 2


def peer(me: int, ports: list[int], listener: socket.socket, chosen: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    addresses = [("127.0.0.1", port) for port in ports]
    meshes = {streams: Mesh(me, addresses, listener, streams) for streams in chosen.streams}
    store = f"tcp://127.0.0.1:{chosen.store}"
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=len(ports))
    elements = int(chosen.mib * 2**20) // 4
    values = np.random.default_rng(me).standard_normal(elements, np.float32)
    tensor = torch.from_numpy(values.copy())
    sides: dict[str, Callable[[], None]] = {"gloo float32": lambda: dist.all_reduce(tensor)}
    for streams, mesh in meshes.items():
        for name in chosen.codecs:
            once = all_reducer(mesh, name, elements)
            sides[f"atoll {streams} {name}"] = lambda once=once: once(values)
    gc.freeze()  # a daemon's heap has no torch, and little to look through
    took: dict[str, list[float]] = {name: [] for name in sides}
    worked: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(WARM + chosen.times):
        for name, side in sides.items():
            dist.barrier()
            begun_s, cpu_s = time.perf_counter(), time.process_time()
            side()
            cpu_s = time.process_time() - cpu_s
            dist.barrier()
            if turn >= WARM:
                took[name].append(time.perf_counter() - begun_s)
                worked[name].append(cpu_s)
    if me == 0:
        show(len(ports), chosen, took, worked)
    dist.destroy_process_group()


def show(
    peers: int,
    chosen: argparse.Namespace,
    took: dict[str, list[float]],
    worked: dict[str, list[float]],
) -> None:
    medians_s = {name: statistics.median(each_s) for name, each_s in took.items()}
    gloo_s = medians_s["gloo float32"]
    for name, median_s in medians_s.items():
        side, *rest = name.split()
        is_exact = rest[-1] == "float32"
        plain_s = 0.0 if is_exact else medians_s.get(" ".join((side, *rest[:-1], "float32")), 0.0)
        ratio = f"{plain_s / median_s:5.2f} x its float32" if plain_s else ""
        print(
            f"{peers} peers  {chosen.mib:g} MiB  {name:<22} {median_s * 1e3:8.1f} ms"
            f"   {gloo_s / median_s:5.2f} x Gloo   {ratio:<20}"
            f" {1e3 * statistics.median(worked[name]):7.1f} ms of a core each",
            flush=True,
        )
        if side == "atoll":
            figure = "/".join((str(peers), *rest))
            results.say(f"{figure}/over_gloo", gloo_s / median_s, "x")
            if plain_s:
                results.say(f"{figure}/over_float32", plain_s / median_s, "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=64.0)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--codecs", nargs="+", default=["float32", "int8", "int4"])
    parser.add_argument("--streams", nargs="+", default=["plain", "sealed"])
    chosen = parser.parse_args()
    for count in chosen.peers:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        ports = [listener.getsockname()[1] for listener in listeners]
        with socket.create_server(("127.0.0.1", 0)) as free:
            chosen.store = free.getsockname()[1]
        children = []
        for me in range(count):
            if (pid := os.fork()) == 0:
                try:
                    peer(me, ports, listeners[me], chosen)
                finally:
                    sys.stdout.flush()
                    os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        for listener in listeners:
            listener.close()


if __name__ == "__main__":
    main()
