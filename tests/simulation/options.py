"""What one seed is: options drawn once, printed, and never consulted again for luck.

Swarm testing: every seed has its own kinds of faults, sizes and speeds, so that rare combinations
get a seed of their own instead of drowning in the average. What takes several faults in the right
order hardly ever comes about by chance: a few per cent of the seeds have a *profile*, which bends
the options and puts these faults into the script (script.py), beside some of any kind.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

from atoll.peer.membership.events import Configured
from atoll.peer.membership.messages import Terms
from atoll.peer.membership.view import Rules
from atoll.peer.membership.witness_owners import Work

__all__ = ["FAULT_KINDS", "NAMES", "PROFILES", "Options", "draw", "draw_usual"]

# Weighted: what one seed may do to a run. "burst" needs the datagram network.
FAULT_KINDS = (
    "kill",
    "kill",
    "off",
    "failpoint",
    "failpoint",
    "pause",
    "cut",
    "one_way",
    "split",
    "bridge",
    "isolate",
    "clog",
    "break",
    "burst",
    "corrupt",
    "hang",
    "detach",
    "slow",
    "leave",
    "hand_over",
    "join",
    "mass_join",
    "mass_leave",
    "flip",
    "garble",
    "unreadable",
    "swizzle",
)
RARE = {"flip", "garble", "mass_leave", "leave", "mass_join"}

# Weighted. "holders": who holds the last rounds dies, and witnesses make a quorum without them.
# "split": a partition that lasts until both sides go on, and its end. "power": all machines go dark
# at once and come back with what their disks hold. "birth": a process dies while the run forms.
PROFILES = {"": 87, "holders": 4, "split": 4, "power": 4, "birth": 1}


# Of the seeds without a profile: in these, who wakes up after a rollback is ahead of it when the
# next election comes.
WAKES_SHARE = 0.05
MISLED_SHARE = 0.025  # and in these one of the others is ahead of it, too
HUBS_SHARE = 0.5  # of those with relays, in which one is a witness
RELAYS_SHARE = 0.6  # of those with such pairs, in which others carry their links
PAIRS_SHARE = 0.12  # of the seeds, in which some pairs have no link
RULE_SHARE = 0.05  # of the seeds, in which some lie about what they have of a broken attempt
LOSSES_SHARE = 0.12  # of the seeds, in which messages of chosen kinds are lost
SITUATIONS_SHARE = 0.2  # of the seeds, each with one of these (situations.py)
SITUATIONS = (
    *("candidate", "coordinator", "learner", "out", "stranger", "advice"),
    *("heir", "laggard", "calls") * 2,  # where less comes about by each
)
MUTES_SHARE = 0.12  # of the seeds, in which some paths carry no data, and nobody reports it
TERMS_SHARE = 0.03  # of the seeds each, that are of audited rounds, and of asynchronous ones
BIRTHS_SHARE = 0.03  # of the seeds: more births than PROFILES has
NAMES = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True)
class Options:
    seed: int
    profile: str = ""  # one of PROFILES
    hosts: int
    witnesses: int = 0
    archives: int = 0
    bootstrap: str = "found"  # by one; or "cradle": by all of a listed number together
    policy: str = "auto"
    on_lost: str = "halt"
    on_fork: str = "auto"
    signed: bool = False
    network: str = "streams"  # as TCP: in order until a link breaks; or "datagrams"
    delay_s: float = 0.02
    jitter: float = 0.5  # of the delay, either way
    loss: float = 0.0
    double: float = 0.0
    inner_s: float = 0.3
    chunks: int = 4
    chunk_s: float = 0.005
    load_s: float = 0.1
    fragments: int = 1
    in_flight: int = 1
    log_rounds: int = 8
    clock_drift: float = 0.0  # rates spread over 1 +- this
    faulty_s: float = 8.0
    fault_rate: float = 1.0  # faults in a second
    restart_s: float = 2.0  # a dead process is back after about this time
    kinds: tuple[str, ...] = ()
    checkpoints: int = 0  # rounds between two of a peer; 0: nobody writes any
    calls: float = 0.0  # share of rounds that are collectives of the trainers' own
    probation: int = 0  # rounds of who joins
    least: int = 1  # peers that have to count in a round
    bans: int = 0  # peers that are found out to lie
    rule: bool = False  # a robust rule: nobody is believed to have made a chunk well
    losses: int = 0  # messages of one kind that are lost or late, mostly with a death soon after
    situation: str = ""  # one of SITUATIONS
    mutes: int = 0  # times that paths carry no data for a while, though their links do
    audited: bool = False  # a result is there once most participants have the same
    asynchronous: bool = False  # a round is of whoever has submitted
    min_trainers: int = 1  # of the run's specification ...
    asks: tuple[int, ...] = ()  # ... and what members ask for, one after the other
    outbound: str = ""  # names of hosts that can only dial out
    unlinkable: tuple[str, ...] = ()  # pairs of names that have no common protocol
    relays: str = ""  # names of hosts that carry control links of those who cannot dial each other
    carries: str = ""  # ... and their data, too
    idle: str = ""  # names of hosts without a trainer

    @property
    def rules(self) -> Rules:
        return Rules(self.policy, self.on_lost, self.on_fork)

    @property
    def configured(self) -> Configured:
        rule = "trimmed(f=1)" if self.rule else ""
        terms = Terms(
            self.probation,
            self.least,
            rule,
            self.audited,
            self.min_trainers,
            self.asynchronous,
            # Where there are relays a witness may own the parts of a step.
            Work((self.chunks,) * self.fragments, 1, "float32") if self.relays else None,
        )
        return Configured("spec", self.fragments, self.in_flight, terms)

    def text(self) -> str:
        return "\n".join(f"  {f.name} = {getattr(self, f.name)!r}" for f in fields(self))


def draw(seed: int) -> Options:
    """Return what this seed is. What is seldom is drawn by a luck of its own: without any of it a
    seed is the usual one."""
    drawn = draw_usual(seed)
    if random.Random(f"rule {seed}").random() < RULE_SHARE:
        drawn = replace(drawn, rule=True)
    luck = random.Random(f"losses {seed}")
    if drawn.hosts >= 2 and luck.random() < LOSSES_SHARE:
        drawn = replace(drawn, losses=luck.choice((2, 4, 8)))
    luck = random.Random(f"situation {seed}")
    if drawn.hosts >= 3 and not drawn.profile and luck.random() < SITUATIONS_SHARE:
        drawn = _in_situation(replace(drawn, situation=luck.choice(SITUATIONS)), luck)
    luck = random.Random(f"mutes {seed}")
    if drawn.hosts >= 3 and luck.random() < MUTES_SHARE:
        drawn = replace(drawn, mutes=luck.choice((1, 2, 3)))
    if random.Random(f"audited {seed}").random() < TERMS_SHARE:
        drawn = replace(drawn, audited=True)
    if drawn.calls == 0 and random.Random(f"asynchronous {seed}").random() < TERMS_SHARE:
        drawn = replace(drawn, asynchronous=True)
    luck = random.Random(f"birth {seed}")
    if not (drawn.profile or drawn.situation) and luck.random() < BIRTHS_SHARE:
        drawn = _fair(replace(_birth(drawn, luck), profile="birth"))
    luck = random.Random(f"wakes {seed}")
    if not (drawn.profile or drawn.situation) and luck.random() < WAKES_SHARE:
        drawn = _fair(replace(_wakes(drawn, luck), profile="wakes"))
    luck = random.Random(f"misled {seed}")
    if not (drawn.profile or drawn.situation) and luck.random() < MISLED_SHARE:
        drawn = _misled(drawn, luck)
    return _with_relays(drawn)


def draw_usual(seed: int) -> Options:
    dice = random.Random(seed)
    hosts = dice.choice((1, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 6, 7, 9))
    if dice.random() < 0.005:
        hosts = 16
    datagrams = dice.random() < 0.4
    kinds = {kind for kind in FAULT_KINDS if dice.random() < (0.1 if kind in RARE else 0.35)}
    if not datagrams:
        kinds.discard("burst")
    if "failpoint" in kinds:  # most of them spring only where something else goes wrong
        kinds.add(dice.choice(("kill", "cut", "pause", "split")))
    fragments = dice.choice((1, 1, 1, 2, 3))
    chunks = dice.choice((1, 3, 4)) * fragments
    slow_bulk = dice.random() < 0.3
    inner_s, log_rounds = dice.choice((0.2, 0.4, 0.8)), dice.choice((2, 4, 16))
    load_s = dice.choice((1.0, 2.0)) if slow_bulk else dice.choice((0.02, 0.1, 0.4))
    plain = Options(
        seed=seed,
        hosts=hosts,
        witnesses=1 if hosts >= 2 and dice.random() < 0.15 else 0,
        bootstrap="cradle" if hosts >= 2 and dice.random() < 0.15 else "found",
        archives=1 if hosts >= 2 and dice.random() < 0.1 else 0,
        policy=dice.choice(("majority", "auto", "auto", "any")),
        on_lost=dice.choice(("halt", "halt", "rollback")),
        on_fork="halt" if dice.random() < 0.05 else "auto",
        signed=dice.random() < 0.5,
        network="datagrams" if datagrams else "streams",
        delay_s=dice.choice((0.0005, 0.005, 0.02, 0.06, 0.15)),
        jitter=dice.choice((0.0, 0.2, 0.9)),
        loss=dice.choice((0.0, 0.0, 0.01, 0.05)) if datagrams else dice.choice((0.0, 0.02)),
        double=dice.choice((0.0, 0.0, 0.05)) if datagrams else 0.0,
        inner_s=inner_s,
        chunks=chunks,
        chunk_s=dice.choice((0.05, 0.1)) if slow_bulk else dice.choice((0.001, 0.005, 0.02)),
        load_s=min(load_s, 0.4 * log_rounds * inner_s),  # else nobody could ever catch up
        fragments=fragments,
        in_flight=dice.randint(1, fragments),
        log_rounds=log_rounds,
        clock_drift=dice.choice((0.0, 0.0, 0.02)),
        faulty_s=dice.choice((4.0, 6.0, 9.0)),
        fault_rate=dice.choice((0.5, 1.0, 2.0, 3.0)),
        restart_s=dice.choice((0.3, 1.5, 3.0)),
        kinds=tuple(sorted(kinds)) or ("kill",),
    )
    plain = _with_pairs(_with_extras(plain))
    profile = dice.choices(tuple(PROFILES), tuple(PROFILES.values()))[0]
    bend = {"holders": _holders, "split": _split, "power": _power, "birth": _birth}.get(profile)
    return _fair(replace(bend(plain, dice), profile=profile) if bend is not None else plain)


def _fair(drawn: Options) -> Options:
    """With fewer replicas than have to count no round is ever begun, and rightly so."""
    replicas = drawn.hosts - drawn.witnesses
    if drawn.profile == "power" or drawn.bootstrap == "cradle":  # who founds together is linked
        drawn = replace(drawn, outbound="", unlinkable=())
    drawn = drawn if replicas >= drawn.least else replace(drawn, least=1)
    return drawn if replicas >= drawn.min_trainers else replace(drawn, min_trainers=1)


def _with_extras(plain: Options) -> Options:
    """Each drawn by a luck of its own: seeds without any stay what they are."""
    seed, hosts = plain.seed, plain.hosts
    luck = random.Random(f"calls {seed}")
    if plain.fragments == 1 and luck.random() < 0.4:
        plain = replace(plain, calls=luck.choice((0.2, 0.5, 1.0)))
    luck = random.Random(f"terms {seed}")
    if luck.random() < 0.3:
        plain = replace(plain, probation=luck.choice((1, 2, 4, 12)))
    if hosts - plain.witnesses >= 3 and luck.random() < 0.15:
        plain = replace(plain, least=2)
    luck = random.Random(f"bans {seed}")
    if hosts >= 3 and luck.random() < 0.2:
        plain = replace(plain, bans=luck.choice((1, 1, 2)))
    luck = random.Random(f"meeting {seed}")
    if hosts - plain.witnesses >= 2 and luck.random() < 0.3:
        plain = replace(plain, min_trainers=luck.choice((2, 2, min(3, hosts - plain.witnesses))))
    if luck.random() < 0.15:
        plain = replace(plain, asks=tuple(luck.choices((1, 2, 3), k=luck.choice((1, 2)))))
    return plain


def _with_pairs(plain: Options) -> Options:
    """Some can only dial out, or a pair has no common protocol; the founder has links to all."""
    luck, names = random.Random(f"links {plain.seed}"), NAMES[1 : plain.hosts]
    if len(names) < 2 or luck.random() >= PAIRS_SHARE:
        return plain
    # Of those outside who cannot reach the coordinator nobody knows: none may be needed.
    if luck.random() < 0.3 and plain.min_trainers == 1 and not plain.asks:
        pairs = ("".join(sorted(luck.sample(names, 2))) for _ in range(luck.choice((1, 1, 2))))
        return replace(plain, unlinkable=tuple(sorted({*pairs})))
    return replace(plain, outbound="".join(sorted(luck.sample(names, luck.randint(2, len(names))))))


def _with_relays(plain: Options) -> Options:
    """Let who can be dialled carry the links of those who cannot, and perhaps their data."""
    luck = random.Random(f"relays {plain.seed}")
    if not (plain.outbound or plain.unlinkable) or luck.random() >= RELAYS_SHARE:
        return plain
    outbound = "".join(NAMES[2 : plain.hosts])
    is_hub = luck.random() < HUBS_SHARE and not plain.witnesses and plain.min_trainers == 1
    if is_hub and len(outbound) > plain.least and not plain.asks:
        # Who can be dialled has no trainer, or is a witness: of those who train none has a way to
        # all others.
        plain = _fair(replace(plain, witnesses=1, outbound=outbound, situation="", idle="a"))
    relays = "".join(name for name in NAMES[: plain.hosts] if name not in plain.outbound)
    carries = "".join(name for name in relays if luck.random() < 0.5)
    return replace(plain, relays=relays, carries=carries if luck.random() < 0.5 else "")


def _in_situation(drawn: Options, luck: random.Random) -> Options:
    """What a situation needs beside its faults."""
    drawn = replace(drawn, faulty_s=9.0)
    if drawn.situation == "heir":  # it has to be a witness: a replica leads with the state only
        drawn = replace(drawn, witnesses=1, outbound="", unlinkable=())
    elif drawn.situation == "stranger":  # a witness that coordinates knows no specification
        drawn = replace(drawn, witnesses=0)
    elif drawn.situation == "laggard":
        drawn = replace(drawn, log_rounds=2, inner_s=0.2, load_s=0.1, chunk_s=0.005, outbound="")
    elif drawn.situation == "calls":
        drawn = replace(drawn, calls=1.0, fragments=1, in_flight=1, asynchronous=False)
    elif drawn.situation == "advice" and luck.random() < 0.5:
        names = luck.sample(NAMES[1 : drawn.hosts], 2)
        drawn = replace(drawn, outbound="".join(sorted(names)), unlinkable=())
    return _fair(drawn)


def _holders(plain: Options, dice: random.Random) -> Options:
    """Fast rounds and links, so that some are committed before those who lag are voted out."""
    hosts = dice.choice((3, 4, 5))
    return replace(
        plain,
        hosts=hosts,
        witnesses=1 if hosts == 3 else 2,
        archives=0,
        policy=dice.choice(("majority", "auto", "any")),
        on_lost=dice.choice(("halt", "rollback", "rollback")),
        delay_s=min(plain.delay_s, 0.02),
        inner_s=dice.choice((0.2, 0.2, 0.6)),
        chunk_s=min(plain.chunk_s, 0.005),
        load_s=0.1,
        log_rounds=16,
        faulty_s=12.0,
        fault_rate=0.2,
    )


def _wakes(plain: Options, dice: random.Random) -> Options:
    """A rollback, and who is ahead of it needs a while to get back."""
    held = _holders(plain, dice)
    delay_s, load_s = dice.choice((0.06, 0.15)), dice.choice((0.4, 0.8))
    return replace(
        held,
        on_lost="rollback",
        inner_s=0.2,
        delay_s=delay_s,
        load_s=load_s,
        faulty_s=16.0,
        losses=0,
    )


def _misled(plain: Options, dice: random.Random) -> Options:
    """The same, and enough that lag, for whoever leads them back and one that is misled."""
    few_faults = {"kinds": ("slow",), "fault_rate": 0.1, "mutes": 0, "asks": (), "bans": 0}
    anybody = {"outbound": "", "unlinkable": (), "least": 1, "min_trainers": 1}
    return replace(
        _wakes(plain, dice),
        **few_faults,
        **anybody,
        profile="misled",
        hosts=7,
        witnesses=2,
        policy="majority",
        bootstrap="found",
        network="datagrams",
    )


def _split(plain: Options, dice: random.Random) -> Options:
    """Going on without a quorum takes 6 to 10 s, meeting again some more."""
    hosts = dice.choice((2, 2, 3, 4, 4, 5, 6))
    return replace(
        plain,
        hosts=hosts,
        witnesses=min(plain.witnesses, hosts - 1),
        archives=0,
        policy="auto" if hosts == 2 and dice.random() < 0.5 else "any",
        on_fork="halt" if dice.random() < 0.15 else "auto",
        load_s=min(plain.load_s, 0.4),
        faulty_s=20.0,
        fault_rate=0.2,
    )


def _power(plain: Options, dice: random.Random) -> Options:
    left_out = {"leave", "mass_leave", "flip", "garble"}
    kinds = tuple(kind for kind in plain.kinds if kind not in left_out)
    return replace(
        plain,
        hosts=max(2, min(plain.hosts, 6)),
        archives=0,
        load_s=min(plain.load_s, 0.4),
        faulty_s=dice.choice((5.0, 10.0)),
        fault_rate=dice.choice((0.2, 0.5)),
        kinds=kinds or ("kill",),
        checkpoints=dice.choice((1, 2, 4)),
    )


def _birth(plain: Options, dice: random.Random) -> Options:
    """One death of three leaves a quorum."""
    bootstrap = dice.choice(("found", "cradle", "cradle"))
    return replace(plain, hosts=max(3, plain.hosts), witnesses=0, archives=0, bootstrap=bootstrap)
