"""Milliseconds of short collectives of two sessions on one machine, called one after the other.

    python tests/benchmarks/short_calls.py [--elements 256] [--times 200] [--turns 3]

Two daemons and two trainers, each a process, on loopback and sealed, as a user has them; nothing
waits between two calls. Printed are the medians of one trainer, and the processor's time that each
daemon takes for a call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.processes import Peer, fleet

import atoll

WARM = 20
BAR_MS = 5.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=256, help="of float32: 1 KiB")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--trainer", help="the home of its daemon: be one trainer")
    chosen = parser.parse_args()
    if chosen.trainer:
        print(json.dumps(train(chosen.trainer, chosen.elements, chosen.times)))
        return
    for turn in range(chosen.turns):
        measure(turn, chosen.elements, chosen.times)


def train(home: str, elements: int, times: int) -> dict[str, float]:
    """Return the median milliseconds of each call."""
    session, values = atoll.connect(home), np.ones(elements, np.float32)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: session.all_reduce(values),
        "barrier": session.barrier,
    }
    for _ in range(WARM):
        session.all_reduce(values)
    took_ms = {}
    for name, call in calls.items():
        each_ms = []
        for _ in range(times):
            began_s = time.perf_counter()
            call()
            each_ms.append(1e3 * (time.perf_counter() - began_s))
        took_ms[name] = statistics.median(each_ms)
    session.close()
    return took_ms


def measure(turn: int, elements: int, times: int) -> None:
    """Print what one fresh run of two takes."""
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
        run.options = lambda name: ("--min-trainers", "2") if name == "a" else ()
        run.form("ab")
        peers = [run.peers[name] for name in "ab"]
        before_s = [processor_s(peer) for peer in peers]
        asked = ["--elements", str(elements), "--times", str(times), "--trainer"]
        trainers = [
            subprocess.Popen(
                [sys.executable, __file__, *asked, str(peer.home)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for peer in peers
        ]
        said = [trainer.communicate()[0] for trainer in trainers]
        calls = WARM + 2 * times
        spent_ms = [
            1e3 * (processor_s(peer) - before) / calls
            for peer, before in zip(peers, before_s, strict=True)
        ]
    for name, took_ms in json.loads(said[0]).items():
        print(f"turn {turn + 1}: {name:<12}{took_ms:6.2f} ms  bar {BAR_MS:g}")
        results.say(f"short_calls/{name}", took_ms, "ms")
    print(
        f"turn {turn + 1}: the daemons' processor {spent_ms[0]:.2f} and {spent_ms[1]:.2f} ms a call"
    )


def processor_s(peer: Peer) -> float:
    """Return the processor's time that a daemon has taken so far, in seconds."""
    fields = Path(f"/proc/{peer.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


if __name__ == "__main__":
    main()
