"""Faults of single messages: of all that a peer says or hears, one kind gets lost, or comes late.

What a protocol forgets to check is seen where one message is missing at the wrong moment, and
random loss hardly ever finds that moment. So a *loss* waits for a kind of message. What it hits is
lost (where links are streams, with the link, which breaks), or comes seconds later, as what a
process has said that is dead by then, or is lost together with all that its sender says and hears
for a while. Half of them are followed by the end of whoever coordinates at that time. Two patterns
have a loss in the middle: results that differ, and words of a former life.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from simulation.fault import Fault
from simulation.options import Options

__all__ = ["Loss", "losses"]


@dataclass(eq=False)
class Loss:
    """Hold a loss that waits for its message."""

    # Of message; "Retry": BEGIN of a round that was begun before; "Flagged": ACCEPT of a fork or a
    # rollback.
    kind: str
    left: int  # so many of them
    way: str  # "from" or "to" ...
    names: str  # ... one of these
    # "lose", "late", "cut"; "doom": lost, and its sender dies of its next COMMIT, after it or
    # ("doom-before") before it; "wake": what was stopped or cut off is back; "mislead": that, and
    # one of the others follows it.
    act: str
    for_s: float


# Each with what may become of it.
KINDS = (
    "Begin lose",
    "Retry lose",
    "Retry cut",
    "Ready lose",
    "Ready cut",
    "Ready late",
    "Commit lose",
    "Commit cut",
    "CoordinatorBeat lose",
    "Repair lose",
    "Repair late",
    "Notice lose",
    "AskFinals lose",
    "Finals lose",
    "Finals late",
    "Miss lose",
    "Prepare lose",
    "Promise lose",
    "Promise cut",
    "Accept lose",
    "Accepted lose",
    "Accepted cut",
    "Install lose",
    "Install cut",
    "Learn lose",
    "Join lose",
    "Join late",
    "ObjectIs lose",
    "Resync lose",
    "Leave lose",
    "Redirect lose",
    "ProbeView lose",
)


def losses(options: Options, names: str) -> list[Fault]:
    """The script of those that the options ask for."""
    dice = random.Random(f"losses {options.seed} {options.faulty_s}")
    script: list[Fault] = []
    for _ in range(options.losses):
        at_s = dice.uniform(0.0, 0.9) * options.faulty_s
        pattern = dice.choice((_message, _message, _dispute, _ghost))
        script += pattern(dice, names, at_s)
    return script


def _message(dice: random.Random, names: str, at_s: float) -> list[Fault]:
    """One kind of message, and perhaps whoever coordinates soon after."""
    kind, act = dice.choice(KINDS).split()
    who = names if dice.random() < 0.4 else dice.choice(names)
    for_s = round(dice.choice((0.3, 1.4, 2.5)) * dice.uniform(0.8, 1.3), 3)
    count, way = dice.choice((1, 1, 2, 4)), dice.choice(("from", "to"))
    loss = Fault(round(at_s, 3), "lose", who, for_s, f"{kind} {act} {count} {way}")
    return [loss, *_death(dice, at_s, 0.5)]


def _dispute(dice: random.Random, names: str, at_s: float) -> list[Fault]:
    """Results differ, so an attempt ends that many hold already; some hear too late of the next.

    Who takes no part in it may be copying its result by then.
    """
    wrong, aside = dice.choice(names), dice.choice(names)
    script = [Fault(round(at_s, 3), "garble", wrong, round(dice.uniform(0.5, 2.5), 3))]
    if dice.random() < 0.7:
        who = wrong if dice.random() < 0.6 else names
        detail = f"Retry {dice.choice(('lose', 'cut'))} {dice.choice((1, 2, 3))} to"
        if dice.random() < 0.5:  # it hears of the commit before, and nobody can tell it more
            who, detail = wrong, "Retry doom 8 to"
        script.append(Fault(round(at_s, 3), "lose", who, round(dice.uniform(0.3, 1.6), 3), detail))
    if dice.random() < 0.5:
        script.append(Fault(round(max(0.0, at_s - 0.4), 3), "detach", aside, 3.0))
        script.append(Fault(round(max(0.0, at_s - 0.4), 3), "slow", names, 3.0))
    return script + _death(dice, at_s, 0.4)


def _ghost(dice: random.Random, names: str, at_s: float) -> list[Fault]:
    """Deliver what a process has said when the next one under its name is in."""
    kind = dice.choice(("Heartbeat", "Heartbeat", "Heartbeat", "Ready", "Join", "Accepted"))
    late_s, count = round(dice.uniform(1.0, 4.0), 3), dice.choice((1, 2, 4))
    away_s = round(dice.uniform(0.02, 0.3), 3)
    return [
        Fault(round(at_s, 3), "lose", dice.choice(names), late_s, f"{kind} late {count} from"),
        Fault(round(at_s + dice.uniform(0.25, 0.5), 3), "kill_hit", "", away_s),
    ]


def _death(dice: random.Random, at_s: float, share: float) -> list[Fault]:
    """Whoever coordinates by then is gone for a while, or stopped."""
    if dice.random() >= share:
        return []
    then = dice.choice(("kill_lead", "kill_lead", "pause_lead", "kill_hit"))
    later_s = dice.choice((0.0, 0.1, 0.5, 1.5)) * dice.uniform(0.5, 1.5)
    away_s = round(dice.choice((0.05, 0.4, 1.5, 4.0)) * dice.uniform(0.7, 1.3), 3)
    return [Fault(round(at_s + later_s, 3), then, "", away_s)]
