"""Seeds with durable homes that each come to one rare situation of those.

    python -m simulation.rare_durable A..B      # seeds; --seed N: one, with its trace

What a ledger is for is needed where faults come in the right order: plain durable seeds
(durable.py) hardly ever come there. Here each situation says what its options, homes and faults
are; the rest is drawn. What every durable seed checks has to hold, and one thing more: the state
that a home gives is on the way to the last commit that its ledger knows of.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from harness.bounded import BoundedNode
from harness.disks import Disk
from harness.host import Host, Trap
from harness.values import State
from harness.world import CALL_AGAIN_S

from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import Recovered
from atoll.peer.membership.operations import Call
from atoll.peer.membership.view import Member
from simulation.arena import Arena
from simulation.arguments import play
from simulation.durable import DurableFaults, Homes, draw_durable, draw_homes, play_durable
from simulation.fault import Fault
from simulation.options import NAMES, Options
from simulation.run import Outcome

__all__ = ["RARE_DURABLE", "run_rare_durable"]

SHOWN_CHARACTERS = 60_000  # of a trace, its end


OFFER_AGAIN_S = 0.2


@dataclass(frozen=True)
class Played:
    """Hold what one seed of a situation is."""

    options: Options
    homes: Homes
    script: list[Fault]
    save_s: float = 0.0  # to write a checkpoint


Situation = Callable[[random.Random, Options], Played]


# ---------------------------------------------------------------- the world


class RareArena(Arena):
    """Be a network whose daemons and trainers do a few things more that real ones do.

    Trainers ask whether their daemon is ready before they train, and offer parameters until a run
    has begun; one that has lost calls may go on with a step. Witnesses read their homes, too, and a
    checkpoint takes a while to be written.
    """

    save_s = 0.0

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.last_words: dict[str, str] = {}  # name -> with which kind of record it dies
        self.sprung_by_record: Callable[[Host], None] = lambda host: None
        self._ready: set[Host] = set()  # whose trainers have heard that they can train
        self._steps_next: set[str] = set()  # names of those whose trainers call nothing now
        self._found: Recovered | None = None  # by the process that was added last
        self._carry[ev.TakeBack] = self._take_back

    def saved(self, host: Host) -> None:
        """Have a checkpoint on the disk once it is written, if its process lives so long."""
        if not self.save_s:
            super().saved(host)
        elif host.disk is not None and not host.tainted and not host.flipped:
            self.after(self.save_s, partial(self._is_written, host, host.disk, host.state))

    def _is_written(self, host: Host, disk: Disk, state: State) -> None:
        if host.alive and self.hosts[host.peer] is host and host.disk is disk:
            disk.save(state)

    def make_node(
        self, member: Member, life: int = 0, found: Recovered | None = None
    ) -> BoundedNode:
        self._found = found
        return super().make_node(member, life, found)

    def _is_on_the_way(self, host: Host, found: Recovered) -> None:
        """Check that a state which is said to be that of a view belongs to its history."""
        own, (number, chain) = host.node.follower, found.known
        if found.view is None or own.diverged or not own.holds:
            return
        history = self.checker._history
        while number > own.round and chain in history:
            number, chain = number - 1, history[chain][0]
        if number == own.round > 0:
            text = f"invariant 17: {host.name} comes back with a state of another history"
            assert chain == own.chain, f"{text}, after round {number} of {found.known[0]}"

    def _read_home(self, host: Host) -> None:
        found = self._found
        if found is not None:
            self._is_on_the_way(host, found)
        super()._read_home(host)
        if not host.is_replica and found is not None and found.state[0]:
            self.deliver(host, ev.HomeRead(*found.state, b"", is_whole=True))

    def deliver(self, host: Host, event: ev.Event) -> None:
        """Tell a witness that owns parts of a result a moment later that it is whole.

        The root of many chunks is made in a thread; what the others say may be faster.
        """
        deliver = partial(super().deliver, host, event)
        if type(event) is ev.AttemptReduced and not host.is_replica:
            self.after(self.disk_dice.uniform(0.0, 0.25), deliver)
        else:
            deliver()

    def train(self, name: str) -> None:
        super().train(name)
        self._offer_again(self.host(name))

    def _offer_again(self, host: Host) -> None:
        """Offer parameters until the run has some, but not while INIT reads them."""
        if not host.alive or not host.trains or host.round or self.hosts[host.peer] is not host:
            return
        if not host.node.follower.contributes:
            self.deliver(host, ev.Offered(b"spec"))
        self.after(OFFER_AGAIN_S, partial(self._offer_again, host))

    def _submit(self, host: Host, fragment: int, phase: int) -> None:
        """Train once the daemon says that it is not behind (peer/daemon/trainer_service.py)."""
        if host not in self._ready:
            if host.alive and host.node.may_be_behind():
                self.after(CALL_AGAIN_S, partial(self._submit, host, fragment, phase))
                return
            self._ready.add(host)
        super()._submit(host, fragment, phase)

    def _call_of(self, host: Host) -> Call:
        if host.name in self._steps_next:
            self._steps_next.discard(host.name)
            return None
        return super()._call_of(host)

    def _take_back(self, host: Host, effect: ev.TakeBack) -> None:
        """Calls are lost: half of the trainers do something else next."""
        self.plane.take_back(host, effect)
        if self.disk_dice.random() < 0.5:
            self._steps_next.add(host.name)

    def _persist(self, host: Host, effect: ev.Persist) -> None:
        super()._persist(host, effect)
        kind = type(effect.record).__name__
        if self.last_words.get(host.name) == kind and host.node.me.inc > 1:
            del self.last_words[host.name]
            self.after(0.0, partial(self.sprung_by_record, host))


class RareFaults(DurableFaults):
    """Faults that need a moment more than those of all durable seeds."""

    arena: RareArena

    def __init__(self, arena: Arena, script: list[Fault]) -> None:
        assert isinstance(arena, RareArena)
        arena.sprung_by_record = self._dies
        self._away_s: dict[str, float] = {}
        self._outages: list[Trap] = []
        self._power_traps: list[Trap] = []
        super().__init__(arena, script)

    def _last_word(self, fault: Fault) -> None:
        """Kill a new incarnation when it has written such a record; it is away for a while."""
        for host in self._hosts(fault):
            self.arena.last_words[host.name] = fault.detail
            self._away_s[host.name] = fault.lasts_s

    def _outage(self, fault: Fault) -> None:
        """Cut everybody's power at a failpoint of one process."""
        kind, count, side = fault.detail.split()
        trap = Trap(kind, int(count), side, fault.lasts_s)
        self._outages.append(trap)
        for host in self._hosts(fault):
            host.traps.append(trap)

    def _power_trap(self, fault: Fault) -> None:
        """Cut that machine's power at a failpoint, always."""
        kind, count, side = fault.detail.split()
        trap = Trap(kind, int(count), side, fault.lasts_s)
        self._power_traps.append(trap)
        for host in self._hosts(fault):
            host.traps.append(trap)

    def _sprung(self, host: Host, trap: Trap) -> None:
        super()._sprung(host, trap)
        if trap in self._power_traps or trap in self._outages:
            host.off = True
        if trap in self._outages:
            for other in self.arena.living():
                away_s = round(trap.away_s * self.arena.disk_dice.uniform(0.5, 1.5), 3)
                self._off(Fault(0.0, "off", other.name, away_s))

    def _ask_to_leave(self, fault: Fault) -> None:
        """Let somebody leave, however few are left; who is started again before that stays."""
        for host in self._hosts(fault):
            if host.alive:
                self.arena.leave(host.name)

    def _go(self, fault: Fault) -> None:
        """Let somebody leave for good, however few are left."""
        self.left.update(host.name for host in self._hosts(fault) if host.alive)
        self._ask_to_leave(fault)

    def _dies(self, host: Host) -> None:
        if not self.over:
            self._kill(Fault(0.0, "kill", host.name, self._away_s[host.name]))

    def heal(self) -> None:
        super().heal()
        self.arena.last_words.clear()


