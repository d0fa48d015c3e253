"""Seeds of runs whose peers have durable homes: any number of them crash at any moment, at once.

What must hold beside the invariants of all runs: a run goes on as long as a majority of the last
view's homes remembers what it has said, whoever comes back first; nothing that was committed is
lost, nobody votes twice, and no view is flagged. Homes are slow, lose what was not synced, lose a
file, fail, or vanish. A home that is put back to what it was is noticed if one who has heard more
takes part in the election: of that there are scripts (test_durable_restarts.py).

    python -m simulation.durable A..B      # seeds; --seed N: one, with its trace
"""

from __future__ import annotations

import gc
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from harness.disks import Disk
from harness.host import Host, Trap
from harness.values import State

from atoll.peer.membership.view import View, is_quorum
from simulation.arena import Arena
from simulation.fault import Fault
from simulation.faults import Faults
from simulation.liveness import goal_reached
from simulation.options import NAMES, Options, draw_usual
from simulation.run import (
    COMMIT_S,
    DRAIN_S,
    FORM_S,
    REJOIN_S,
    Outcome,
    _furthest,
    _has_formed,
    _until,
)
from simulation.script import draw_script

__all__ = [
    "DurableFaults",
    "Homes",
    "draw_durable",
    "draw_homes",
    "durable_script",
    "play_durable",
    "run_durable",
]

# What a run may meet beside crashes. Who leaves, lies or has bad memory is in other seeds.
KINDS = {"kill", "off", "failpoint", "pause", "cut", "one_way", "split", "bridge", "isolate"}
KINDS |= {"clog", "break", "burst", "corrupt", "hang", "detach", "slow", "hand_over", "join"}
SYNCS_S = (0.0005, 0.004, 0.03, 0.2)
AWAY_MAX_S = 3.0  # less than it takes to be voted out of a view that has lost its quorum
FORKS_SHARE = 0.2  # of the seeds, in which some may go on without the others
MOVES_SHARE = 0.2  # of the seeds, in which who is started again listens somewhere else
VOTES_ONLY = 0.15  # of the homes, that have room for no results
SAVE_EVERY = (2, 5, 1000)
READS_S = (0.0, 0.05, 0.5, 2.5)  # to read a home
TRAPS = ("Persist", "Persist", "Ready", "Promise", "Accepted", "Commit", "Begin", "Installed")


def draw_durable(seed: int) -> Options:
    plain, luck = draw_usual(seed), random.Random(f"durable {seed}")
    kinds = tuple(kind for kind in plain.kinds if kind in KINDS) or ("kill",)
    hosts = luck.choice((2, 3, 3, 3, 4, 5, 5, 7))
    return replace(
        plain,
        profile="durable",
        hosts=hosts,
        witnesses=1 if hosts > 2 and luck.random() < 0.2 else 0,
        archives=0,
        policy=luck.choice(("any", "auto")) if luck.random() < FORKS_SHARE else "majority",
        on_lost="halt",
        load_s=min(plain.load_s, 0.4),
        fault_rate=luck.choice((0.2, 0.5, 1.0)),
        kinds=kinds,
        checkpoints=0,
        bans=0,
        least=1,
        min_trainers=1,
        asks=(),
        outbound="",
        unlinkable=(),
    )


@dataclass(frozen=True, kw_only=True)
class Homes:
    """Hold what the homes of one seed are like."""

    moves: bool  # who is started again listens somewhere else
    save_every: int  # rounds between two checkpoints
    read_s: float  # to read a home
    syncs_s: Mapping[str, float]  # to sync a ledger, by the name of its host
    votes_only: frozenset[str] = frozenset()  # names of those that have no room for results


def draw_homes(seed: int) -> Homes:
    luck, fate = random.Random(f"homes {seed}"), random.Random(f"rooms {seed}")
    save_every = luck.choice(SAVE_EVERY)
    return Homes(
        moves=random.Random(f"moves {seed}").random() < MOVES_SHARE,
        save_every=save_every,
        read_s=random.Random(f"reads {seed}").choice(READS_S),
        syncs_s={name: luck.choice(SYNCS_S) for name in NAMES},
        votes_only=frozenset(name for name in NAMES[1:] if fate.random() <= VOTES_ONLY),
    )


