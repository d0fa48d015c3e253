"""Policies towards stragglers on one lab shape: wait, fewer steps, asynchronous, coded; as root.

    python tests/benchmarks/stragglers.py [--mbit 50] [--rtt-ms 40] [--seconds 60]
        [--policies NAME ...] [--patterns turns one]

Four hosts with a daemon and a trainer each (harness/straggling_trainer.py says what a step is). By
*turns* each peer is five times as slow in a fifth of all windows of two seconds; *one* is five
times as slow for good. All begin with the same parameters; a line is the median over peers of the
steps that one has taken and of the held-out loss at a third, two thirds and the end of the time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.labnet import NAMES, LabNet
from harness.processes import Fleet, Process, fleet
from harness.straggling_trainer import POLICIES

from atoll.peer.lab.lab import Lab

TRAINER = Path(__file__).parents[1] / "harness" / "straggling_trainer.py"
PEERS = 4
BEGIN_S = 15.0  # after which all have loaded torch and are attached
LATE_S = 6.0  # whose first line comes later was not there at the beginning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--rtt-ms", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--patterns", nargs="+", default=["turns", "one"], choices=["turns", "one"])
    chosen = parser.parse_args()
    for pattern in chosen.patterns:
        for policy in chosen.policies:
            with (
                Lab(PEERS, rate_mbit=chosen.mbit, rtt_ms=chosen.rtt_ms) as lab,
                tempfile.TemporaryDirectory() as folder,
                fleet(Path(folder), LabNet(lab)) as run,  # type: ignore[arg-type]  # what it needs
            ):
                measure(run, policy, pattern, chosen.seconds)


def measure(run: Fleet, policy: str, pattern: str, seconds: float) -> None:
    names = NAMES[:PEERS]
    run.form(names)
    begin_s = time.time() + BEGIN_S
    trainers = [start(run, n, name, policy, pattern, begin_s) for n, name in enumerate(names)]
    time.sleep(begin_s + seconds + 1 - time.time())
    figures = []
    for part in (1 / 3, 2 / 3, 1):
        found = [at(trainer, part * seconds) for trainer in trainers]
        figures.append(tuple(statistics.median(x) for x in zip(*found, strict=True)))
    shown = ", ".join(f"{steps:4.0f} steps {loss:.4f}" for steps, loss in figures)
    print(f"{pattern:<6} {policy:<18} {shown}", flush=True)
    name = policy.replace(",", "").replace(" ", "-")
    results.say(f"{pattern}/{name}/loss", figures[-1][1], "1")


def at(trainer: Process, second: float) -> tuple[float, float]:
    """Return steps and loss of the last line until then."""
    errors = [line for line in trainer.lines if "error" in line]
    late = [line for line in trainer.lines[:1] if line.get("at_s", 0.0) > LATE_S]
    if errors or late or trainer.popen.poll() is not None:
        raise SystemExit(f"{trainer.log.name}: {errors or late or trainer.text[-500:]}")
    line = [line for line in trainer.lines if line.get("at_s", second + 1) <= second][-1]
    return float(line["steps"]), float(line["loss"])


def start(run: Fleet, number: int, name: str, policy: str, pattern: str, begin_s: float) -> Process:
    command = [sys.executable, str(TRAINER), str(run.peers[name].home), policy, pattern]
    numbers = map(str, (number, PEERS, begin_s))
    process = Process([*command, *numbers], run.folder / f"trainer-{name}.log")
    run.trainers[name] = process
    return process


if __name__ == "__main__":
    main()
