"""What audits add to a round of real daemons: seconds, bytes, processor time.

    python tests/benchmarks/audit.py [--peers 8] [--parameters 10e6] [--mbit 200 --rtt-ms 20]
        [--codec int8] [--rounds 8] [--times 3]

Numpy trainers hand over whole vectors. Fleets without audits and with them take turns, each for
``--rounds`` after the first few, ``--times`` times; medians of all rounds. A round's seconds are
the slowest daemon's own, from BEGIN to the end of the outer step; bytes are all that a peer sends
from round to round, but for probes; processor time is all that its daemon uses, every thread.

With ``--mbit`` every peer is on a host of a lab, which needs root. Without it all are on loopback:
as there is no network to wait for, a round takes as long as the processors of this machine have to
work for all peers together, and so do audits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.labnet import NAMES, LabNet
from harness.processes import Fleet, fleet

from atoll.peer.lab.lab import Lab

METHODS = {"plain": "noisy", "audited": "audited"}
WARM = 3  # the first is INIT, and trainers that attach late miss one
LOOK_S = 0.05  # peers share the cores with this script
PATIENCE_S = 300.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Side:
    """Of all fleets of a kind: of each round its seconds; of each peer of a fleet, for a round in
    the mean, bytes and processor seconds."""

    took_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--parameters", type=float, default=10e6)
    parser.add_argument("--mbit", type=float, default=0.0, help="rate of each link; 0: loopback")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="with --mbit")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--inner-s", type=float, default=1.0, help="between two rounds")
    parser.add_argument("--rounds", type=int, default=8, help="of each fleet")
    parser.add_argument("--times", type=int, default=3, help="fleets of each kind")
    chosen = parser.parse_args()
    sides = {name: Side() for name in METHODS}
    for _ in range(chosen.times):
        for name, side in sides.items():
            with network(chosen) as net, tempfile.TemporaryDirectory() as folder:
                with fleet(Path(folder), net) as run:
                    measure(run, METHODS[name], side, chosen)
    compare(sides, chosen)


@contextlib.contextmanager
def network(chosen: argparse.Namespace) -> Iterator[Any]:
    if not chosen.mbit:
        yield None
        return
    with Lab(chosen.peers, rate_mbit=chosen.mbit, rtt_ms=chosen.rtt_ms) as lab:
        yield LabNet(lab)


def measure(run: Fleet, method: str, side: Side, chosen: argparse.Namespace) -> None:
    names = NAMES[: chosen.peers]
    run.form(names)
    for name in names:
        run.train(name, chosen.parameters, 0, chosen.inner_s, codec=chosen.codec, method=method)
    first = max(status["round"] for status in after(run, names, WARM))
    before = after(run, names, first + 1)
    cpu_before = {name: cpu_s(run.peers[name].pid) for name in names}
    last, took_s = before, list[float]()
    while len(took_s) < chosen.rounds:
        last = after(run, names, max(status["round"] for status in last) + 1)
        took_s.append(max(status["last_round_s"] for status in last))
    for name, begun, ended in zip(names, before, last, strict=True):
        rounds = ended["round"] - begun["round"]
        side.sent_bytes.append((sent(ended) - sent(begun)) / rounds)
        side.cpu_s.append((cpu_s(run.peers[name].pid) - cpu_before[name]) / rounds)
    assert run.agree(names)
    assert "parts were opened" not in run.peers[names[0]].text  # nothing to doubt: nobody lies
    side.took_s += took_s
    shown = " ".join(f"{seconds:.3f}" for seconds in took_s)
    print(f"{method:<8} {shown} s  {last[0]['layout'][:60]}", flush=True)


def after(run: Fleet, names: str, number: int) -> list[dict[str, Any]]:
    """Of each peer, once it has applied this round."""
    found, limit_s = [], time.monotonic() + PATIENCE_S
    for name in names:
        while not (status := run.peers[name].try_status()) or not applied(status, number):
            assert time.monotonic() < limit_s, run.report()
            time.sleep(LOOK_S)
        found.append(status)
    return found


def applied(status: dict[str, Any], number: int) -> bool:
    return max(map(int, status["digests"]), default=0) >= number


def sent(status: dict[str, Any]) -> int:
    """Probes of the links go with the data streams, and between rounds."""
    sent = status["bytes"]["sent"]
    return int(sent["rounds"] + sent["state"] + sent["control"])


def cpu_s(pid: int) -> float:
    """Of all threads of a process, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13])) / TICKS_PER_S


def compare(sides: dict[str, Side], chosen: argparse.Namespace) -> None:
    medians = {
        name: [statistics.median(x) for x in (side.took_s, side.sent_bytes, side.cpu_s)]
        for name, side in sides.items()
    }
    for name, (took_s, sent_bytes, used_s) in medians.items():
        spread = f"{min(sides[name].took_s):.3f} to {max(sides[name].took_s):.3f}"
        print(
            f"{name:<8} {took_s:.3f} s ({spread}, n={len(sides[name].took_s)}), {sent_bytes:,.0f} B"
            f" and {1e3 * used_s:.0f} ms of processors for each peer and round",
            flush=True,
        )
    plain, audited = medians["plain"], medians["audited"]
    longer, more = (100 * (audited[i] / plain[i] - 1) for i in (0, 1))
    cpu_ms = 1e3 * (audited[2] - plain[2])
    where = f"{chosen.mbit:g} Mbit/s, {chosen.rtt_ms:g} ms" if chosen.mbit else "loopback"
    what = f"{chosen.peers} peers, {chosen.parameters / 1e6:g} million, {chosen.codec}"
    print(
        f"{what}, {where}: audits add {longer:.1f} % of time, {more:.2f} % of bytes,"
        f" {cpu_ms:.0f} ms of processors",
        flush=True,
    )
    kind = f"{chosen.mbit:g}" if chosen.mbit else "loopback"
    results.say(f"{kind}/longer", longer, "%")
    results.say(f"{kind}/more_bytes", more, "%")
    results.say(f"{kind}/cpu", cpu_ms, "ms")


if __name__ == "__main__":
    main()
