"""Count the seeds that come to each row of the literal tables and each outcome of a condition.

    python -m simulation.coverage --seeds 0..5000 --jobs 2   # what fewer than 20 of 5,000 reach
    python -m simulation.coverage --seeds 0..500 --all       # everything
    python -m simulation.coverage --seeds 0..500 --only member,attempt

A decision module counts its own conditions (guards.py). Fewer seeds are scaled: of 1,500, what six
or more reach is enough. What no seed can come to, or need not, is known with the reason
(unreached.py) and is counted only. `make simulate-coverage` is the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from simulation import guards
from simulation.altered import MODULES, alter
from simulation.arguments import jobs, seeds
from simulation.unreached import UNREACHED

BATCH = 25
ENOUGH = 20 / 5_000  # of the seeds
SHOWN_CHARACTERS = 90
WORDS_CHARACTERS = 80  # of an item that has a reason

Item = tuple[str, int, str]  # module, line or 0, what it is


def prepare(modules: tuple[str, ...]) -> None:
    """Let this process count in these modules, and in the tables that they look things up in."""
    alter({module: partial(guards.counted, module) for module in modules})
    from atoll.peer.membership import node, phase

    for name in ("_EVENTS", "_MESSAGES"):
        setattr(node, name, _Table(name, getattr(node, name)))
    phase.TRANSITIONS = _Table("TRANSITIONS", phase.TRANSITIONS)  # type: ignore[misc]


class _Table(dict[Any, Any]):
    """A literal table that notes which rows are looked up."""

    tables: ClassVar[dict[str, _Table]] = {}

    def __init__(self, name: str, rows: dict[Any, Any]) -> None:
        super().__init__(rows)
        self.seen: set[Any] = set()
        self.tables[name] = self

    def __getitem__(self, key: Any) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


def batch(first: int, end: int) -> tuple[Counter[Item], list[str]]:
    """In how many of these seeds each item was reached; and what has failed."""
    from simulation.mixed import run_mixed

    counts: Counter[Item] = Counter()
    failed = []
    for seed in range(first, end):
        guards.HITS[:] = bytes(len(guards.HITS))
        for table in _Table.tables.values():
            table.seen.clear()
        outcome = run_mixed(seed)
        if outcome.failure:
            failed.append(f"seed {seed}: {outcome.failure}")
        counts.update(reached())
    return counts, failed


def reached() -> Iterator[Item]:
    """Return what this process has come to since the counters were set back."""
    for place, hit in enumerate(guards.HITS):
        if hit:
            yield _outcome(place)
    for name, table in _Table.tables.items():
        for key in table.seen & table.keys():
            yield _row(name, key)


def every_item() -> Iterator[Item]:
    for place in range(len(guards.HITS)):
        yield _outcome(place)
    for name, table in _Table.tables.items():
        for key in table:
            yield _row(name, key)


def words(item: Item) -> str:
    """Return what an item is, wherever in its module that stands."""
    module, _, text = item
    return f"{module} {text.split(' #')[0]}"[:WORDS_CHARACTERS]


def _outcome(place: int) -> Item:
    guard = guards.GUARDS[place // 2]
    text = f"{guard.within}: {guard.text[:SHOWN_CHARACTERS]}"
    return guard.module, guard.line, f"{'yes' if place % 2 else 'no '} {text} #{place // 2}"


def _row(name: str, key: Any) -> Item:
    parts = key if isinstance(key, tuple) else (key,)
    shown = " ".join(getattr(part, "name", None) or part.__name__ for part in parts)
    return name, 0, shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="coverage", description=__doc__)
    parser.add_argument("--seeds", type=seeds, default=(0, 1500), help="A..B: from A to before B")
    parser.add_argument("--jobs", type=jobs, default=2, help="processes, 2 unless it is said")
    parser.add_argument("--only", default="", help="modules, with commas between")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long; 0: never")
    parser.add_argument("--all", action="store_true", help="also what is reached often")
    asked = parser.parse_args(arguments)
    first, end = asked.seeds
    started_s = time.monotonic()
    modules = tuple(filter(None, asked.only.split(","))) or MODULES
    prepare(modules)  # what is forked from here counts too
    counts: Counter[Item] = Counter()
    failed: list[str] = []
    done = 0
    with ProcessPoolExecutor(asked.jobs) as pool, suppress(KeyboardInterrupt):
        starts = range(first, end, BATCH)
        ends = [min(end, start + BATCH) for start in starts]
        for found, wrong in pool.map(batch, starts, ends):
            counts.update(found)
            failed += wrong
            done = min(done + BATCH, end - first)
            if asked.minutes and time.monotonic() - started_s > 60 * asked.minutes:
                pool.shutdown(cancel_futures=True)
                break
    items = sorted({*every_item()})
    least = max(1, round(ENOUGH * done))
    few = [item for item in items if counts[item] < least]
    rare = [item for item in few if words(item) not in UNREACHED]
    for item in items if asked.all else rare:
        module, line, text = item
        print(f"{counts[item]:6} {module}{f'.py:{line}' if line else ''} {text}")
    print("\n".join(failed))
    print(
        f"{len(items)} items in {done} seeds: {sum(not counts[i] for i in items)} reached"
        f" in none, {len(few)} in fewer than {least}, for which {len(few) - len(rare)} have a"
        f" reason; {len(failed)} seeds failed"
    )
    return bool(failed or rare)


if __name__ == "__main__":
    sys.exit(main())
