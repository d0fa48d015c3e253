"""Seeds of situations that take the right faults in the right order, and hardly ever come about.

    python -m simulation.rare 0..1000
    python -m simulation.rare --seed 17

Each situation bends the options of a plain seed and writes the whole script of its faults; when
they come, to whom, and all that the situation does not need, is drawn. What every seed checks holds
here, too. A situation is there for conditions of the decision modules that fewer than 20 of 5,000
other seeds decide one way or the other (`make simulate-coverage`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from simulation.arguments import play
from simulation.fault import Fault
from simulation.options import NAMES, Options, draw_usual
from simulation.run import Outcome, run_script
from simulation.situations import situations

__all__ = ["RARE", "run_rare"]

SHOWN_CHARACTERS = 60_000  # of a trace, its end

FOR_GOOD_S = 1e6  # not before the faults end
ADVICE_S = 0.7  # between two pieces of advice

Drawn = tuple[Options, list[Fault]]


def run_rare(seed: int, tracing: bool = False) -> Outcome:
    """Play the situation of this seed; a failure names the situation, too."""
    name, options, script = drawn_rare(seed)
    outcome = run_script(options, script, tracing)
    failure = f"{outcome.failure} ({name})" if outcome.failure else ""
    return replace(outcome, failure=failure)


def drawn_rare(seed: int) -> tuple[str, Options, list[Fault]]:
    """Return the situation of a seed, with its options and its script."""
    name = list(RARE)[seed % len(RARE)]
    dice = random.Random(f"rare {seed}")
    options, script = RARE[name](dice, _plain(dice, seed))
    return name, options, sorted(script, key=lambda fault: fault.at_s)


def _plain(dice: random.Random, seed: int) -> Options:
    """Return what the situations have in common: three to five replicas, and no luck but this."""
    return replace(
        draw_usual(seed),
        profile="",
        hosts=dice.choice((3, 4, 5)),
        witnesses=0,
        archives=0,
        bootstrap="found",
        on_fork="auto",
        loss=0.0,
        double=0.0,
        faulty_s=10.0,
        kinds=(),
        checkpoints=0,
        calls=0.0,
        probation=0,
        least=1,
        bans=0,
        min_trainers=1,
        asks=(),
        outbound="",
        unlinkable=(),
    )


def _fault(at_s: float, kind: str, who: str = "", lasts_s: float = 0.0, detail: str = "") -> Fault:
    return Fault(round(at_s, 3), kind, who, round(lasts_s, 3), detail)


def _with(options: Options, **changes: Any) -> Options:
    """Return these options with some changed."""
    return replace(options, **changes)


def _names(options: Options) -> str:
    return NAMES[: options.hosts + options.archives]


# ---------------------------------------------------------------- results that differ


def _disputed(dice: random.Random, plain: Options) -> Drawn:
    """Cut off the coordinator that alone has heard both results of an attempt."""
    # Over short ways no BEGIN is repeated that has come through.
    options = replace(plain, hosts=3, faulty_s=18.0, delay_s=min(plain.delay_s, 0.02))
    at_s, wrong = dice.uniform(0.2, 1.5), dice.choice("bc")
    lasts_s = dice.choice((3.0, 14.0)) * dice.uniform(0.9, 1.1)
    return options, [
        _fault(at_s, "garble", wrong, dice.uniform(0.8, 1.5)),
        _fault(at_s, "lose", "abc", lasts_s, "Retry cut 1 from"),
    ]


def _doomed(dice: random.Random, plain: Options) -> Drawn:
    """Let the one with another result not hear of the next attempt, and its coordinator die."""
    options = replace(plain, hosts=3, faulty_s=8.0)
    at_s, wrong = dice.uniform(0.2, 1.5), dice.choice("bc")
    away_s = dice.uniform(2.0, 6.0)
    return options, [
        _fault(at_s, "garble", wrong, dice.uniform(0.8, 1.5)),
        _fault(at_s, "lose", wrong, away_s, f"Retry {dice.choice(('doom', 'doom-before'))} 8 to"),
    ]


def _deaf_judge(dice: random.Random, plain: Options) -> Drawn:
    """Let results differ while somebody else has none, and gets none."""
    options = replace(plain, hosts=dice.choice((3, 4)), chunks=1, fragments=1, in_flight=1, mutes=1)
    wrong, deaf = dice.sample(_names(options)[1:], 2)
    at_s = dice.uniform(0.2, 2.0)
    return options, [
        _fault(at_s, "garble", wrong, dice.uniform(2.0, 3.0)),
        _fault(at_s, "mute", deaf, dice.uniform(4.0, 6.0), "deaf"),
    ]


def _two_digests(dice: random.Random, plain: Options) -> Drawn:
    """Let somebody die before anybody knows that two results of the attempt are there."""
    quiet = {"network": "datagrams", "delay_s": dice.choice((0.005, 0.02)), "inner_s": 0.4}
    options = _with(plain, **quiet, hosts=4, chunks=1, fragments=1, in_flight=1, chunk_s=0.005)
    at_s = dice.uniform(1.0, 3.0)
    wrong = dice.choice("bcd")
    return options, [
        _fault(at_s - 0.9, "detach", "a", 9.0),
        _fault(at_s, "garble", wrong, 2.0),
        _fault(at_s, "lose", "bcd", 1.0, "Ready lose 6 from"),
        _fault(at_s, "failpoint", "bcd", 2.0, f"Ready {dice.choice((1, 2, 3))} after"),
    ]


def _tie(dice: random.Random, plain: Options) -> Drawn:
    """Let the digests of two tie, and whoever decides between them wake up."""
    options = replace(plain, hosts=3, inner_s=min(plain.inner_s, 0.4))
    at_s, sleeps = dice.uniform(0.2, 1.5), dice.choice("bc")
    flipped = dice.choice([name for name in "abc" if name != sleeps])
    return options, [
        _fault(at_s, "pause", sleeps, dice.uniform(3.6, 4.4)),
        _fault(at_s + dice.uniform(2.1, 2.5), "flip", flipped),
    ]


def _doubt(dice: random.Random, plain: Options) -> Drawn:
    """Tell somebody late that its state is wrong: it holds the next result by then."""
    quick = {"delay_s": dice.choice((0.06, 0.15)), "inner_s": 0.2, "network": "datagrams"}
    options = _with(plain, **quick, hosts=dice.choice((3, 4)))
    options = replace(options, load_s=min(plain.load_s, 0.2))  # or rounds are too fast for joiners
    script = []
    for turn in range(3):
        at_s = 0.3 + 3.0 * turn + dice.uniform(0.0, 0.5)
        late_s = dice.uniform(0.2, 1.2)
        script += [
            _fault(at_s, "flip", dice.choice("bc")),
            _fault(at_s, "lose", _names(options), late_s, "Resync late 1 from"),
        ]
    return options, script


# ---------------------------------------------------------------- paths that carry no data


def _dumb_owner(dice: random.Random, plain: Options) -> Drawn:
    """Let the owner of the only chunk get all parts, and hand its result to nobody."""
    options = replace(plain, faulty_s=14.0, chunks=1, fragments=1, in_flight=1, mutes=1)
    return options, [_fault(dice.uniform(0.2, 2.0), "mute", "a", 12.0, "dumb")]


def _needed_by_all(dice: random.Random, plain: Options) -> Drawn:
    """Stop a round twice by one peer that it cannot do without."""
    options = replace(plain, hosts=dice.choice((3, 4)), mutes=1, asks=(), faulty_s=11.0)
    options = replace(options, min_trainers=options.hosts)
    who, kind = dice.choice(_names(options)[1:]), dice.choice(("deaf", "dumb"))
    return options, [_fault(dice.uniform(0.2, 2.0), "mute", who, dice.uniform(6.0, 8.0), kind)]


def _gone_cleanup(dice: random.Random, plain: Options) -> Drawn:
    """Let whoever has said what it has of a stalled attempt die before another one has."""
    quick = {"network": "datagrams", "delay_s": dice.choice((0.0005, 0.005, 0.02))}
    options = _with(plain, **quick, hosts=dice.choice((4, 5)), mutes=1)
    names, at_s = _names(options), dice.uniform(0.2, 1.5)
    deaf = dice.choice(names[1:])
    others = names[1:].replace(deaf, "")
    return options, [
        _fault(at_s, "mute", deaf, 5.0, "deaf"),
        _fault(at_s, "lose", deaf, 0.8, "Finals lose 3 from"),
        _fault(at_s, "failpoint", others, 2.0, "Finals 1 after"),
    ]


def _in_pieces(dice: random.Random, plain: Options, bridge: str, half: str) -> Drawn:
    """Split the data's ways into two halves for a long time, with one peer between them."""
    few = {"chunks": 1, "fragments": 1, "in_flight": 1, "policy": "majority", "mutes": 1}
    options = _with(plain, **few, hosts=dice.choice((6, 7)), faulty_s=14.0)
    return options, [_fault(0.3, "mute", bridge + half, 13.0, "bridge")]


