"""Memory that a daemon takes during a round, beyond the buffers that it announces.

    python tests/benchmarks/memory.py [--peers 4] [--mib 256] [--codec int8] [--rounds 6]

Real daemons on loopback with numpy trainers. Counted for each daemon, every SAMPLE_S: its anonymous
pages and those of files, as the kernel counts them, and every region that it shares with its
trainer once and whole, whichever of the two has touched the pages. The peak is at least the
kernel's own of what is mapped (VmHWM), which no sample misses.

Taken off: what the same daemon held in a view without a state (*idle*), and what is *listed*:
parameters and momentum twice (16 bytes per parameter), the submission (4), the full log of rounds,
and a result (of the round under way; between rounds its memory may wait for the next one). What
is left is *beyond*: it must stay below 64 MiB. Measured is when the log no longer grows. The most
since the start must also stay below idle, what the trainer announces (``host_bytes``) and 64 MiB.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import results
from harness.processes import Fleet, Peer, fleet, until

from atoll.collectives import get_codec
from atoll.optim.footprint import LOG_ENTRIES_MIN, host_bytes, log_cap_bytes
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec

MIB = 1 << 20
BAR_BYTES = 64 * MIB
SAMPLE_S = 0.02  # a round takes ten times that at least; reading costs a daemon a fraction of 1 ms
INNER_S = 0.5  # between two rounds: long enough for a few samples at rest
LIMIT_S = 600.0  # for all rounds of a phase; a busy machine makes a large one in 20 s
# Rounds after the log is full: its first entry is larger than the others, and memory is used again
# from the second one that goes.
SETTLED = 3
REGION = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .* (\d+) +/memfd:atoll-", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mib", type=float, default=256.0, help="float32 parameters")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--rounds", type=int, default=6, help="to be measured, with a full log")
    chosen = parser.parse_args()
    names = "abcdefgh"[: chosen.peers]
    manifest = Manifest.of([Parameter("w", (int(chosen.mib * MIB / 4),))])
    listed = Listed.of(manifest, chosen.codec)
    spec = RunSpec(sync_every=1, codec=chosen.codec)
    announced = host_bytes(spec, manifest)
    print(
        f"{len(names)} peers, {chosen.mib:g} MiB of float32, {chosen.codec}; listed:"
        f" {listed}; announced: at most {announced / MIB:.1f} MiB",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
        run.form(names)
        time.sleep(1.0)  # until links are up and nothing is under way
        idle = {name: counted_bytes(run.peers[name]) for name in names}
        for name in names:
            run.train(name, manifest.elements, inner_s=INNER_S, codec=chosen.codec)
        reach(run, names, listed.full_after + SETTLED)
        before = {name: mapped_peak_bytes(run.peers[name], reset=True) for name in names}
        with Watch([run.peers[name] for name in names]) as watch:
            reach(run, names, listed.full_after + SETTLED + chosen.rounds)
    print("MiB       idle   at rest   peak   beyond, at rest   at the peak   (since the start)")
    worst = 0.0
    for name in names:
        low, high = watch.lowest[name], watch.highest[name]
        beyond = high - idle[name] - listed.bytes
        worst = max(worst, beyond)
        rest = low - idle[name] - listed.bytes
        whole = max(before[name], high) - idle[name] - announced
        print(
            f"peer {name} {idle[name] / MIB:7.1f} {low / MIB:9.1f} {high / MIB:6.1f}"
            f" {rest / MIB:15.1f} {beyond / MIB:15.1f}"
            f"   ({whole / MIB:+.1f} of what is announced{', MISSED' * (whole > BAR_BYTES)})"
        )
    met = "" if worst < BAR_BYTES else "  MISSED"
    print(f"at most {worst / MIB:.1f} MiB beyond; bar {BAR_BYTES // MIB}{met}")
    results.say("beyond", worst / MIB, "MiB")


@dataclass(frozen=True)
class Listed:
    """The buffers of decisions.md, for a run of one fragment whose log is full."""

    state: int
    submission: int
    log: int
    result: int
    full_after: int  # rounds until the log drops its first entry

    @classmethod
    def of(cls, manifest: Manifest, codec: str) -> Listed:
        """The first entry of a log carries the parameters, each other one a result."""
        n, result = manifest.elements, get_codec(codec).encoded_bytes(manifest.elements)
        cap = log_cap_bytes(manifest)
        kept = max(LOG_ENTRIES_MIN, cap // result)
        with_first = 1 + max(LOG_ENTRIES_MIN - 1, (cap - 4 * n) // result)
        return cls(16 * n, 4 * n, kept * result, result, max(kept, with_first) + 1)

    @property
    def bytes(self) -> int:
        return self.state + self.submission + self.log + self.result

    def __str__(self) -> str:
        return (
            f"state {self.state / MIB:.1f}, submission {self.submission / MIB:.1f}, log of"
            f" {self.log // self.result} rounds {self.log / MIB:.1f}, result"
            f" {self.result / MIB:.1f}, together {self.bytes / MIB:.1f} MiB"
        )


@dataclass
class Watch:
    """The least and the most that each daemon holds, as long as the block takes."""

    peers: list[Peer]
    lowest: dict[str, int] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Watch:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for peer in self.peers:
            peak = mapped_peak_bytes(peer)
            self.highest[peer.name] = max(self.highest[peer.name], peak)

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for peer in self.peers:
                found = counted_bytes(peer)
                self.lowest[peer.name] = min(found, self.lowest.get(peer.name, found))
                self.highest[peer.name] = max(found, self.highest.get(peer.name, found))


def counted_bytes(peer: Peer) -> int:
    """Anonymous and file pages in memory, and each shared region once."""
    said = Path(f"/proc/{peer.pid}/status").read_text()
    maps = Path(f"/proc/{peer.pid}/maps").read_text()
    regions = {found[3]: int(found[2], 16) - int(found[1], 16) for found in REGION.finditer(maps)}
    return field_bytes(said, "RssAnon") + field_bytes(said, "RssFile") + sum(regions.values())


def mapped_peak_bytes(peer: Peer, *, reset: bool = False) -> int:
    """The most that was ever mapped and in memory, since the last reset."""
    found = field_bytes(Path(f"/proc/{peer.pid}/status").read_text(), "VmHWM")
    if reset:
        Path(f"/proc/{peer.pid}/clear_refs").write_text("5")
    return found


def field_bytes(said: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", said, re.MULTILINE)
    assert found is not None, f"this kernel does not show {name}"
    return int(found[1]) << 10


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
