"""Faults of situations: what plain seeds hardly ever come to, because it takes a moment.

Each kind has seeds of its own (``Options.situation``). Who wants to leave does so as a candidate,
as a coordinator that nobody hears, while it loads the state, or before anybody has answered it; a
stranger asks to come in with another specification; and planners advise the coordinator, of all
members or some.
"""

from __future__ import annotations

import random

from simulation.fault import Fault
from simulation.options import Options

__all__ = ["situations"]

STRANGER = "z"  # no host of a script is called that
ADVICE_S = 0.7  # between two pieces of advice


def situations(options: Options, names: str) -> list[Fault]:
    """The script of the one that the options ask for."""
    if not options.situation:
        return []
    dice = random.Random(f"situation {options.seed} {options.faulty_s}")
    return _SITUATIONS[options.situation](dice, options, names)


def _candidate(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """Whoever hears nobody stands for election, and goes on doing so."""
    who, at_s = dice.choice(names), round(dice.uniform(0.1, 1.0), 3)
    leaves_s = round(at_s + dice.uniform(1.5, 2.5), 3)
    return [Fault(at_s, "isolate", who, 8.0), Fault(leaves_s, "leave_as", who, 0.0, "candidate")]


def _coordinator(dice: random.Random, options: Options, names: str) -> list[Fault]:
    return [Fault(round(dice.uniform(0.1, 3.0), 3), "leave_as", names, 0.0, "coordinator")]


def _outside(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """A process dies, and the next one under its name is outside for a while."""
    who, at_s = dice.choice(names), round(dice.uniform(0.1, 2.0), 3)
    away_s = round(dice.uniform(0.3, 1.0), 3)
    leaves = Fault(round(at_s + 0.2, 3), "leave_as", names, 0.0, options.situation)
    return [Fault(at_s, "kill", who, away_s), leaves]


def _stranger(dice: random.Random, options: Options, names: str) -> list[Fault]:
    return [Fault(round(dice.uniform(0.1, 0.5) * options.faulty_s, 3), "stranger", STRANGER)]


def _advice(dice: random.Random, options: Options, names: str) -> list[Fault]:
    times_s = [0.1 + n * ADVICE_S for n in range(int((options.faulty_s - 0.1) / ADVICE_S))]
    return [Fault(round(at_s, 3), "advise", "", 0.0, str(dice.randrange(1000))) for at_s in times_s]


_SITUATIONS = {
    "candidate": _candidate,
    "coordinator": _coordinator,
    "learner": _outside,
    "out": _outside,
    "stranger": _stranger,
    "advice": _advice,
}