def _pieces_led(dice: random.Random, plain: Options) -> Drawn:
    """Put the coordinator in one of two halves with a bridge."""
    options, script = _in_pieces(dice, plain, "f", "ab" if dice.random() < 0.5 else "cde")
    return replace(options, hosts=6), script


def _pieces_idle(dice: random.Random, plain: Options) -> Drawn:
    """Put the coordinator in a half, and take its trainer away."""
    options, script = _in_pieces(dice, plain, "f", dice.choice(("bc", "de", "bcd")))
    return replace(options, hosts=6), [*script, _fault(0.2, "detach", "a", 14.0)]


def _pieces_advised(dice: random.Random, plain: Options) -> Drawn:
    """Put the coordinator between the halves, and let planners say who owns what."""
    options, script = _in_pieces(dice, plain, "a", "bc")
    later = dice.choice(("b", "c", "bc", "bc", "abc"))
    for turn in range(int(options.faulty_s / ADVICE_S)):
        owners = "bc" if turn < 8 else later
        script.append(_fault(0.05 + turn * ADVICE_S, "advise_owners", owners))
    return options, script


# ---------------------------------------------------------------- pairs without a link


def _advised_pairs(dice: random.Random, plain: Options) -> Drawn:
    """Planners advise of all, while two have no link, or newcomers may own nothing."""
    options = replace(plain, hosts=dice.choice((3, 4, 5)), faulty_s=9.0)
    names = _names(options)
    pair = "".join(sorted(dice.sample(names[1:], 2)))
    options = replace(options, outbound=pair)
    times = int(options.faulty_s / ADVICE_S)
    script = [
        _fault(0.1 + n * ADVICE_S, "advise", detail=str(dice.randrange(1000))) for n in range(times)
    ]
    return options, script


