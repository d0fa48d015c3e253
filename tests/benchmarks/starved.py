"""Run daemons and numpy trainers on cores that others keep busy, and say what that has cost.

Burners are processes that do nothing but count, each in a session of its own, so that the scheduler
gives it a share of its own. The first state is the way from the first trainer's parameters to the
state on every daemon, as their logs say: to be asked costs a daemon time of its own. What it costs
is what it takes beyond that of idle daemons, which have their heartbeats. A view or a retry after
the run was formed is one too many: nobody has died. Where ``which`` is "slices" two daemons, one of
them the coordinator, are stopped for 1.5 s again and again, and run for 0.15 s between.
machine_time.py makes figures of it.
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

from harness.labnet import NAMES
from harness.processes import Fleet, fleet, until

IDLE_S = 10.0  # in which idle daemons are measured
BURN = [sys.executable, "-c", "while True: pass"]
AWAY_S, AWAKE_S = 1.5, 0.15  # of a daemon that gets a processor in slices only
KINDS = ("coordinator-lost", "excluded", "no-quorum", "retry", "give-up", "miss", "dead")
FIRST = re.compile(r"^[0-9:]{8} round +1 ", re.MULTILINE)  # it has the first parameters
EVENT = re.compile(r"^[0-9:]{8} (\S+) +(.*)$", re.MULTILINE)


@dataclass
class Turn:
    """Keep what one run has come to."""

    first_s: float = 0.0  # of the first state
    first_cpu_s: float = 0.0  # of all daemons until they had it ...
    idle_cpu_s: float = 0.0  # ... and of idle ones in that time, which is not in it
    rounds: int = 0
    rounds_s: float = 0.0
    views: int = 0  # after the run was formed
    first_retries: int = 0  # attempts at the first state that were begun again
    events: Counter[str] = field(default_factory=Counter)


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
        idle_cpu_s = cpu_s(run)
        time.sleep(IDLE_S)
        turn, begun_s, begun_cpu_s = Turn(), time.monotonic(), cpu_s(run)
        idle_share = (begun_cpu_s - idle_cpu_s) / IDLE_S
        for name in names:
            run.train(name, chosen.parameters, inner_s=0.5)

        def reached(number: int) -> bool:
            at = [run.peers[name].try_status() for name in names]
            return all(s.get("digest") and s["round"] >= number for s in at) or late(end_s)

        def have_first() -> bool:
            return all(FIRST.search(run.peers[name].text) for name in names) or late(end_s)

        until(have_first, "the first state", timeout_s=2 * chosen.limit_s)
        turn.first_s, took_cpu_s = time.monotonic() - begun_s, cpu_s(run) - begun_cpu_s
        turn.idle_cpu_s = idle_share * turn.first_s
        turn.first_cpu_s = took_cpu_s - turn.idle_cpu_s
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
