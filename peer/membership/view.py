"""Define views: who is in, in which order, and which sets of voters may decide.

A view is a numbered, ordered member list with a coordinator. Views form a chain: each is decided
by a quorum of the voters of the one before it. ``members[0]`` is the
tie-breaker of an even split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

from atoll.peer.net.wire import Within, encode, message

REPLICA = "replica"  # holds the state and votes
WITNESS = "witness"  # votes, holds nothing
ARCHIVE = "archive"  # follows the log outside the view: holds the state, has no vote
POLICIES = ("majority", "any", "auto")
ON_LOST = ("halt", "rollback")
ON_FORK = ("auto", "halt")
MEMBERS_MAX = 1024  # one coordinator must hear everyone's heartbeat four times a second
ADDRESS_BYTES_MAX = 300  # a DNS name has 253; so a full view takes 0.4 of its 1 MiB frame
ABSENT_MAX = 256  # machines of a run that are being restarted; of more, the latest are remembered
BANNED_MAX = (
    1024  # that views name, as many as members; what is beyond each member knows for itself
)
ANCESTORS_MAX = 64  # forks are rare; peers of older lineages join anew

# What may arrive. Views and attempts go into data headers as u32, the others are hashed or packed
# as u64: the other half of each range is room for counting on from the highest that arrived.
PeerId = Annotated[bytes, Within(32, 32)]
Lineage = Annotated[bytes, Within(32, 32)]
Digest = Annotated[bytes, Within(0, 32)]  # and chains; empty where there is none yet
Incarnation = Annotated[int, Within(0, (1 << 63) - 1)]
Views = Annotated[int, Within(0, (1 << 31) - 1)]
Attempts = Annotated[int, Within(0, (1 << 31) - 1)]
Rounds = Annotated[int, Within(0, (1 << 62) - 1)]
Ballots = Annotated[int, Within(0, (1 << 62) - 1)]
Lives = Annotated[int, Within(0, (1 << 63) - 1)]  # numbers of processes
Positions = Annotated[int, Within(0, (1 << 62) - 1)]  # records in a ledger (durable_records.py)


@message(wire="Member")
@dataclass(frozen=True, slots=True)
class Member:
    """Describe one peer, as the view names it.

    ``inc`` is the number of its memory as a voter: higher when what it had promised is forgotten.
    """

    peer: PeerId
    inc: Incarnation
    role: str = REPLICA
    address: str = ""

    def __post_init__(self) -> None:
        if len(self.peer) != 32 or self.role not in (REPLICA, WITNESS, ARCHIVE):
            raise ValueError("a peer has a 32-byte id and is a replica, a witness or an archive")
        if len(self.address.encode()) > ADDRESS_BYTES_MAX:
            raise ValueError(f"a member's address has at most {ADDRESS_BYTES_MAX} bytes")


@message(wire="Ballot")
@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """Identify a Paxos ballot.

    Number 0 belongs to the live coordinator, higher ones to candidates. With the number of its
    process nothing of a proposer's needs to be on disk: no two lives of it propose at one ballot.
    """

    number: Ballots = 0
    peer: Annotated[bytes, Within(0, 32)] = b""
    life: Lives = 0


@message(wire="Rules")
@dataclass(frozen=True, slots=True)
class Rules:
    """Hold what the run's founder has chosen; every view of the run carries it.

    ``policy``: who may go on when the others are silent. ``majority``: more than half of the
    voters. ``any``: whoever is left, after a wait, as a flagged fork. ``auto``: ``any`` while a
    view has two voters, ``majority`` from three on. ``on_lost``: what to do when nobody alive holds
    the last committed round. ``on_fork``: what to do when two lineages meet. ``min_trainers``: how
    many trainers a round needs; 0: as many as the run's specification says. It is the only one that
    a later view may change (:func:`changes_rules`).
    """

    policy: str = "auto"
    on_lost: str = "halt"
    on_fork: str = "auto"
    min_trainers: Annotated[int, Within(0, MEMBERS_MAX)] = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES or self.on_lost not in ON_LOST:
            raise ValueError(f"policy is one of {POLICIES}, on_lost one of {ON_LOST}")
        if self.on_fork not in ON_FORK:
            raise ValueError(f"on_fork is one of {ON_FORK}")
        if not 0 <= self.min_trainers <= MEMBERS_MAX:
            raise ValueError(f"min_trainers is 0 to {MEMBERS_MAX}")


DEFAULT_RULES = Rules()


@message(wire="Newcomer")
@dataclass(frozen=True, slots=True)
class Newcomer:
    """Describe a member whose submissions do not count yet.

    They do once it has been a participant of ``rounds`` more committed rounds (probation.py).
    """

    peer: PeerId
    rounds: Rounds


@message(wire="Absent")
@dataclass(frozen=True, slots=True)
class Absent:
    """Describe a peer that counted when it went.

    ``since``: the base round of the first view without it.
    """

    peer: PeerId
    since: Rounds


@message(wire="Banned")
@dataclass(frozen=True, slots=True)
class Banned:
    """Describe a peer that is out for ever.

    ``evidence`` is the SHA-256 of the file that shows why.
    """

    peer: PeerId
    evidence: Annotated[bytes, Within(32, 32)]


@message(wire="View")
@dataclass(frozen=True)
class View:
    """Describe a view: its members in order, its coordinator, and the position that it builds on.

    Who is in it is asked for all the time, so it is worked out once. (Slots have no room for that.)

    ``base_round`` and ``base_chain`` are the last round that every later one builds on.

    ``fork``: it was decided without a quorum, in a lineage of its own. ``rollback``: its base is
    older than what had been committed, because nobody alive held that any more.
    """

    lineage: Lineage
    number: Views
    members: tuple[Member, ...]
    coordinator: PeerId
    base_round: Rounds
    base_chain: Digest
    fork: bool = False
    ancestors: tuple[Lineage, ...] = ()  # lineages that this one continues, the latest last
    rollback: bool = False
    rules: Rules = DEFAULT_RULES
    newcomers: Annotated[tuple[Newcomer, ...], Within(0, MEMBERS_MAX)] = ()
    absent: Annotated[tuple[Absent, ...], Within(0, ABSENT_MAX)] = ()  # the latest last
    since: Rounds = 0  # the position from which the run was founded or resumed
    banned: Annotated[tuple[Banned, ...], Within(0, BANNED_MAX)] = ()  # the first first (bans.py)
    # Members that can only dial out, in ascending order: who draws partners by it draws alike.
    outbound: Annotated[tuple[PeerId, ...], Within(0, MEMBERS_MAX)] = ()

    def __post_init__(self) -> None:
        ids = self.peers
        if not 0 < len(ids) <= MEMBERS_MAX or len(set(ids)) != len(ids):
            raise ValueError(f"a view has 1 to {MEMBERS_MAX} different members, got {len(ids)}")
        if any(member.role == ARCHIVE for member in self.members):
            raise ValueError("an archive has no vote, so no view names it")
        if self.coordinator not in ids or len(self.lineage) != 32:
            raise ValueError("a view's coordinator is a member and its lineage has 32 bytes")
        if len(self.ancestors) > ANCESTORS_MAX:
            raise ValueError(f"a view names at most {ANCESTORS_MAX} ancestors")
        new, gone = {x.peer for x in self.newcomers}, {x.peer for x in self.absent}
        if len(new) < len(self.newcomers) or len(gone) < len(self.absent):
            raise ValueError("a view names each newcomer and each absent peer once")
        out = {x.peer for x in self.banned}
        if not new <= {*ids} or (gone | out) & {*ids}:
            raise ValueError("newcomers are members, and the absent and the banned are not")
        if len(out) < len(self.banned):
            raise ValueError("a view names each banned peer once")
        if list(self.outbound) != sorted({*self.outbound} & {*ids}):
            raise ValueError("who can only dial out is a member, named once and in order")

    @cached_property
    def digest(self) -> bytes:
        """Return the SHA-256 of the view as it goes over the wire: votes name it by this."""
        return hashlib.sha256(b"atoll-view" + encode(self)).digest()

    @cached_property
    def peers(self) -> tuple[bytes, ...]:
        return tuple(member.peer for member in self.members)

    @cached_property
    def peer_set(self) -> frozenset[bytes]:
        return frozenset(self.peers)

    @cached_property
    def replicas(self) -> tuple[bytes, ...]:
        return tuple(member.peer for member in self.members if member.role == REPLICA)

    @cached_property
    def witnesses(self) -> tuple[bytes, ...]:
        return tuple(member.peer for member in self.members if member.role == WITNESS)

    @property
    def may_fork(self) -> bool:
        """Return whether the policy in force lets fewer than a quorum go on, as a fork."""
        policy = self.rules.policy
        return policy == "any" or (policy == "auto" and len(self.members) == 2)

    @cached_property
    def _by_peer(self) -> dict[bytes, Member]:
        return {member.peer: member for member in self.members}

    def member(self, peer: bytes) -> Member | None:
        return self._by_peer.get(peer)

    def is_banned(self, peer: bytes) -> bool:
        return any(ban.peer == peer for ban in self.banned)

    def describe(self) -> str:
        names = ", ".join(short(peer) for peer in self.peers)
        count = "1 member" if len(self.members) == 1 else f"{len(self.members)} members"
        fork = ", a FORK without quorum" if self.fork else ""
        back = ", a ROLLBACK" if self.rollback else ""
        return (
            f"view {self.number}{fork}{back}: {count} ({names}),"
            f" coordinator {short(self.coordinator)}, state of round {self.base_round}"
        )


def outbound_of(view: View, members: Iterable[Member]) -> tuple[bytes, ...]:
    """Return who of these members can only dial out, as far as the view knows."""
    return tuple(sorted({*view.outbound}.intersection(member.peer for member in members)))


def is_quorum(view: View, peers: Collection[bytes]) -> bool:
    """Return whether these peers are a quorum of the view's voters.

    It takes more than half of the voters, or exactly half with the tie-breaker: any two intersect.
    In a bootstrap view no tie-breaker may go on alone: it may hold nothing, and the other half what
    is left.
    """
    present = len(view.peer_set.intersection(peers))
    if 2 * present == len(view.members):
        return view.members[0].peer in peers and view.number > 0
    return 2 * present > len(view.members)


def successors(view: View) -> tuple[bytes, ...]:
    """Return the order in which members stand for election when the coordinator is lost."""
    return tuple(peer for peer in view.peers if peer != view.coordinator)


def short(peer: bytes) -> str:
    """Return the name that people see for a peer id: eight hexadecimal digits."""
    return hashlib.sha256(peer).hexdigest()[:8]


def plain(text: str) -> str:
    """Return what others have written as logs and terminals may show it.

    It is one line, which cannot pass for several, nor move the cursor.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def genesis_chain(lineage: bytes) -> bytes:
    return hashlib.sha256(b"atoll-genesis" + lineage).digest()