def _advised_calls(dice: random.Random, plain: Options) -> Drawn:
    """Advise while trainers call collectives and some die, until nobody left owns anything."""
    options, script = _advised_pairs(dice, plain)
    options = replace(options, calls=0.5, fragments=1, in_flight=1)
    names = _names(options)
    dying = dice.sample(names, 2)
    if dice.random() < 0.6:  # they own everything
        script = [replace(fault, kind="advise_owners", who=dying[0]) for fault in script]
    deaths = [
        _fault(
            dice.uniform(0.5, 6.0), "failpoint", name, 2.0, f"Ready {dice.choice((1, 2))} before"
        )
        for name in dying
    ]
    return options, [*script, *deaths]


def _joiners_apart(dice: random.Random, plain: Options) -> Drawn:
    """Let two join that have no link to each other and own nothing yet; others go for a while."""
    options = replace(plain, hosts=dice.choice((3, 4)), probation=12, faulty_s=10.0)
    names = _names(options)
    joiners = NAMES[len(names) : len(names) + 2]
    at_s = dice.uniform(0.1, 0.6)
    detached_s = dice.uniform(4.0, 5.0)
    apart: dict[str, Any] = {"outbound": joiners}
    if dice.random() < 0.7:  # each has none to one of those that own: nobody reaches all
        options, names, joiners = replace(options, hosts=3), NAMES[:3], NAMES[3:5]
        apart = {"unlinkable": (names[1] + joiners[0], names[2] + joiners[1])}
        names, detached_s = names[:1], 0.1
    return replace(options, **apart), [
        _fault(at_s, "join", joiners),
        *(
            _fault(detached_s, "detach", name, 3.0 if "outbound" in apart else 9.0)
            for name in names
        ),
    ]


def _heir(dice: random.Random, plain: Options) -> Drawn:
    """Hand the run to a witness that is voted in anew before it hears that it is in."""
    options = replace(plain, hosts=dice.choice((4, 5)), witnesses=1, faulty_s=9.0)
    return options, situations(replace(options, situation="heir"), _names(options))


def _heavy_joiner(dice: random.Random, plain: Options) -> Drawn:
    """Let whoever comes back load the state for longer than it is waited for."""
    quick: dict[str, Any] = {"log_rounds": 2, "inner_s": 0.2, "load_s": 0.1, "chunk_s": 0.005}
    options = replace(plain, **quick, situation="laggard", hosts=4)
    who, at_s = dice.choice(_names(options)[1:]), dice.uniform(0.2, 1.0)
    return options, [
        _fault(at_s, "kill", who, dice.uniform(0.1, 0.5)),
        _fault(at_s, "heavy", who, 8.0, str(dice.choice((1.0, 2.0, 3.0)))),
    ]


def _unreadable_helper(dice: random.Random, plain: Options) -> Drawn:
    """Let a witness that owns the parts of all do nothing, or have no way to one of them."""
    options = _hub(dice, plain)
    at_s = dice.uniform(0.2, 3.0)
    far = dice.choice(_names(options)[2:])
    fault = _fault(at_s, "unreadable", "b", 2.0)
    return options, [fault if dice.random() < 0.7 else _fault(at_s, "cut", "b" + far, 3.0)]


def _hub(dice: random.Random, plain: Options) -> Options:
    """Return options of peers that have links to a coordinator without a trainer and a witness."""
    hosts = dice.choice((4, 5, 6))
    outbound = NAMES[2:hosts]
    hub = {"witnesses": 1, "outbound": outbound, "idle": "a", "relays": "ab", "carries": ""}
    return _with(plain, **hub, hosts=hosts)


def _far_holders(dice: random.Random, plain: Options) -> Drawn:
    """Kill an owner after its chunks came to one, from whom not all can copy them."""
    quick = {"chunk_s": 0.005, "chunks": 4, "fragments": 1, "in_flight": 1, "mutes": 1}
    options = _with(plain, **quick, hosts=5, unlinkable=("cd",), delay_s=min(plain.delay_s, 0.06))
    at_s = dice.uniform(0.6, 2.0)
    return options, [
        _fault(at_s - 0.5, "detach", "a", 9.0),
        _fault(at_s, "mute", "bd", 5.0, "way"),
        _fault(at_s, "mute", "be", 5.0, "way"),
        _fault(at_s + options.inner_s + dice.uniform(0.5, 1.2), "kill", "b", 2.0),
    ]


