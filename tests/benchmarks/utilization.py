"""How much of the time trainers compute: DiLoCo beside StreamingDiLoCo, on slow links; as root.

    python tests/benchmarks/utilization.py [--hosts 4] [--mbit 50] [--rtt-ms 80]
        [--parameters 8e6] [--sync-every 30] [--step-s 0.2] [--rounds 6] [--warm 4]

Each peer is a daemon with a trainer of its own on a host of a lab. A local step takes ``--step-s``
(harness/timed_trainer.py), and the methods have their usual codecs: int8 and 4 bits. The first
rounds, in which links are measured and StreamingDiLoCo finds its delay, do not count. Shares are
those of the peer that computes least, over whole rounds. All peers must agree on every digest.

With the numbers above a round of DiLoCo moves 12 MB out of each host, 2 s of its link, beside 6 s
of computing: less than 80 %, which is where StreamingDiLoCo is to have 95 % and more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.labnet import NAMES, LabNet
from harness.processes import Fleet, Process, fleet

from atoll.peer.lab.lab import Lab

TRAINER = Path(__file__).parents[1] / "harness" / "timed_trainer.py"
METHODS = ("diloco", "streaming_diloco")
START_S, PATIENCE = 60.0, 10.0  # a minute, and many times what the steps alone take
LOOK_S = 0.5  # peers share the cores with this script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--rtt-ms", type=float, default=80.0)
    parser.add_argument("--parameters", type=float, default=8e6)
    parser.add_argument("--sync-every", type=int, default=30)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=6, help="that count, of each method")
    parser.add_argument("--warm", type=int, default=4, help="rounds before them")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    chosen = parser.parse_args()
    print(
        f"{chosen.hosts} hosts, {chosen.mbit:g} Mbit/s, {chosen.rtt_ms:g} ms; "
        f"{chosen.parameters / 1e6:g} million parameters, rounds of {chosen.sync_every} steps of "
        f"{chosen.step_s:g} s",
        flush=True,
    )
    for method in chosen.methods:
        with (
            Lab(chosen.hosts, rate_mbit=chosen.mbit, rtt_ms=chosen.rtt_ms) as lab,
            tempfile.TemporaryDirectory() as folder,
            fleet(Path(folder), LabNet(lab)) as run,  # type: ignore[arg-type]  # what a fleet needs
        ):
            measure(run, method, chosen)


def measure(run: Fleet, method: str, chosen: argparse.Namespace) -> None:
    names = NAMES[: chosen.hosts]
    run.form(names)
    trainers = {name: start(run, name, method, chosen) for name in names}
    begin, end = (chosen.sync_every * n for n in (chosen.warm, chosen.warm + chosen.rounds))
    limit_s = time.monotonic() + START_S + PATIENCE * end * chosen.step_s
    while min(map(steps, trainers.values())) < end:
        assert time.monotonic() < limit_s, run.report()
        time.sleep(LOOK_S)
    shares = []
    for name, trainer in trainers.items():
        lines = {line["steps"]: line for line in trainer.lines if "steps" in line}
        first, last = lines[begin], lines[end]
        took_s = last["now_s"] - first["now_s"]
        shares.append((last["computed_s"] - first["computed_s"]) / took_s)
        print(
            f"{method:<16} {name}: computes {shares[-1]:6.1%} of {took_s:6.1f} s; rounds "
            f"{last['rounds'] - first['rounds']:.0f}, missed {last['missed']:.0f}, waited "
            f"{last['waited_s'] - first['waited_s']:.1f} s",
            flush=True,
        )
    said = [line for line in trainers["a"].text.splitlines() if "merged" in line]
    print(*said[-1:], f"{run.agree(names)} digests are equal everywhere", sep="\n", flush=True)
    results.say(f"{method}/computes", 100 * min(shares), "%")


def start(run: Fleet, name: str, method: str, chosen: argparse.Namespace) -> Process:
    numbers = (int(chosen.parameters), chosen.sync_every, chosen.step_s)
    command = [sys.executable, str(TRAINER), str(run.peers[name].home), method]
    process = Process([*command, *map(str, numbers)], run.folder / f"trainer-{name}.log")
    run.trainers[name] = process
    return process


def steps(trainer: Process) -> int:
    lines: list[dict[str, Any]] = trainer.lines
    errors = [line for line in lines if "error" in line]
    if errors:
        raise SystemExit(f"{trainer.log.name}: {errors[0]}")
    return int(lines[-1].get("steps", 0)) if lines else 0


if __name__ == "__main__":
    main()
