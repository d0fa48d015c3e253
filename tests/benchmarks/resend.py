"""Bytes that survivors send again when one of eight peers is killed at half of a round.

    python tests/benchmarks/resend.py [--peers 8] [--mib 64] [--mbit 20] [--times 3]

Every daemon has a network namespace and a link of its own rate (tests/harness/netns.py, so this
needs root); the trainers are numpy. Counted is what leaves the survivors' interfaces during the
round, headers and control messages included, beside the same peers' undisturbed rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.netns import Net
from harness.processes import Fleet, fleet, until

LONG_S = 300.0  # rounds on slow links
INNER_S = 4.0  # the links are quiet for so long between rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--mib", type=float, default=64.0, help="float32 parameters")
    parser.add_argument("--mbit", type=float, default=20.0, help="rate of each link, each way")
    parser.add_argument("--times", type=int, default=3, help="kills")
    arguments = parser.parse_args()
    names = "abcdefgh"[: arguments.peers]
    elements = arguments.mib * 2**20 / 4
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder), Net(names)) as run:
        run.form(names)
        for name in names:
            run.train(name, elements, inner_s=INNER_S)
        again = [one_kill(run, names, arguments.mbit * 1e6) for _ in range(arguments.times)]
    print(
        f"{len(names)} peers, {arguments.mib:g} MiB, {arguments.mbit:g} Mbit/s, one killed at half"
        f" of a round: survivors send {statistics.median(again):.1%} again"
        f" (worst {max(again):.1%}, n={len(again)})"
    )


def one_kill(run: Fleet, names: str, rate_bps: float) -> float:
    """What the survivors sent more than in an undisturbed round, as a part of that."""
    whole_round(run, names)
    shape(run, names, rate_bps)
    start = whole_round(run, names)
    before = sent_bytes(run, names)
    wait_round(run, names, start + 1)
    between = sent_bytes(run, names)
    plain = {name: between[name] - before[name] for name in names}
    victim = next(n for n in names if run.peers[n].status()["phase"] != "coordinator")
    half_bytes = between[victim] + plain[victim] / 2
    assert run.net is not None
    net = run.net
    until(lambda: net.moved_bytes(victim)[0] > half_bytes, "half of a round", timeout_s=LONG_S)
    run.peers[victim].kill()
    survivors = names.replace(victim, "")
    wait_round(run, survivors, start + 2)
    after = sent_bytes(run, survivors)
    more = sum(after[name] - between[name] - plain[name] for name in survivors)
    again = more / sum(plain[name] for name in survivors)
    retries = max(run.peers[name].said("retry") for name in survivors)
    print(f"round {start + 2}: {again:+.1%} of {plain[survivors[0]]:,} B each, {retries} retries")
    run.trainers[victim].ends()
    shape(run, names, 0)  # whoever is back loads the state, which is no part of this
    run.restart(victim)
    return again


def shape(run: Fleet, names: str, rate_bps: float) -> None:
    assert run.net is not None
    for name in names:
        run.net.rate(name, rate_bps)


def whole_round(run: Fleet, names: str) -> int:
    """A round to which everybody has contributed, and which everybody has applied."""
    while True:
        seen = {name: len(run.trainers[name].lines) for name in names}
        latest = max(run.peers[name].reaches(1)["round"] for name in names)
        wait_round(run, names, latest + 1)
        for name in names:
            run.sees(name, len(names))
        fresh = {name: run.trainers[name].lines[seen[name] :] for name in names}
        if all(lines and lines[-1].get("kind") == "committed" for lines in fresh.values()):
            return latest + 1


def wait_round(run: Fleet, names: str, number: int) -> None:
    """Everybody has applied this round, and nobody has begun the next."""

    def there() -> bool:
        return all(run.peers[name].try_status().get("round", 0) >= number for name in names)

    until(there, f"round {number}", *run.peers.values(), timeout_s=LONG_S)


def sent_bytes(run: Fleet, names: str) -> dict[str, int]:
    assert run.net is not None
    return {name: run.net.moved_bytes(name)[0] for name in names}


if __name__ == "__main__":
    main()
