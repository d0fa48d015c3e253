"""When a run must recover, how long that may take, and when it has.

The oracle is a judgement of its own, made at the moment when the faults stop: a view installed at
a living peer goes on if it has a living quorum (or a policy that lets fewer go on) and somebody
holds its base (or the rules let it go back). What a living voter has accepted binds the next
decision, so it has to be able to go on as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from harness.host import Host

from atoll.peer.membership.consensus import base_of
from atoll.peer.membership.node import Node
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.view import ARCHIVE, REPLICA, View, is_quorum
from simulation.arena import Arena

__all__ = ["Outlook", "goal_reached", "is_halted", "outlook", "why_not"]

FORK_S = 12.0  # T_any, drawn from 6 to 10 s, and the election
LOST_S = 8.0  # waiting for a lost base, and the election
MEET_S = 6.0  # lineages look for each other every 1.5 s; joining anew
GATHER_S = 6.0  # of founders that resume together: calls, waiting for the rest, the election
FALL_BACK_S = 12.0  # of a run that is silent, and a new incarnation before that
BACK_S = 15.0  # of one that is down or outside: a new incarnation, catching up, a view
REMOVE_S = 9.0  # a peer that never comes back is voted out after 8 s


@dataclass(frozen=True)
class Outlook:
    """Whether a commit must follow, and how much longer than usual that may take."""

    verdict: str
    recovers: bool = False
    extra_s: float = 0.0
    everyone: bool = True  # all who live have to be in again, too


def outlook(arena: Arena, left: set[str]) -> Outlook:
    staying = [h for h in arena.living() if h.name not in left]
    if any(h.node.coordinator and h.node.coordinator.halted for h in staying):
        return Outlook("halted, and says so")
    tips = _tips(arena, staying)
    if not tips and _is_bound_to_the_dead(staying):
        return Outlook("the first view may name a dead incarnation")
    if not tips and _resumes(arena, left):
        return Outlook("resumed from checkpoints", True, GATHER_S + MEET_S)
    if not tips and _falls_back(staying):
        return Outlook("gave way to one that is gone", True, FALL_BACK_S + GATHER_S + MEET_S)
    if len({view.lineage for view in tips}) > 1 and arena.options.on_fork == "halt":
        return Outlook("two lineages, and on_fork=halt")
    found = [_prospect(arena, view, staying) for view in tips]
    able = [extra_s for extra_s in found if extra_s is not None]
    if able and not _is_linked_replica(arena, staying):
        return Outlook("no replica has links to all others")
    if not able:
        return Outlook("no living quorum that holds the base")
    wanting = [_wants_counting(arena, view, left) for view in tips]
    if None in wanting:
        return Outlook("held: those who are left do not count, or are too few")
    meeting_s = _wants_trainers(arena, tips, left)
    if meeting_s is None:
        return Outlook("held: too few trainers are left")
    several = MEET_S + _gap(staying, arena) if len(tips) > 1 else 0.0
    if any(_is_poisoned(view, staying) for view in tips):
        return Outlook("memory errors without a majority against them")
    waits_s = max([meeting_s, *filter(None, wanting)])
    waits_s += _handing_over_s(arena)
    # Of several lineages one may be of somebody who can only dial out, and the others meet first.
    everyone = _has_hub(arena, left) and (len(tips) == 1 or not arena.outbound)
    everyone = everyone and _has_donors(arena, left)
    return Outlook("recovered", True, min(able) + several + waits_s, everyone)


def _handing_over_s(arena: Arena) -> float:
    """How long it may take until somebody coordinates who has a link to all."""
    has_pairs = bool(arena.outbound or arena.unlinkable)
    return arena.timing.better_s + LOST_S if has_pairs else 0.0


def _has_hub(arena: Arena, left: set[str]) -> bool:
    """Return whether any coordinator has to come to have links to all, also to those outside.

    Who can be dialled has them, and takes over from who cannot. Between two without a common
    protocol nobody knows of the one that is outside.
    """
    coming = [host.name for host in arena.hosts.values() if host.name not in left]
    return not arena.unlinkable and any(name not in arena.outbound for name in coming)


def _has_donors(arena: Arena, left: set[str]) -> bool:
    """Return whether the state has a way to everybody who may lack it.

    Of two that can only dial out neither can give it to the other, unless a relay carries data.
    """
    coming = [host for host in arena.hosts.values() if host.name not in left]
    if any(host.name in arena.options.carries for host in coming):
        return True
    replicas = [host.name for host in coming if host.node.me.role == REPLICA]
    outbound = [name for name in replicas if name in arena.outbound]
    return len(outbound) < 2 or len(outbound) < len(replicas)


def _resumes(arena: Arena, left: set[str]) -> bool:
    """Nobody is in a view, and a majority of the last view that a disk names will be here: those
    who are dead come back with what their disks hold, and whoever is outside may vote."""
    disks = [disk.view for name, disk in arena.disks.items() if name not in left]
    last = [v for v in disks if all(_comes_before(other, v) for other in disks)]
    if not last or any(host.node.view is not None for host in arena.living()):
        return False
    here = 0
    for host in arena.hosts.values():
        node, may_vote = host.node, host.name not in left
        if host.alive:
            outside = node.phase is Phase.OUT and not node.joining.renewing
            may_vote &= node.bootstrap.waiting or outside
        here += may_vote and host.peer in last[0].peers
    return 2 * here > len(last[0].peers)


def _is_bound_to_the_dead(staying: list[Host]) -> bool:
    """A founder has accepted a first view that has no living quorum: it may come to be decided."""
    elections = [h.node.election for h in staying if h.node.view and h.node.view.number == 0]
    accepted = [e.acceptor.accepted.proposal for e in elections if e and e.acceptor.accepted]
    return any(not is_quorum(first, _voters(first, staying)) for first in accepted)


def _falls_back(staying: Iterable[Host]) -> bool:
    """A majority of a view that gave way to another run, of which nobody is left."""
    waiting = [host for host in staying if host.node.bootstrap.expected is not None]
    votes: Counter[tuple[bytes, int]] = Counter()
    sizes: dict[tuple[bytes, int], int] = {}
    for host in waiting:
        bootstrap_view = host.node.bootstrap.expected
        assert bootstrap_view is not None
        if host.peer in bootstrap_view.voters:
            votes[bootstrap_view.lineage, bootstrap_view.number] += 1
            sizes[bootstrap_view.lineage, bootstrap_view.number] = len(bootstrap_view.voters)
    return any(2 * count > sizes[mark] for mark, count in votes.items())


def _comes_before(view: View, last: View) -> bool:
    earlier = view.lineage == last.lineage and view.number <= last.number
    return earlier or view.lineage in last.ancestors


def _tips(arena: Arena, staying: Iterable[Host]) -> list[View]:
    """The latest view of each lineage that a living peer is in."""
    latest: dict[bytes, View] = {}
    for host in staying:
        view = host.node.view
        if view is not None and view.number > 0:
            known = latest.get(view.lineage)
            if known is None or view.number > known.number:
                latest[view.lineage] = view
    newest: dict[bytes, View] = {}
    for (lineage, _), view in arena.checker.views.items():
        if lineage not in newest or view.number > newest[lineage].number:
            newest[lineage] = view
    # A decided view that only the dead had entered has been taken to their graves.
    return [view for lineage, view in latest.items() if newest[lineage] == view]


def _is_linked_quorum(arena: Arena, view: View, present: Iterable[bytes]) -> bool:
    """Return whether one of these could be elected and coordinate."""
    here = [*present]
    return any(
        is_quorum(view, [peer for peer in here if not arena.are_apart(lead, peer)]) for lead in here
    )


def _is_linked_replica(arena: Arena, staying: list[Host]) -> bool:
    """Return whether one holds a result from which all can copy it: a witness hands on nothing."""
    inside = [host for host in staying if host.node.view is not None]
    replicas = [host.peer for host in inside if host.node.follower.is_replica]
    return any(all(arena.has_data_path(one, peer) for peer in replicas) for one in replicas)


def _prospect(arena: Arena, view: View, staying: Iterable[Host]) -> float | None:
    """How much longer than usual this view may take to go on; None if it cannot."""
    voters = _voters(view, staying)
    extra_s = 0.0
    elections = [n.election for n in voters.values() if n.election and n.view == view]
    accepted = [e.acceptor.accepted.proposal for e in elections if e.acceptor.accepted]
    bound = {proposal for proposal in accepted if not proposal.fork}
    for each in {view, *bound}:
        present = _voters(each, staying)
        if not _is_linked_quorum(arena, each, present):
            if arena.outbound or arena.unlinkable:
                return None  # each who goes on alone knows less than all together
            able = [n for n in present.values() if not n.follower.unsynced]
            if not each.may_fork or not able:
                return None
            extra_s = FORK_S
    replicas = [node for node in voters.values() if node.follower.is_replica]
    if not replicas:
        return None
    reports = {peer: node.follower.report() for peer, node in voters.items()}
    base = base_of(view, reports)
    if not base.held or base.disputed or base.round < view.base_round:
        holds = any(report.holds for report in reports.values())
        rolls_back = view.rules.on_lost == "rollback" and holds
        if not rolls_back:
            return None
        extra_s += LOST_S
    return extra_s


def _wants_counting(arena: Arena, view: View, left: set[str]) -> float | None:
    """How long it may take until enough are in who count; None if they never come."""
    new = {newcomer.peer for newcomer in view.newcomers}
    eligibility = {*view.replicas, *(absent.peer for absent in view.absent)} - new
    hosts = [h for h in arena.hosts.values() if h.peer in eligibility and h.name not in left]
    able = [host for host in hosts if host.node.me.role == REPLICA and host.trains]
    if len(able) < arena.options.least:
        return None
    here = sum(host.peer in view.replicas and host.node.view == view for host in able)
    return 0.0 if here >= arena.options.least else BACK_S


def _wants_trainers(arena: Arena, tips: list[View], left: set[str]) -> float | None:
    """How long it may take until as many trainers are in as any view may come to need; None if so
    many never come. Nobody trains in a lineage of too few until the others are met."""
    needed = max(arena.options.min_trainers, *arena.checker.decisions.asked, 1)
    hosts = [h for h in arena.hosts.values() if h.name not in left and h.trains]
    if needed > 1 and arena.outbound and not _has_hub(arena, left):
        return None  # each goes on alone, and they never meet
    able = [host for host in hosts if host.node.me.role == REPLICA]
    if needed > 1 and len(able) < needed:
        return None
    inside = (sum(h.peer in tip.replicas and h.node.view == tip for h in able) for tip in tips)
    return 0.0 if needed == 1 or min(inside) >= needed else BACK_S


def _voters(view: View, staying: Iterable[Host]) -> dict[bytes, Node]:
    found = {}
    for host in staying:
        member = view.member(host.peer)
        if member is not None and member.inc == host.node.me.inc:
            found[host.peer] = host.node
    return found


def _is_poisoned(view: View, staying: list[Host]) -> bool:
    voters = _voters(view, staying)  # some may not have heard of this view yet
    replicas = [h for h in staying if h.peer in voters and h.node.follower.is_replica]
    wrong = sum(bool(h.tainted or h.flipped) for h in replicas)
    # Who is still loading has no voice, and nothing to load while the others do not agree.
    able = [h for h in replicas if not h.node.follower.unsynced and h.round >= view.base_round]
    right = sum(not (h.tainted or h.flipped) for h in able)
    return wrong > 0 and wrong >= right


def is_halted(arena: Arena) -> bool:
    """Whether a coordinator has halted because memory errors have no majority against them in its
    view: members may have been excluded since, so that this could not be foreseen."""
    staying = arena.living()
    leads = [h.node for h in staying if h.node.coordinator and h.node.coordinator.halted]
    return any(node.view is not None and _is_poisoned(node.view, staying) for node in leads)


def _gap(staying: list[Host], arena: Arena) -> float:
    """A lineage that is behind gives way at once; one ahead but stuck has to be overtaken."""
    rounds = [host.round for host in staying]
    options = arena.options
    round_s = 1.3 * options.inner_s + 8 * options.delay_s + options.chunk_s * options.chunks + 0.2
    return (max(rounds) - min(rounds)) * round_s


def goal_reached(arena: Arena, left: set[str], goal: int) -> bool:
    """Everyone alive is in one view, archives follow it, and all have got so far."""
    staying = [h for h in arena.living() if h.name not in left]
    if any(host.round < goal for host in staying):
        return False
    inside = [host for host in staying if host.node.me.role != ARCHIVE]
    views = {host.node.view for host in inside}
    view = next(iter(views))
    if len(views) > 1 or view is None or arena.outlaws.missing():
        return False
    return set(view.peers) == {h.peer for h in inside}


def why_not(arena: Arena) -> str:
    """Where everybody stands."""
    lines = []
    for host in arena.living():
        view = host.node.view
        where = f"view {view.number} of {len(view.members)}" if view else "outside"
        own = host.node.follower
        state = " unsynced" if own.unsynced else ""
        lines.append(f"{host.name}: {host.node.phase.value}, {where}, round {own.round}{state}")
    return "; ".join(lines + [f"not banned: {each}" for each in arena.outlaws.missing()])
