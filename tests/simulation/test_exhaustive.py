"""All orders of events, for small runs.

What these searches cover: three peers in one view, links that keep their order, every delivery and
every end of a reduction or fetch interleaved in every way, crashes at every state, with every
beginning of what the victim had under way, down to the last survivor; a coordinator that is heard
late; a hand-over under way; each peer started again once, at any time after its crash, with what a
power cut has left of its disk. What they do not: lost messages on living links, joins, more than
one chunk, disks that take their time, and timeouts that fire while something else could still
happen, but for those of one silence. A state counts once; 64-bit fingerprints are compared.

Measured, complete: 2 rounds without a fault have 186 states, 1 round with 1 crash 2,400, 2 rounds
with 2 crashes 33,900 (10 s of a busy core), 1 round with a late coordinator 40,000, 1 round with a
hand-over and a crash 124,000.

Faults that are planted have to be found. A freeze matters only while the old coordinator can still
commit, so with crashes alone nothing shows its loss: who crashed commits nothing, and nobody stands
against a coordinator that is heard. One that is heard late shows it. A base of another height than
the highest is only chosen if a voter lacks a round that was committed without it: a replica without
a trainer. An accepted view has to be repeated only if it was decided and its proposer is gone,
while a quorum of its voters lives: a hand-over, then one crash.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.peer.membership import events as ev
from simulation.exhaustive import Found, Search, Setting, search
from simulation.moves import fingerprint
from simulation.snapshots import clone

TESTS = Path(__file__).parents[1]
HUNT = """
import sys
from simulation.mutants import plant
plant(sys.argv[1])
from simulation.exhaustive import Setting, search
try:
    print(search(eval(sys.argv[2])).failure)
except AssertionError as early:  # some show before the search begins, while the run is formed
    print(early)
"""

LONG = "no freeze on promise"
PLANTED = {  # what is searched, and what is broken
    "base without READY": (Setting(1, 1, 5_000), "forgets round"),
    "minimum base": (Setting(1, 1, 5_000, trainers="ab"), "forgets round"),
    "ignore accepted value": (Setting(1, 1, 10_000, successor="b"), "two views"),
    LONG: (Setting(1, 0, 200_000, silent="a"), "forgets round"),  # after 154,000
    "third quorum": (Setting(1, 2, 1_000), "without a quorum"),
    "half quorum": (Setting(1, 2, 5_000), "without a quorum"),
    "commit before quorum": (Setting(1, 1, 1_000), "has READY of 1 of 3"),
}


def complete(setting: Setting) -> Found:
    found = search(setting)
    assert not found.failure, "\n".join([found.failure, *found.path])
    assert found.complete
    return found


def test_two_rounds_without_faults_are_complete() -> None:
    found = complete(Setting(2, 0, 10_000))
    assert found.ends
    assert found.states > 100


def test_one_round_with_a_crash_anywhere_is_complete() -> None:
    assert complete(Setting(1, 1, 10_000)).ends > 100


def test_one_round_of_two_of_three_with_a_crash_anywhere_is_complete() -> None:
    assert complete(Setting(1, 1, 10_000, trainers="ab")).ends > 100


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_rounds_and_two_crashes_anywhere_are_complete() -> None:
    assert complete(Setting(2, 2, 100_000)).ends > 2_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_coordinator_that_is_heard_late_is_complete() -> None:
    assert complete(Setting(1, 0, 100_000, silent="a")).ends > 2_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hand_over_and_a_crash_are_complete() -> None:
    assert complete(Setting(1, 1, 400_000, successor="b")).ends > 2_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_rounds_of_two_of_three_with_two_crashes_are_complete() -> None:
    assert complete(Setting(2, 2, 400_000, trainers="ab")).ends > 2_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "setting",
    [
        Setting(3, 2, 200_000),
        Setting(1, 1, 20_000, silent="a"),
        Setting(2, 2, 50_000, successor="c"),
    ],
    ids=["three rounds", "a silence and a crash", "a hand-over and two crashes"],
)
def test_more_than_can_be_completed_as_far_as_the_bound_goes(setting: Setting) -> None:
    found = search(setting)
    assert not found.failure, "\n".join([found.failure, *found.path])
    assert found.ends > 300


@pytest.mark.timeout(300)
def test_a_restart_at_any_time_as_far_as_the_bound_goes() -> None:
    found = search(Setting(1, 0, 400, restarts="b"))
    assert not found.failure, "\n".join([found.failure, *found.path])
    assert found.ends > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("who", ["a", "b", "abc"])
def test_restarts_at_any_time_as_far_as_the_bound_goes(who: str) -> None:
    """Restart the coordinator, a member, or each once: all of them may be down at once."""
    found = search(Setting(1, 0, 40_000, restarts=who))
    assert not found.failure, "\n".join([found.failure, *found.path])
    assert found.ends > 300


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n == "no freeze on promise" else n
        for n in PLANTED
    ],
)
def test_a_planted_fault_is_found(name: str) -> None:
    setting, broken = PLANTED[name]
    done = subprocess.run(
        [sys.executable, "-c", HUNT, name, repr(setting)],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert broken in done.stdout


def test_a_copy_of_a_machine_leaves_the_original_alone() -> None:
    start = Search(Setting(1, 0, 10)).start
    peer, node = start.nodes[0]
    before = fingerprint(start)
    twin = clone(node)
    deadline_s = twin.next_deadline_s()
    assert deadline_s is not None
    assert twin.handle(ev.Tick(), deadline_s + 1.0)
    assert fingerprint(start) == before
    assert peer == twin.me.peer
