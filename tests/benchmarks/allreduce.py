"""All-reduce of float32 on loopback: atoll's engine beside torch.distributed's Gloo, in one run.

    python tests/benchmarks/allreduce.py [--mib 64] [--peers 2 4] [--times 7] [--streams plain]

Every peer is a process. All sides have the same data and take turns; Gloo uses plain TCP, atoll its
own data streams, plain or sealed (AES-256-GCM). The figure is the time from a barrier until the
slowest peer has the result, the median of ``--times``. Gloo works in place; atoll leaves its input
alone, as rounds need it.
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
from atoll.peer.rounds.sealedstream import SealedStream
from atoll.peer.rounds.tcpstream import DataStream, PlainStream

HEADER = struct.Struct("<IBII")  # attempt, kind, chunk, bytes
SECRET = bytes(range(32))  # of this benchmark's streams, which are nobody's
WARM = 2


class Mesh:
    """A TCP connection in each direction between any two processes."""

    def __init__(self, me: int, ports: list[int], listener: socket.socket, streams: str) -> None:
        self.me, self.everyone = me, range(len(ports))
        self.streams = streams
        self.out: dict[int, DataStream] = {}
        self.into: dict[int, DataStream] = {}
        accepting = threading.Thread(target=self._accept, args=(listener, len(ports) - 1))
        accepting.start()
        for peer, port in enumerate(ports):
            if peer != me:
                sock = socket.create_connection(("127.0.0.1", port))
                sock.sendall(bytes([me]))
                self.out[peer] = self._stream(sock, f"{peer}", dialled=True)
        accepting.join()
        self.reduction: Reduction | None = None
        self.attempt = 0
        self.changed = threading.Condition()
        for peer, stream in self.into.items():
            threading.Thread(target=self._read, args=(peer, stream), daemon=True).start()

    def _accept(self, listener: socket.socket, count: int) -> None:
        for _ in range(count):
            sock, _ = listener.accept()
            peer = sock.recv(1)[0]
            self.into[peer] = self._stream(sock, f"{peer}", dialled=False)

    def _stream(self, sock: socket.socket, peer: str, *, dialled: bool) -> DataStream:
        if self.streams == "plain":
            return PlainStream(sock, peer)
        return SealedStream(sock, peer, SECRET, dialled=dialled)

    def _read(self, peer: int, stream: DataStream) -> None:
        head = memoryview(bytearray(HEADER.size))
        while True:
            stream.recv_into(head, idle=True)
            attempt, kind, chunk, length = HEADER.unpack(head)
            with self.changed:
                self.changed.wait_for(lambda attempt=attempt: self.attempt >= attempt)
            assert self.reduction is not None
            buffer = self.reduction.reserve(peer, kind, chunk, length, 60.0)
            assert buffer is not None
            stream.recv_into(buffer)
            self.reduction.received(peer, kind, chunk)

    def begin(self, reduction: Reduction) -> None:
        with self.changed:
            self.reduction = reduction
            self.attempt += 1
            self.changed.notify_all()
        reduction.start({p: Outlet(self.out[p], self.attempt) for p in reduction.destinations})


class Outlet:
    def __init__(self, stream: DataStream, attempt: int) -> None:
        self.stream, self.attempt = stream, attempt

    def send(self, kind: int, chunk: int, payload: memoryview) -> None:
        self.stream.sendall(HEADER.pack(self.attempt, kind, chunk, payload.nbytes), payload)


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
    meshes = {streams: Mesh(me, ports, listener, streams) for streams in chosen.streams}
    store = f"tcp://127.0.0.1:{chosen.store}"
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=len(ports))
    elements = int(chosen.mib * 2**20) // 4
    values = np.random.default_rng(me).standard_normal(elements, np.float32)
    tensor = torch.from_numpy(values.copy())
    sides: dict[str, Callable[[], None]] = {"gloo float32": lambda: dist.all_reduce(tensor)}
    for streams, mesh in meshes.items():
        for name in chosen.codecs:
            once = atoll_side(mesh, name, elements)
            sides[f"atoll {streams} {name}"] = lambda once=once: once(values)
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
        gloo_s = statistics.median(took["gloo float32"])
        for name, each_s in took.items():
            median_s, cpu_s = statistics.median(each_s), statistics.median(worked[name])
            print(
                f"{len(ports)} peers  {chosen.mib:g} MiB  {name:<22} {median_s * 1e3:8.1f} ms"
                f"   {gloo_s / median_s:5.2f} x Gloo   {cpu_s * 1e3:7.1f} ms of a core each",
                flush=True,
            )
    dist.destroy_process_group()


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
