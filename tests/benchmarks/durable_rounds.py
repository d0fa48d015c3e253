"""Measure what durable rounds cost a run, and what they save whoever is started again.

    python tests/benchmarks/durable_rounds.py [--only rounds barrier restart] [--parameters 10e6]
        [--round-s 5] [--rounds 8] [--turns 3] [--disk-mb-per-s 200] [--sync-ms 5]
        [--restart-parameters 100e6] [--mbit 100]

``rounds``: two daemons and trainers, by turns with ``--durable rounds`` on a disk of that speed
(harness/slow_disk.py; the files are in memory) and with ``--durable off``; what the median round
takes longer, and what is written for one. ``barrier``: the same of a session's ``barrier()``.
``restart``: three daemons in a lab (needs root) with links of that speed; what one receives that is
killed and comes back, until it takes part again, beside the results of the rounds it has missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import itertools

from harness import results
from harness.labnet import LabNet
from harness.processes import Fleet, fleet, until
from harness.slow_disk import SlowDisk

import atoll
from atoll.peer.lab.lab import Lab

MEMORY = Path("/dev/shm")
LIMIT_S = 900.0
BARRIERS = 50
WARM_ROUNDS = 2  # the first state, and a round
MISSED = 2
ALLOWED_BYTES = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = {"rounds": rounds, "barrier": barriers, "restart": restart}
    parser.add_argument("--only", nargs="+", choices=list(kinds), default=list(kinds))
    parser.add_argument("--parameters", type=float, default=10e6)
    parser.add_argument("--round-s", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--disk-mb-per-s", type=float, default=200.0)
    parser.add_argument("--sync-ms", type=float, default=5.0)
    parser.add_argument("--restart-parameters", type=float, default=100e6)
    parser.add_argument("--mbit", type=float, default=100.0)
    chosen = parser.parse_args()
    for kind in chosen.only:
        kinds[kind](chosen)


@contextmanager
def pair(durable: str, chosen: argparse.Namespace) -> Iterator[tuple[Fleet, list[SlowDisk]]]:
    """Form a run of two daemons, each with a disk of its own."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as made:
        folder, disks = Path(made), []
        with fleet(folder) as run:
            run.options = lambda name: ("--durable", durable)
            for name in "ab":
                (folder / name).mkdir(mode=0o700)
                speed, sync_s = 1e6 * chosen.disk_mb_per_s, 1e-3 * chosen.sync_ms
                disks.append(SlowDisk(folder / name, folder / f"disk-{name}", speed, sync_s))
                run.environment = disks[-1].environment
                run.join(name) if run.invite else run.up(name)
            for name in "ab":
                run.sees(name, 2)
            yield run, disks


# ---------------------------------------------------------------- rounds


def rounds(chosen: argparse.Namespace) -> None:
    took_s: dict[str, list[float]] = {"rounds": [], "off": []}
    written: list[float] = []
    syncs: list[float] = []
    for turn in range(chosen.turns):
        for durable in ("rounds", "off") if turn % 2 else ("off", "rounds"):
            with pair(durable, chosen) as (run, disks):
                found = round_times(run, disks, chosen)
                took_s[durable] += found[0]
                print(f"{durable:7} {1e3 * statistics.median(found[0]):8.1f} ms, with the training")
                if durable == "rounds":
                    written.append(found[1])
                    syncs.append(found[2])
    cost_s = statistics.median(took_s["rounds"]) - statistics.median(took_s["off"])
    results.say("durable/round_cost", 1e3 * cost_s, "ms")
    results.say("durable/round_cost_share", 100 * cost_s / chosen.round_s, "%")
    nbytes = statistics.median(written)
    results.say("durable/written_per_round", nbytes / 1e6, "MB")
    results.say("durable/written_per_parameter_and_round", nbytes / chosen.parameters, "bytes")
    results.say("durable/syncs_per_round", statistics.median(syncs), "syncs")


def round_times(
    run: Fleet, disks: list[SlowDisk], chosen: argparse.Namespace
) -> tuple[list[float], float, float]:
    """Return the seconds of each round, and bytes and syncs of a peer for one."""
    for name in "ab":
        run.train(name, chosen.parameters, inner_s=chosen.round_s)
    watched = [*run.peers.values(), *run.trainers.values()]

    def times(name: str) -> list[float]:
        return [line["unix_s"] for line in run.trainers[name].lines if "unix_s" in line]

    def done(many: int) -> bool:
        time.sleep(0.05)
        return all(len(times(name)) >= many for name in "ab")

    until(lambda: done(WARM_ROUNDS), "it begins", *watched, timeout_s=LIMIT_S)
    before = [(disk.written_bytes, disk.syncs) for disk in disks]
    until(lambda: done(WARM_ROUNDS + chosen.rounds), "rounds", *watched, timeout_s=LIMIT_S)
    count = min(len(times(name)) for name in "ab") - WARM_ROUNDS
    written = statistics.mean(
        disk.written_bytes - was[0] for disk, was in zip(disks, before, strict=True)
    )
    syncs = statistics.mean(disk.syncs - was[1] for disk, was in zip(disks, before, strict=True))
    took = []
    for name in "ab":
        ends = times(name)[WARM_ROUNDS - 1 :]
        took += [later - earlier for earlier, later in itertools.pairwise(ends)]
    return took, written / count, syncs / count


