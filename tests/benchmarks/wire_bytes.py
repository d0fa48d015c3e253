"""Bytes that each peer sends in a round, beside what the butterfly should cost in theory.

    python tests/benchmarks/wire_bytes.py [--peers 3] [--parameters 2e6] [--rounds 20]

Theory, per peer and round, n peers, N parameters, int8 in blocks of 256 (1 + 4/256 bytes per
parameter): (n-1)/n of the encoded vector out as contributions and as much again as results.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.processes import fleet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--parameters", type=float, default=2e6)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    n, names = arguments.peers, "abcdefgh"[: arguments.peers]
    encoded_bytes = arguments.parameters * (1 + 4 / 256)
    theory_bytes = 2 * (n - 1) / n * encoded_bytes
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as run:
        run.form(names)
        for name in names:
            run.train(name, arguments.parameters, inner_s=0.3)
        # Round 1 ships the first parameters, and trainers that attach late miss a round.
        start = max(run.peers[name].reaches(4)["round"] for name in names)
        before = {name: counts(run.peers[name].reaches(start + 1)) for name in names}
        end = start + 1 + arguments.rounds
        after = {name: counts(run.peers[name].reaches(end)) for name in names}
    print(f"{n} peers, {arguments.parameters:.0f} parameters, int8; theory {theory_bytes:,.0f} B")
    for name in names:
        rounds = after[name][0] - before[name][0]
        data = (after[name][1] - before[name][1]) / rounds
        control = (after[name][2] - before[name][2]) / rounds
        over = 100 * data / theory_bytes - 100
        print(
            f"peer {name}: {data:,.0f} B of data per round, {over:+.2f} % of theory;"
            f" {control:,.0f} B of control messages"
        )


def counts(status: dict[str, object]) -> tuple[int, int, int]:
    moved = status["bytes"]
    assert isinstance(moved, dict)
    assert isinstance(status["round"], int)
    # Probes of the links go with the data streams, and between rounds.
    return status["round"], moved["sent"]["rounds"], moved["sent"]["control"]


if __name__ == "__main__":
    main()
