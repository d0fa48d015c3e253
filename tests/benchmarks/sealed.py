"""One data stream over loopback: plain TCP, sealed records, TLS. GB/s of payload.

    python tests/benchmarks/sealed.py [--mib 128] [--frame-kib 1024] [--times 7]

The sender and the receiver are processes of their own. Each of the three streams carries the same
frames in turn, so that all of them meet the same noise; medians. The receiver's clock counts, from
the first frame's header to the last one's end.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from atoll.peer.net.certs import run_tls
from atoll.peer.net.identity import Home
from atoll.peer.net.tls import TlsChannel
from atoll.peer.streams.frames import DATA_HEADER_BYTES
from atoll.peer.streams.stream import DataStream, PlainStream, SealedStream, TlsStream

MODES = ("plain", "sealed", "tls")
# Of this benchmark's run, which is nobody's.
SECRET = bytes(range(32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=128, help="payload of one measurement")
    parser.add_argument("--frame-kib", type=int, default=1024, help="payload of one frame")
    parser.add_argument("--times", type=int, default=7, help="measurements of each stream")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    frame_bytes = arguments.frame_kib << 10
    frames = (arguments.mib << 20) // frame_bytes
    if arguments.receive:
        receive(frame_bytes, frames, arguments.times)
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--receive"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        port = int(receiver.stdout.readline())
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        busy: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        streams = {mode: dialled(mode, port) for mode in MODES}
        header, payload = bytes(DATA_HEADER_BYTES), memoryview(bytearray(frame_bytes))
        for _ in range(arguments.times + 1):  # the first one warms up
            for mode, stream in streams.items():
                started_s = time.process_time()
                for _ in range(frames):
                    stream.sendall(header, payload)
                sending_s = time.process_time() - started_s
                elapsed_s, receiving_s = map(float, receiver.stdout.readline().split())
                rates[mode].append(frames * frame_bytes / elapsed_s / 1e9)
                mib = frames * frame_bytes / 2**20
                busy[mode].append((1e3 * sending_s / mib, 1e3 * receiving_s / mib))
        for stream in streams.values():
            stream.close()
    print(f"one stream, loopback, frames of {arguments.frame_kib} KiB, n={arguments.times}")
    for mode in MODES:
        warm = rates[mode][1:]
        sending_ms, receiving_ms = map(statistics.median, zip(*busy[mode][1:], strict=True))
        print(
            f"{mode:>7}: {statistics.median(warm):5.2f} GB/s ({min(warm):.2f} to {max(warm):.2f});"
            f" a core is busy {sending_ms:.3f} ms per MiB sent, {receiving_ms:.3f} received"
        )


def receive(frame_bytes: int, frames: int, times: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        streams = [opened(mode, listening.accept()[0], dialled=False) for mode in MODES]
    header = memoryview(bytearray(DATA_HEADER_BYTES))
    payload = memoryview(bytearray(frame_bytes))
    for _ in range(times + 1):
        for stream in streams:
            stream.recv_into(header, idle=True)
            started_s, cpu_s = time.perf_counter(), time.process_time()
            stream.recv_into(payload)
            for _ in range(frames - 1):
                stream.recv_into(header, idle=True)
                stream.recv_into(payload)
            print(time.perf_counter() - started_s, time.process_time() - cpu_s, flush=True)
    for stream in streams:
        stream.close()


def dialled(mode: str, port: int) -> DataStream:
    return opened(mode, socket.create_connection(("127.0.0.1", port)), dialled=True)


def opened(mode: str, sock: socket.socket, *, dialled: bool) -> DataStream:
    if mode == "plain":
        return PlainStream(sock, "the other side")
    if mode == "sealed":
        return SealedStream(sock, "the other side", SECRET, dialled=dialled)
    return asyncio.run(shaken(sock, dialled))


async def shaken(sock: socket.socket, dialled: bool) -> TlsStream:
    with tempfile.TemporaryDirectory() as folder:
        home = Home.open(Path(folder) / "home")
        tls = run_tls(home, SECRET)
        home.close()
    context: ssl.SSLContext = tls.client if dialled else tls.server
    channel = TlsChannel(sock, context, server_side=not dialled)
    await channel.handshake()
    return TlsStream(channel.take(), "the other side")


if __name__ == "__main__":
    main()
