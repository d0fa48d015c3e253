"""Measure what caps hold: bytes at a host's interface, with rounds and a state transfer; as root.

    python tests/benchmarks/caps.py [--mbit 200] [--rtt-ms 20] [--up 20] [--down 30] [--mib 24]
        [--seconds 60] [--loss 0] [--plain] [--only rounds serve load]

Three daemons with numpy trainers on hosts of a lab; the last one is capped (``--plain``: not). The
figures are of all windows of ten seconds, one begun every half second, and come from the interface
of its namespace in /proc/net/dev, which has packets with the headers of IP and TCP there: it is a
TUN device, and has none of Ethernet.

- ``rounds``: trainers hand in at once, so a round is an exchange, and the caps are what limits it;
- ``serve``: rounds rest, and a newcomer loads the state from the capped peer and the others, whose
  uplinks have the rate of the cap here, so that it takes its part;
- ``load``: the capped peer is the newcomer, and loads the state while rounds of the others rest.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.labnet import NAMES, LabNet
from harness.processes import Fleet, fleet, until

from atoll.peer.lab.lab import Lab

WINDOW_S, STEP_S = 10.0, 0.5
PHASES = ("rounds", "serve", "load")
RESTING_S = 10_000.0  # of inner steps: rounds rest
WARM_ROUNDS = 2  # before the windows that count: the links are measured, and the rounds planned
LIMIT_S = 600.0


class Reading(NamedTuple):
    at_s: float
    received: int
    sent: int


def interface(lab: Lab, host: int) -> Reading:
    """Hold what the kernel has counted at a host's one interface to the others."""
    text = lab.run(host, "cat", "/proc/net/dev").stdout
    fields = next(line.split(":")[1].split() for line in text.splitlines() if "eth0:" in line)
    return Reading(time.monotonic(), int(fields[0]), int(fields[8]))


class Watch:
    """Read a host's interface twice a second, meanwhile."""

    def __init__(self, lab: Lab, host: int) -> None:
        self.readings: list[Reading] = []
        self._lab, self._host, self._end = lab, host, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.is_set():
            self.readings.append(interface(self._lab, self._host))
            self._end.wait(STEP_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def windows(self) -> list[tuple[float, float]]:
        """Mbit/s sent and received in each window."""
        found = []
        for n, first in enumerate(self.readings):
            last = next((r for r in self.readings[n:] if r.at_s >= first.at_s + WINDOW_S), None)
            if last is not None:
                scale = 8e-6 / (last.at_s - first.at_s)
                found.append(
                    ((last.sent - first.sent) * scale, (last.received - first.received) * scale)
                )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--up", type=float, default=20.0)
    parser.add_argument("--down", type=float, default=30.0)
    parser.add_argument("--mib", type=float, default=24.0, help="of parameters, float32")
    parser.add_argument("--seconds", type=float, default=60.0, help="of rounds")
    parser.add_argument("--loss", type=float, default=0.0, help="percent")
    parser.add_argument("--plain", action="store_true", help="without caps")
    parser.add_argument("--only", nargs="+", default=PHASES, choices=PHASES)
    chosen = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}; {vars(chosen)}", flush=True)
    for phase in chosen.only:
        measure(phase, chosen)


def measure(phase: str, chosen: argparse.Namespace) -> None:
    """Run one phase and print what its windows had."""
    hosts = 4 if phase == "serve" else 3
    capped = NAMES[2]
    caps = (
        () if chosen.plain else ("--up-mbit", f"{chosen.up:g}", "--down-mbit", f"{chosen.down:g}")
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(hosts, rate_mbit=chosen.mbit, rtt_ms=chosen.rtt_ms, loss=chosen.loss) as lab,
        fleet(Path(folder), LabNet(lab)) as run,  # type: ignore[arg-type]
    ):
        run.options = lambda name: caps if name == capped else ()
        elements = chosen.mib * (1 << 20) / 4
        began = rounds = 0
        if phase == "rounds":
            run.form("abc")
            for name in "abc":
                run.train(name, elements, inner_s=0.0, codec="float32")
            began = run.peers[capped].reaches(1 + WARM_ROUNDS)["round"]
            with Watch(lab, 2) as watch:
                time.sleep(chosen.seconds)
            rounds = run.peers[capped].status()["round"] - began
        else:
            for host in (0, 1) if phase == "serve" else ():
                lab.set_rate(host, up=chosen.up)
            watch = transfer(run, lab, elements, newcomer="d" if phase == "serve" else capped)
        line = "\n".join(
            line for line in text_of(run, capped).splitlines() if line.startswith(("caps", "plan"))
        )
        show(phase, watch, chosen, rounds)
        print(line, flush=True)


def transfer(run: Fleet, lab: Lab, elements: float, newcomer: str) -> Watch:
    """Let a newcomer load the state of a run whose rounds rest; return what the capped host saw."""
    old = "abc".replace(newcomer, "")
    run.form(old)
    for name in old:
        run.train(name, elements, inner_s=RESTING_S, codec="float32")
    for name in old:
        run.peers[name].reaches(1)
    with Watch(lab, 2) as watch:
        run.join(newcomer)
        until(
            lambda: run.peers[newcomer].try_status().get("round", 0) >= 1,
            "the newcomer has the state",
            *run.peers.values(),
            timeout_s=LIMIT_S,
        )
    return watch


def text_of(run: Fleet, name: str) -> str:
    from atoll.peer.daemon.status import render

    return render(run.peers[name].status())


def show(phase: str, watch: Watch, chosen: argparse.Namespace, rounds: int) -> None:
    """Print the least, the usual and the largest window of each direction."""
    took_s = watch.readings[-1].at_s - watch.readings[0].at_s
    found = watch.windows()
    print(f"{phase}: {took_s:.1f} s, {len(found)} windows, {rounds} rounds", flush=True)
    for way, index, cap in (("up", 0, chosen.up), ("down", 1, chosen.down)):
        rates = sorted(window[index] for window in found)
        if rates:
            least, usual, most = rates[0], rates[len(rates) // 2], rates[-1]
            print(
                f"  {way:4s} least {least:6.2f}  median {usual:6.2f}  most {most:6.2f} Mbit/s,"
                f" {most / cap:.1%} of {cap:g}",
                flush=True,
            )


if __name__ == "__main__":
    main()
