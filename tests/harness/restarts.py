"""Kill any of the daemons of a run at once, start them again with their own lines, and look."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.power_cut import PoweredFleet
from harness.processes import Fleet, until

ROUNDS = 4  # before anything is killed
BACK_S = 120.0  # a run that has not gone on by then is dead
POLL_S = 0.02  # whoever asks more often takes the processor from those who are asked


class Restart(NamedTuple):
    """What came of it: ``back_s`` from when a majority answered until the next commit."""

    killed: str
    wait_s: float
    last_round: int  # that anybody knew of before
    back_s: float
    redone: int  # rounds that were done before and have another digest now
    agreed: int  # rounds of which all have the same digest


def subsets(names: str) -> Iterator[str]:
    """Every subset of these but the empty one, the small ones first."""
    for size in range(1, len(names) + 1):
        yield from map("".join, itertools.combinations(names, size))


def begin_training(run: Fleet, names: str) -> None:
    """Form a run whose rounds are never twice the same, and wait for a few of them."""
    run.form(names)
    for name in names:
        run.train(name, inner_s=0.2, method="restless")
    for name in names:
        run.peers[name].reaches(ROUNDS)


def kill_and_restart(
    run: Fleet,
    names: str,
    killed: Sequence[str],
    wait_s: float,
    draw: random.Random,
    *,
    again_s: float | None = None,
) -> Restart:
    """Kill these daemons and their trainers at one instant, and start them in random order.

    ``again_s`` after that once more. In a fleet of which the power can be cut, their homes lose
    what was not synced. AssertionError if the run does not go on, or if anybody has other bits.
    """
    before, redone = known_rounds(run, names), 0
    ports = {name: run.peers[name].port for name in killed}
    told = _kill(run, killed, draw)
    time.sleep(wait_s)
    _start(run, ports, draw)
    if again_s is not None:
        time.sleep(again_s)
        redone += sum(_told_again(run, name, told[name]) for name in killed)
        now = known_rounds(run, names)
        redone += _differ(before, now)
        before = now | before
        again = _kill(run, killed, draw)
        told = {name: max(told[name], again[name]) for name in killed}
        _start(run, ports, draw)
    last = max(*map(int, before), *told.values())
    majority = len(names) // 2 + 1
    everybody = [run.peers[name] for name in names]

    def wait(condition: Callable[[dict[str, Any]], bool], how_many: int, what: str) -> None:
        def there() -> bool:
            time.sleep(POLL_S)
            run.tend(names)
            return sum(condition(peer.try_status()) for peer in everybody) >= how_many

        until(there, what, *everybody, timeout_s=BACK_S)

    wait(bool, majority, "a majority answers")
    began_s = time.monotonic()
    wait(lambda status: status.get("round", 0) > last, 1, f"a round after {last}")
    back_s = time.monotonic() - began_s
    wait(
        lambda status: (
            len(status.get("members", ())) == len(names)
            and bool(status["digest"])
            and status["round"] > last
        ),
        len(names),
        "everybody is in again",
    )
    after = known_rounds(run, names)
    redone += _differ(before, after)
    redone += sum(_told_again(run, name, told[name]) for name in killed)
    return Restart("".join(killed), wait_s, last, back_s, redone, run.agree(names))


def _kill(run: Fleet, killed: Sequence[str], draw: random.Random) -> dict[str, int]:
    """Kill these; return the last round of which each one's trainer was told that it is committed.

    What a trainer was told is committed, also in the moment before its daemon died.
    """
    for name in killed:
        run.peers[name].kill()
    told = {}
    for name in killed:
        run.peers[name].ends()
        run.trainers[name].kill()
        run.trainers[name].ends()
        told[name] = max(committed_rounds(run.trainers[name].lines), default=0)
    if isinstance(run, PoweredFleet):
        run.lose("".join(killed), draw.randrange(1 << 32))
    return told


def _differ(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    """Return how many rounds have another digest than they had before."""
    return sum(after.get(number, digest) != digest for number, digest in before.items())


def committed_rounds(lines: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the rounds that a numpy trainer was told are committed, by the lines that it wrote.

    One that it has missed has begun without it, and may not be committed yet.
    """
    return [line["round"] for line in lines if line.get("kind") == "committed"]


def _told_again(run: Fleet, name: str, last: int) -> int:
    """Return how many rounds up to ``last`` a new trainer was told as committed once more."""
    return sum(number <= last for number in committed_rounds(run.trainers[name].lines))


def _start(run: Fleet, ports: dict[str, int], draw: random.Random) -> None:
    for name in draw.sample(list(ports), len(ports)):
        run.again(name, ports[name])


def known_rounds(run: Fleet, names: str) -> dict[str, str]:
    """The digest of each round that anybody remembers; whoever was killed remembers nothing."""
    found: dict[str, str] = {}
    for name in names:
        found |= run.peers[name].try_status().get("digests", {})
    return found
