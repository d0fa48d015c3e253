"""Count what `atoll run` loses: machines that are told to go, and scripts that are killed.

    python tests/benchmarks/operated.py [--only leave kills] [--times 50] [--kills 20] [--seed 0]

``leave``: a peer trains all the time; beside it `atoll run` joins, trains, and is sent SIGTERM at a
random moment, again and again. For each: how long until it has ended, whether it has left in order,
and how far the round has moved the run's parameters in which its steps since the last round are, of
how far it should: every step moves them by 1, and those of the other peer weigh alike.

``kills``: `atoll run` alone, whose script is killed at random moments: within three rounds of its
training, every fifth time while it starts. For each: from which round it goes on, and how many
local steps were lost.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.processes import Fleet, Process, fleet, until
from harness.supervised import SYNC_EVERY, Supervised, joining, round_begins, supervise, trains

GRACE_S = 30.0  # as `atoll run` has it by default
HANDED_IN = re.compile(r"SIGTERM: its last (\d+) local steps? counted in round (\d+)")
STEP_S = 0.05
ROUNDED = 0.02  # of float32 after thousands of steps; a step more or less moves by more
ROUND_S = SYNC_EVERY * STEP_S
EARLY = 5  # every fifth kill comes at some moment of a script's start ...
EARLY_S = 5.0  # ... within so long


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=("leave", "kills"), default=("leave", "kills"))
    parser.add_argument("--times", type=int, default=50, help="of SIGTERM")
    parser.add_argument("--kills", type=int, default=20, help="of the script")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    chosen = parser.parse_args()
    missed = 0
    for kind, count in (("leave", chosen.times), ("kills", chosen.kills)):
        if kind in chosen.only:
            with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
                moments = random.Random(chosen.seed)
                missed += (leave if kind == "leave" else kills)(run, count, moments)
    return min(missed, 1)


# ---------------------------------------------------------------- SIGTERM


def leave(run: Fleet, times: int, moments: random.Random) -> int:
    """Print a line for each SIGTERM, and return how many did not go as they should."""
    home = run.up("a").home
    stays = Process(list(trains(step_s=STEP_S)), run.folder / "trainer-a.log", ATOLL_HOME=str(home))
    run.trainers["a"] = stays
    print(f"SIGTERM, then (grace time {GRACE_S:.0f} s)   left   steps   in round   moved")
    took_s, good, weighed, seen = [], 0, 0, 0
    for number in range(1, times + 1):
        peer = supervise(run, "b", *joining(run), command=trains(step_s=STEP_S))
        until(lambda peer=peer: peer.last("attached") is not None, "it trains", peer)
        time.sleep(moments.uniform(0.0, 3 * ROUND_S))
        told_s = time.monotonic()
        peer.kill(signal.SIGTERM)
        code = peer.ends()
        took_s.append(time.monotonic() - told_s)
        in_order = code == 0 and "left the run" in peer.text
        found = HANDED_IN.search(peer.text)
        steps, in_round = map(int, found.groups()) if found else (0, 0)
        far = moved(stays, in_round) if found else None
        weighed += far is not None and abs(far - mean_of(steps)) < ROUNDED
        seen += far is not None
        good += in_order and found is not None and took_s[-1] <= GRACE_S
        order = "in order" if in_order else "NOT in order"
        weighs = "not seen" if far is None else f"{far:.2f} of {mean_of(steps):.2f}"
        print(f"{number:3}  {took_s[-1]:6.2f} s  {order:>28} {steps:7} {in_round:10}   {weighs}")
        sys.stdout.flush()
    took_s.sort()
    print(
        f"left in order, steps counted, within {GRACE_S:.0f} s: {good} of {times}; seconds until"
        f" ended: median {took_s[len(took_s) // 2]:.2f}, most {took_s[-1]:.2f}\nparameters moved as"
        f" far as these steps weigh: {weighed} of {seen} rounds that the other peer was in\n"
    )
    return times - good + seen - weighed


def mean_of(steps: int) -> float:
    """Return how far a round moves the parameters, of the other peer's steps and ``steps``."""
    return (SYNC_EVERY**2 + steps**2) / (SYNC_EVERY + steps)


def moved(stays: Process, in_round: int) -> float | None:
    """Return how far that round has moved the parameters; None if the other peer missed it.

    The other peer prints where it begins each round.
    """
    until(lambda: stays.lines[-1].get("round", 0) > in_round, "the other goes on", stays)
    begins = round_begins(stays)
    before, after = begins.get(in_round - 1), begins.get(in_round)
    return None if before is None or after is None else before - after


# ---------------------------------------------------------------- SIGKILL


def kills(run: Fleet, times: int, moments: random.Random) -> int:
    """Print a line for each kill of the script, and return how often more was lost than may be."""
    peer = supervise(run, "a", "--run", "demo", command=trains(step_s=STEP_S))
    print("script killed after        in round   steps lost   goes on from round")
    lost, good, seen, was_at = [], 0, 0, 0
    comes_back(peer, seen)
    for number in range(1, times + 1):
        is_early = number % EARLY == 0
        pid = until(lambda: peer.children().get("script"), "the script is there", peer)
        life_s = moments.uniform(0.0, EARLY_S if is_early else 3 * ROUND_S)
        time.sleep(life_s)
        os.kill(pid, signal.SIGKILL)
        until(lambda number=number: deaths(peer) == number, "the death is said", peer)
        life = [line for line in peer.lines[seen:] if "since" in line or "attached" in line]
        seen = len(peer.lines)
        was_at = life[-1].get("round", life[-1].get("attached")) if life else was_at
        lost.append(life[-1].get("since", 0) if life else 0)
        goes_on = (number + 1) % EARLY > 0  # else the next kill comes before that
        back_at = comes_back(peer, seen) if goes_on else was_at
        fine = back_at >= was_at and lost[-1] < SYNC_EVERY
        good += fine
        shown = back_at if goes_on else "killed before"
        print(
            f"{number:3} {life_s:8.2f} s {'start' if is_early else 'training':>9} {was_at:10}"
            f" {lost[-1]:12} {shown:>20}{'' if fine else '   TOO MUCH IS LOST'}",
            flush=True,
        )
    peer.kill(signal.SIGTERM)
    peer.ends()
    print(
        f"started again after {deaths(peer)} of {times} kills; lost no more than the steps since"
        f" the last round (of {SYNC_EVERY}): {good} of {times}; steps lost:"
        f" {sum(lost) / times:.1f} in the mean, {max(lost)} at most\n"
    )
    return times - good


def deaths(peer: Supervised) -> int:
    return sum("the script was killed by SIGKILL" in line for line in peer.said)


def comes_back(peer: Supervised, seen: int) -> int:
    """Return the round from which the next life goes on that has come so far as to train."""

    def attached() -> dict[str, Any]:
        return next((line for line in peer.lines[seen:] if "attached" in line), {})

    return int(until(attached, "it trains again", peer)["attached"])


if __name__ == "__main__":
    sys.exit(main())
