"""Rounds of real daemons between hosts of a lab, before their links are known and after; as root.

    python tests/benchmarks/planned.py [--hosts 4] [--mbit 100] [--rtt-ms 50] [--loss 0.5]
        [--slow 20] [--mib 16] [--codec float32] [--rounds 6] [--inner-s 4] [--congestion cubic]

Each peer is a daemon with a numpy trainer on a host of its own. Nothing is configured: the daemons
probe the ways between them, and the coordinator plans. A round's time is the daemon's own, from
BEGIN to the end of the outer step; ``--inner-s`` of training lie between two, so that probes have
time. The share of the rate is what a perfect all-reduce moves, divided by the slowest daemon's time
and the rate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.labnet import NAMES, LabNet
from harness.processes import Fleet, fleet

from atoll.collectives import get_codec
from atoll.peer.lab.lab import Lab

PATIENCE_S = 600.0  # for the plan, and for each round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--loss", type=float, default=0.0, help="percent, each way")
    parser.add_argument("--slow", type=float, default=0.0, help="Mbit/s of the last host's link")
    parser.add_argument("--mib", type=float, default=16.0)
    parser.add_argument("--codec", default="float32")
    parser.add_argument("--rounds", type=int, default=6, help="of each kind")
    parser.add_argument("--inner-s", type=float, default=4.0)
    parser.add_argument("--congestion", default="auto", help="auto, cubic, bbr")
    chosen = parser.parse_args()
    rates = dict.fromkeys(range(chosen.hosts), chosen.mbit)
    if chosen.slow:
        rates[chosen.hosts - 1] = chosen.slow
    with (
        Lab(chosen.hosts, rate_mbit=rates, rtt_ms=chosen.rtt_ms, loss=chosen.loss) as lab,
        tempfile.TemporaryDirectory() as folder,
        fleet(Path(folder), LabNet(lab)) as run,  # type: ignore[arg-type]  # what a fleet needs
    ):
        names = NAMES[: chosen.hosts]
        run.options = lambda name: ("--congestion", chosen.congestion)
        run.form(names)
        for name in names:
            run.train(name, chosen.mib * 2**18, inner_s=chosen.inner_s, codec=chosen.codec)
        measure(run, names, chosen)


def measure(run: Fleet, names: str, chosen: argparse.Namespace) -> None:
    """One line for each round, and the medians without a plan and with one."""
    took: dict[bool, list[float]] = {False: [], True: []}
    begin_s = time.monotonic()
    last = 1  # INIT
    while len(took[True]) < chosen.rounds and time.monotonic() - begin_s < PATIENCE_S:
        for name in names:
            run.peers[name].reaches(last + 1)
        statuses = [run.peers[name].status() for name in names]
        last = max(status["round"] for status in statuses)
        planned = all(status["layout"] for status in statuses)
        seconds = max(float(status["last_round_s"]) for status in statuses)
        took[planned].append(seconds)
        said = statuses[0]["layout"][:120] or "no plan yet"
        print(f"round {last:3}  {seconds:7.3f} s  {said}", flush=True)
    share = 2 * (chosen.hosts - 1) / chosen.hosts
    elements = int(chosen.mib * 2**18)
    bits = 8 * share * get_codec(chosen.codec).encoded_bytes(elements)
    for planned, seconds in took.items():
        if seconds:
            median_s = statistics.median(seconds)
            used = bits / median_s / (chosen.mbit * 1e6)
            name = "planned" if planned else "without a plan"
            print(f"{name:<16} {median_s:7.3f} s  n={len(seconds)}  {used:6.1%} of the rate")


if __name__ == "__main__":
    main()
