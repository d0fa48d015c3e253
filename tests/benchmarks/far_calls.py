"""Short collectives of sessions over a long way, in round trips; as root.

    python tests/benchmarks/far_calls.py [--peers 2] [--mbit 100] [--rtt-ms 50] [--times 15]

Each daemon is on a host of a lab, and one thread of this script calls for each at the same moment.
The figure is the time from there until the last has its answer, the median of ``--times``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.labnet import NAMES, LabNet
from harness.processes import fleet

import atoll
from atoll.peer.lab.lab import Lab

WARM = 3
BARRIER_ROUND_TRIPS = 2.5
VALUES = np.ones(256, np.float32)  # 1 KiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--times", type=int, default=15)
    chosen = parser.parse_args()
    names = NAMES[: chosen.peers]
    with (
        Lab(chosen.peers, rate_mbit=chosen.mbit, rtt_ms=chosen.rtt_ms) as lab,
        tempfile.TemporaryDirectory() as folder,
        fleet(Path(folder), LabNet(lab)) as run,  # type: ignore[arg-type]  # what a fleet needs
    ):
        run.form(names)
        sessions = [atoll.connect(run.peers[name].home) for name in names]
        together = Together(sessions)
        together(lambda s: s.gather(b"", at_least=len(names)))  # until all are attached
        measure("barrier", together, lambda s: s.barrier(), chosen, BARRIER_ROUND_TRIPS)
        measure("all_reduce of 1 KiB", together, lambda s: s.all_reduce(VALUES), chosen)


class Together:
    """Let all sessions call at once."""

    def __init__(self, sessions: list[atoll.Session]) -> None:
        self._sessions = sessions
        self._pool = ThreadPoolExecutor(len(sessions))

    def __call__(self, call: Callable[[atoll.Session], object]) -> tuple[float, list[object]]:
        """Return how many seconds it took until the last had its answer, and the answers."""
        start, ends = threading.Barrier(len(self._sessions) + 1), []

        def one(session: atoll.Session) -> object:
            start.wait()
            answer = call(session)
            ends.append(time.perf_counter())
            return answer

        waiting = [self._pool.submit(one, session) for session in self._sessions]
        start.wait()
        begun_s = time.perf_counter()
        answers = [each.result() for each in waiting]
        return max(ends) - begun_s, answers


def measure(
    what: str,
    together: Together,
    call: Callable[[atoll.Session], object],
    chosen: argparse.Namespace,
    bar: float = 0.0,
) -> None:
    took_s = [together(call)[0] for _ in range(WARM + chosen.times)][WARM:]
    median_s, trips = statistics.median(took_s), 1e3 / chosen.rtt_ms
    missed = f"  bar {bar:g}{'  MISSED' if median_s * trips > bar else ''}" if bar else ""
    print(
        f"{chosen.peers} peers, {chosen.rtt_ms:g} ms: {what:<20} {median_s * 1e3:7.1f} ms,"
        f" {median_s * trips:.2f} round trips (worst {max(took_s) * trips:.2f}){missed}",
        flush=True,
    )
    results.say(f"{what}/round_trips", median_s * trips, "x")


if __name__ == "__main__":
    main()