def _bad_part(dice: random.Random, plain: Options) -> Drawn:
    """Keep a chunk with a part of one that says of itself next that it has none."""
    quick = {"chunk_s": 0.005, "chunks": 4, "fragments": 1, "in_flight": 1, "mutes": 1}
    options = _with(plain, **quick, hosts=dice.choice((4, 5)), delay_s=min(plain.delay_s, 0.06))
    at_s = dice.uniform(0.2, 2.0)
    dies, bad, other = dice.sample(_names(options)[1:], 3)
    dies_s = at_s + options.inner_s + dice.uniform(0.5, 1.2)
    return options, [
        _fault(at_s, "mute", dies + other, 5.0, "way"),
        _fault(dies_s - 0.01, "unreadable", bad, 2.5),
        _fault(dies_s, "kill", dies, 2.0),
    ]


def _newcomers_cut(dice: random.Random, plain: Options) -> Drawn:
    """Cut somebody on probation off from one who counts."""
    options = replace(plain, hosts=dice.choice((4, 5, 6)), probation=12, load_s=0.02)
    at_s, spare = dice.uniform(0.2, 1.0), NAMES[options.hosts]
    other = dice.choice(_names(options)[1:])
    script = [_fault(at_s, "join", spare)]
    for turn in range(2):
        cut_s = at_s + 2.0 + 3.5 * turn + dice.uniform(0.0, 1.0)
        script.append(_fault(cut_s, "cut", spare + other, 2.5))
    return options, script


# ---------------------------------------------------------------- joiners, and who lags behind


def _unheard_caller(dice: random.Random, plain: Options) -> Drawn:
    """Let a joiner call at others while the coordinator has it again, or has dropped it again."""
    options = replace(plain, hosts=dice.choice((4, 5)), unlinkable=("bc",), faulty_s=16.0)
    who = _names(options)[-1]
    again_s = 3.9 + 4.0 * dice.uniform(0.95, 1.1)
    return options, [
        _fault(3.2, "kill", who, 0.2),
        _fault(3.25, "stuck", who, 12.0),
        _fault(3.9, "cut", who + "a", again_s - 3.9),
        _fault(again_s + dice.uniform(0.4, 0.8), "cut", who + "a", 4.0),
    ]


def _stuck_joiner(dice: random.Random, plain: Options) -> Drawn:
    """Give a joiner nothing of the state until it is dropped; others come and go meanwhile."""
    has_archive = dice.random() < 0.4
    quick = {"log_rounds": 2, "inner_s": 0.2, "load_s": 0.1, "chunk_s": 0.005}
    options = _with(plain, **quick, situation="laggard", archives=int(has_archive))
    names, at_s = _names(options), dice.uniform(0.2, 1.5)
    who = names[-1] if has_archive else dice.choice(names[1:])
    return options, [
        _fault(at_s, "kill", who, 0.4),
        _fault(at_s, "stuck", who, dice.uniform(5.0, 7.0)),
        _fault(at_s + dice.uniform(2.3, 3.0), "join", NAMES[len(names)]),
    ]


def _two_laggards(dice: random.Random, plain: Options) -> Drawn:
    """Let two fall behind, one a moment longer than the other."""
    quick = {"log_rounds": 2, "inner_s": 0.2, "load_s": 0.1, "chunk_s": 0.005}
    options = _with(plain, **quick, situation="laggard", hosts=5, delay_s=min(plain.delay_s, 0.06))
    at_s, (one, other) = dice.uniform(0.2, 1.5), dice.sample(_names(options)[1:], 2)
    away_s = dice.uniform(1.5, 1.8)
    return options, [
        _fault(at_s, "isolate", one, away_s),
        _fault(at_s, "isolate", other, away_s + dice.uniform(0.2, 0.4)),
        _fault(at_s, "heavy", one, 6.0, "2.0"),
    ]


def _unsynced_lead(dice: random.Random, plain: Options) -> Drawn:
    """Let somebody join while the coordinator's own state is found out to be wrong."""
    slow = {"delay_s": 0.15, "inner_s": dice.choice((0.2, 0.4)), "load_s": 1.5, "log_rounds": 16}
    options = _with(plain, **slow, hosts=dice.choice((4, 5)))
    script = []
    for turn in range(2):
        at_s, who = 4.0 * turn + dice.uniform(0.2, 1.5), dice.choice(_names(options)[1:])
        script.append(_fault(at_s, "kill", who, 0.2))
        script.append(_fault(at_s + dice.uniform(0.0, 1.2), "flip_lead"))
    return options, script


def _banned_outside(dice: random.Random, plain: Options) -> Drawn:
    """Find somebody out to lie while it is asking to come in."""
    options = replace(plain, hosts=dice.choice((4, 5)), bans=1, load_s=0.4, inner_s=0.4)
    options = replace(options, log_rounds=16, load_s=dice.choice((0.8, 1.5)))
    names, at_s = _names(options), dice.uniform(0.2, 2.0)
    who = dice.choice(names[1:])
    finders = "".join(name for name in names if name != who)
    return options, [
        _fault(at_s, "kill", who, 0.2),
        _fault(at_s + dice.uniform(0.4, 0.8), "ban_outside", who, 1.0, f"alone {finders}"),
    ]


