"""Measure what a run does on a core that others keep busy: elections, broken attempts, CPU time.

    python tests/benchmarks/starved.py [--peers 4] [--parameters 40e6] [--rounds 5] [--burners 10]
        [--cores 1] [--limit-s 110] [--only quiet starved slices] [--keep FOLDER]

Daemons, numpy trainers and burners (processes that do nothing but count, each in a session of its
own, so that the scheduler gives it a share of its own) have the same cores. Before that the same is
measured without burners. The first state is the way from the first trainer's parameters to the
state on every daemon. A view or a retry after the run was formed is one too many: nobody has died.
``slices`` needs no burners: two daemons, the coordinator's among them, are stopped for 1.5 s again
and again, and run for 0.15 s between. ``--keep`` copies the daemons' logs there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.labnet import NAMES
from harness.processes import Fleet, fleet, until

BURN = [sys.executable, "-c", "while True: pass"]
KINDS_OF_RUN = ("quiet", "starved", "slices")
AWAY_S, AWAKE_S = 1.5, 0.15  # of a daemon that gets a processor in slices only
KINDS = ("coordinator-lost", "excluded", "no-quorum", "retry", "give-up", "miss", "dead")
EVENT = re.compile(r"^[0-9:]{8} (\S+) +(.*)$", re.MULTILINE)


@dataclass
class Turn:
    """Keep what one run has come to."""

    first_s: float = 0.0  # of the first state
    first_cpu_s: float = 0.0  # of all daemons until they had it
    rounds: int = 0
    rounds_s: float = 0.0
    views: int = 0  # after the run was formed
    first_retries: int = 0  # attempts at the first state that were begun again
    events: Counter[str] = field(default_factory=Counter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--parameters", type=float, default=40e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burners", type=int, default=10, help="for each core")
    parser.add_argument("--cores", type=int, nargs="+", default=[1], help="that all have")
    parser.add_argument("--limit-s", type=float, default=110.0, help="of each of the two runs")
    parser.add_argument("--only", nargs="+", choices=KINDS_OF_RUN, default=KINDS_OF_RUN)
    parser.add_argument("--keep", type=Path, help="a folder for the daemons' logs")
    chosen = parser.parse_args()
    os.sched_setaffinity(0, chosen.cores)  # and of all that is started from here
    found = {}
    for name in chosen.only:
        burners = chosen.burners * len(chosen.cores) if name == "starved" else 0
        load = os.getloadavg()[0]
        with burning(burners):
            found[name] = turn = one_turn(chosen, name)
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(turn.events.items()))
        print(
            f"{name:<8} {burners} burners, load {load:.1f} before: first state"
            f" {turn.first_s:.1f} s, {turn.first_cpu_s:.1f} s of CPU; {turn.rounds} rounds in"
            f" {turn.rounds_s:.1f} s; {turn.views} views more; {shown or 'nothing noted'}",
            flush=True,
        )
        results.say(f"starved/{name}/views", turn.views, "views")
        results.say(f"starved/{name}/retries", turn.events["retry"], "attempts")
        results.say(f"starved/{name}/rounds", turn.rounds, "rounds")
    if {"quiet", "starved"} <= found.keys():
        over = found["starved"].first_cpu_s / max(found["quiet"].first_cpu_s, 1e-9)
        results.say("starved/first_cpu", over, "x")


@contextmanager
def sliced(run: Fleet, names: str) -> Iterator[None]:
    """Stop these daemons again and again, each in its own time."""
    over = threading.Event()

    def turn(name: str) -> None:
        while not over.is_set():
            run.peers[name].kill(signal.SIGSTOP)
            over.wait(AWAY_S)
            run.peers[name].kill(signal.SIGCONT)
            over.wait(AWAKE_S)

    threads = [threading.Thread(target=turn, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def burning(count: int) -> Iterator[None]:
    burners = [subprocess.Popen(BURN, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.wait()


def one_turn(chosen: argparse.Namespace, which: str) -> Turn:
    names = NAMES[: chosen.peers]
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
        run.form(names)
        formed = view_of(run)
        end_s = time.monotonic() + chosen.limit_s
        turn, begun_s, begun_cpu_s = Turn(), time.monotonic(), cpu_s(run)
        for name in names:
            run.train(name, chosen.parameters, inner_s=0.5)

        def reached(number: int) -> bool:
            at = [run.peers[name].try_status() for name in names]
            return all(s.get("digest") and s["round"] >= number for s in at) or late(end_s)

        until(lambda: reached(1), "the first state", timeout_s=2 * chosen.limit_s)
        turn.first_s, turn.first_cpu_s = time.monotonic() - begun_s, cpu_s(run) - begun_cpu_s
        begun_s = time.monotonic()
        victims = ("a" + names[-1]) if which == "slices" else ""  # a has founded it and coordinates
        with sliced(run, victims):
            until(lambda: reached(1 + chosen.rounds), "the rounds", timeout_s=2 * chosen.limit_s)
        turn.rounds_s = time.monotonic() - begun_s
        for name in names:
            turn.rounds = max(turn.rounds, run.peers[name].try_status().get("round", 0) - 1)
            said = EVENT.findall(run.peers[name].text)
            kinds = Counter(kind for kind, _ in said)
            turn.first_retries += sum(k == "retry" and t.startswith("round 1:") for k, t in said)
            turn.events.update({kind: kinds[kind] for kind in KINDS if kinds[kind]})
            if chosen.keep is not None:
                chosen.keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(run.peers[name].log, chosen.keep / f"{which}-{name}.log")
        turn.views = view_of(run) - formed
        return turn


def late(end_s: float) -> bool:
    return time.monotonic() > end_s


def view_of(run: Fleet) -> int:
    return max(peer.try_status().get("view", 0) for peer in run.peers.values())


def cpu_s(run: Fleet) -> float:
    """Return what all daemons have taken of a processor so far."""
    ticks = 0
    for peer in run.peers.values():
        fields = Path(f"/proc/{peer.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