def follows(later: View, earlier: View) -> bool:
    """Return whether ``later`` is further along the same lineage."""
    return earlier.lineage == later.lineage and later.number > earlier.number


def changes_rules(before: View, after: View) -> str:
    """Return what is wrong with the rules of a view that is to follow; "" for nothing."""
    kept = replace(after.rules, min_trainers=before.rules.min_trainers)
    return "" if kept == before.rules else "its rules are not those of the run"


def new_lineage(before: bytes, reason: bytes) -> bytes:
    """Return the identity of a history that leaves ``before``.

    ``reason`` is unique in it.
    """
    return hashlib.sha256(b"atoll-fork" + before + reason).digest()


def forked(view: View, ballot: Ballot) -> View:
    """Return the view in a lineage of its own, for a history that went on without a quorum."""
    numbers = (view.number, ballot.number, ballot.life)
    mark = b"".join(number.to_bytes(8, "big") for number in numbers) + ballot.peer
    ancestors = (*view.ancestors, view.lineage)[-ANCESTORS_MAX:]
    lineage = new_lineage(view.lineage, mark)
    return replace(view, lineage=lineage, ancestors=ancestors, fork=True)


def founded(view: View) -> View:
    """Return the first view of a run that several have founded together.

    It has a lineage of its own for these very incarnations. A founder that keeps no votes has
    forgotten its own when it is started again, so two first views may come to be decided; they are
    two lineages then, which are met as such.
    """
    mark = b"".join(m.peer + m.inc.to_bytes(8, "big") for m in view.members)
    ancestors = (*view.ancestors, view.lineage)[-ANCESTORS_MAX:]
    begun = replace(view, since=view.base_round)
    return replace(begun, lineage=new_lineage(view.lineage, mark), ancestors=ancestors)


def chain_after(chain: bytes, round_number: int, fragment: int, root: bytes) -> bytes:
    """Return the hash that identifies the state after a round.

    ``root`` covers bytes and contributors.
    """
    place = round_number.to_bytes(8, "big") + fragment.to_bytes(2, "big")
    return hashlib.sha256(b"atoll-round" + chain + place + root).digest()