def _leaving_heirs(dice: random.Random, plain: Options) -> Drawn:
    """Let the coordinator leave when it has been asked to hand over to one that cannot lead."""
    options = replace(plain, hosts=dice.choice((4, 5)))
    names, at_s = _names(options), dice.uniform(0.5, 2.5)
    heir = dice.choice(names[1:])
    return options, [
        _fault(at_s - 0.3, dice.choice(("kill", "pause", "pause")), heir, 3.0),
        _fault(at_s, "hand_over", heir),
        _fault(at_s + dice.uniform(0.0, 0.05), "leave_as", names, 0.0, "coordinator"),
    ]


# ---------------------------------------------------------------- late words


def _late_failure(dice: random.Random, plain: Options) -> Drawn:
    """That a submission cannot be read is found when the next attempt has begun."""
    slow = {"chunk_s": 0.1, "delay_s": dice.choice((0.0005, 0.005)), "load_s": 0.4}
    options = _with(plain, **slow, hosts=dice.choice((4, 5)), log_rounds=16)
    at_s = dice.uniform(0.2, 2.5)
    dies, bad = dice.sample(_names(options)[1:], 2)
    return options, [
        _fault(at_s, "failpoint", dies, 2.0, "Reduce 1 after"),
        _fault(at_s, "unreadable", bad, 2.5),
    ]


def _other_call(dice: random.Random, plain: Options) -> Drawn:
    """Let one that has failed in an attempt call something else while the next one needs it."""
    calls = {"calls": 1.0, "fragments": 1, "in_flight": 1, "network": "datagrams", "inner_s": 0.2}
    options = _with(plain, **calls, asynchronous=False, delay_s=min(plain.delay_s, 0.06))
    options = replace(options, min_trainers=options.hosts, faulty_s=14.0)
    script = []
    for turn in range(3):
        at_s = 4.5 * turn + dice.uniform(0.2, 1.0)
        last, who = dice.sample(_names(options)[1:], 2)
        script += [
            _fault(at_s, "hang", last, 1.2),  # meanwhile the others have called the same
            _fault(at_s + 0.9, "unreadable", who, 1.2),
            _fault(at_s + 0.9, "other_call", who, 3.0),
            _fault(at_s + 0.9, "lose", who, 1.0, "Miss lose 2 from"),
        ]
    return options, script


def _late_finals(dice: random.Random, plain: Options) -> Drawn:
    """Delay what somebody had of one attempt until the next one has ended, too."""
    quick = {"network": "datagrams", "delay_s": dice.choice((0.0005, 0.005, 0.02))}
    options = _with(plain, **quick, hosts=dice.choice((5, 6)), fragments=1, in_flight=1)
    names, at_s = _names(options), dice.uniform(0.2, 2.0)
    late, mute = dice.sample(names[1:], 2)
    others = names.replace(late, "")[1:]
    late_s = 0.27 + 6 * options.delay_s + dice.uniform(0.0, 0.2)
    script = [_fault(at_s, "lose", late, late_s, "Finals late 2 from")]
    if dice.random() < 0.5:  # it is in the second one, too
        script.append(_fault(at_s, "failpoint", others, 2.0, "Reduce 1 after"))
        script.append(_fault(at_s, "failpoint", others, 2.0, f"Reduce {len(others)} after"))
    else:
        others = others.replace(mute, "")
        script.append(_fault(at_s, "unreadable", late, 2.0))
        script.append(_fault(at_s, "lose", mute, 2.0, "Finals lose 9 from"))
        script.append(_fault(at_s, "failpoint", others, 2.0, f"Reduce {len(others) + 1} after"))
    return options, script


def _late_prepare(dice: random.Random, plain: Options) -> Drawn:
    """Let somebody vote before it is asked for its promise."""
    options = replace(plain, network="datagrams", delay_s=dice.choice((0.02, 0.06)), hosts=5)
    options = replace(options, bootstrap="cradle")  # members in order: "e" is the last to stand
    at_s = dice.uniform(0.2, 3.0)
    asked_s = 0.13 + 4 * options.delay_s  # about from the first PREPARE to ACCEPT
    return options, [
        _fault(at_s, "kill_lead", "", 4.0),
        _fault(at_s, "lose", "e", asked_s + dice.uniform(0.0, 0.08), "Prepare late 1 to"),
        _fault(at_s, "lose", "e", asked_s - dice.uniform(0.0, 0.08), "Prepare late 9 to"),
        *(
            _fault(at_s, "lose", "e", 3.0, f"{kind} lose 12 to")
            for kind in ("Accepted", "Install", "Learn")
        ),
    ]


