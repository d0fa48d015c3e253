"""Daemons that are all started at once form a view: how long it takes, and what it costs.

    python tests/benchmarks/form.py [--peers 16 32 64]

One founds the run, and all others join by its invite at the same moment, on loopback, without
trainers. Two cores start about two daemons a second, so what counts is the time from the moment in
which the last process answers until all see all. *Control* is what one daemon has sent by then, the
mean and the most; *gave up* are those that have ended. Last, the coordinator's processor and
control bytes while nothing happens.
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
from harness.processes import Fleet, Peer, fleet

UP_LIMIT_S = 300.0
LIMIT_S = 120.0  # from when the last process answers until all see all
IDLE_S = 10.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 32])
    chosen = parser.parse_args()
    for count in chosen.peers:
        with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
            form(run, count)


def form(run: Fleet, count: int) -> None:
    names = [f"p{number:03d}" for number in range(count)]
    begun_s = time.monotonic()
    founder = run.up(names[0])
    for name in names[1:]:
        run.join(name)
    waiting, up_s, formed_s = set(names), 0.0, 0.0
    while waiting and time.monotonic() - begun_s < UP_LIMIT_S:
        waiting -= {name for name in waiting if run.peers[name].popen.poll() is not None}
        waiting = {name for name in waiting if not run.peers[name].try_status()}
        time.sleep(0.2)
    up_s = time.monotonic() - begun_s
    inside = 0
    while time.monotonic() - begun_s < up_s + LIMIT_S:
        inside = len(founder.try_status().get("members", ())) or inside  # it may be too busy
        if inside == count and all(sees(run.peers[name], count) for name in names):
            break
        time.sleep(0.2)
    formed_s = time.monotonic() - begun_s
    ended = [name for name in names if run.peers[name].popen.poll() is not None]
    for name in ended[:1]:
        print(f"{name}: {run.peers[name].text.strip()[-500:]}", flush=True)
    sent = [
        control_bytes(run.peers[name])
        for name in names
        if name not in ended and run.peers[name].try_status()
    ]
    before_s, before_bytes = processor_s(founder), control_bytes(founder)
    time.sleep(IDLE_S)
    busy = (processor_s(founder) - before_s) / IDLE_S
    rate = (control_bytes(founder) - before_bytes) / IDLE_S
    print(
        f"{count} daemons: the last answers after {up_s:.1f} s, {inside} members"
        f" {formed_s - up_s:.1f} s later; {len(ended)} gave up; control sent by one"
        f" {statistics.mean(sent) / 1e6:.2f} MB (most {max(sent) / 1e6:.2f}); idle coordinator"
        f" {busy:.1%} of a core, {rate / 1e3:.1f} kB/s",
        flush=True,
    )
    results.say(f"{count}/formed_after_up", formed_s - up_s, "s")
    results.say(f"{count}/control", statistics.mean(sent), "B")


def sees(peer: Peer, count: int) -> bool:
    status = peer.try_status()
    return len(status.get("members", ())) == count


def control_bytes(peer: Peer) -> int:
    return int(peer.status()["bytes"]["sent"]["control"])


def processor_s(peer: Peer) -> float:
    fields = Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


if __name__ == "__main__":
    main()
