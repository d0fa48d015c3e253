"""All-reduce of float32 on loopback: atoll's engine beside torch.distributed's Gloo, in one run.

    python tests/benchmarks/allreduce.py [--mib 64] [--peers 2 4] [--times 7] [--codecs float32]

Every peer is a process; both sides use plain TCP between the same processes and the same data, and
take turns. The figure is the time from a barrier until the slowest peer has the result, the median
of ``--times``. Gloo works in place; atoll leaves its input alone, as rounds need it.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from atoll.collectives import Reduction, RoundResult, butterfly_plan, get_codec, grid_for
from atoll.collectives.codecs import F32

HEADER = struct.Struct("<IBII")  # attempt, kind, chunk, bytes
WARM = 2


class Mesh:
    """A TCP connection in each direction between any two processes."""

    def __init__(self, me: int, ports: list[int], listener: socket.socket) -> None:
        self.me, self.everyone = me, range(len(ports))
        self.out: dict[int, socket.socket] = {}
        self.into: dict[int, socket.socket] = {}
        accepting = threading.Thread(target=self._accept, args=(listener, len(ports) - 1))
        accepting.start()
        for peer, port in enumerate(ports):
            if peer != me:
                self.out[peer] = sock = socket.create_connection(("127.0.0.1", port))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(bytes([me]))
        accepting.join()
        self.reduction: Reduction | None = None
        self.attempt = 0
        self.changed = threading.Condition()
        for peer, sock in self.into.items():
            threading.Thread(target=self._read, args=(peer, sock), daemon=True).start()

    def _accept(self, listener: socket.socket, count: int) -> None:
        for _ in range(count):
            sock, _ = listener.accept()
            self.into[sock.recv(1)[0]] = sock

    def _read(self, peer: int, sock: socket.socket) -> None:
        head = memoryview(bytearray(HEADER.size))
        while fill(sock, head):
            attempt, kind, chunk, length = HEADER.unpack(head)
            with self.changed:
                self.changed.wait_for(lambda attempt=attempt: self.attempt >= attempt)
            assert self.reduction is not None
            buffer = self.reduction.reserve(peer, kind, chunk, length, 60.0)
            assert buffer is not None
            fill(sock, buffer)
            self.reduction.received(peer, kind, chunk)

    def begin(self, reduction: Reduction) -> None:
        with self.changed:
            self.reduction = reduction
            self.attempt += 1
            self.changed.notify_all()
        reduction.start({p: Outlet(self.out[p], self.attempt) for p in reduction.destinations})


class Outlet:
    def __init__(self, sock: socket.socket, attempt: int) -> None:
        self.sock, self.attempt = sock, attempt

    def send(self, kind: int, chunk: int, payload: memoryview) -> None:
        parts = [HEADER.pack(self.attempt, kind, chunk, len(payload)), payload]
        sent = self.sock.sendmsg(parts) - HEADER.size
        if sent < len(payload):
            self.sock.sendall(payload[sent:])


def fill(sock: socket.socket, view: memoryview) -> bool:
    filled = 0
    while filled < len(view):
        count = sock.recv_into(view[filled:], len(view) - filled, socket.MSG_WAITALL)
        if not count:
            return False
        filled += count
    return True


def atoll_side(mesh: Mesh, codec_name: str, elements: int) -> Callable[[F32], None]:
    codec, grid = get_codec(codec_name), grid_for(elements)
    ids = [bytes([p]) * 32 for p in mesh.everyone]
    plan = butterfly_plan(ids, [1.0] * len(ids), grid)
    result = RoundResult(codec, grid)

    def once(values: F32) -> None:
        result.digests = [b""] * grid.count
        done = threading.Event()

        def source(chunk: int, out: F32) -> None:
            lo, hi = grid.bounds(chunk)
            out[:] = values[lo:hi]

        def failed(participant: int, why: str) -> None:
            raise SystemExit(f"{participant}: {why}")

        reduction = Reduction(
            plan=plan,
            me=mesh.me,
            source=source,
            result=result,
            on_done=lambda digests: done.set(),
            on_failed=failed,
            own=lambda chunk: values[slice(*grid.bounds(chunk))],
            hashed=False,
        )
        mesh.begin(reduction)
        assert done.wait(60.0)
        assert reduction.join(60.0)

    return once


def peer(me: int, ports: list[int], listener: socket.socket, chosen: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    mesh = Mesh(me, ports, listener)
    store = f"tcp://127.0.0.1:{chosen.store}"
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=len(ports))
    elements = int(chosen.mib * 2**20) // 4
    values = np.random.default_rng(me).standard_normal(elements, np.float32)
    tensor = torch.from_numpy(values.copy())
    sides: dict[str, Callable[[], None]] = {"gloo float32": lambda: dist.all_reduce(tensor)}
    for name in chosen.codecs:
        once = atoll_side(mesh, name, elements)
        sides[f"atoll {name}"] = lambda once=once: once(values)
    took: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(WARM + chosen.times):
        for name, side in sides.items():
            dist.barrier()
            begun_s = time.perf_counter()
            side()
            dist.barrier()
            if turn >= WARM:
                took[name].append(time.perf_counter() - begun_s)
    if me == 0:
        gloo_s = statistics.median(took["gloo float32"])
        for name, each_s in took.items():
            median_s = statistics.median(each_s)
            print(
                f"{len(ports)} peers  {chosen.mib:g} MiB  {name:<16} {median_s * 1e3:8.1f} ms"
                f"   {gloo_s / median_s:5.2f} x Gloo",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=64.0)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--codecs", nargs="+", default=["float32", "int8"])
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
