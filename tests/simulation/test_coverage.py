"""Seeds that reach nothing show nothing: what a fixed range of them comes to, and that a process
may die at every failpoint.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from harness.tracing import trace_name

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.net.wire import registered
from simulation.arena import NAMES
from simulation.options import PROFILES, WAKES_SHARE, Options, draw
from simulation.run import run_script, run_seed
from simulation.script import FAILPOINTS, Fault, draw_script

TESTS = Path(__file__).parents[1]
PROFILED = range(350)  # of these, those with a profile ...
PLAIN = range(50)  # ... and of these, those whose script has failpoints
# About half of what these seeds come to today.
AT_LEAST = {
    "rollback views": 2,
    "base-lost": 2,
    "fork views": 13,
    "yield": 10,
    "power cut": 10,
    "up": 28,  # back with a checkpoint
    "cradles": 16,
    "resumed views": 9,  # first views of a lineage that go on from checkpoints ...
    "resume": 2,  # ... of one alone
    "views with newcomers": 24,
    "views that remember somebody": 9,
    "held": 2,
    "asked": 2,
}
SPRUNG_MIN, SPRUNG_KINDS_MIN = 13, 9
SHARE_MIN = 0.02  # of the seeds, for each profile but births


def test_the_seeds_reach_what_is_rare() -> None:
    seen: Counter[str] = Counter()
    for seed in PROFILED:
        options = draw(seed)
        if options.profile or (seed in PLAIN and "failpoint" in options.kinds):
            outcome = run_seed(seed)
            assert not outcome.failure, f"make replay SEED={seed}: {outcome.failure}"
            seen.update(outcome.seen)
    missed = {what: seen[what] for what, least in AT_LEAST.items() if seen[what] < least}
    assert not missed, f"{missed} of {AT_LEAST}; all: {seen}"
    sprung = {what: count for what, count in seen.items() if what.startswith("sprung ")}
    assert len(sprung) >= SPRUNG_KINDS_MIN, sprung
    assert SPRUNG_MIN <= sum(sprung.values()) <= seen["failpoints"], sprung


def test_profiles_have_a_few_per_cent_of_the_seeds_each() -> None:
    drawn = Counter(draw(seed).profile for seed in range(3000))
    assert drawn.keys() == {*PROFILES, "wakes", "misled"}
    assert all(drawn[profile] > SHARE_MIN * 3000 for profile in PROFILES if profile != "birth")
    assert drawn["wakes"] > 0.5 * WAKES_SHARE * 3000
    assert drawn[""] > 2 * 3000 / 3


# ---------------------------------------------------------------- failpoints


def _plain(options: Options) -> bool:
    return not options.profile


def _is_quick(options: Options) -> bool:
    """A learner that is ahead of what it was told last goes back to that."""
    quick = options.fragments > 1 and options.inner_s == 0.2 and options.load_s <= 0.1
    return quick and _plain(options) and bool({"join", "kill"} & set(options.kinds))


# Where to look for those that plain seeds seldom come to.
WHERE: dict[str, Callable[[Options], bool]] = {
    "AskTrainers": lambda options: _plain(options) and bool(options.asks),
    "Hail": lambda options: options.profile == "power",
    "Leave": lambda options: _plain(options) and "leave" in options.kinds,
    "Meet": lambda options: options.profile == "split",
    "Notice": lambda options: options.profile == "holders",
    "ObjectIs": lambda options: _plain(options) and options.calls > 0,
    "Offer": lambda options: options.profile == "birth" and options.bootstrap == "cradle",
    "Renew": lambda options: options.profile == "split",
    "Resync": lambda options: _plain(options) and "flip" in options.kinds,
    "Undo": _is_quick,
    "Yield": lambda options: options.profile == "split",
}
TRIES = 40


@pytest.mark.parametrize("kind", FAILPOINTS)
def test_a_process_may_die_at_every_failpoint(kind: str) -> None:
    """The first to do it dies right afterwards; the run bears it, in every seed on the way."""
    fits = WHERE.get(kind, _plain)
    tried = 0
    for seed in range(5000):
        options = draw(seed)
        if not fits(options):
            continue
        if spring(options, kind):
            return
        tried += 1
        assert tried < TRIES, f"{tried} seeds, and nobody came to {kind}"


def spring(options: Options, kind: str) -> bool:
    names = NAMES[: options.hosts + options.archives]
    at_s, script = 0.05, draw_script(options)
    if options.profile == "birth":  # in the place of its own; one of three may die
        at_s, names = 0.0, names[:1]
        script = [fault for fault in script if fault.at_s > 0.0]
    point = Fault(at_s, "failpoint", names, 1.0, f"{kind} 1 after")
    outcome = run_script(options, [point, *script])
    assert not outcome.failure, f"seed {options.seed} with a failpoint: {outcome.failure}"
    return bool(outcome.seen.get(f"sprung {kind}"))


def test_no_message_and_no_effect_is_left_out() -> None:
    """But parts of messages, how they travel, what nobody is refused for, what ends one, and disks.

    durable.py has those.
    """
    kinds = {*ms.InView.__subclasses__(), *get_args(ms.MEMBERSHIP)}
    messages = kinds & {*registered().values()}  # without those that slots were made of
    found = {trace_name(kind) for kind in (*messages, *get_args(ev.Effect))}
    assert found == {*FAILPOINTS, "JoinRefused", "Left", "Packed", "Persist", "Send", "TakeBack"}


def test_what_is_known_not_to_be_reached_is_in_the_source() -> None:
    """In a process of its own, which counts the conditions of all modules."""
    code = (
        "from simulation import coverage\n"
        "coverage.prepare(coverage.MODULES)\n"
        "known = {coverage.words(item) for item in coverage.every_item()}\n"
        "print(*sorted(coverage.UNREACHED - known), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=TESTS
    )
    assert done.stdout.strip() == ""
