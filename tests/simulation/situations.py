"""Faults of situations: what plain seeds hardly ever come to, because it takes a moment.

Each kind has seeds of its own (``Options.situation``). Who wants to leave does so as a candidate,
as a coordinator that nobody hears, while it loads the state, or before anybody has answered it; a
stranger asks to come in with another specification; planners advise the coordinator, of all
members or some; a witness that comes back is to coordinate at once, and hears of it late; somebody
cannot keep up, or downloads nothing; participants of collectives die at them, and call others.
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


def _heir(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """The witness is voted in again and handed the run, before it hears of the first of both."""
    witness, at_s = names[1], round(dice.uniform(0.2, 3.0), 3)
    away_s = round(dice.uniform(0.1, 1.0), 3)
    lost = f"Install lose {dice.choice((6, 9, 12))} to"
    return [
        Fault(at_s, "kill", witness, away_s),
        Fault(round(at_s + 0.05, 3), "lose", witness, 1.0, lost),
        *(
            Fault(round(at_s + 0.05 + n * away_s / 4, 3), "hand_over", witness)
            for n in range(dice.randint(3, 8))
        ),
    ]


def _laggard(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """Whoever comes back finds that states take longer to load than rounds, or gets none."""
    at_s, who = round(dice.uniform(0.1, 1.5), 3), dice.choice(names)
    away_s = round(dice.choice((0.1, 0.5, 1.5)) * dice.uniform(0.8, 1.2), 3)
    ends = dice.choice(("kill", "kill", "pause", "isolate"))
    how = dice.choice(("heavy", "heavy", "stuck"))
    again_s = round(at_s + dice.uniform(3.5, 5.5), 3)
    return [
        Fault(at_s, ends, who, away_s),
        Fault(at_s, how, who, round(dice.uniform(4.0, 7.5), 3), str(dice.choice((0.4, 0.8, 2.0)))),
        *([Fault(again_s, "kill", dice.choice(names), away_s)] if dice.random() < 0.5 else []),
    ]


def _calls(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """Some die in the middle of a collective, which the others repeat without them."""
    script = []
    for _ in range(dice.choice((1, 2, 3))):
        at_s, away_s = dice.uniform(0.0, 0.7) * options.faulty_s, round(dice.uniform(0.2, 2.0), 3)
        kind = dice.choice(("Ready", "Ready", "Begin", "Reduce", "ObjectIs", "Heartbeat"))
        detail = f"{kind} {dice.choice((1, 2, 3))} {dice.choice(('before', 'after'))}"
        who = names if dice.random() < 0.5 else dice.choice(names)
        script.append(Fault(round(at_s, 3), "failpoint", who, away_s, detail))
        lost = f"{dice.choice(('Begin', 'Ready', 'ObjectIs'))} lose {dice.choice((1, 2, 4))} to"
        script.append(Fault(round(at_s, 3), "lose", dice.choice(names), 1.0, lost))
    return script


_SITUATIONS = {
    "candidate": _candidate,
    "coordinator": _coordinator,
    "learner": _outside,
    "out": _outside,
    "stranger": _stranger,
    "advice": _advice,
    "heir": _heir,
    "laggard": _laggard,
    "calls": _calls,
}
