"""Daemons that die at once and come back, and power cuts of all of them: is any round lost?

    python tests/chaos/restarts.py cuts [--times 200]
    python tests/chaos/restarts.py grid [--waits 0 3 30] [--joiners]

Five daemons, on hosts of their own (network namespaces, so it needs root), with numpy trainers
whose rounds are never twice the same. ``cuts``: the power of all
is cut, anywhere in a round or in a restart, and their homes lose what was not synced
(harness/power_cut.py). ``grid``: each of the 31 subsets is killed by SIGKILL, and comes back after
each wait, in random order, with its own line; with ``--joiners`` the founder stays away for ever,
and the subsets are those of the others. A line for each, and a table at the end. What fails is
told, keeps its logs, and the rest goes on with a new run. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.netns import Net
from harness.power_cut import PoweredFleet
from harness.processes import Fleet
from harness.restarts import Restart, begin_training, kill_and_restart, subsets

FIVE = "abcde"
BACK_S = 5.0  # from when a majority has replayed until a commit
BETWEEN_S = 1.0  # up to so long after a restart the next one comes
Try = Callable[[Fleet], Restart]


class Table:
    """Keep what came of each try."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Restart]] = []
        self.failures: list[str] = []

    def add(self, group: str, found: Restart) -> None:
        self.found.append((group, found))
        if found.redone:
            self.failures.append(f"{found.redone} rounds of {found.killed} were done again")
        if found.back_s > BACK_S:
            self.failures.append(f"{found.killed}: a round after {found.back_s:.2f} s only")

    def lines(self) -> Iterator[str]:
        yield f"{'':12} {'times':>6} {'redone':>7} {'back: median':>13} {'90 %':>7} {'longest':>8}"
        yield from map(self._line, dict.fromkeys(group for group, _ in self.found))
        late = sum(found.back_s > BACK_S for _, found in self.found)
        yield f"{late} took longer than {BACK_S:.0f} s; {len(self.failures)} failed"

    def _line(self, group: str) -> str:
        rows = [found for name, found in self.found if name == group]
        took = sorted(found.back_s for found in rows)
        redone = sum(found.redone for found in rows)
        ninth = took[len(took) * 9 // 10]
        times = f"{statistics.median(took):11.2f} s {ninth:5.2f} s {took[-1]:6.2f} s"
        return f"{group:12} {len(rows):6} {redone:7} {times}"


def cuts(times: int, draw: random.Random) -> Iterator[tuple[str, Try]]:
    def cut(run: Fleet) -> Restart:
        time.sleep(draw.uniform(0.0, BETWEEN_S))
        return kill_and_restart(run, FIVE, FIVE, 0.0, draw)

    def cut_twice(run: Fleet) -> Restart:
        again_s = draw.uniform(0.0, 3.0)  # while they replay, elect, or do their first round
        return kill_and_restart(run, FIVE, FIVE, 0.0, draw, again_s=again_s)

    for _ in range(times):
        yield draw.choice([("cut", cut), ("cut", cut), ("cut twice", cut_twice)])


def grid(waits: list[float], names: str, draw: random.Random) -> Iterator[tuple[str, Try]]:
    points = [(killed, wait_s) for wait_s in waits for killed in subsets(names)]
    draw.shuffle(points)
    for killed, wait_s in points:

        def restart(run: Fleet, killed: str = killed, wait_s: float = wait_s) -> Restart:
            return kill_and_restart(run, names, killed, wait_s, draw)

        yield f"after {wait_s:.0f} s", restart


class Grid:
    """Do one try after the other with a run, and with a new one after each that fails."""

    def __init__(self, make: Callable[[Path], Fleet], names: str, folder: Path) -> None:
        self.table = Table()
        self._make, self._names, self._folder = make, names, folder
        self._run: Fleet | None = None

    def do(self, number: int, group: str, attempt: Try) -> None:
        try:
            found = attempt(self._run or self._begin(number))
        except AssertionError as error:
            self.table.failures.append(str(error))
            print(f"{number:4} {group}: FAILED: {str(error)[:6000]}", flush=True)
            self.close()
            return
        self.table.add(group, found)
        print(
            f"{number:4} {group}: {found.killed} at round {found.last_round}: a round after"
            f" {found.back_s:.2f} s, {found.redone} redone, {found.agreed} digests equal",
            flush=True,
        )

    def _begin(self, number: int) -> Fleet:
        """Form a run of all five; whoever does not take part dies for good."""
        self._run = run = self._make(self._folder / f"from-{number}")
        begin_training(run, FIVE)
        for name in set(FIVE) - set(self._names):
            for process in (run.peers[name], run.trainers[name]):
                process.kill()
                process.ends()
        for name in self._names:
            run.sees(name, len(self._names))
        return run

    def close(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cuts", "grid"))
    parser.add_argument("--times", type=int, default=200, help="power cuts")
    parser.add_argument("--waits", type=float, nargs="+", default=[0.0, 3.0, 30.0])
    parser.add_argument("--joiners", action="store_true", help="the founder never comes back")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="atoll-restarts-"))
    print(f"{arguments.what} with seed {arguments.seed}, logs in {folder}", flush=True)
    draw = random.Random(arguments.seed)
    names = FIVE[1:] if arguments.joiners else FIVE
    tries = cuts(arguments.times, draw)
    if arguments.what == "grid":
        tries = grid(arguments.waits, names, draw)
    kind = PoweredFleet if arguments.what == "cuts" else Fleet
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what follows
    with Net(FIVE) as net:

        def make(each: Path) -> Fleet:
            each.mkdir()
            return kind(each, net)

        several = Grid(make, names, folder)
        try:
            for number, (group, attempt) in enumerate(tries, 1):
                several.do(number, group, attempt)
        finally:
            several.close()
            print(*several.table.lines(), *several.table.failures, sep="\n", flush=True)
    return 1 if several.table.failures else 0


if __name__ == "__main__":
    sys.exit(main())