# ---------------------------------------------------------------- barrier()


def barriers(chosen: argparse.Namespace) -> None:
    took_s: dict[str, list[float]] = {}
    with pair("rounds", chosen) as (first, _), pair("off", chosen) as (second, _):
        runs = {"rounds": first, "off": second}
        for durable, run in runs.items():
            took_s[durable] = []
            barrier_times(run)  # the first ones open streams
        for _ in range(chosen.turns):
            for durable, run in runs.items():
                took_s[durable] += barrier_times(run)
    for durable, found in took_s.items():
        print(f"barrier() with --durable {durable}: {1e3 * statistics.median(found):.2f} ms")
    cost_s = statistics.median(took_s["rounds"]) - statistics.median(took_s["off"])
    results.say("durable/barrier_cost", 1e3 * cost_s, "ms")


def barrier_times(run: Fleet) -> list[float]:
    context = get_context("fork")
    found: Queue[list[float]] = context.Queue()
    homes = [run.peers[name].home for name in "ab"]
    processes = [context.Process(target=call_barriers, args=(home, found)) for home in homes]
    for process in processes:
        process.start()
    took = [each for _ in processes for each in found.get(timeout=LIMIT_S)]
    for process in processes:
        process.join()
    return took


def call_barriers(home: Path, found: Queue[list[float]]) -> None:
    session = atoll.connect(home)
    took = []
    while len(session.barrier()) < 2:
        pass
    for _ in range(BARRIERS):
        began_s = time.monotonic()
        session.barrier()
        took.append(time.monotonic() - began_s)
    session.close()
    found.put(took)


# ---------------------------------------------------------------- a restart


def restart(chosen: argparse.Namespace) -> None:
    elements = chosen.restart_parameters
    with (
        Lab(3, rate_mbit=chosen.mbit, rtt_ms=20.0) as lab,
        tempfile.TemporaryDirectory() as made,
        fleet(Path(made), LabNet(lab)) as run,  # type: ignore[arg-type]  # what a fleet needs
    ):
        run.form("abc")
        for name in "abc":
            run.train(name, elements, inner_s=chosen.round_s)
        reaches(run, "c", 2)
        at = run.peers["c"].status()["round"]
        for process in (run.peers["c"], run.trainers["c"]):
            process.kill()
            process.ends()
        reaches(run, "a", at + MISSED)
        began_s = time.monotonic()
        run.again("c")
        first = takes_part(run, "c")
        took_s = time.monotonic() - began_s
        status = run.peers["c"].status()
        files = (run.peers["a"].home / "rounds").iterdir()
        result_bytes = min(file.stat().st_size for file in files)  # the first one is float32
    received = {kind: n for kind, n in status["bytes"]["received"].items() if kind != "rounds"}
    missed = first - 1 - at
    allowed = missed * result_bytes + ALLOWED_BYTES  # int8: 1.016 bytes per parameter
    shown = ", ".join(f"{kind} {nbytes / 1e6:.2f} MB" for kind, nbytes in received.items())
    print(f"killed at round {at}, takes part in {first} after {took_s:.1f} s; received {shown}")
    results.say("durable/restart_received", sum(received.values()) / 1e6, "MB")
    results.say("durable/restart_over_allowed", sum(received.values()) / allowed, "x")
    results.say("durable/restart_allowed", allowed / 1e6, "MB")
    results.say("durable/restart_state", 8 * elements / 1e6, "MB")


def takes_part(run: Fleet, name: str) -> int:
    """Wait until what a trainer handed in is in a round again; return which."""

    def its_rounds() -> list[int]:
        time.sleep(0.05)
        run.tend(name)
        lines = run.trainers[name].lines
        return [line["round"] for line in lines if line.get("kind") == "committed"]

    watched = [*run.peers.values(), *run.trainers.values()]
    return until(its_rounds, f"{name} takes part", *watched, timeout_s=LIMIT_S)[0]


def reaches(run: Fleet, name: str, number: int) -> None:
    """Wait until a peer has this round; as long as large states take."""

    def there() -> bool:
        time.sleep(0.05)
        run.tend(name)
        status = run.peers[name].try_status()
        return bool(status.get("digest")) and status["round"] >= number

    until(there, f"{name} reaches round {number}", *run.peers.values(), timeout_s=LIMIT_S)


if __name__ == "__main__":
    main()