# ---------------------------------------------------------------- situations


def _homes(plain: Options, **changed: object) -> Homes:
    return replace(draw_homes(plain.seed), **changed)  # type: ignore[arg-type]


def _fork(dice: random.Random, plain: Options) -> Played:
    """Bring two histories into one ledger.

    One of two goes on alone and dies; the other goes on from the round before, and takes the first
    in. Then it dies again, right as it has caught up, or soon after.
    """
    at_s = round(dice.uniform(0.3, 1.5), 3)
    # Longer than a silence takes to be death, and shorter than until the dead are voted out.
    cut_s = round(dice.uniform(2.1, 2.45), 3)
    # At once after it: within it nobody would hear of the death, and later of these rounds.
    dies_s, away_s = round(at_s + cut_s + 0.001, 3), round(dice.uniform(0.3, 0.5), 3)
    options = replace(
        plain,
        hosts=2,
        witnesses=0,
        bootstrap="found",
        policy=dice.choice(("any", "any", "auto")),
        on_fork="auto",
        network="datagrams",
        delay_s=0.05,
        loss=0.0,
        double=0.0,
        inner_s=round(dice.uniform(0.05, 0.1), 3),
        load_s=dice.choice((0.05, 0.1)),
        chunk_s=0.0025,
        log_rounds=16,
        probation=0,
        faulty_s=7.0,
    )
    script = [
        Fault(at_s, "cut", "ab", cut_s),
        Fault(dies_s, "kill", "a", away_s),
        Fault(dies_s, "hang", "b", round(dice.uniform(0.4, 0.7), 3)),
    ]
    # It has the others' state, or is in their view and on its way there.
    kind = dice.choice(("CommitRecord", "CommitRecord", "ViewRecord"))
    again_s = round(dice.uniform(0.1, 0.4), 3)
    script.append(Fault(round(dies_s + 0.1, 3), "last_word", "a", again_s, kind))
    homes = _homes(
        plain,
        save_every=dice.choice((2, 5, 1000)),
        read_s=dice.choice((0.0, 0.05)),
        syncs_s=_syncs_s(0.004, a=dice.choice((0.03, 0.06))),
        votes_only=frozenset(),
    )
    return Played(options, homes, script, save_s=dice.choice((0.0, 0.0, 0.0, 1.0)))


