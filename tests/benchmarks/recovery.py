"""Seconds from SIGKILL of a daemon in the middle of a reduce to the next commit on all survivors.

    python tests/benchmarks/recovery.py [--peers 4] [--mib 16] [--times 10]

Loopback, numpy trainers. For each kill the fleet is whole again before the next one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.processes import Fleet, fleet, until


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mib", type=float, default=16.0, help="float32 parameters")
    parser.add_argument("--times", type=int, default=10, help="kills of each kind")
    arguments = parser.parse_args()
    elements = arguments.mib * 2**20 / 4
    names = "abcdefgh"[: arguments.peers]
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
        run.form(names)
        for name in names:
            run.train(name, elements, inner_s=0.05)
        for name in names:
            run.peers[name].reaches(4)
        for kind in ("member", "coordinator"):
            took_s = [kill_one(run, names, kind, elements) for _ in range(arguments.times)]
            print(
                f"SIGKILL of a {kind:<11} {arguments.peers} peers, {arguments.mib:g} MiB: "
                f"median {statistics.median(took_s):.3f} s, max {max(took_s):.3f} s, "
                f"n={len(took_s)}",
                flush=True,
            )


def kill_one(run: Fleet, names: str, kind: str, elements: float) -> float:
    """Kill, measure, restart the victim and wait until everybody trains again."""
    leader = next(n for n in names if run.peers[n].status()["phase"] == "coordinator")
    victim = leader if kind == "coordinator" else next(n for n in names if n != leader)
    peer = run.peers[victim]
    until(lambda: peer.try_status().get("attempt"), "a reduce", peer)
    killed_s = time.time()
    peer.kill()
    survivors = [name for name in names if name != victim]
    took_s = max(until_commit(run, name, killed_s) for name in survivors) - killed_s
    run.trainers[victim].ends()
    run.up(victim)
    run.sees(victim, len(names))
    run.train(victim, elements, inner_s=0.05)
    fresh = run.trainers[victim]
    until(lambda: len(fresh.lines) > 3, "the restarted trainer contributes", fresh)
    return took_s


def until_commit(run: Fleet, name: str, after_s: float) -> float:
    def committed() -> float | None:
        times = [x["unix_s"] for x in run.trainers[name].lines if x.get("kind") == "committed"]
        return next((t for t in times if t > after_s), None)

    return until(committed, f"{name} commits again", *run.peers.values())


if __name__ == "__main__":
    main()
