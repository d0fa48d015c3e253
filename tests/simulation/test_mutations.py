"""Mutations and counters change the syntax trees of decision modules, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FunctionType

from atoll.peer.net.wire import registered
from simulation import guards, mutations, survivors
from simulation.altered import MODULES, source_of
from simulation.losses import KINDS

TESTS = Path(__file__).parents[1]
SOURCE = """
from __future__ import annotations

def pick(a, b):
    if a and not b:
        return a
    return [x for x in (a, b) if x > 1] or None
"""


def test_a_draw_is_a_draw() -> None:
    drawn = mutations.draw(7, 40)
    assert drawn == mutations.draw(7, 40) != mutations.draw(8, 40)
    assert len({(each.module, each.place) for each in drawn}) == 40
    for each in drawn:
        assert each.before != each.after
        compile(mutations.mutated(each)(source_of(each.module)), each.module, "exec")


def test_every_module_can_be_marked_and_counted() -> None:
    for module in MODULES:
        source = source_of(module)
        compile(mutations.marked({0: 0} if "def " in source else {})(source), module, "exec")
        compile(guards.counted(module, source), module, "exec")


def test_both_outcomes_of_each_condition_are_counted() -> None:
    first = len(guards.GUARDS)
    scope: dict[str, object] = {}
    FunctionType(compile(guards.counted("toy", SOURCE), "toy", "exec"), scope)()
    texts = [guard.text for guard in guards.GUARDS[first:]]
    assert texts == ["a", "b", "[x for x in (a, b) if x > 1]", "x > 1"]

    def hits(*given: int) -> list[int]:
        guards.HITS[:] = bytes(len(guards.HITS))
        scope["pick"](*given)  # type: ignore[operator]
        return [place - 2 * first for place, hit in enumerate(guards.HITS) if hit]

    assert hits(1, 0) == [1, 2]  # a is true, b is false, and that is all
    assert hits(0, 1) == [0, 4, 6]
    assert hits(3, 3) == [1, 3, 5, 7]


def test_losses_wait_for_messages_that_there_are() -> None:
    kinds = {each.split()[0] for each in KINDS} - {"Retry"}
    assert kinds <= registered().keys()
    assert {each.split()[1] for each in KINDS} == {"lose", "late", "cut"}


def test_what_changes_nothing_can_still_be_drawn() -> None:
    """Else the source has changed, and the reason may not hold any more."""
    everything = {each.words for each in mutations.draw(0, 1_000_000)}
    assert survivors.EQUIVALENT.keys() | survivors.HOSTILE.keys() <= everything


def test_what_is_drawn_can_be_shown() -> None:
    words = [sys.executable, "-m", "simulation.mutate", "--draw", "--count", "3"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=TESTS, check=True)
    assert len(done.stdout.splitlines()) == 3
