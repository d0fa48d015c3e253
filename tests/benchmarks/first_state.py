"""Measure how the first parameters of a run reach all hosts: bytes that each sends, and the time.

    python tests/benchmarks/first_state.py [--hosts 4] [--mbit 50] [--rtt-ms 20]
        [--parameters 10e6] [--times 3]

Real daemons with numpy trainers on the hosts of a lab; needs root. The time is from the first MiB
that leaves the first host until every daemon holds the state. ``over_ideal``: that time over
(state / downlink). Where all copied from one, it would be hosts - 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.labnet import NAMES, LabNet
from harness.processes import fleet, until

from atoll.peer.lab.lab import Lab

BYTES_PER_PARAMETER = 4  # float32; the momentum begins as zeros
PAYLOAD_SHARE = 1448 / 1500  # TCP's of a full packet, with timestamps
BEGUN_BYTES = 1 << 20
LIMIT_S = 600.0
LONG_S = 3600.0  # no second round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--parameters", type=float, default=10e6)
    parser.add_argument("--times", type=int, default=3)
    chosen = parser.parse_args()
    best_s = ideal_s(chosen)
    found = []
    for _ in range(chosen.times):
        took_s, sent = one_turn(chosen)
        found.append((took_s, sent))
        shown = " ".join(f"{each / 1e6:.1f}" for each in sent)
        print(
            f"{took_s:.2f} s, {took_s / best_s:.2f} times the state over one downlink"
            f" ({best_s:.2f} s); MB sent by each: {shown}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    results.say("first_state/over_ideal", statistics.median(s for s, _ in found) / best_s, "x")
    uneven = statistics.median(max(sent) / statistics.mean(sent) for _, sent in found)
    results.say("first_state/most_over_mean", uneven, "x")


def ideal_s(chosen: argparse.Namespace) -> float:
    """Return how long the state takes over one downlink."""
    state_bytes = BYTES_PER_PARAMETER * chosen.parameters
    return float(state_bytes / PAYLOAD_SHARE * 8 / (chosen.mbit * 1e6))


def one_turn(chosen: argparse.Namespace) -> tuple[float, list[int]]:
    """Return the seconds until all have the state, and the bytes that each line has sent."""
    names = NAMES[: chosen.hosts]
    hosts = range(chosen.hosts)
    with (
        Lab(chosen.hosts, rate_mbit=chosen.mbit, rtt_ms=chosen.rtt_ms) as lab,
        tempfile.TemporaryDirectory() as folder,
        fleet(Path(folder), LabNet(lab)) as run,  # type: ignore[arg-type]  # what a fleet needs
    ):
        run.form(names)
        before = [lab.counters(host).sent_bytes for host in hosts]
        for name in names:
            run.train(name, chosen.parameters, inner_s=LONG_S)

        def sent() -> list[int]:
            return [lab.counters(host).sent_bytes - before[host] for host in hosts]

        def are_there() -> bool:
            return all(run.peers[name].try_status().get("digest") for name in names)

        watched = run.peers.values()
        until(lambda: max(sent()) > BEGUN_BYTES, "it begins", *watched, timeout_s=LIMIT_S)
        begun_s = time.monotonic()
        until(are_there, "all have the state", *watched, timeout_s=LIMIT_S)
        return time.monotonic() - begun_s, sent()


if __name__ == "__main__":
    main()