def _calm(plain: Options, **changed: object) -> Options:
    """Return options without what these situations have no use for."""
    usual = replace(
        plain,
        witnesses=0,
        policy="majority",
        network="datagrams",
        delay_s=0.02,
        loss=0.0,
        double=0.0,
        inner_s=0.2,
        load_s=0.1,
        fragments=1,
        in_flight=1,
        probation=0,
        calls=0.0,
        losses=0,
        mutes=0,
        situation="",
        rule=False,
        audited=False,
        asynchronous=False,
        idle="",
        faulty_s=7.0,
    )
    return replace(usual, **changed)  # type: ignore[arg-type]


def _syncs_s(rest_s: float, **syncs_s: float) -> dict[str, float]:
    return {**dict.fromkeys(NAMES, rest_s), **syncs_s}


def _restarted_voter(dice: random.Random, plain: Options) -> Played:
    """Restart somebody whose vote is on its disk while the others still write theirs."""
    names = NAMES[: dice.choice((3, 4))]
    who = dice.choice(names[1:])
    script = []
    for _ in range(3):
        at_s = round(dice.uniform(0.2, 5.0), 3)
        detail = f"Ready {dice.choice((2, 2, 4))} after"
        script.append(Fault(at_s, "failpoint", who, round(dice.uniform(0.05, 0.3), 3), detail))
    homes = _homes(plain, syncs_s=_syncs_s(1.0, **{who: 0.004}), votes_only=frozenset(), read_s=0.0)
    return Played(_calm(plain, hosts=len(names)), homes, _sorted(script))