def durable_script(options: Options) -> list[Fault]:
    """Faults of all kinds, and crashes of any number at once."""
    luck = random.Random(f"crashes {options.seed}")
    names = NAMES[: options.hosts]
    script = draw_script(replace(options, profile=""))
    for _ in range(luck.choice((1, 1, 2, 3))):
        at_s = round(luck.uniform(0.2, 0.8) * options.faulty_s, 3)
        dead = luck.sample(names, luck.randint(1, len(names)))
        how = luck.choice(("kill", "off"))
        away = " ".join(f"{name}:{luck.uniform(0.0, AWAY_MAX_S):.2f}" for name in dead)
        script.append(Fault(at_s, "crash", "".join(dead), 0.0, f"{how} {away}"))
        if luck.random() < 0.5:  # armed shortly before: somebody dies between two steps of a vote
            side, count = luck.choice(("before", "after")), luck.choice((1, 1, 2, 3))
            who = names if luck.random() < 0.5 else luck.choice(names)
            detail = f"{luck.choice(TRAPS)} {count} {side}"
            trap_s = round(max(0.0, at_s - luck.choice((0.0, 0.3))), 3)
            script.append(Fault(trap_s, "failpoint", who, round(luck.uniform(0.0, 2.0), 3), detail))
    for kind in ("slow_disk", "disk_fails", "disk_lost", "damage", "disk_full"):
        if luck.random() < 0.12:
            at_s = round(luck.uniform(0.0, 0.7) * options.faulty_s, 3)
            lasts_s = round(luck.uniform(0.3, 4.0), 3)
            script.append(Fault(at_s, kind, luck.choice(names), lasts_s))
    return sorted(script, key=lambda fault: fault.at_s)


class DurableFaults(Faults):
    """Faults of homes, beside those of processes and networks."""

    def __init__(self, arena: Arena, script: list[Fault]) -> None:
        super().__init__(arena, script)
        self.damaged: set[str] = set()

    def _can_die(self, host: Host) -> bool:
        return host.alive

    def _crash(self, fault: Fault) -> None:
        how, *away = fault.detail.split()
        hosts = [host for host in self._hosts(fault) if host.alive]
        back = dict(word.split(":") for word in away)
        self.arena.seen[f"crash of {len(hosts)} of {len(self.arena.hosts)}"] += 1
        for host in hosts:
            host.off = how == "off"
            self.arena.kill(host.name)
        for host in hosts:
            wait = Fault(0.0, "back", host.name, float(back[host.name]))
            self._undo(wait, partial(self._restart, host))

    def _sprung(self, host: Host, trap: Trap) -> None:
        """Half of the traps are power cuts."""
        host.off = self.arena.disk_dice.random() < 0.5
        super()._sprung(host, trap)

    def _slow_disk(self, fault: Fault) -> None:
        for host in self._hosts(fault):
            disk = self.arena.homes[host.name]
            disk.sync_s, before_s = 1.0, disk.sync_s
            self._undo(fault, lambda disk=disk, s=before_s: setattr(disk, "sync_s", s))

    def _disk_fails(self, fault: Fault) -> None:
        for host in self._hosts(fault):
            self.arena.homes[host.name].fails = True

    def _disk_full(self, fault: Fault) -> None:
        """There is room for votes, and none for results."""
        for host in self._hosts(fault):
            name = host.name
            self.arena.keeps_rounds(name, keeps=False)
            self._undo(fault, partial(self.arena.keeps_rounds, name, keeps=True))

    def _disk_lost(self, fault: Fault) -> None:
        """The machine comes back with an empty home."""
        for host in self._hosts(fault):
            if host.alive:
                host.off = True
                self.arena.kill(host.name)
                self.arena.homes[host.name] = Disk(self.arena.homes[host.name].sync_s)
                self._undo(fault, lambda h=host: self._restart(h))

    def _damage(self, fault: Fault) -> None:
        for host in self._hosts(fault):
            self.damaged.add(host.name)
            self.arena.homes[host.name].damage(self.arena.disk_dice)

    def heal(self) -> None:
        super().heal()
        for disk in self.arena.homes.values():
            disk.sync_s, disk.fails = min(disk.sync_s, SYNCS_S[-1]), False


# ---------------------------------------------------------------- whether a run has to go on


