"""Measure what the status page costs with eight hours of twenty peers behind it.

A daemon is started in a home whose event files have them. Printed: how long the first look takes
and what processor time of the daemon, how long its event loop then answers nobody, what an open
page costs it from then on, and its memory. Needs Chromium and playwright.

    .venv/bin/python tests/benchmarks/page.py [--peers 20] [--hours 8] [--round 5]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.browser import tab
from harness.long_history import write
from harness.processes import Peer, fleet, until

OPEN_S = 60.0
IDLE_S = 20.0


class Look:
    """Ask a daemon for its status all the time, and remember the slowest answer."""

    def __init__(self, peer: Peer) -> None:
        self.slowest_s = 0.0
        self._peer, self._ends = peer, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ends.is_set():
            begun_s = time.monotonic()
            self._peer.status()
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)

    def __enter__(self) -> Look:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, default=20)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--round", type=float, default=5.0)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
        home = Path(folder) / "a"
        home.mkdir(mode=0o700)
        write(home, parsed.peers, parsed.hours, parsed.round)
        files = sorted(home.glob("events*.jsonl"))
        lines = sum(path.read_bytes().count(b"\n") for path in files)
        print(f"{lines:,} lines, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
        peer = run.up("a", "--page", "127.0.0.1:0")
        url = until(lambda: peer.text.partition("page: ")[2].partition("\n")[0], "a page", peer)
        measure(peer, url)


def measure(peer: Peer, url: str) -> None:
    process = psutil.Process(peer.pid)

    def cpu_s() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    def spent(seconds: float) -> float:
        begun_s = cpu_s()
        time.sleep(seconds)
        return (cpu_s() - begun_s) / seconds

    with Look(peer) as before:
        time.sleep(5)
    idle, memory = spent(IDLE_S), process.memory_info().rss
    print(f"nobody looks: {idle:.2%} of a core, {memory / 1e6:.0f} MB")
    begun_s, used_s = time.monotonic(), cpu_s()
    with Look(peer) as meanwhile:
        data = urllib.request.urlopen(f"{url}api/history?points=320").read()
    print(
        f"first history: {time.monotonic() - begun_s:.2f} s, {cpu_s() - used_s:.2f} s of processor"
        f" (with the questions beside it), {len(data) / 1e3:.0f} kB; slowest answer of the daemon"
        f" meanwhile {1e3 * meanwhile.slowest_s:.0f} ms, before {1e3 * before.slowest_s:.0f} ms"
    )
    for path in ("api/history?points=320", "api/history?points=0", "api/events", "api/status"):
        begun_s, used_s = time.monotonic(), cpu_s()
        for _ in range(10):
            data = urllib.request.urlopen(url + path).read()
        took_ms, cpu_ms = 100 * (time.monotonic() - begun_s), 100 * (cpu_s() - used_s)
        print(f"{path}: {took_ms:.0f} ms, {cpu_ms:.0f} ms of processor, {len(data) / 1e3:.0f} kB")
    with tab() as seen:
        begun_s = time.monotonic()
        seen.open(url)
        print(f"page in the browser: {time.monotonic() - begun_s:.2f} s until all is drawn")
        share = spent(OPEN_S)
    print(f"one page open: {share:.2%} of a core, {process.memory_info().rss / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
