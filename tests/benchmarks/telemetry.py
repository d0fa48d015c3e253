"""Measure what events and rows cost a run: processor time of daemons, bytes for each row.

    python tests/benchmarks/telemetry.py [--parameters 1e6] [--round-s 1] [--rounds 30] [--turns 3]

Four daemons with trainers, by turns with and without events and rows. ``share``: what their own
methods take of the processor time of a daemon, measured inside it by the clock of its thread, of
all rounds; ``on_off``: what a daemon takes longer for a round with them than without, the median of
the turns, which has also what the network and the decoder do for rows, and the noise of the
machine. Bytes: of a row on the wire, and in the file of a home for each round and peer, the events
among them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.processes import Fleet, Peer, fleet

from atoll.peer.telemetry.event_file import files_of, read

NAMES = "abcd"
WARM_ROUNDS = 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=1e6)
    parser.add_argument("--round-s", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3)
    chosen = parser.parse_args()
    taken: dict[str, list[float]] = {"timed": [], "off": []}
    for _ in range(chosen.turns):
        for how, found in taken.items():
            with tempfile.TemporaryDirectory() as folder:
                found.append(turn(Path(folder), how, chosen))
    on_s, off_s = (statistics.median(found) for found in taken.values())
    results.say("telemetry_off_cpu_per_round", 1e3 * off_s, "ms")
    results.say("telemetry_on_cpu_per_round", 1e3 * on_s, "ms")
    results.say("telemetry_on_off", 100 * (on_s / off_s - 1), "%")


def turn(folder: Path, how: str, chosen: argparse.Namespace) -> float:
    """Return what the four take of the processor for one round each, in seconds."""
    with fleet(folder) as run:
        run.odd = dict.fromkeys(NAMES, f"telemetry:{how}")
        run.form(NAMES)
        for name in NAMES:
            run.train(name, chosen.parameters, inner_s=chosen.round_s)
        first = min(run.peers[name].reaches(WARM_ROUNDS)["round"] for name in NAMES)
        began_s = cpu_s(run)
        last = min(run.peers[name].reaches(first + chosen.rounds)["round"] for name in NAMES)
        each_s = (cpu_s(run) - began_s) / (last - first)
        if how == "timed":
            say_costs(run)
        return each_s / len(NAMES)


def cpu_s(run: Fleet) -> float:
    """Return the processor time that all daemons have taken so far, in seconds."""
    found = 0
    for peer in run.peers.values():
        fields = Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()
        found += int(fields[11]) + int(fields[12])
    return found / TICKS_PER_S


def say_costs(run: Fleet) -> None:
    shares, wire, file = zip(*map(costs, run.peers.values()), strict=True)
    results.say("telemetry_share", 100 * max(shares), "%")
    results.say("telemetry_row_on_the_wire", max(wire), "B")
    results.say("telemetry_file_per_round_and_peer", max(file), "B")


def costs(peer: Peer) -> tuple[float, float, float]:
    """Return the share of the time since the warm rounds, bytes of a row, bytes in the file."""
    told = [line for line in peer.lines if "telemetry_s" in line]
    before, after = told[WARM_ROUNDS], told[-1]
    spent_s = [sum(line["telemetry_s"].values()) for line in (before, after)]
    share = (spent_s[1] - spent_s[0]) / (after["cpu_s"] - before["cpu_s"])
    rounds = {(e["peer"], e["last"]) for e in read(peer.home) if e["kind"] == "row"}
    file_bytes = sum(path.stat().st_size for path in files_of(peer.home))
    return share, after["row_bytes"] / len(told), file_bytes / len(rounds)


if __name__ == "__main__":
    main()