def prospect(arena: Arena, faults: DurableFaults) -> str:
    """Return why it need not; "" if a majority of the last view remembers what it has said."""
    views = arena.checker.views.values()
    tips = {view.lineage: view for view in sorted(views, key=lambda view: view.number)}
    last = [v for v in tips.values() if not any(v.lineage in x.ancestors for x in tips.values())]
    if len(last) != 1:
        return "founded twice"
    if arena.options.policy != "majority":
        return "some may go on alone"
    bound = {*last, *_accepted(arena, last[0])}
    for view in bound:
        remember = [m.peer for m in view.members if _remembers(arena, m.peer, m.inc)]
        if not is_quorum(view, remember):
            return "too few homes remember"
    if not _is_held(arena):
        return "the only copy is lost"
    return "files damaged" if faults.damaged else ""


def _is_held(arena: Arena) -> bool:
    """Return whether somebody, dead or alive, has the state after the last round that was applied.

    Where it has no room on its disk, a peer that is alone has its rounds in memory only.
    """
    _, last = max(arena.checker.commits, key=lambda place: place[1])
    chains = {chain for (_, n), (_, chain) in arena.checker.commits.items() if n == last}
    wanted = {arena.checker.truth[chain] for chain in chains}
    return any(_state_of(arena, host).values in wanted for host in arena.hosts.values())


def _lacks_result(arena: Arena) -> bool:
    """Return whether somebody has voted for a result that nobody has any more.

    Whoever else has voted for it may have lost its memory: nobody can say then that it was not
    committed. So it may be the base of a view that was decided since, which all know of.
    """
    homes = [arena.homes[host.name].open(holds_state=True) for host in arena.hosts.values()]
    voted = {
        (head.place, head.run.root)
        for home in homes
        for head in home.ready
        if head.begin is not None and head.changes_state
    }
    held = {place for disk in arena.homes.values() for place in disk.rounds}
    jobs = [item for host in arena.living() for item in host.jobs.items() if item[1].complete]
    roots = {job.root for _, job in jobs}
    reached = max(_state_of(arena, host).round for host in arena.hosts.values())
    base = max(home.known[0] for home in homes)
    has_base = any(number == base for number, _ in jobs) or any(n == base for _, _, n, _ in held)
    is_there = base <= reached or has_base
    return not is_there or any(place not in held and root not in roots for place, root in voted)


def _state_of(arena: Arena, host: Host) -> State:
    disk = arena.homes[host.name]
    return host.state if host.alive else disk.state(disk.open(holds_state=True), arena.chunks)[0]


def _accepted(arena: Arena, view: View) -> set[View]:
    found = set()
    for host in arena.hosts.values():
        election = host.node.election
        if host.alive and host.node.view == view and election is not None:
            vote = election.acceptor.accepted
        else:
            said = arena.homes[host.name].open(holds_state=True)
            vote = said.accepted if said.view == view else None
        found |= {vote.proposal} if vote is not None and not vote.proposal.fork else set()
    return found


def _remembers(arena: Arena, peer: bytes, inc: int) -> bool:
    host = arena.hosts[peer]
    if host.alive:
        return host.node.me.inc == inc and host.node._here.outbox.is_on
    return arena.homes[host.name].incarnation() == inc


def run_durable(seed: int, tracing: bool = False, script: list[Fault] | None = None) -> Outcome:
    options = draw_durable(seed)
    script = durable_script(options) if script is None else script
    return play_durable(options, draw_homes(seed), script, tracing)


def play_durable(
    options: Options,
    homes: Homes,
    script: list[Fault],
    tracing: bool = False,
    arena_of: Callable[[Options], Arena] = Arena,
    faults_of: Callable[[Arena, list[Fault]], DurableFaults] | None = None,
) -> Outcome:
    """Play one seed whose peers have these homes; ``arena_of`` and ``faults_of`` make its world."""
    gc.disable()  # as run_script does
    try:
        return _carried_out(options, homes, script, tracing, arena_of, faults_of or DurableFaults)
    finally:
        gc.enable()