def _full(dice: random.Random, plain: Options) -> Played:
    """Fill a disk to which a result is being written, though its peer has said that it keeps it."""
    names = NAMES[: dice.choice((2, 3, 3))]
    script = [
        Fault(at_s, "disk_full", dice.choice(names), round(dice.uniform(0.1, 0.6), 3))
        for at_s in sorted(round(dice.uniform(0.0, 6.0), 3) for _ in range(14))
    ]
    homes = _homes(plain, syncs_s=_syncs_s(0.2), votes_only=frozenset())
    return Played(_calm(plain, hosts=len(names)), homes, script)


def _votes_left(dice: random.Random, plain: Options) -> Played:
    """Cut all power when only one, which keeps votes, has its READY on the disk."""
    script = [Fault(round(dice.uniform(0.2, 2.0), 3), "outage", "b", 0.8, "Ready 2 after")]
    homes = _homes(plain, syncs_s=_syncs_s(1.0, b=0.0005), votes_only=frozenset("b"), read_s=0.0)
    return Played(_calm(plain, hosts=dice.choice((3, 3, 4))), homes, script)


def _first_vote(dice: random.Random, plain: Options) -> Played:
    """Restart a witness that had to vote for the first parameters."""
    at_s = round(dice.uniform(0.1, 1.0), 3)
    script = [Fault(at_s, dice.choice(("kill", "off")), "b", round(dice.uniform(0.1, 1.0), 3))]
    hosts, witnesses, slow = dice.choice(((4, 1, "a"), (5, 2, "a"), (5, 2, "d"), (5, 2, "e")))
    options = _calm(plain, hosts=hosts, witnesses=witnesses, bootstrap="cradle")
    syncs_s = _syncs_s(0.004, **{slow: 1.0})
    return Played(options, _homes(plain, syncs_s=syncs_s, save_every=1000), script)


def _rotten(dice: random.Random, plain: Options) -> Played:
    """Of the files that a process needs some are missing, and some look well and are not."""
    # The others' state is not there sooner than what the files give.
    script = [Fault(0.0, "heavy", "a", 9.0, "1.0")]
    for who, start_s in zip(dice.sample("abc", 3), (1.5, 3.5, 5.5), strict=True):
        at_s = round(start_s + dice.uniform(0.0, 0.5), 3)
        count = dice.choice((2, 3))
        script += [Fault(round(at_s + n * 0.01, 3), "damage", who) for n in range(count)]
        script.append(Fault(round(at_s + 0.1, 3), "crash", who, 0.0, f"kill {who}:0.3"))
    homes = _homes(plain, save_every=1000, read_s=0.05, votes_only=frozenset())
    return Played(_calm(plain, hosts=3, inner_s=0.1), homes, script)


def _lost_calls(dice: random.Random, plain: Options) -> Played:
    """Operations are lost with the power of all but one, which is not heard when they are back."""
    script = []
    for start_s in (0.3, 3.3, 6.3):
        at_s = round(start_s + dice.uniform(0.0, 1.0), 3)
        stays = dice.choice("abc")
        dead = [name for name in "abc" if name != stays]
        away = " ".join(f"{name}:{dice.uniform(0.05, 0.4):.2f}" for name in dead)
        script.append(Fault(at_s, "isolate", stays, 2.2))
        script.append(Fault(at_s, "crash", "".join(dead), 0.0, f"off {away}"))
    options = _calm(plain, hosts=3, calls=0.6, faulty_s=10.0, inner_s=dice.choice((0.05, 0.2)))
    homes = _homes(
        plain, syncs_s=_syncs_s(0.2), save_every=1000, votes_only=frozenset(), read_s=0.0
    )
    return Played(options, homes, script)