def _late_vote(dice: random.Random, plain: Options) -> Drawn:
    """Give two ballots of one view votes; one of the first is heard after one of the second."""
    options = replace(plain, network="datagrams", hosts=5, delay_s=dice.choice((0.005, 0.02, 0.06)))
    at_s, alone = dice.uniform(0.2, 2.0), dice.choice("bcde")
    return options, [
        _fault(at_s, "kill_lead", "", 6.0),
        _fault(at_s, "failpoint", "bcde", 4.0, "Accept 4 after"),
        _fault(at_s, "lose", "bcde", dice.uniform(0.6, 1.5), "Accepted late 10 from"),
        _fault(at_s, "lose", alone, 2.0, "Accepted lose 60 from"),
        _fault(at_s, "lose", alone, 2.0, "Accepted lose 60 to"),
    ]


def _late_hello(dice: random.Random, plain: Options) -> Drawn:
    """Delay what a founder has called until its next process has called."""
    # Most of a view that is decided may be dead, and nothing here remembers: one alone is to go on.
    cradle = {"profile": "birth", "bootstrap": "cradle", "network": "datagrams", "policy": "any"}
    options = _with(plain, **cradle, faulty_s=4.0)
    who, missing = dice.sample(_names(options), 2)
    return options, [
        Fault(0.0, "failpoint", missing, round(dice.uniform(1.5, 2.5), 3), "Hail 1 before"),
        Fault(0.0, "lose", who, round(dice.uniform(0.6, 1.2), 3), "Hail late 2 from"),
        Fault(0.0, "failpoint", who, round(dice.uniform(0.05, 0.2), 3), "Hail 3 after"),
    ]


def _late_notice(dice: random.Random, plain: Options) -> Drawn:
    """Let a witness vote for one attempt, and hear of the next one's result first."""
    few = {"hosts": 5, "witnesses": 1, "network": "datagrams"}
    options = _with(plain, **few, inner_s=0.4, delay_s=min(plain.delay_s, 0.06))
    at_s = dice.uniform(1.0, 3.0)
    return options, [
        _fault(at_s - 0.9, "detach", "de", 8.0),
        _fault(at_s, "garble", "d", 3.0),
        _fault(at_s, "clog", "ba", 1.0),
        _fault(at_s, "lose", "b", 2.0, "Retry lose 1 to"),
    ]


# ---------------------------------------------------------------- histories


def _broken_split(
    dice: random.Random, plain: Options, hosts: int = 0, few: int = 2
) -> tuple[Options, str, str, float, Fault]:
    """Return options, both sides, when the split ends, and the split: both sides go on."""
    any_may = {"policy": "any", "load_s": min(plain.load_s, 0.4), "faulty_s": 24.0}
    options = _with(plain, **any_may, hosts=hosts or dice.choice((5, 6)))
    options = replace(options, delay_s=min(plain.delay_s, 0.06))
    names = _names(options)
    away = "".join(sorted(dice.sample(names[1:], few)))
    rest = "".join(name for name in names if name not in away)
    at_s, lasts_s = dice.uniform(0.2, 1.5), dice.uniform(10.8, 12.5)
    return options, away, rest, at_s + lasts_s, _fault(at_s, "split", away, lasts_s)


def _left_of_a_fork(dice: random.Random, plain: Options) -> Drawn:
    """Most of a fork is gone when the other lineage comes back, as far as it or not."""
    options, few, rest, end_s, split = _broken_split(dice, plain, hosts=6, few=3)
    hung = [_fault(split.at_s, "hang", rest, end_s - split.at_s + 4.0)]
    return options, [
        split,
        _fault(end_s - 0.1, "off", few[:2], 8.0),
        *(hung if dice.random() < 0.6 else []),
    ]


def _left_of_a_rival(dice: random.Random, plain: Options) -> Drawn:
    """Let two lineages wait for each other's end; then most of one is gone."""
    options, few, _, end_s, split = _broken_split(dice, plain)
    gone = _fault(end_s + dice.uniform(2.0, 3.0), "off", few[0], FOR_GOOD_S)
    return replace(options, on_fork="halt", faulty_s=54.0), [split, gone]


def _lead_of_none(dice: random.Random, plain: Options) -> Drawn:
    """Let a coordinator without a quorum meet the lineage of who went on alone."""
    options = replace(plain, hosts=3, policy="any", faulty_s=20.0)
    at_s = dice.uniform(0.5, 1.5)
    return options, [
        _fault(at_s, "kill", "c", FOR_GOOD_S),
        _fault(at_s, "isolate", "a", dice.uniform(6.5, 10.5)),
    ]


def _crossing_meet(dice: random.Random, plain: Options) -> Drawn:
    """Change who coordinates again and again while two lineages meet."""
    options, _, rest, end_s, split = _broken_split(dice, plain)
    options = replace(options, on_fork="halt", delay_s=0.15, load_s=0.1)
    return options, [
        split,
        *(_fault(end_s + 0.4 * n, "hand_over", rest[n % len(rest)]) for n in range(16)),
    ]


def _leaves_a_fork(dice: random.Random, plain: Options) -> Drawn:
    """Let somebody that its coordinator does not hear leave as its lineage gives way."""
    options, few, _, end_s, split = _broken_split(dice, plain)
    who = dice.choice(few)
    leave_s = end_s + dice.uniform(-0.3, 0.5)
    return options, [
        split,
        _fault(leave_s - 0.3, "clog", who + few.replace(who, ""), 4.0),
        _fault(leave_s, "leave", who),
    ]