def _carried_out(
    options: Options,
    homes: Homes,
    script: list[Fault],
    tracing: bool,
    arena_of: Callable[[Options], Arena],
    faults_of: Callable[[Arena, list[Fault]], DurableFaults],
) -> Outcome:
    arena = arena_of(options)
    arena.is_durable, arena.disk_dice = True, random.Random(f"power {options.seed}")
    arena.moves, arena.save_every, arena.read_s = homes.moves, homes.save_every, homes.read_s
    for name in NAMES:
        arena.homes[name] = Disk(homes.syncs_s[name])
        arena.homes[name].keeps_rounds = name not in homes.votes_only
    arena.tracing = tracing
    failure = verdict = ""
    try:
        verdict = _run(arena, options, script, faults_of)
    except AssertionError as error:
        failure = str(error) or "assertion: " + traceback.format_exc(limit=-2)
    except Exception as error:  # the machine itself failed: that is a finding, not a crash
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rsplit('/', 1)[-1]}:{place.name}:{place.lineno}"
        failure = f"crash in {where}: {type(error).__name__}: {error}"
    views, trace = len(arena.checker.views), arena.tail(100_000) if tracing else ""
    seen = {what: count for what, count in sorted(arena.seen.items()) if count}
    for kind in ("recovered", "amnesia", "restarted", "excluded"):
        seen[kind] = arena.noted[kind]
    return Outcome(
        options.seed,
        failure,
        verdict,
        arena.committed,
        views,
        arena.events,
        arena.now_s,
        trace,
        seen,
    )


def _run(
    arena: Arena,
    options: Options,
    script: list[Fault],
    faults_of: Callable[[Arena, list[Fault]], DurableFaults],
) -> str:
    calm = arena.loss, arena.double
    arena.loss = arena.double = 0.0
    if options.profile == "birth":  # what happens while it forms
        faults_of(arena, [fault for fault in script if fault.at_s == 0.0])
        script = [fault for fault in script if fault.at_s > 0.0]
    arena.begin()
    _until(arena, lambda: _has_formed(arena), FORM_S, "the run never formed")
    arena.formed = True
    arena.loss, arena.double = calm
    faults = faults_of(arena, script)
    arena.run(options.faulty_s)
    faults.heal()
    arena.run(faults.drain_s + DRAIN_S + 5 * options.delay_s)
    why = prospect(arena, faults)
    faults.revive()
    flagged = [view.describe() for view in arena.checker.views.values() if view.rollback]
    assert not flagged, f"invariant 8: {flagged} although no rule lets a view go back"
    if why:
        arena.run(6.0)
        return why
    transfer_s = 2 * (options.load_s + options.chunk_s * options.chunks * options.hosts)
    transfer_s += arena.read_s
    waits_s = max(3.0 * options.inner_s, 20 * options.delay_s) + transfer_s
    start, lacks_result = _furthest(arena), _lacks_result(arena)
    limit_s = COMMIT_S + waits_s
    try:
        _until(arena, lambda: _furthest(arena) > start, limit_s, "invariant 7: no commit")
    except AssertionError:
        if lacks_result:
            return "the only copy of a result is lost"
        raise
    goal, limit_s = start + 2, REJOIN_S + waits_s + 0.5 * len(arena.hosts)
    ended = partial(goal_reached, arena, faults.left, goal)
    _until(arena, ended, limit_s, "invariant 7: not everyone is back")
    arena.checker.bounded(arena)
    return "recovered"


def main(words: list[str]) -> int:
    if words[0] == "--seed":
        seed = int(words[1])
        outcome = run_durable(seed, tracing=True)
        print(draw_durable(seed).text(), *durable_script(draw_durable(seed)), sep="\n")
        print(outcome.trace[-60_000:], outcome.failure or outcome.verdict, outcome.seen, sep="\n")
        return bool(outcome.failure)
    first, end = map(int, words[0].split(".."))
    verdicts: dict[str, int] = {}
    seen: dict[str, int] = {}
    failed = 0
    for seed in range(first, end):
        outcome = run_durable(seed)
        failed += bool(outcome.failure)
        if outcome.failure:
            print(seed, outcome.failure[:300], flush=True)
        verdicts[outcome.verdict] = verdicts.get(outcome.verdict, 0) + 1
        for what, count in outcome.seen.items():
            seen[what] = seen.get(what, 0) + count
    print(f"{end - first} seeds, {failed} failed: {verdicts}; {seen}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
