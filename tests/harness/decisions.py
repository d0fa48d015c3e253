"""How every view comes to be: who has decided it, under which rules, on which base.

The judge knows what every voter has really said and which rules the run was given. It counts for
itself and asks no machine what it may do. Rules are those of design/membership.md:

- a view without a quorum of the one before is a flagged fork, where the policy lets one be;
- a view goes back behind what was committed only as a flagged rollback, where ``on_lost`` says so,
  or behind operations alone, which change nothing;
- the first view of a lineage is a founder's, or is decided by a quorum of those who were to found
  or resume the run together, on the highest position that one of them had;
- a view keeps the bans of the one before, and a new one is believed by a quorum of that;
- a view that an election makes, other than a fork or a first view, keeps every voter that lives and
  has a link to the candidate, and every one that the candidate has heard within the removal time;
- who changes its lineage says so; with ``on_fork=halt`` no lineage gives way by itself and none
  begins a round beside another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.forks import RIVAL_S
from atoll.peer.membership.view import Ballot, Member, Rules, View, genesis_chain

if TYPE_CHECKING:
    from harness.host import Host

__all__ = ["Decisions", "suffice"]

# What is judged when it is said (``Decisions._says``).
_JUDGED = frozenset((ms.Accepted, ms.Promise, ms.Prepare, ms.Accept, ms.Begin, ms.Yield))
Place = tuple[bytes, int]  # a lineage, and a view in it
Position = tuple[int, bytes]  # a round, and its chain


class Decisions:
    """Part of the checker, which knows all views."""

    def __init__(self, views: dict[Place, View]) -> None:
        self.rules: Rules | None = None  # None: of no run that this judge has seen being founded
        self.asked: set[int] = set()  # numbers of trainers that members have asked for
        self._views = views
        self.lives: Callable[[bytes, Member], bool] = lambda here, member: True
        self.name_of: Callable[[bytes], str] = repr
        self.believers: dict[bytes, set[bytes]] = {}  # who is banned, and who believes it
        self.committed: set[tuple[bytes, int, bytes]] = set()  # lineage, round, chain
        self._votes: dict[Place, dict[tuple[Ballot, bytes], set[tuple[bytes, int]]]] = {}
        self._promised: dict[tuple[Place, Ballot], set[bytes]] = {}
        self._attempts: dict[tuple[bytes, int, int], ms.Begin] = {}
        self._latest: dict[tuple[bytes, int], ms.Begin] = {}  # of a lineage's round
        self._highest: dict[object, Ballot] = {}  # that anybody has promised in a view
        self._accepted: dict[object, tuple[Ballot, View]] = {}
        self._cradles: dict[bytes, View] = {}
        self._brought: dict[bytes, dict[bytes, set[Position]]] = {}  # into which cradle, by whom
        self._founded: dict[bytes, Position] = {}  # lineage of a founder alone -> where it stood
        self._lineage: dict[Host, tuple[bytes, int]] = {}
        self._flags: dict[Host, set[str]] = {}  # notes since it entered its view
        self._begun: dict[Host, tuple[Place, int]] = {}  # the last attempt that it has begun
        self._met: dict[Host, tuple[bytes, float]] = {}  # its lineage, when it met another
        self._heard_s: dict[tuple[Host, bytes], float] = {}  # by whom, from whom, on its clock
        self._asked_s: dict[tuple[Host, Place], float] = {}  # its first PREPARE in a view
        self._judged: set[tuple[Place, Ballot]] = set()

    # ------------------------------------------------------------ what is said

    def heard(self, host: Host, source: bytes) -> None:
        self._heard_s[host, source] = host.node.now_s

    def watch(self, host: Host, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        if type(event) is ev.Received and type(event.message) is ms.Meet:
            self._meets(host, event.message)
        last: object = None
        for effect in effects:
            kind = type(effect)
            if kind is ev.Send:
                message = effect.message
                if message is not last:  # the same one to many
                    last = message
                    if type(message) in _JUDGED:
                        self._says(host, message)
            elif kind is ev.Installed:
                if type(event) is ev.Found or _resumes_alone(host, effect.view, effects):
                    self._founded[effect.view.lineage] = _position(host, effect.view.lineage)
                self._same_lineage(host, effect.view, effects)
            elif kind is ev.Note:
                self._flags.setdefault(host, set()).add(effect.kind)
                if effect.kind == "genesis":
                    self._enters_cradle(host)

    def _says(self, host: Host, message: object) -> None:
        kind = type(message)
        if kind is ms.Accepted:
            cast = self._votes.setdefault((message.lineage, message.view), {})
            voters = cast.setdefault((message.ballot, message.digest), set())
            voters.add((host.peer, message.inc))
            for (ballot, digest), others in cast.items():
                twice = ballot == message.ballot and digest != message.digest
                twice = twice and (host.peer, message.inc) in others
                assert not twice, f"invariant 1: {host.name} votes for two views in one ballot"
            place = (message.lineage, message.view, host.memory)
            below = message.ballot < self._highest.get(place, Ballot())
            known = self._accepted.get(place) == (message.ballot, message.digest)
            assert known or not below, f"invariant 1: {host.name} votes below its promise"
            self._accepted[place] = message.ballot, message.digest
        elif kind is ms.Promise:
            place = (message.lineage, message.view), message.ballot
            self._promised.setdefault(place, set()).add(host.peer)
            key = (message.lineage, message.view, host.memory)
            before, _ = self._accepted.get(key, (None, None))
            forgets = before is not None and (message.accepted_ballot or Ballot()) < before
            assert not forgets, f"invariant 1: {host.name} promises without its vote"
            self._highest[key] = max(self._highest.get(key, Ballot()), message.ballot)
        elif kind is ms.Prepare:
            self._asked_s.setdefault((host, (message.lineage, message.view)), host.node.now_s)
        elif kind is ms.Accept and message.ballot.number > 0:
            self._keeps_the_living(host, message)
        elif kind is ms.Begin:
            self._begins_round(host, message)
        elif kind is ms.Yield and self.rules is not None:
            text = f"I6: {host.name} gives way by itself, and on_fork={self.rules.on_fork}"
            assert self.rules.on_fork == "auto", text

    def _enters_cradle(self, host: Host) -> None:
        view = host.node.view
        if view is not None and view.number == 0:
            self._cradles[view.lineage] = view
            brought = self._brought.setdefault(view.lineage, {}).setdefault(host.peer, set())
            brought.add(_position(host, view.lineage))

    def _keeps_the_living(self, host: Host, accept: ms.Accept) -> None:
        """Judge what a candidate has chosen itself, when it says so first."""
        place, view, before = (accept.lineage, accept.view), accept.proposal, None
        # A vote binds: of anybody, or the candidate's own in a former life, which nobody has heard.
        own = host.promised.accepted if host.promised is not None else None
        voted = own is not None and own.proposal.digest == view.digest
        voted |= any(digest == view.digest for _, digest in self._votes.get(place, ()))
        chosen = view.coordinator == accept.ballot.peer == host.peer and not voted
        promisers_only = view.fork or view.rollback  # see consensus.py
        if chosen and not promisers_only and (place, accept.ballot) not in self._judged:
            before = self._views.get(place)
        self._judged.add((place, accept.ballot))
        for member in before.members if before is not None else ():
            if view.member(member.peer) is None:
                wrong = f"invariant 14: the election of view {view.number} drops"
                drops = self._may_drop(host, member, place, member.peer == before.coordinator)
                assert drops, f"{wrong} {self.name_of(member.peer)}, which lives"

    def _may_drop(self, host: Host, member: Member, place: Place, led: bool) -> bool:
        if not self.lives(host.peer, member):
            return True
        linked = member.peer in host.node.linked
        asked_s = self._asked_s.get((host, place), host.node.now_s) if not led else 0.0
        since_s = max(asked_s, self._heard_s.get((host, member.peer), 0.0))
        long_ago = host.node.now_s - since_s > host.node.timing.remove_s
        return long_ago and (led or not linked)

    # ------------------------------------------------------------ lineages

    def _same_lineage(self, host: Host, view: View, effects: Sequence[ev.Effect]) -> None:
        """I6: from one lineage to another only with a note, flagged, or by joining anew, which
        has its note too."""
        before = self._lineage.get(host)
        flags = self._flags.pop(host, set())
        self._lineage[host] = view.lineage, host.node.me.inc
        if before is None or before[0] == view.lineage:
            return
        if before[1] == host.node.me.inc:
            notes = {effect.kind for effect in effects if type(effect) is ev.Note}
            assert "fork" in notes, f"I6: {host.name} changes its lineage without an event"
        else:
            text = f"I6: {host.name} comes back to another lineage without an event"
            assert flags & {"yield", "excluded", "amnesia"}, text

    def _meets(self, host: Host, meet: ms.Meet) -> None:
        view = host.node.view
        halts = self.rules is not None and self.rules.on_fork == "halt"
        if halts and view is not None and meet.lineage != view.lineage:
            self._met[host] = view.lineage, host.node.now_s

    def _begins_round(self, host: Host, begin: ms.Begin) -> None:
        """One round under one number, whoever coordinates; repetitions do not count. Not beside
        another lineage, if these are to halt."""
        place = begin.lineage, begin.view
        known = self._attempts.setdefault((*place, begin.attempt), begin)
        text = f"invariant 2: {host.name} begins attempt {begin.attempt} twice, as {begin.round}"
        assert known == begin, text
        latest = self._latest.setdefault((begin.lineage, begin.round), begin)
        if (latest.view, latest.attempt) < (begin.view, begin.attempt):
            self._latest[begin.lineage, begin.round] = begin
        if self._begun.get(host, (place, 0)) >= (place, begin.attempt) and host in self._begun:
            return
        self._begun[host] = place, begin.attempt
        lineage, met_s = self._met.get(host, (b"", 0.0))
        halted = lineage == begin.lineage and host.node.now_s < met_s + RIVAL_S
        assert not halted, f"I6: {host.name} begins {begin.round} beside another lineage"

    # ------------------------------------------------------------ decisions

    def decided(self, host: Host, view: View) -> None:
        """The first time that anybody enters this view: it must have been decided by then."""
        rules = self.rules
        if rules is None:
            return
        kept = replace(view.rules, min_trainers=rules.min_trainers)
        asked = view.rules.min_trainers in {rules.min_trainers, *self.asked}
        text = f"invariant 8: view {view.number} has other rules: {view.rules}"
        assert kept == rules, text
        assert asked, text
        back = f"invariant 8: view {view.number} goes back, and on_lost={rules.on_lost}"
        assert not view.rollback or rules.on_lost == "rollback", back
        if view.number == 1:
            self._first_view(view)
            return
        lineage = view.ancestors[-1] if view.fork else view.lineage
        before = self._views.get((lineage, view.number - 1))
        assert before is not None, f"invariant 8: view {view.number} follows no view"
        between = range(view.base_round + 1, before.base_round + 1)
        steps = [number for number in between if not self._is_operation(before, number)]
        hides = bool(steps) and not view.rollback
        assert not hides, f"invariant 8: view {view.number} goes back in secret"
        ballots = self._ballots((lineage, before.number), view, before)
        self._bans(view, before)
        if len(before.members) == 1:  # its vote is heard by nobody else
            assert host.peer in before.peers, f"invariant 8: {host.name} decides for others"
            assert not view.fork, "invariant 8: a fork of one that was alone"
        elif view.fork:
            self._forks(view, before, ballots)
        else:
            self._has_quorum(view, before, ballots)

    def _is_operation(self, view: View, number: int) -> bool:
        """Return whether what was begun last under that number changes no state."""
        lineages = view.lineage, *reversed(view.ancestors)
        found = (self._latest.get((lineage, number)) for lineage in lineages)
        latest = next((begin for begin in found if begin is not None), None)
        return latest is not None and latest.operation is not None

    def _bans(self, view: View, before: View) -> None:
        """None is forgotten; a new one is believed by a quorum."""
        count = len(before.banned)
        kept = view.banned[:count] == before.banned
        assert kept, f"invariant 9: view {view.number} forgets a ban"
        for ban in view.banned[count:]:
            believers = self.believers.get(ban.peer, set())
            text = f"invariant 9: view {view.number} names a ban that {len(believers)} believe"
            assert suffice(before, believers), text

    def _ballots(self, place: Place, view: View, before: View) -> dict[Ballot, set[bytes]]:
        """Who has voted for it, in which ballot; only those lives that the view before names."""
        found = {}
        for (ballot, digest), cast in self._votes.get(place, {}).items():
            if digest == view.digest:
                mine = {(m.peer, m.inc) for m in before.members}
                named = cast & mine if before.number else cast
                found[ballot] = {peer for peer, _ in named} & set(before.peers)
        return found

    def _has_quorum(self, view: View, before: View, ballots: dict[Ballot, set[bytes]]) -> None:
        most = max((len(cast) for cast in ballots.values()), default=0)
        wrong = f"invariant 8: view {view.number} has {most} of {len(before.members)} votes"
        assert any(suffice(before, cast) for cast in ballots.values()), wrong
        for ballot, cast in ballots.items():
            if not suffice(before, cast):
                continue
            if ballot.number == 0:
                alone = ballot.peer == before.coordinator
                assert alone, f"invariant 8: not the coordinator's ballot: view {view.number}"
                continue
            place = (before.lineage, before.number), ballot
            promised = {ballot.peer, *self._promised.get(place, ())}  # its own is heard by itself
            assert suffice(before, promised), f"{wrong}: {len(promised)} promises"

    def _forks(self, view: View, before: View, ballots: dict[Ballot, set[bytes]]) -> None:
        assert self.rules is not None
        policy, size = self.rules.policy, len(before.members)
        text = f"invariant 8: view {view.number} forks off {size} members under policy={policy}"
        assert policy == "any" or (policy == "auto" and size == 2), text
        agreed = any(set(view.peers) <= cast for cast in ballots.values())
        assert agreed, f"invariant 8: fork {view.number} has members that have not voted for it"
        assert view.lineage != before.lineage, f"invariant 8: fork {view.number} in secret"

    def _first_view(self, view: View) -> None:
        """One founder's, or that of a cradle. What it builds on was committed in a lineage that it
        names, and is the most that its founders have."""
        base = view.base_round, view.base_chain
        flags = view.fork or view.rollback
        assert not flags, f"invariant 8: the first view is flagged: {view.describe()}"
        if view.lineage in self._founded:
            assert base == self._founded[view.lineage], f"invariant 8: founded on {base}"
        else:
            bootstrap_view = self._cradles.get(view.ancestors[-1]) if view.ancestors else None
            assert bootstrap_view is not None, (
                "invariant 8: a first view of a lineage that nobody founded"
            )
            if len(bootstrap_view.members) > 1:  # else its vote is heard by nobody else
                place = bootstrap_view.lineage, 0
                self._has_quorum(view, bootstrap_view, self._ballots(place, view, bootstrap_view))
            brought = self._brought[bootstrap_view.lineage]
            held = {p for peer in view.peers for p in brought.get(peer, ())}
            assert base in held, f"invariant 8: resumed at {base}, which no founder held"
            # A founder that was started again may have brought less before.
            least = max(min(brought[peer]) for peer in view.peers if peer in brought)
            assert base >= least, f"invariant 8: resumed at {base[0]}, before {least[0]}"
        if view.base_round and self.committed:
            known = any((lineage, *base) in self.committed for lineage in view.ancestors)
            assert known, f"invariant 8: round {view.base_round} is not of an ancestor of this run"


def _resumes_alone(host: Host, view: View, effects: Sequence[ev.Effect]) -> bool:
    """The only voter of its checkpoint: it enters its cradle and leaves it in one moment."""
    first = view.number == 1 and view.peers == (host.peer,)
    return first and any(type(e) is ev.Note and e.kind == "genesis" for e in effects)


def _position(host: Host, lineage: bytes) -> Position:
    own = host.node.follower
    return own.round, own.chain or genesis_chain(lineage)


def suffice(view: View, peers: set[bytes]) -> bool:
    """More than half of the voters, or exactly half with the first of them."""
    present = sum(peer in peers for peer in view.peers)
    return 2 * present > len(view.members) or (
        2 * present == len(view.members) and view.peers[0] in peers
    )
