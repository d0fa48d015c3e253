"""Kill any of the daemons of a run at once, start them again with their own lines, and look."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.processes import Fleet, until

BACK_S = 60.0  # a run that has not gone on by then is dead


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


def kill_and_restart(
    run: Fleet, names: str, killed: Sequence[str], wait_s: float, draw: random.Random
) -> Restart:
    """Kill these daemons and their trainers at one instant, and start them in random order.

    Raises AssertionError if the run does not go on, or if anybody has other bits.
    """
    before = known_rounds(run, names)
    last = max(map(int, before))
    for name in killed:
        run.peers[name].kill()
    for name in killed:
        run.peers[name].ends()
        run.trainers[name].kill()
        run.trainers[name].ends()
    time.sleep(wait_s)
    order = draw.sample(list(killed), len(killed))
    for name in order:
        run.again(name)
    majority = len(names) // 2 + 1
    everybody = [run.peers[name] for name in names]
    until(
        lambda: sum(bool(peer.try_status()) for peer in everybody) >= majority,
        "a majority answers",
        *everybody,
        timeout_s=BACK_S,
    )
    began_s = time.monotonic()
    until(
        lambda: max(peer.try_status().get("round", 0) for peer in everybody) > last,
        f"a round after {last}",
        *everybody,
        timeout_s=BACK_S,
    )
    back_s = time.monotonic() - began_s
    for name in names:
        run.sees(name, len(names))
        run.peers[name].reaches(last + 1)
    after = known_rounds(run, names)
    redone = sum(after.get(number, digest) != digest for number, digest in before.items())
    return Restart("".join(killed), wait_s, last, back_s, redone, run.agree(names))


def known_rounds(run: Fleet, names: str) -> dict[str, str]:
    """The digest of each round that anybody remembers; whoever was killed remembers nothing."""
    found: dict[str, str] = {}
    for name in names:
        found |= run.peers[name].try_status().get("digests", {})
    return found