def _owner(dice: random.Random, plain: Options) -> Played:
    """Kill a witness that owns parts of a result in the middle of it; it is back at once."""
    times = dice.choice((1, 2))
    script = [
        Fault(round(0.3 + n * 1.5, 3), "failpoint", "b", 0.1, "Reduce 1 after")
        for n in range(times)
    ]
    options = _calm(
        plain,
        hosts=4,
        witnesses=1,
        outbound="cd",
        relays="ab",
        carries="",
        idle="a",
        inner_s=0.1,
        calls=dice.choice((0.0, 1.0, 1.0)),
        chunk_s=0.02,
    )
    homes = _homes(
        plain,
        syncs_s=_syncs_s(0.004, a=1.0),  # so that a vote of the witness is needed
        votes_only=frozenset(),
        read_s=0.0,
    )
    return Played(options, homes, script)


def _second_copy(dice: random.Random, plain: Options) -> Played:
    """Leave the vote of one that keeps nothing else on its disk, and take its result away."""
    script = [
        Fault(round(0.2 + n * 2.0, 3), "power_trap", "b", 0.2, "Ready 2 before") for n in range(3)
    ]
    homes = _homes(
        plain,
        syncs_s=_syncs_s(0.004, a=dice.choice((0.004, 0.5))),
        votes_only=frozenset("b"),
        read_s=0.0,
    )
    return Played(_calm(plain, hosts=2), homes, script)


def _late_sync(dice: random.Random, plain: Options) -> Played:
    """Sync a READY when its attempt is over, and its result was kept for the next."""
    script = [Fault(0.1, "detach", "a", 9.0)]
    for at_s in (0.8, 3.8):
        at_s = round(at_s + dice.uniform(0.0, 0.5), 3)
        script += [
            Fault(at_s, "slow_disk", "b", 1.5),
            Fault(at_s, "lose", "b", 1.0, "Ready lose 1 from"),
            Fault(round(at_s + 0.1, 3), "lose", "b", 1.0, "Heartbeat lose 1 from"),
            Fault(at_s, "failpoint", "c", 0.8, "Ready 1 before"),
        ]
    homes = _homes(plain, syncs_s=_syncs_s(0.004), votes_only=frozenset(), read_s=0.0)
    return Played(_calm(plain, hosts=3), homes, script)


def _bystander(dice: random.Random, plain: Options) -> Played:
    """Ask one that takes no part in a collective for its vote while it still reads its home."""
    script = [Fault(0.2, "kill", "b", 9.0), Fault(0.2, "detach", "c", 9.0)]
    script += [
        Fault(round(1.5 + n * 1.4, 3), "failpoint", "c", 0.1, "Ready 1 before") for n in range(4)
    ]
    options = _calm(plain, hosts=3, calls=1.0, faulty_s=8.0)
    homes = _homes(plain, syncs_s=_syncs_s(0.004), read_s=dice.choice((0.5, 1.0)))
    return Played(options, homes, script)


def _leaver(dice: random.Random, plain: Options) -> Played:
    """Let somebody leave while its disk is slow, or forget that it was a member."""
    at_s = round(dice.uniform(0.3, 2.0), 3)
    if dice.random() < 0.5:
        script = [Fault(at_s, "slow_disk", "a", 3.0), Fault(round(at_s + 0.1, 3), "go", "a")]
        homes = _homes(plain, syncs_s=_syncs_s(0.004), read_s=0.0)
        return Played(_calm(plain, hosts=2), homes, script)
    who = dice.choice("abc")
    script = [
        Fault(at_s, "isolate", "".join(name for name in "abc" if name != who), 4.0),
        Fault(round(at_s + dice.uniform(0.1, 1.4), 3), "go", who),
        Fault(round(at_s + 0.1, 3), "disk_fails", who),
    ]
    options = _calm(plain, hosts=3, delay_s=dice.choice((0.02, 0.1)))
    return Played(options, _homes(plain, syncs_s=_syncs_s(0.004)), _sorted(script))


