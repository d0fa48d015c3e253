"""Make attempts at one round, as its coordinator, until one may be committed.

Theory. A round is begun with the participants S whose submissions have arrived. An attempt ends
in one of two ways. *Commit*, when every living participant holds the result R, at least two living
replicas do (one, if there is only one), the coordinator among them unless it is a witness, and
those that hold it together with the witnesses that attest it are a quorum of the voters, each of
which has its vote on its disk: a slow disk delays nobody while a quorum of others is faster. Of
those that keep results on their disks, two have this one there (one, if there is only one), or a
power cut could leave a majority of votes for what nobody has. Replicas
outside S are asked to fetch R at once, because the quorum may need them, but the commit waits for
them only if it does: they follow by the log. Of a session's own all-reduce only the participants
hold R, because only their trainers want it; all other voters attest it, as witnesses do. *Retry*
with a higher attempt number, when a participant died or edges stalled and nobody alive holds R, or
when participants hold different results: then without the minority. If somebody holds R the attempt
is *finished* instead: the others fetch it. An attempt is given up before the next begins and never
committed afterwards, which is why the highest (round, attempt) in a view change's reports is the
only candidate. Between the two, participants are asked which chunks of it are final, and the next
attempt keeps those (:class:`AttemptCleanup`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.collectives.units import duration, listed
from atoll.peer.membership.events import Effect, Note, Send
from atoll.peer.membership.failure_detector import Silence
from atoll.peer.membership.kept_chunks import (
    DIGEST_BYTES,
    HOLDERS_MAX,
    KEPT_BYTES_MAX,
    RECORD_BYTES,
    Kept,
    pack_kept,
    parse_kept,
)
from atoll.peer.membership.link_graph import LinkGraph, Pair
from atoll.peer.membership.messages import AskFinals, Begin, Finals, Miss, Notice, Ready, Repair
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import View, is_quorum, short
from atoll.peer.rounds.entries import INIT, ORIGINS_MAX, REDUCE, EntryOrigin

ATTEMPTS_MAX = 16  # a round that failed this often goes back to the barrier, and says so
DISPUTES_MAX = 3  # retries after different results without a majority: then it is no accident
SPOKEN_BEATS = 2  # in which who has been silent brings data, before that passes for a stall
REPEAT_BYTES_PER_S = 128 * 1024  # what a link of 1 Mbit/s brings
REPAIRS_MAX = 4  # orders to one peer to fetch R; after that it counts as stalled


@dataclass(slots=True)
class Attempt:
    """Keep one BEGIN and what has come back for it."""

    view: View
    me: bytes
    begin: Begin
    timing: Timing
    emit: Callable[[Effect], None]
    began_s: float
    links: LinkGraph = field(default_factory=LinkGraph)  # as they were when it began
    ready: dict[bytes, bytes] = field(default_factory=dict)  # peer -> root it holds or attests
    durable: dict[bytes, bytes] = field(default_factory=dict)  # ... and has on its disk: its vote
    kept: set[bytes] = field(default_factory=set)  # ... with the result
    keepers: set[bytes] = field(default_factory=set)  # on whose disks results are, or will be
    # Participants that were started again. For this attempt they are outsiders: their submissions
    # are lost with their processes, and what these had said of it stays true.
    restarted: set[bytes] = field(default_factory=set)
    misses: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    dispute: str = ""  # who holds which result, if they differ
    minority: set[bytes] = field(default_factory=set)  # who holds another than most participants
    tries: int = 1  # at this round, this one included; numbers of attempts rise within a view
    audited: bool = False  # a result is there once most participants have verified it
    silence: Silence = field(default_factory=Silence)  # of its participants, as it is now
    detours: tuple[bytes, ...] = ()  # witnesses that could own, if a path has to be avoided
    is_stall: bool = False  # it has ended because no byte moved, and nobody knows why
    able: set[bytes] = field(default_factory=set)  # who may own parts, where others can do without
    broken: set[Pair] = field(default_factory=set)  # it has ended because of these paths
    _begun_s: dict[bytes, float] = field(default_factory=dict)  # when BEGIN was repeated
    # When each peer was told to copy the result last, and from whom so far; b"": from nobody near.
    _repairs: dict[bytes, tuple[float, tuple[bytes, ...]]] = field(default_factory=dict)
    _noticed_s: float = float("-inf")
    _missed_s: float | None = None  # when the first report of a broken edge was looked at
    _whole_s: float | None = None  # since when nothing is lacking but copies of outsiders
    _progress_bytes: int = -1
    _progress_s: float = 0.0
    _silent_s: float = float("-inf")  # when somebody in it last said nothing

    def __post_init__(self) -> None:
        self._progress_s = self.began_s
        for peer in self.view.peers:
            self.emit(Send(peer, self.begin))

    def repeat(self, peer: bytes, now_s: float) -> None:
        """Send BEGIN again to a peer that may have lost it, but not too soon.

        A long one may still be on its way, and more would jam the link.
        """
        pause_s = len(self.begin.blob) / REPEAT_BYTES_PER_S
        if now_s - self._begun_s.get(peer, self.began_s) >= pause_s:
            self._begun_s[peer] = now_s
            self.emit(Send(peer, self.begin))

    def discount_pause(self, pause_s: float) -> None:
        """Discount a pause in which the coordinator itself was stopped."""
        self._progress_s += pause_s

    def wait_turn(self, now_s: float) -> None:
        """Count no stall while an earlier round is not committed yet.

        Only after that commit do those who hold this result say READY here.
        """
        self._progress_s = now_s

    # ------------------------------------------------------------ what comes back

    def on_ready(self, source: bytes, ready: Ready) -> None:
        if (ready.round, ready.attempt) == (self.begin.round, self.begin.attempt):
            kept = ready.keeps_rounds
            self.heard_ready(source, ready.root, durable=not ready.pending, kept=kept)

    def heard_ready(self, source: bytes, root: bytes, *, durable: bool, kept: bool) -> None:
        self.ready[source] = root
        if durable:
            self.durable[source] = root
            if kept:
                self.kept.add(source)

    def lost_memory(self, peer: bytes) -> None:
        """Hear that a peer was started again: what it held in memory only is no copy any more.

        What it has on its disk stays, its vote too.
        """
        if peer not in self.kept:
            self.ready.pop(peer, None)

    @property
    def participants(self) -> tuple[bytes, ...]:
        """Return the participants that are still the processes that began."""
        return tuple(p for p in self.begin.participants if p not in self.restarted)

    def on_miss(self, source: bytes, miss: Miss) -> None:
        exchange = self.begin.exchange
        current = (miss.round, miss.attempt) == (self.begin.round, self.begin.attempt)
        if current and source in exchange:
            # Two without a link exchange nothing in this attempt, so nothing of it is broken there.
            named = {*miss.peers} - self.links.apart_from(source, exchange)
            if named:
                self.misses[source] = tuple(peer for peer in exchange if peer in named)

    @property
    def _stall_s(self) -> float:
        """Return how long no byte may move: of progress one hears with heartbeats."""
        return self.timing.stall_s + self.silence.late_s

    @property
    def attesters(self) -> tuple[bytes, ...]:
        """Return the peers that vote for a result that others hold."""
        witnesses = self.view.witnesses
        if self.begin.kind != REDUCE:
            return witnesses
        others = (p for p in self.view.replicas if p not in self.begin.participants)
        return (*witnesses, *others)

    @property
    def jury(self) -> set[bytes]:
        """Return the participants who count.

        Newcomers do not: a liar could bring as many of them as it takes.
        """
        return {*self.begin.counted}

    @property
    def copies(self) -> dict[bytes, bytes]:
        """Return the replicas that hold a result, with its root; what attesters say is no copy."""
        attesters = self.attesters
        copies = {peer: root for peer, root in self.ready.items() if peer not in attesters}
        if not self.audited:
            return copies
        jury = self.jury
        votes = Counter(root for peer, root in copies.items() if peer in jury)
        # One that lies may say that it has something, and lend it to all others.
        return copies if 2 * max(votes.values(), default=0) > len(jury) else {}

    # ------------------------------------------------------------ commit

    def committable(
        self,
        now_s: float,
        alive: Collection[bytes],
        unsynced: Collection[bytes],
        training: Collection[bytes] = (),
    ) -> bytes:
        """Return the root to commit, or b""; ask attesters once the copies are there.

        Outsiders that are ``training`` get a moment to fetch R: they want to take part in the next
        round, and without it they would first have to catch up.
        """
        copies = self.copies
        roots = set(copies.values())
        attesters = self.attesters
        root = next(iter(roots), None) if self.me in attesters else copies.get(self.me)
        if root is None or len(roots) > 1:
            return b""
        synced = [p for p in self.view.replicas if p in alive and p not in unsynced]
        able = [p for p in synced if p not in attesters]
        waiting = [p for p in self.participants if p in able and p not in copies]
        on_disk = [peer for peer in copies if peer in able and peer in self.durable]
        if (
            waiting
            or len(on_disk) < min(2, len(able))
            or not self._survives_power_cut(on_disk, able)
        ):
            return b""
        agreeing = {peer for peer, theirs in self.durable.items() if theirs == root}
        if self.begin.kind == REDUCE:  # before COMMIT, so that nobody has to catch up with it
            self._ask_attesters(now_s, alive, root)
        known = self.ready.get(self.me) == root or self.me in self.view.witnesses
        if known and is_quorum(self.view, agreeing):
            self._whole_s = now_s if self._whole_s is None else self._whole_s
            lacking = [p for p in synced if p in training and p not in self.ready]
            patient = now_s - self._whole_s < self.timing.grace_s
            return b"" if lacking and patient else root
        self._ask_attesters(now_s, alive, root)
        return b""

    def _survives_power_cut(self, voted: Collection[bytes], able: Collection[bytes]) -> bool:
        """Return whether enough disks have the result; of an operation none needs to.

        Who keeps only votes, or whose disk is full, is no copy, as a witness is none.
        """
        if self.begin.operation is not None:
            return True
        can = [p for p in able if p in self.keepers and (p not in self.durable or p in self.kept)]
        return len(self.kept.intersection(voted)) >= min(2, len(can))

    def _ask_attesters(self, now_s: float, alive: Collection[bytes], root: bytes) -> None:
        """Ask attesters to vote for the result that others hold.

        This comes only once enough hold it, or a round could be committed of which a single death
        takes the only copy.
        """
        if now_s - self._noticed_s < self.timing.repair_s:
            return
        self._noticed_s = now_s
        begin = self.begin
        notice = Notice(begin.lineage, begin.view, begin.round, begin.attempt, begin.fragment, root)
        for peer in self.attesters:
            if peer in alive and self.ready.get(peer) != root:
                self.emit(Send(peer, notice))

    # ------------------------------------------------------------ finish or retry

    def step(
        self,
        now_s: float,
        usable: Collection[bytes],
        progress_bytes: int,
        links: LinkGraph,
    ) -> tuple[bytes, ...] | None:
        """Move on; return None to wait, else the participants of the next attempt.

        An empty tuple says to give up. ``usable``: who lives and follows the run; ``links``: who
        can copy from whom now.
        """
        begin, copies = self.begin, self.copies
        participants = begin.participants
        dead = [peer for peer in begin.exchange if peer not in usable or peer in self.restarted]
        if progress_bytes != self._progress_bytes:
            self._progress_bytes, self._progress_s = progress_bytes, now_s
        if self.silence.is_open:
            self._silent_s = now_s
        # Who has said nothing for a while, and speaks again, has data on the way.
        spoke_s = now_s - self._silent_s
        stalled = now_s - self._progress_s > self._stall_s and spoke_s > SPOKEN_BEATS * (
            self.timing.heartbeat_s
        )
        holders = [peer for peer in copies if peer in usable]
        if len(set(copies.values())) > 1:
            silent = [p for p in participants if p not in {*dead, *copies}]
            return self._without_minority(now_s, dead, [] if stalled else silent)
        if holders and self.unrepairable(now_s):
            kept = tuple(peer for peer in self.participants if peer in usable)
            self._note_retry(f"{_named(self.unrepairable(now_s))} could not fetch the result")
            return kept
        if holders:
            attesters = self.attesters
            inside = (*self.participants, *attesters)
            outside = [p for p in self.view.replicas if p not in inside]
            wanting = outside + (list(self.participants) if dead or stalled or self.misses else [])
            able = [peer for peer in wanting if peer in usable]
            self._repair(now_s, able, holders, links)
            return None
        if dead:
            self._note_retry(self._why_without(dead))
            return tuple(peer for peer in participants if peer not in dead)
        if stalled:
            misses, self.broken = self._blamed()
            excluded = self.cover(misses)
            self.is_stall = not (excluded or self.broken)
            self._note_retry(f"no data for {duration(self._stall_s)}", without=excluded)
            return tuple(peer for peer in participants if peer not in excluded)
        return self._without_broken_edges(now_s, links)

    def _why_without(self, dead: Collection[bytes]) -> str:
        slow = self.silence.slow.intersection(dead)
        gone = {*dead} - slow
        why = [f"{_named(gone)} died"] if gone else []
        why += [f"{_named(slow)} says nothing, though its machine answers"] if slow else []
        return ", ".join(why)

    def _without_minority(
        self, now_s: float, dead: Collection[bytes], silent: Collection[bytes]
    ) -> tuple[bytes, ...] | None:
        """Return the participants of the next attempt after different results, or None to wait.

        They are the participants who agree with most of those who count, and everyone without a
        majority; the dead are left out. Outsiders have only copied theirs, so they have no say.
        """
        holders: dict[bytes, list[bytes]] = {}
        for peer, root in sorted(self.copies.items()):
            holders.setdefault(root, []).append(peer)
        ours, jury = self.begin.participants, self.jury
        votes = {root: len(jury.intersection(peers)) for root, peers in holders.items()}
        most = max(votes, key=lambda root: votes[root])
        if 2 * votes[most] > sum(votes.values()) + len(jury.intersection(silent)):
            self.minority = {peer for peer, root in self.copies.items() if root != most}
        elif silent:
            return None  # the first to speak do not pass for all
        self.dispute = "; ".join(
            f"{root.hex()[:16]} on {', '.join(map(short, peers))}"
            for root, peers in holders.items()
        )
        excluded = {*dead, *self.minority.intersection(ours)}
        self._note_retry(f"results differ ({self.dispute})", without=excluded)
        return tuple(peer for peer in ours if peer not in excluded)

    def _without_broken_edges(self, now_s: float, links: LinkGraph) -> tuple[bytes, ...] | None:
        """Return the participants of the next attempt after broken edges, or None to wait.

        Of broken edges between living peers, wait a moment for the death of one end. Who reports
        itself cannot contribute: that needs no waiting. Nor does it when two others name one peer:
        on full links its death may show a second later, and all that is sent in between is lost.
        Of other edges nobody knows which end is to blame. If somebody has links to all and is at
        none of them, nobody is left out: the next attempt does without these paths.
        """
        if not self.misses:
            return None
        own = {reporter for reporter, missing in self.misses.items() if reporter in missing}
        if self._missed_s is None:
            self._missed_s = now_s
        waited_s = now_s - self._missed_s
        patient = waited_s < self.timing.repair_s
        misses, paths = self._blamed()
        cover = self.cover(misses)
        is_clear = bool(cover) and self.is_named_by_two(cover, self.misses)
        if not own and not is_clear and waited_s >= self.timing.repair_s / 2:
            self.broken = self._paths_to_avoid(links)
        if paths and not patient:
            self.broken |= paths
        if self.broken:
            self._note_retry(f"data links are broken: {_shown(self.broken)}")
            return self.participants
        excluded = own if patient and not is_clear else cover
        if not excluded & set(self.begin.participants):
            return None
        what = "a submission cannot be used" if excluded == own else "data links are broken"
        self._note_retry(f"{what}: {_named(excluded)}")
        return tuple(peer for peer in self.begin.participants if peer not in excluded)

    def _blamed(self) -> tuple[dict[bytes, set[bytes]], set[Pair]]:
        """Return the reports for which an end may be to blame, and the paths of all others.

        Where a relay carries data, or a witness owns them, that is to blame first: another one, or
        none, is tried before somebody who lives and trains is left out. So is the path between two
        at INIT, where a witness can own instead: that two have no link may not be known yet, and
        who misses this round has to load the state, for which there may be no way.
        """
        helpers, links = self.begin.helpers, self.links
        found: dict[bytes, set[bytes]] = {}
        paths: set[Pair] = set()
        for reporter, named in self.misses.items():
            for peer in named:
                ends = {reporter, peer}
                if reporter == peer and peer in helpers:  # it can do nothing for anybody
                    paths |= {_pair(peer, other) for other in self.begin.participants}
                elif len(ends) > 1 and (
                    links.are_relayed(reporter, peer)
                    or ends & {*helpers}
                    or any(links.reaches(other, ends) for other in self.detours)
                ):
                    paths.add(_pair(reporter, peer))
                else:
                    found.setdefault(reporter, set()).add(peer)
        return found, paths

    def _paths_to_avoid(self, links: LinkGraph) -> set[Pair]:
        """Return the edges that are reported, if the next attempt can do without them."""
        edges = {_pair(reporter, peer) for reporter, named in self.misses.items() for peer in named}
        at_an_end = {peer for edge in edges for peer in edge}
        everyone = self.begin.participants
        owns = any(links.reaches(peer, everyone) for peer in self.able - at_an_end)
        return edges if owns else set()

    def cover(self, misses: Mapping[bytes, Collection[bytes]]) -> set[bytes]:
        """Return the peers that are left out on these reports of participants.

        Of INIT, whose parameters it hands out is chosen last: without it there is no round.
        """
        last = self.begin.counted[0] if self.begin.kind == INIT else self.me
        last = b"" if last in self.begin.helpers else last
        return vertex_cover(misses, last, {*self.begin.participants} - self.jury)

    def is_named_by_two(
        self, cover: Collection[bytes], misses: Mapping[bytes, Collection[bytes]]
    ) -> bool:
        """Return whether two others name each of these peers, or it names itself.

        Of one broken edge, either end may be to blame.
        """
        jury = self.jury  # a newcomer's word costs it nothing: against one of these it has none
        named = [
            peer
            for reporter, missing in misses.items()
            for peer in missing
            if reporter in jury or peer not in jury
        ]
        return all(named.count(peer) >= 2 or peer in misses.get(peer, ()) for peer in cover)

    def _repair(
        self, now_s: float, peers: list[bytes], holders: list[bytes], links: LinkGraph
    ) -> None:
        """Order each of these peers to copy the result, from a holder that it has a link to.

        That is another one for each, so that they share the work, and we after a try in vain.
        Who has none waits until one of its neighbours holds it; that counts as a try in vain.
        """
        for position, peer in enumerate(peers):
            last_s, tried = self._repairs.get(peer, (float("-inf"), ()))
            if peer in self.ready or len(tried) >= REPAIRS_MAX or not self._is_due(now_s, last_s):
                continue
            near = [holder for holder in holders if links.have_path(holder, peer)]
            holder = self._holder(position, near, tried) if near else b""
            self._repairs[peer] = (now_s, (*tried, holder))
            if holder:
                begin = self.begin
                order = Repair(begin.lineage, begin.view, begin.round, begin.attempt, holder)
                self.emit(Send(peer, order))

    def _holder(self, position: int, near: list[bytes], tried: tuple[bytes, ...]) -> bytes:
        """Return from whom a peer is to copy the result next, after these in vain."""
        if tried and self.me in near and self.me not in tried:
            return self.me  # whoever else it is cut off from, we hear it
        untried = [holder for holder in near if holder not in tried] or near
        return untried[position % len(untried)]

    def out_of_reach(self, alive: Collection[bytes], links: LinkGraph) -> set[bytes]:
        """Return the replicas to whom the result has no way, from the participants or by others.

        They count as unsynced: nobody could hand it to them.
        """
        if links.is_complete:
            return set()
        far = {*self.view.replicas}.difference(self.begin.participants)
        new: Collection[bytes] = self.begin.participants
        while far and new:
            new = [peer for peer in far if links.apart_from(peer, new) != {*new}]
            far.difference_update(new)
            new = [peer for peer in new if peer in alive]
        return far

    def unrepairable(self, now_s: float) -> set[bytes]:
        """Return the peers that could not fetch the result in REPAIRS_MAX tries.

        They count as unsynced.
        """
        if not self._repairs:
            return set()
        return {
            peer
            for peer, (last_s, tried) in self._repairs.items()
            if len(tried) >= REPAIRS_MAX and peer not in self.ready and self._is_due(now_s, last_s)
        }

    def _is_due(self, now_s: float, last_s: float) -> bool:
        """Return whether an order to fetch is due, or the last one has failed.

        The first order goes at once; it is repeated, or has failed, after a time without a byte.
        """
        never = last_s == float("-inf")
        wait_s = self.timing.repair_s + self.silence.late_s
        return never or now_s - max(last_s, self._progress_s) >= wait_s

    def _note_retry(self, why: str, without: Collection[bytes] = ()) -> None:
        again = f"trying again without {_named(without)}" if without else "trying again"
        text = f"round {self.begin.round}: {why}, {again} (attempt {self.tries + 1})"
        self.emit(Note("retry", text))


def _pair(one: bytes, other: bytes) -> Pair:
    return min(one, other), max(one, other)


def _named(peers: Collection[bytes]) -> str:
    return listed([short(peer) for peer in sorted(peers)])


def _shown(pairs: Collection[Pair]) -> str:
    return listed([f"{short(one)} to {short(other)}" for one, other in sorted(pairs)])


@dataclass(slots=True)
class RetryBudget:
    """Count what one round has cost so far."""

    tries: int = 0
    stalls: int = 0  # attempts that came to a stop without a reason
    disputes: int = 0  # attempts with different results that will be tried with the same peers
    distrusted: set[bytes] = field(default_factory=set)  # whose copy of the result was another

    def dispute(self, attempt: Attempt, participants: Collection[bytes]) -> None:
        """Note different results of one attempt; ``participants`` are those of the next.

        An outsider that copied wrongly is left behind, while the quorum can do without it.
        """
        outsiders = attempt.minority.difference(attempt.begin.participants, {attempt.me})
        if outsiders - self.distrusted:
            self.distrusted |= outsiders
        elif set(participants) == set(attempt.begin.participants):
            self.disputes += 1


def vertex_cover(
    misses: Mapping[bytes, Collection[bytes]], last: bytes, newcomers: Collection[bytes] = ()
) -> set[bytes]:
    """Return a greedy vertex cover of the reported broken edges.

    The ``last`` one, usually the coordinator, is chosen last. A reporter that names itself cannot
    contribute at all and is always in the cover. One of the ``newcomers``, who do not count, that
    names somebody who does leaves out itself alone: else it would cost nothing to leave out whom
    one likes.
    """
    cover = {peer for peer, missing in misses.items() if peer in missing}
    light = {*newcomers} - {last}
    edges = {
        frozenset((reporter, missing))
        for reporter, named in misses.items()
        for missing in named
        if missing != reporter and not (reporter in light and missing not in light)
    }
    while edges := {edge for edge in edges if not edge & cover}:
        degree: dict[bytes, int] = {}
        for edge in edges:
            for peer in edge:
                degree[peer] = degree.get(peer, 0) + 1
        cover.add(max(degree, key=lambda peer: (peer != last, degree[peer], peer)))
    named = {peer: {*missing} - light - cover for peer, missing in misses.items()}
    return cover | {peer for peer in light if named.get(peer)}


def unexplained(waits_for: Mapping[bytes, Collection[bytes]]) -> dict[bytes, set[bytes]]:
    """Return who waits for whom, without those who are late because others are.

    Whoever waits for others, and not for the one that waits for it, has an excuse. If all have one,
    nobody has.
    """
    found = {
        peer: {other for other in named if peer in (waits_for.get(other) or (peer,))}
        for peer, named in waits_for.items()
    }
    if any(found.values()):
        return found
    return {peer: {*named} for peer, named in waits_for.items()}


# ---------------------------------------------------------------- what an attempt leaves behind

_NAMED_BYTES = 48  # a participant with its weight, packed
_NOT_FINAL = bytes(DIGEST_BYTES)


class AttemptCleanup:
    """Close one attempt that is over: its finished chunks go into the next one.

    Theory. When the coordinator gives an attempt up it asks the living participants which chunks of
    it are final (AskFinals), and waits a moment for their answers. A chunk that somebody holds
    final, with one digest, is *kept*: the next BEGIN names its digest, its origin (whose
    submissions, with which weights, are in its mean) and holders; whoever lacks it fetches it, and
    only the other chunks are reduced again. The result is defined by that BEGIN, READY still means
    "I hold all of it", and attempts are still totally ordered, so the safety argument is unchanged.
    Whose submission turned out to be unusable is not kept: chunks with a part of it are reduced
    again.

    The answers also say whom each participant waited for. When a round stalls and nobody has
    reported a broken link, that tells who is to go on without: a peer that sends and cannot receive
    looks healthy to everyone until then. If it is one peer alone, and two others have waited for
    it, the next attempt goes on without it; else only the third one does without those who were
    waited for.
    """

    def __init__(
        self,
        attempt: Attempt,
        participants: tuple[bytes, ...],
        asked: Collection[bytes],
        timing: Timing,
        emit: Callable[[Effect], None],
        now_s: float,
    ) -> None:
        self.attempt = attempt
        self.is_stall = attempt.is_stall
        self._participants = participants
        self._asked = set(asked)
        self._finals: dict[bytes, bytes] = {}
        self._missing: dict[bytes, tuple[bytes, ...]] = {}
        self._until_s = now_s + timing.kept_s + attempt.silence.late_s
        begin = attempt.begin
        ask = AskFinals(begin.lineage, begin.view, begin.round, begin.attempt)
        for peer in sorted(self._asked):
            emit(Send(peer, ask))

    def on_finals(self, source: bytes, finals: Finals) -> None:
        begin = self.attempt.begin
        if source in self._asked and finals.attempt == begin.attempt:
            self._finals[source] = finals.digests
            self._missing[source] = finals.missing

    def is_done(self, now_s: float, alive: Collection[bytes]) -> bool:
        return now_s >= self._until_s or not (self._asked & set(alive)) - self._finals.keys()

    def participants(self, alive: Collection[bytes], *, excluding: bool) -> tuple[bytes, ...]:
        """Return the participants of the next attempt.

        ``excluding``: without those whom the others waited for.
        """
        cover = self.attempt.cover(self._late(alive)) if excluding else set[bytes]()
        return tuple(p for p in self._participants if p in alive and p not in cover)

    def is_clear(self, alive: Collection[bytes]) -> bool:
        """Return whether one peer alone explains the stall, and two living others say so."""
        late = self._late(alive)
        cover = self.attempt.cover(late)
        return len(cover) == 1 and self.attempt.is_named_by_two(cover, late)

    def is_between(self, me: bytes, alive: Collection[bytes]) -> bool:
        """Return whether all that was waited for was to or from ``me``, as two living others say.

        A coordinator that no data reaches, or leaves, would leave out all others: it hears what
        they say, and is itself needed for each commit.
        """
        late = self._late(alive)
        edges = [{peer, other} for peer, named in late.items() for other in named]
        others = sum(me in named for peer, named in late.items() if peer != me)
        return others >= 2 and all(me in edge for edge in edges)

    def _late(self, alive: Collection[bytes]) -> Mapping[bytes, Collection[bytes]]:
        """Return for whom the living have waited, but for those who are late for others' sake."""
        return unexplained(self.waits_for(alive))

    def waits_for(self, alive: Collection[bytes]) -> dict[bytes, tuple[bytes, ...]]:
        """Return for whom the living participants waited, as they say themselves."""
        return {peer: named for peer, named in self._missing.items() if peer in alive}

    def kept(
        self, alive: Collection[bytes], copiers: Collection[bytes], links: LinkGraph
    ) -> tuple[tuple[EntryOrigin, ...], bytes]:
        """Return ``past`` and ``kept`` of the next BEGIN; only the living can hand anything out.

        ``copiers``: its participants, each of whom needs every chunk that is kept. One that some of
        them could not copy from anybody named is reduced again.
        """
        begin = self.attempt.begin
        view = self.attempt.view
        before = {
            item.chunk: item.origin
            for item in parse_kept(begin.kept, len(view.members), len(begin.origins))
        }
        unusable = {peer for peer, named in self.attempt.misses.items() if peer in named}
        usable = [not unusable & set(origin.participants) for origin in begin.origins]
        position = {peer: index for index, peer in enumerate(view.peers)}
        found: list[Kept] = []
        for chunk, holders in sorted(self._holders(alive).items()):
            origin = before.get(chunk, 0)
            if len(holders) == 1 and usable[origin]:  # of one digest: else it is reduced again
                digest, peers = next(iter(holders.items()))
                if near := holders_for(peers, copiers, links):
                    named = tuple(position[peer] for peer in near)
                    found.append(Kept(chunk, origin, digest, named))
        used = sorted({item.origin for item in found})[: ORIGINS_MAX - 1]
        renumbered = {origin: index + 1 for index, origin in enumerate(used)}
        past = tuple(begin.origins[origin] for origin in used)
        named_kept = [x._replace(origin=renumbered[x.origin]) for x in found if x.origin in used]
        return past, pack_kept(named_kept[: _room(begin.origins, past)])

    def _holders(self, alive: Collection[bytes]) -> dict[int, dict[bytes, list[bytes]]]:
        """Return who holds each chunk final, by chunk and digest.

        Lists of different lengths are not of one grid: only the longest count.
        """
        lengths = [len(digests) for digests in self._finals.values() if digests]
        found: dict[int, dict[bytes, list[bytes]]] = {}
        for peer, digests in sorted(self._finals.items()):
            whole = len(digests) % DIGEST_BYTES == 0 and len(digests) == max(lengths, default=0)
            if peer not in alive or not whole:
                continue
            for chunk in range(len(digests) // DIGEST_BYTES):
                digest = digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
                if digest != _NOT_FINAL:
                    found.setdefault(chunk, {}).setdefault(digest, []).append(peer)
        return found


def holders_for(
    holders: Sequence[bytes], copiers: Collection[bytes], links: LinkGraph
) -> list[bytes]:
    """Return the holders to name, so that each of ``copiers`` is one or is linked to one.

    As many as BEGIN has room for; none if that is too few for somebody.
    """
    if links.is_complete:
        return list(holders[:HOLDERS_MAX])
    lacking = [peer for peer in copiers if peer not in holders]
    near = {holder: links.apart_from(holder, lacking) for holder in holders}
    named: list[bytes] = []
    far = {*lacking}
    while len(named) < min(HOLDERS_MAX, len(near)):
        best = min((h for h in near if h not in named), key=lambda h: len(far & near[h]))
        named.append(best)
        far &= near[best]
    return [] if far else named


def _room(origins: Sequence[EntryOrigin], past: Sequence[EntryOrigin]) -> int:
    """Return how many records fit into BEGIN beside the participants that it names.

    These are those of its attempt and of the past.
    """
    named = sum(len(origin.participants) for origin in (*origins[:1], *past))
    return max(0, KEPT_BYTES_MAX - _NAMED_BYTES * named) // RECORD_BYTES