def _orphans(dice: random.Random, plain: Options) -> Drawn:
    """Kill whoever takes all others into its lineage, so that nobody has it."""
    few = {"hosts": 5, "policy": "any", "faulty_s": 32.0, "load_s": dice.choice((0.02, 0.02, 0.1))}
    options = _with(plain, **few, delay_s=min(plain.delay_s, 0.06))
    # It tells them where its run stands, or is about to let the first of them in.
    learns = f"Learn {dice.choice((2, 3, 4, 5, 8))} after"
    dies = learns if dice.random() < 0.5 else "Installed 1 before"
    return options, [
        _fault(0.5, "isolate", "de", 11.0),
        _fault(0.6, "hang", "abc", 14.0),
        _fault(11.3, "failpoint", "abcde", FOR_GOOD_S, dies),
    ]


def _witness_goes_back(dice: random.Random, plain: Options) -> Drawn:
    """Let a witness vote for a fork that goes back to what one replica holds."""
    few = {"witnesses": 2, "hosts": 5, "policy": "any", "on_lost": "rollback", "faulty_s": 22.0}
    quick = {"delay_s": min(plain.delay_s, 0.02), "inner_s": 0.2, "chunk_s": 0.005, "load_s": 0.1}
    options = _with(plain, **few, **quick, log_rounds=16, fragments=1, in_flight=1, chunks=4)
    behind = dice.choice("ade")
    ahead = "".join(name for name in "ade" if name != behind)
    at_s, apart_s = dice.uniform(0.2, 1.0), dice.uniform(1.7, 2.4)
    gone = ahead + dice.choice("bc")
    return options, [
        _fault(at_s, "split", behind, apart_s),
        _fault(at_s + apart_s - 0.03, "kill", gone, FOR_GOOD_S),
    ]


# ---------------------------------------------------------------- beginnings


def _idle_birth(dice: random.Random, plain: Options) -> Drawn:
    """Kill the only one that has offered parameters before all have been heard in the view."""
    options = replace(plain, profile="birth", faulty_s=4.0, hosts=dice.choice((3, 4, 5)))
    names = _names(options)
    first, silent = dice.sample(names[1:], 2)
    options = replace(options, idle=names.replace(first, ""), network="datagrams")
    return options, [
        Fault(0.0, "failpoint", first, 2.0, f"Offer {dice.choice((1, 2, 3))} after"),
        Fault(0.0, "lose", silent, 1.0, f"Install lose {dice.choice((6, 12))} to"),
    ]


def _dead_birth(dice: random.Random, plain: Options) -> Drawn:
    """Kill somebody in the first view before its first heartbeat."""
    # A view of two may be decided, and nothing here remembers: one alone is to go on.
    options = replace(plain, profile="birth", bootstrap="cradle", faulty_s=4.0, policy="auto")
    options = replace(options, hosts=dice.choice((3, 4, 5)))
    who = dice.choice(_names(options))
    detail = dice.choice(("Installed 1 after", "Heartbeat 1 before"))
    return options, [Fault(0.0, "failpoint", who, round(dice.uniform(1.0, 3.0), 3), detail)]


def _far_birth(dice: random.Random, plain: Options) -> Drawn:
    """Take the first parameters of one to whom the witness has no path."""
    hosts = dice.choice((4, 5))
    idle = dice.choice(("a", "ade"[: hosts - 2], "ade"[: hosts - 2]))
    options = replace(plain, witnesses=1, idle=idle, outbound="bc", hosts=hosts, faulty_s=4.0)
    return options, []


# ---------------------------------------------------------------- after all were gone


def _dark(dice: random.Random, plain: Options) -> tuple[Options, float]:
    """Return options of a run that a power cut ends, and when that is."""
    saved = {"checkpoints": 1, "load_s": dice.choice((0.4, 0.8)), "log_rounds": 16}
    options = _with(plain, **saved, inner_s=0.4, faulty_s=14.0)
    return options, dice.uniform(1.5, 3.0)


def _called_learner(dice: random.Random, plain: Options) -> Drawn:
    """Let a process with a checkpoint call for the run at somebody who joins it."""
    options, at_s = _dark(dice, plain)
    names = _names(options)
    back = " ".join(f"{name}:up:{dice.uniform(0.3, 1.0):.2f}" for name in names)
    later_s = at_s + 5.0 + dice.uniform(0.0, 1.0)
    return options, [
        _fault(at_s, "power", names, 0.0, back),
        _fault(later_s, "join", NAMES[len(names)]),
        _fault(later_s + 0.1, "kill", dice.choice(names[1:]), 0.2),
    ]


def _resumed(dice: random.Random, plain: Options) -> Drawn:
    """Resume one alone from its checkpoint."""
    options, at_s = _dark(dice, plain)
    names = _names(options)
    alone, also = dice.choice(names), "new" if dice.random() < 0.7 else "up"
    back = " ".join(
        f"{name}:{'resume' if name == alone else also}:{dice.uniform(0.3, 3.0):.2f}"
        for name in names
    )
    return replace(options, faulty_s=8.0), [_fault(at_s, "power", names, 0.0, back)]


