"""The script of faults that a seed expands to.

A script is drawn up front and does not look at the run, so that a shrinker may take any line out
of it. A fault that makes no sense when its time comes (killing the dead) does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from simulation.arena import NAMES
from simulation.fault import Fault
from simulation.losses import losses
from simulation.options import Options
from simulation.situations import situations

__all__ = ["FAILPOINTS", "SELDOM", "Fault", "draw_script"]

# Right before or right after emitting one of these a process may die: every message of the
# membership machine that can be sent here, and every effect with consequences.
OFTEN = (
    "Begin",
    "Ready",
    "Commit",
    "Apply",
    "Reduce",
    "Prepare",
    "Promise",
    "Accept",
    "Accepted",
    "Install",
    "Installed",
    "Learn",
    "Abort",
    "Join",
    "Heartbeat",
    "CoordinatorBeat",
    "SameBeat",
    "TellTrainer",
    "Note",
)
# Whoever is the first to say one of these dies: one process alone may never come to it.
SELDOM = (
    "AskFinals",
    "AskKernel",
    "AskTrainers",
    "CatchUp",
    "Connect",
    "Fetch",
    "Finals",
    "Hail",
    "Leave",
    "ListFinal",
    "Meet",
    "Miss",
    "Notice",
    "ObjectIs",
    "Offer",
    "Probe",
    "ProbeView",
    "Redirect",
    "Renew",
    "Repair",
    "Resync",
    "Undo",
    "Yield",
)
FAILPOINTS = (*OFTEN, *SELDOM)
# Without these options it is never said.
NEEDS: dict[str, Callable[[Options], bool]] = {
    "AskTrainers": lambda options: bool(options.asks),
    "Hail": lambda options: options.checkpoints > 0,
    "Leave": lambda options: bool({"leave", "mass_leave"} & set(options.kinds)),
    "Notice": lambda options: options.witnesses > 0,
    "ObjectIs": lambda options: options.calls > 0,
    "Offer": lambda options: options.profile == "birth",
    "Resync": lambda options: "flip" in options.kinds,
    "Yield": lambda options: options.policy != "majority" and options.on_fork == "auto",
}
STARVED_SHARE = 0.08  # of the seeds
FOR_GOOD_S = 1e6  # not before the faults end


def draw_script(options: Options) -> list[Fault]:
    dice = random.Random(options.seed ^ 0xFA17)
    names = NAMES[: options.hosts + options.archives]
    spare = list(NAMES[len(names) :])
    script = _PROFILES[options.profile](dice, options, names) if options.profile else []
    at_s = 0.0
    while True:
        at_s += dice.expovariate(options.fault_rate)
        if at_s >= options.faulty_s:
            script += _bans(options, names) + _asks(options, names) + _starved(options, names)
            script += losses(options, names) + situations(options, names)
            script += _mutes(options, names)
            return sorted(script, key=lambda fault: fault.at_s)
        kind = dice.choice(options.kinds)
        fault = _draw(dice, options, kind, names, spare, at_s)
        script.append(fault)
        names += fault.who if kind in ("join", "mass_join") else ""


def _starved(options: Options, names: str) -> list[Fault]:
    """Some get a processor for moments only; their kernels go on acknowledging what comes."""
    dice = random.Random(f"starved {options.seed} {options.faulty_s}")
    if dice.random() >= STARVED_SHARE:
        return []
    who = dice.sample(names, dice.choice((1, 1, len(names))))
    at_s = round(dice.uniform(0.0, 0.5) * options.faulty_s, 3)
    away_s = dice.choice((0.5, 1.5, 3.0))  # at most, each time
    return [Fault(at_s, "starve", name, options.faulty_s / 2, str(away_s)) for name in who]


def _mutes(options: Options, names: str) -> list[Fault]:
    """Paths that carry no data for a while: of a pair, to one, from one, or of two halves."""
    dice = random.Random(f"mutes {options.seed} {options.faulty_s}")
    script = []
    for _ in range(options.mutes):
        kind = dice.choice(("pair", "way", "deaf", "dumb", "bridge", "bridge"))
        count = {"pair": 2, "way": 2, "bridge": dice.randint(2, len(names) - 1)}.get(kind, 1)
        who = "".join(dice.sample(names, min(count, len(names))))
        lasts_s = round(dice.choice((2.0, 4.0, 7.0)) * dice.uniform(0.8, 1.2), 3)
        at_s = round(dice.uniform(0.0, 0.6) * options.faulty_s, 3)
        script.append(Fault(at_s, "mute", who, lasts_s, kind))
        if kind == "deaf" and dice.random() < 0.7:  # it takes no part, and cannot copy results
            script.append(Fault(max(0.0, round(at_s - 0.6, 3)), "detach", who, 9.0))
    return script


def _bans(options: Options, names: str) -> list[Fault]:
    """Of whom, and by how many: those who took part, all or some, and at once or one by one."""
    dice = random.Random(f"bans {options.seed} {options.faulty_s}")
    script = []
    for name in dice.sample(names[: options.hosts], options.bans):
        finders = [other for other in names if other != name and dice.random() < 0.8]
        kind = "alone" if dice.random() < 0.5 else "words"
        if kind == "alone":
            finders = finders[: dice.choice((1, 2, len(names)))]
        lives_s = dice.choice((0.1, 1.0, options.faulty_s))  # until it knows, or is stopped
        at_s = round(dice.uniform(0.0, 0.8) * options.faulty_s, 3)
        script.append(Fault(at_s, "ban", name, lives_s, f"{kind} {''.join(finders)}"))
    return script


def _asks(options: Options, names: str) -> list[Fault]:
    """By whom, and for how many trainers in a round."""
    dice = random.Random(f"asks {options.seed} {options.faulty_s}")
    return [
        Fault(
            round(dice.uniform(0.0, 0.9) * options.faulty_s, 3), "ask", dice.choice(names), 0.0, n
        )
        for n in map(str, options.asks)
    ]


def _draw(
    dice: random.Random, options: Options, kind: str, names: str, spare: list[str], at_s: float
) -> Fault:
    def some(low: int, high: int) -> str:
        count = max(1, min(len(names), dice.randint(low, high)))
        return "".join(dice.sample(names, count))

    lasts_s = round(dice.choice((0.2, 1.0, 2.5, 5.0)) * dice.uniform(0.5, 1.5), 3)
    who, detail = some(1, 1), ""
    if kind in ("kill", "off", "failpoint"):
        lasts_s = round(options.restart_s * dice.uniform(0.3, 2.0), 3)
        if dice.random() < 0.15:
            lasts_s = FOR_GOOD_S
    if kind == "failpoint":
        at_s *= 0.4  # it takes its time to spring
        who, detail = _failpoint(dice, options, who, names)
    elif kind in ("cut", "one_way", "clog", "break", "corrupt"):
        who = some(2, 2)
    elif kind in ("split", "bridge", "isolate", "swizzle"):
        who = some(1, max(1, len(names) - 1))
    elif kind == "mass_leave":
        who = some(1, max(1, len(names) - 2))  # most of them: those who stay are no quorum
    elif kind in ("join", "mass_join"):
        count = 1 if kind == "join" else dice.randint(2, 5)
        who = "".join(spare.pop(0) for _ in range(min(count, len(spare))))
    elif kind == "burst":
        loss, double, late = (dice.choice((0.0, 0.05, 0.15)) for _ in range(3))
        detail = f"{loss} {double} {late}"
    return Fault(round(at_s, 3), kind, who, lasts_s, detail)


def _failpoint(dice: random.Random, options: Options, who: str, names: str) -> tuple[str, str]:
    """Whose, and which."""
    side = dice.choice(("before", "after"))
    if dice.random() < 0.5:
        seldom = [kind for kind in SELDOM if NEEDS.get(kind, lambda options: True)(options)]
        return names, f"{dice.choice(seldom)} {dice.choice((1, 1, 2))} {side}"
    if dice.random() < 0.5:
        who = names
    return who, f"{dice.choice(OFTEN)} {dice.choice((1, 1, 2, 3, 5))} {side}"


def _point(dice: random.Random, names: str, at_s: float, kinds: tuple[str, ...]) -> list[Fault]:
    """Half of the time, for the first of anybody to do one of these."""
    detail = f"{dice.choice(kinds)} {dice.choice((1, 1, 2))} {dice.choice(('before', 'after'))}"
    away_s = round(dice.uniform(0.3, 3.0), 3)
    fault = Fault(round(at_s, 3), "failpoint", names, away_s, detail)
    return [fault] if dice.random() < 0.5 else []


# ---------------------------------------------------------------- profiles


def _holders(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """Some replicas are cut off while the others commit; these die when the cut is mended."""
    witnesses = names[1 : 1 + options.witnesses]
    replicas = [name for name in names if name not in witnesses]
    behind = dice.sample(replicas, dice.randint(1, max(1, len(replicas) - 2)))
    ahead = "".join(name for name in replicas if name not in behind)
    # Long enough to count as dead, so that rounds go on; not so long as to be voted out.
    lasts_s = dice.uniform(1.7, 2.4) if dice.random() < 0.7 else dice.uniform(2.4, 7.0)
    at_s = dice.uniform(0.2, 1.5)
    how = dice.choice(("kill", "kill", "off", "pause"))
    away_s = dice.choice((6.5, 8.0, FOR_GOOD_S)) if how != "pause" else dice.uniform(6.0, 9.0)
    # Whoever wakes up after a rollback, and finds that nothing has been committed since, goes back.
    still = [Fault(round(at_s, 3), "hang", "".join(behind), 14.0)] if how == "pause" else []
    return [
        Fault(round(at_s, 3), "split", "".join(behind), round(lasts_s, 3)),
        Fault(round(at_s + lasts_s - 0.03, 3), how, ahead, round(away_s, 3)),
        *still,
        *_point(dice, names, at_s, ("Notice", "Undo", "Repair", "Accepted", "Install", "Promise")),
    ]


def _wakes(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """Stop who holds the last rounds; as soon as the others are about to go back it wakes up,
    and whoever leads them there dies a moment later."""
    witnesses = names[1 : 1 + options.witnesses]
    replicas = [name for name in names if name not in witnesses]
    behind = dice.sample(replicas, dice.randint(1, max(1, len(replicas) - 2)))
    ahead = "".join(name for name in replicas if name not in behind)
    at_s, apart_s = dice.uniform(0.2, 1.0), dice.uniform(1.8, 3.0)
    dies_s = round(dice.choice((0.4, 0.6, 1.0)) * dice.uniform(0.7, 1.3), 3)
    return [
        Fault(round(at_s, 3), "split", "".join(behind), round(apart_s, 3)),
        Fault(round(at_s + apart_s - 0.03, 3), "pause", ahead, 12.0),
        Fault(round(at_s + apart_s, 3), "lose", names, dies_s, "Flagged wake 1 from"),
    ]


def _misled(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """The same; and one of the others follows who wakes, not knowing that the rest goes back."""
    witnesses = names[1 : 1 + options.witnesses]
    replicas = [name for name in names if name not in witnesses]
    behind = dice.sample(replicas[1:], 2)
    ahead = "".join(name for name in replicas if name not in behind)
    at_s, apart_s = dice.uniform(0.2, 1.0), dice.uniform(1.8, 3.0)
    dies_s = round(options.load_s * dice.uniform(1.0, 1.6) + 0.3, 3)
    return [
        Fault(round(at_s, 3), "split", "".join(behind), round(apart_s, 3)),
        Fault(round(at_s + apart_s - 0.03, 3), "pause", ahead, 12.0),
        Fault(round(at_s + apart_s, 3), "lose", names, dies_s, "Flagged mislead 1 from"),
    ]


def _split(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """Longer than it takes to go on without a quorum."""
    few = min(2, len(names) // 2)  # two or more on both sides, if there are so many
    away = "".join(dice.sample(names, dice.randint(few, len(names) - few)))
    at_s, lasts_s = dice.uniform(0.2, 2.0), dice.uniform(9.0, 14.0)
    kinds = ("Yield", "Yield", "Meet", "Renew", "Redirect", "Undo", "CatchUp", "Installed")
    return [
        Fault(round(at_s, 3), "split", away, round(lasts_s, 3)),
        *_point(dice, names, at_s + lasts_s - 0.1, kinds),
    ]


def _power(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """Everyone dies; each comes back in its own time and way."""
    at_s = round(dice.uniform(0.5, options.faulty_s - 1.0), 3)
    alone = dice.choice(names) if dice.random() < 0.2 else ""
    also = "new" if dice.random() < 0.7 else "up"  # how the others come, beside one that resumes
    back = []
    for name in names:
        how = dice.choices(("up", "new", "gone"), (8, 1, 1))[0]
        if alone:
            how = "resume" if name == alone else also
        back.append(f"{name}:{how}:{dice.uniform(0.3, 3.0):.2f}")
    kinds = ("Hail", "Hail", "Promise", "Accepted", "Install", "Installed", "Note", "Prepare")
    return [
        Fault(at_s, "power", names, 0.0, " ".join(back)),
        *_point(dice, names, at_s + 0.1, kinds),
    ]


def _birth(dice: random.Random, options: Options, names: str) -> list[Fault]:
    """At the very beginning, and not to an only founder."""
    together = options.bootstrap == "cradle"
    kinds = (*OFTEN, *("Offer", "Hail") * 4) if together else (*OFTEN, "CatchUp", "Connect")
    detail = f"{dice.choice(kinds)} {dice.choice((1, 1, 2, 3))} {dice.choice(('before', 'after'))}"
    who = dice.choice(names if together else names[1:])
    return [Fault(0.0, "failpoint", who, round(dice.uniform(0.2, 3.0), 3), detail)]


_PROFILES = {
    "holders": _holders,
    "split": _split,
    "power": _power,
    "birth": _birth,
    "wakes": _wakes,
    "misled": _misled,
}