def _birth(dice: random.Random, plain: Options) -> Played:
    """Kill a founder while the run forms; it is back with what it has voted for."""
    hosts = dice.choice((2, 3, 3, 4))
    names = NAMES[:hosts]
    who = names[-1] if dice.random() < 0.6 else dice.choice(names)
    trap = dice.choice(("Promise 1", "Accepted 1", "Persist 1", "Persist 2", "Persist 3"))
    away_s = round(dice.uniform(0.1, 1.0), 3)
    script = [Fault(0.0, "failpoint", who, away_s, f"{trap} after")]
    options = _calm(plain, hosts=hosts, profile="birth", bootstrap="cradle", faulty_s=3.0)
    # Founders are listed with their addresses.
    return Played(options, _homes(plain, moves=False), script)


def _former(dice: random.Random, plain: Options) -> Played:
    """Delay what a process has said until the next one with its home has said something."""
    names = NAMES[: dice.choice((3, 4))]
    who = dice.choice(names)
    script = []
    for at_s in (0.4, 2.6, 4.8):
        at_s += round(dice.uniform(0.0, 0.5), 3)
        kind = dice.choice(("Heartbeat", "Leave", "Ready"))
        away_s, late_s = round(dice.uniform(0.05, 0.3), 3), round(dice.uniform(0.7, 1.5), 3)
        dies_s = at_s + 0.3
        if kind == "Leave":
            script.append(Fault(round(at_s + 0.01, 3), "ask_to_leave", who))
            dies_s = at_s + 0.02
        script += [
            Fault(round(at_s, 3), "lose", who, late_s, f"{kind} late 4 from"),
            Fault(round(dies_s, 3), "kill", who, away_s),
        ]
        if dice.random() < 0.5:  # and its successor's beats are late
            back_s = round(dies_s + away_s - 0.005, 3)
            script.append(Fault(back_s, "lose", who, 0.6, "Heartbeat late 3 from"))
    options = _calm(plain, hosts=len(names), calls=dice.choice((0.0, 0.5, 1.0)))
    homes = _homes(plain, syncs_s=_syncs_s(dice.choice((0.0005, 0.004))), read_s=0.0)
    return Played(options, homes, _sorted(script))


def _sorted(script: list[Fault]) -> list[Fault]:
    return sorted(script, key=lambda fault: fault.at_s)


RARE_DURABLE: dict[str, Situation] = {
    "fork": _fork,
    "restarted voter": _restarted_voter,
    "full": _full,
    "votes left": _votes_left,
    "first vote": _first_vote,
    "rotten": _rotten,
    "lost calls": _lost_calls,
    "owner": _owner,
    "second copy": _second_copy,
    "late sync": _late_sync,
    "bystander": _bystander,
    "leaver": _leaver,
    "birth": _birth,
    "former": _former,
}


# ---------------------------------------------------------------- playing them


def played(seed: int) -> tuple[str, Played]:
    """Return which situation a seed is of, and what it is there."""
    names = [*RARE_DURABLE]
    name = names[seed % len(names)]
    dice = random.Random(f"rare durable {seed}")
    return name, RARE_DURABLE[name](dice, draw_durable(seed))


def run_rare_durable(seed: int, tracing: bool = False) -> Outcome:
    """Play the situation of this seed; a failure is what any durable seed may fail of."""
    name, it = played(seed)

    def arena_of(options: Options) -> RareArena:
        arena = RareArena(options)
        arena.save_s = it.save_s
        return arena

    outcome = play_durable(it.options, it.homes, it.script, tracing, arena_of, RareFaults)
    failure = f"{outcome.failure} ({name})" if outcome.failure else ""
    return replace(outcome, failure=failure)


def shown(seed: int) -> str:
    """Return what a seed is, and what it has come to."""
    name, it = played(seed)
    outcome = run_rare_durable(seed, tracing=True)
    lines = (name, it.options.text(), it.homes, *it.script, outcome.trace[-SHOWN_CHARACTERS:])
    return "\n".join(map(str, (*lines, outcome.failure or outcome.verdict, outcome.seen)))


def main(arguments: list[str] | None = None) -> int:
    return play(run_rare_durable, __doc__, f"{len(RARE_DURABLE)} situations", shown, arguments)


if __name__ == "__main__":
    sys.exit(main())