def _kept_its_power(dice: random.Random, plain: Options) -> Drawn:
    """Let one keep its power, and ask for a view of the run that the others begin again."""
    options, at_s = _dark(dice, plain)
    options = replace(options, hosts=dice.choice((4, 5)), delay_s=dice.choice((0.06, 0.15)))
    names = _names(options)
    stays = dice.choice(names)
    back = " ".join(
        f"{name}:stays:0" if name == stays else f"{name}:up:{dice.uniform(0.3, 0.8):.2f}"
        for name in names
    )
    return options, [
        _fault(at_s - 0.01, "isolate", stays, dice.uniform(2.8, 4.6)),
        _fault(at_s, "power", names, 0.0, back),
    ]


# ---------------------------------------------------------------- who asks for something


def _asks_alone(dice: random.Random, plain: Options) -> Drawn:
    """Ask for more trainers at somebody whom nobody hears, until it is outside."""
    options = replace(plain, hosts=dice.choice((3, 4, 5)), asks=(2,), faulty_s=14.0)
    who, at_s = dice.choice(_names(options)[1:]), dice.uniform(0.2, 2.0)
    return options, [
        _fault(at_s, "isolate", who, dice.uniform(8.0, 10.0)),
        _fault(at_s + 0.05, "ask", who, 0.0, "2"),
    ]


def _leaves_twice(dice: random.Random, plain: Options) -> Drawn:
    """Ask somebody to leave, and again while it does."""
    options = replace(plain, hosts=dice.choice((4, 5)), faulty_s=6.0)
    options = replace(options, delay_s=dice.choice((0.06, 0.15)))
    who, at_s = dice.choice(_names(options)), dice.uniform(0.2, 2.0)
    return options, [
        _fault(at_s, "leave", who),
        _fault(at_s + dice.uniform(0.02, 0.3), "leave", who),
    ]


def _banned_fork(dice: random.Random, plain: Options) -> Drawn:
    """Bans are told while peers come into another lineage."""
    options, _, rest, end_s, split = _broken_split(dice, plain)
    options = replace(options, bans=1)
    names = _names(options)
    who = dice.choice(rest[1:])
    finders = "".join(name for name in names if name != who)
    kind = dice.choice(("alone", "words"))
    return options, [split, _fault(end_s - 3.0, "ban", who, 0.1, f"{kind} {finders}")]


RARE: dict[str, Callable[[random.Random, Options], Drawn]] = {
    "disputed": _disputed,
    "doomed": _doomed,
    "deaf judge": _deaf_judge,
    "two digests": _two_digests,
    "tie": _tie,
    "doubt": _doubt,
    "dumb owner": _dumb_owner,
    "needed by all": _needed_by_all,
    "gone cleanup": _gone_cleanup,
    "pieces led": _pieces_led,
    "pieces idle": _pieces_idle,
    "pieces advised": _pieces_advised,
    "advised pairs": _advised_pairs,
    "advised calls": _advised_calls,
    "joiners apart": _joiners_apart,
    "heir": _heir,
    "heavy joiner": _heavy_joiner,
    "unreadable helper": _unreadable_helper,
    "far holders": _far_holders,
    "bad part": _bad_part,
    "newcomers cut": _newcomers_cut,
    "unheard caller": _unheard_caller,
    "stuck joiner": _stuck_joiner,
    "two laggards": _two_laggards,
    "unsynced lead": _unsynced_lead,
    "banned outside": _banned_outside,
    "leaving heirs": _leaving_heirs,
    "late failure": _late_failure,
    "other call": _other_call,
    "late finals": _late_finals,
    "late prepare": _late_prepare,
    "late vote": _late_vote,
    "late hello": _late_hello,
    "late notice": _late_notice,
    "left of a fork": _left_of_a_fork,
    "left of a rival": _left_of_a_rival,
    "lead of none": _lead_of_none,
    "crossing meet": _crossing_meet,
    "leaves a fork": _leaves_a_fork,
    "orphans": _orphans,
    "witness goes back": _witness_goes_back,
    "idle birth": _idle_birth,
    "dead birth": _dead_birth,
    "far birth": _far_birth,
    "called learner": _called_learner,
    "resumed": _resumed,
    "kept its power": _kept_its_power,
    "asks alone": _asks_alone,
    "leaves twice": _leaves_twice,
    "banned fork": _banned_fork,
}


def shown(seed: int) -> str:
    """Return what a seed is, and what it has come to."""
    name, options, script = drawn_rare(seed)
    outcome = run_rare(seed, tracing=True)
    lines = (name, options.text(), *script, outcome.trace[-SHOWN_CHARACTERS:])
    return "\n".join(map(str, (*lines, outcome.failure or outcome.verdict)))


def main(arguments: list[str] | None = None) -> int:
    return play(run_rare, __doc__, f"{len(RARE)} situations", shown, arguments)


if __name__ == "__main__":
    sys.exit(main())
