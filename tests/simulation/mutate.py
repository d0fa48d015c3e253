"""Mechanical mutations of the decision modules (mutations.py): what finds each of them?

    python -m simulation.mutate --seed 20 --count 60 --seeds 0..5000 --jobs 2

First all seeds run once without any mutation and note in which of them each could matter. Then each
mutation is planted in a process of its own: the scenarios first, which take a second, then the
seeds that are left, until one fails. Unit tests do not count. `--seconds` bounds what one mutation
may take of a processor: the table says how many of its seeds were run. `make mutate` is the same.
A survivor that is known stands in survivors.py with the reason: it changes nothing, or matters to
hostile peers only, and counts as not caught. Exit code 1 if fewer than nine of ten of those that
change anything were caught.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from simulation import mutations
from simulation.altered import alter
from simulation.arguments import jobs, seeds
from simulation.mutations import Mutation
from simulation.survivors import EQUIVALENT, HOSTILE

BATCH = 25
TESTS = Path(__file__).parents[1]
SHARE_MIN = 0.9
RUN_CPU_S = 120.0  # a seed takes a second at most: this one does not end
SHOWN_CHARACTERS = 80
WHY_CHARACTERS = 100


# ---------------------------------------------------------------- where each could matter


def reach(drawn: list[Mutation], first: int, end: int, processes: int) -> list[list[int]]:
    """The seeds in which each mutation could make a difference."""
    numbers: dict[str, dict[int, int]] = {}
    for number, mutation in enumerate(drawn):
        numbers.setdefault(mutation.module, {})[mutation.place] = number
    alter({module: mutations.marked(places) for module, places in numbers.items()})
    mutations.HITS[:] = bytes(len(drawn))
    found: list[list[int]] = [[] for _ in drawn]
    with ProcessPoolExecutor(processes) as pool:
        starts = range(first, end, BATCH)
        for hits in pool.map(_reached, starts, [min(end, start + BATCH) for start in starts]):
            for seed, reached in hits:
                for number in reached:
                    found[number].append(seed)
    return found


def _reached(first: int, end: int) -> list[tuple[int, list[int]]]:
    from simulation.mixed import run_mixed

    found = []
    for seed in range(first, end):
        mutations.HITS[:] = bytes(len(mutations.HITS))
        run_mixed(seed)
        found.append((seed, [number for number, hit in enumerate(mutations.HITS) if hit]))
    return found


# ---------------------------------------------------------------- one mutation


def judge(mutation: Mutation, wanted: Iterable[int], limit_s: float) -> str:
    """In a process of its own: what has found it, or how many seeds have not."""
    alter({mutation.module: mutations.mutated(mutation)})
    signal.signal(signal.SIGVTALRM, _too_long)
    scenario = _failing_scenario()
    if scenario:
        return f"scenario {scenario}"
    from simulation.mixed import run_mixed

    count, started_s = 0, time.process_time()
    for seed in wanted:
        if time.process_time() - started_s > limit_s:
            break
        signal.setitimer(signal.ITIMER_VIRTUAL, RUN_CPU_S)
        outcome = run_mixed(seed)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        count += 1
        if outcome.failure:
            return f"seed {seed} {outcome.failure[:WHY_CHARACTERS]}"
    return f"SURVIVED {count}"


def _failing_scenario() -> str:
    try:
        from simulation.scenario import FOLDER, play, split
    except Exception as error:  # it cannot even be imported
        return f"none can be played: {error}"
    for path in sorted(FOLDER.glob("*.txt")):
        head, transcript = split(path.read_text("utf-8"))
        signal.setitimer(signal.ITIMER_VIRTUAL, RUN_CPU_S)
        try:
            same = play(head) == transcript
        except Exception:  # the machine has failed, or a check
            same = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        if not same:
            return path.stem
    return ""


def _too_long(*_: object) -> None:
    raise AssertionError(f"a storm: {RUN_CPU_S:.0f} s of a processor, and no end")


def _judged_apart(seed: int, drawn: list[Mutation], limit_s: float, given: list[int]) -> str:
    number, *wanted = given
    words = ["--seed", str(seed), "--count", str(len(drawn)), "--judge", str(number)]
    done = subprocess.run(
        [sys.executable, "-m", "simulation.mutate", *words, "--seconds", str(limit_s)],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
    )
    if done.returncode:
        return f"crash {done.stderr.strip().splitlines()[-1][:WHY_CHARACTERS]}"
    return done.stdout.strip()


# ---------------------------------------------------------------- the table


def table(
    seed: int, drawn: list[Mutation], found: list[list[int]], processes: int, limit_s: float
) -> Iterator[tuple[Mutation, str]]:
    given = [[number, *found[number]] for number in range(len(drawn))]
    with ThreadPoolExecutor(processes) as pool:
        how = pool.map(partial(_judged_apart, seed, drawn, limit_s), given)
        yield from zip(drawn, how, strict=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutate", description=__doc__)
    parser.add_argument("--seed", type=int, default=20, help="of the draw")
    parser.add_argument("--count", type=int, default=60, help="mutations to draw")
    parser.add_argument("--seeds", type=seeds, default=(0, 5000), help="A..B: from A to before B")
    parser.add_argument("--jobs", type=jobs, default=2, help="processes, 2 unless it is said")
    parser.add_argument("--seconds", type=float, default=600.0, help="of a processor for each")
    parser.add_argument("--judge", type=int, help="one mutation; seeds as JSON on standard input")
    parser.add_argument("--draw", action="store_true", help="show what is drawn, and no more")
    asked = parser.parse_args(arguments)
    drawn = mutations.draw(asked.seed, asked.count)
    if asked.judge is not None:
        print(judge(drawn[asked.judge], json.load(sys.stdin), asked.seconds))
        return 0
    if asked.draw:
        for number, mutation in enumerate(drawn):
            print(f"{number:3} {mutation}")
        return 0
    first, end = asked.seeds
    found = reach(drawn, first, end, asked.jobs)
    caught = same = 0
    for number, (mutation, how) in enumerate(
        table(asked.seed, drawn, found, asked.jobs, asked.seconds)
    ):
        survives = how.startswith("SURVIVED")
        why = EQUIVALENT.get(mutation.words, "") if survives else ""
        caught += not survives
        same += bool(why)
        how = f"{how}, and changes nothing: {why}" if why else how
        if survives and mutation.words in HOSTILE:
            how = f"{how}; found by unit tests: {HOSTILE[mutation.words]}"
        could = f"{len(found[number]):5} of {end - first}"
        print(f"{number:3} {could} | {str(mutation)[: 2 * SHOWN_CHARACTERS]} | {how}", flush=True)
    others = len(drawn) - same
    text = f"{caught} of {others} caught: {caught / others:.0%}"
    print(f"{text}; {same} more of {len(drawn)} are known to change nothing")
    return caught < SHARE_MIN * others


if __name__ == "__main__":
    sys.exit(main())
