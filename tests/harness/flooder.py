"""Idle connections without end: from each source to each target so many a second, nothing sent.

Arguments: rate per source, seconds that each connection is held, sources (IPv4, comma-separated),
targets (HOST:PORT, comma-separated). Prints one JSON line per second: connections so far, how many
the kernel would not begin, and the processor time of this process. Until it is killed.
"""

from __future__ import annotations

import json
import resource
import socket
import struct
import sys
import time
from collections import deque

RESET = struct.pack("ii", 1, 0)  # the end of a connection leaves nothing behind here
NO_PORT = 24  # IP_BIND_ADDRESS_NO_PORT: the port is chosen when the target is known
BEHIND_S_MAX = 0.05  # what a busy machine has not let us do is not made up for


def begin(source: str, target: tuple[str, int]) -> socket.socket | None:
    sock = socket.socket()
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        sock.setsockopt(socket.IPPROTO_IP, NO_PORT, 1)
        sock.bind((source, 0))
        sock.connect_ex(target)
    except OSError:
        sock.close()
        return None
    return sock


def main() -> None:
    rate, hold_s = float(sys.argv[1]), float(sys.argv[2])
    sources = sys.argv[3].split(",")
    targets = [
        (host, int(port)) for host, _, port in (t.rpartition(":") for t in sys.argv[4].split(","))
    ]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pairs = [(source, target) for source in sources for target in targets]
    per_s = rate * len(pairs)
    held: deque[tuple[float, socket.socket]] = deque()
    begun = failed = number = 0
    due_s = told_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        due_s = max(due_s, now_s - BEHIND_S_MAX)
        while due_s <= now_s:
            due_s += 1 / per_s
            sock = begin(*pairs[number % len(pairs)])
            number += 1
            if sock is None or len(held) > hard - 100:
                failed += 1
            if sock is not None:
                begun += 1
                held.append((now_s, sock))
        while held and (held[0][0] < now_s - hold_s or len(held) > hard - 200):
            held.popleft()[1].close()
        if now_s - told_s >= 1.0:
            told_s = now_s
            cpu_s = time.process_time()
            line = {"begun": begun, "failed": failed, "cpu_s": cpu_s, "now_s": now_s}
            print(json.dumps(line), flush=True)
        time.sleep(max(0.0, min(0.01, due_s - time.monotonic())))


if __name__ == "__main__":
    main()
