"""Digests of what the machines do in each seed, as `tests/golden/traces.txt` keeps them.

    python -m simulation.traces                    # compare all seeds of the file
    python -m simulation.traces --seeds 0..200     # some of them
    python -m simulation.traces --seed 17          # the trace of one, a line for each effect
    python -m simulation.traces --rewrite          # of another protocol, on purpose

A trace has every effect of every machine and no name of a class or a field (harness/tracing.py), so
renaming and moving code leaves it as it is. `make traces` is the same. Exit code 1 at a difference.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from harness.golden_text import FOLDER
from harness.tracing import Recorder

from simulation.arguments import jobs, seeds
from simulation.options import draw
from simulation.run import run_script
from simulation.script import draw_script

__all__ = ["FILE", "SAMPLE", "SEEDS", "digest_of", "kept"]

FILE = FOLDER / "traces.txt"
SEEDS = 2_000
SAID_EVERY = 100
# For `make test`: of three hosts and more, the cheapest two of each kind of network, beginning,
# signatures, fragments and calls. Two seconds.
SAMPLE = (
    114, 205, 221, 371, 668, 685, 693, 712, 742, 766, 825, 827, 855, 885, 886, 1195, 1200, 1262,
    1315, 1316, 1340, 1368, 1394, 1440, 1452, 1472, 1499, 1519, 1610, 1615, 1680, 1681, 1730, 1762,
    1819, 1827, 1853, 1898, 1932, 1984,
)  # fmt: skip
HEAD = """\
# A seed of the simulator, and the first 16 hexadecimal digits of the SHA-256 of the effects of all
# machines in it. `make traces` compares, `make traces ARGS=--rewrite` writes it anew.
"""


def digest_of(seed: int) -> str:
    recorder = Recorder()
    _run(seed, recorder)
    return recorder.digest


def kept(path: Path = FILE) -> dict[int, str]:
    """Return the digests that the file has, by seed."""
    lines = path.read_text("utf-8").splitlines()
    pairs = (line.split() for line in lines if not line.startswith("#"))
    return {int(seed): digest for seed, digest in pairs}


def _run(seed: int, recorder: Recorder) -> None:
    options = draw(seed)
    outcome = run_script(options, draw_script(options), recorder=recorder)
    assert not outcome.failure, f"make replay SEED={seed}: {outcome.failure}"


def _digests(wanted: Iterable[int], processes: int) -> Iterator[tuple[int, str]]:
    """Yield seeds in order with their digests, as soon as they are known."""
    wanted = list(wanted)
    if processes == 1:
        yield from ((seed, digest_of(seed)) for seed in wanted)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from zip(wanted, pool.map(digest_of, wanted, chunksize=10), strict=True)


def compare(wanted: Iterable[int], processes: int) -> int:
    """Stop at the first seed that differs: the others differ for the same reason."""
    known, same = kept(), 0
    for seed, digest in _digests((seed for seed in wanted if seed in known), processes):
        if digest != known[seed]:
            print(f"seed {seed} has the trace {digest}, and had {known[seed]}")
            print(f"  make traces SEED={seed} > now.txt, the same on the commit before, and diff;")
            print("  if it is meant to differ: make traces ARGS=--rewrite")
            return 1
        same += 1
    print(f"{same} traces are as they were")
    return 0 if same else 2


def rewrite(wanted: Iterable[int], processes: int) -> int:
    """Write the digests of these seeds; those of others stay in the file."""
    found, started_s = kept() if FILE.exists() else {}, time.monotonic()
    for done, (seed, digest) in enumerate(_digests(wanted, processes), 1):
        found[seed] = digest
        if done % SAID_EVERY == 0:
            print(f"{done} seeds in {time.monotonic() - started_s:.0f} s", flush=True)
    FILE.write_text(HEAD + "".join(f"{s} {d}\n" for s, d in sorted(found.items())), "utf-8")
    return 0


def show(seed: int) -> int:
    recorder = Recorder(keep=True)
    _run(seed, recorder)
    sys.stdout.writelines(recorder.lines)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="traces", description=__doc__)
    parser.add_argument("--seed", type=int, help="print the trace of one seed")
    parser.add_argument("--seeds", type=seeds, default=(0, SEEDS), help="A..B: from A to before B")
    parser.add_argument("--rewrite", action="store_true", help="keep what is found from now on")
    parser.add_argument("--jobs", type=jobs, default=2, help="processes, 2 unless it is said")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        return show(asked.seed)
    return (rewrite if asked.rewrite else compare)(range(*asked.seeds), asked.jobs)


if __name__ == "__main__":
    sys.exit(main())
