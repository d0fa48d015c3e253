"""Memory of a daemon per parameter, at the peak of a round and of the first state, and at rest.

    python tests/benchmarks/memory.py [--elements 1e7 1e8 4e8] [--momentum-codec dynamic8]

Real daemons on loopback with numpy trainers, which keep rounds on their disk as users' do. Counted
for each daemon, every SAMPLE_S, by the kernel's own figures (smaps): its private pages, its share
of what is shared with other programs (Pss), and every region that it shares with its trainer once
and whole, whichever of the two has touched the pages. Taken off: what the same daemon held in a
view without a state. The bar is BAR_BYTES per parameter at the peak of a round, by how the momentum
is kept, and that what a method announces at its start (``host_bytes``) is within ANNOUNCED of it.

The trainer's own memory (Pss without those regions) is told beside its model: the numpy trainer has
two vectors of float32, so 8 bytes per parameter, and what the library adds.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.processes import Fleet, Process, fleet, until

from atoll.optim.footprint import host_bytes
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec

MIB = 1 << 20
BAR_BYTES = {"float32": 12.0, "dynamic8": 8.0}  # per parameter
ANNOUNCED = 0.1
SAMPLE_S = 0.02  # reading a daemon's smaps takes 1 ms
INNER_S = 0.5  # between two rounds: long enough for a few samples at rest
LIMIT_S = 900.0  # for a phase; a busy machine makes a large round in 20 s
REGION = "/memfd:atoll-"
HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=float, nargs="+", default=[1e7, 1e8, 4e8])
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--momentum-codec", choices=BAR_BYTES, default="float32")
    chosen = parser.parse_args()
    print("bytes per parameter, above the same daemon idle; the worst of its peers")
    print("parameters   first state   at rest   peak of a round   announced   trainer, own pages")
    for elements in map(int, chosen.elements):
        spec = RunSpec(sync_every=1, codec=chosen.codec, momentum_codec=chosen.momentum_codec)
        found = measured(elements, "abcdefgh"[: chosen.peers], spec, chosen.rounds)
        manifest = Manifest.of([Parameter("w", (elements,))])
        announced = host_bytes(spec, manifest) / elements
        missed = [
            "MISSED: the peak" * (found.peak > BAR_BYTES[spec.momentum_codec]),
            "MISSED: announced" * (abs(announced / found.peak - 1) > ANNOUNCED),
        ]
        print(
            f"{elements:10,} {found.first:13.2f} {found.rest:9.2f} {found.peak:17.2f}"
            f" {announced:11.2f} {found.trainer:20.2f}   {'  '.join(filter(None, missed))}",
            flush=True,
        )
        results.say(f"{elements}/peak", found.peak, "bytes")


@dataclass
class Found:
    """Hold the bytes per parameter above idle, of the worst of all peers."""

    first: float
    rest: float
    peak: float
    trainer: float


@dataclass
class Watch:
    """Keep the least and the most that each process holds, in bytes."""

    run: Fleet
    least: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    trainers: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Watch:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def begin(self) -> None:
        for seen in (self.least, self.most, self.trainers):
            seen.clear()

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for name, peer in self.run.peers.items():
                held = held_bytes(peer, shares=True)
                self.least[name] = min(held, self.least.get(name, held))
                self.most[name] = max(held, self.most.get(name, held))
            for name, trainer in list(self.run.trainers.items()):
                with contextlib.suppress(OSError):  # it has not begun yet
                    held = held_bytes(trainer, shares=False)
                    self.trainers[name] = max(held, self.trainers.get(name, held))


def measured(elements: int, names: str, spec: RunSpec, rounds: int) -> Found:
    codec, method = spec.codec, "diloco8" if spec.momentum_codec == "dynamic8" else "diloco"
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
        run.form(names)
        time.sleep(1.0)  # until links are up and nothing is under way
        idle = {name: held_bytes(run.peers[name], shares=True) for name in names}
        small = small_trainer_bytes(codec)
        with Watch(run) as watch:
            for name in names:
                run.train(name, elements, inner_s=INNER_S, codec=codec, method=method)
            reach(run, names, 3)
            first = max(watch.most[name] - idle[name] for name in names)
            watch.begin()
            reach(run, names, 3 + rounds)
            rest = max(watch.least[name] - idle[name] for name in names)
            peak = max(watch.most[name] - idle[name] for name in names)
            trainer = max(watch.trainers.values()) - small
    return Found(*(each / elements for each in (first, rest, peak, trainer)))


def small_trainer_bytes(codec: str) -> int:
    """Return what the same trainer holds with a model of nothing."""
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
        run.up("a")
        run.train("a", 1e3, inner_s=INNER_S, codec=codec)
        reach(run, "a", 3)
        return held_bytes(run.trainers["a"], shares=False)


def held_bytes(process: Process, *, shares: bool) -> int:
    """Return Pss, with regions that daemon and trainer share whole, or, without ``shares``, not."""
    total_bytes, is_region = 0, False
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        if HEAD.match(line):
            is_region = REGION in line
        elif line.startswith("Rss:" if is_region else "Pss:") and (shares or not is_region):
            total_bytes += int(line.split()[1]) << 10
    return total_bytes


def reach(run: Fleet, names: str, number: int) -> None:
    for name in names:
        peer = run.peers[name]
        until(
            lambda peer=peer: peer.try_status().get("round", 0) >= number,
            f"round {number}",
            peer,
            timeout_s=LIMIT_S,
        )


if __name__ == "__main__":
    main()
