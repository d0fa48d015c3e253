"""Keep what the coordinator knows of each member: its last heartbeat, and whether it lives.

A member is dead when it has been silent for too long (failure_detector.py), or at once when its
address, which accepted us before, refuses the connection. It is *removable* later: membership
changes lazily, because a peer that is back in a second should find its place.
"""

from __future__ import annotations

from collections.abc import Collection

from atoll.peer.membership.failure_detector import FailureDetector, Machines, Silence
from atoll.peer.membership.link_graph import BrokenPaths, LinkGraph, Pair, graph_of, same_paths
from atoll.peer.membership.messages import Begin, Heartbeat
from atoll.peer.membership.operations import object_digest
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import View, is_quorum


class Roster:
    def __init__(
        self, view: View, me: bytes, timing: Timing, now_s: float, machines: Machines | None = None
    ) -> None:
        self.view = view
        self.me = me
        self._timing = timing
        self._machines = machines or Machines()
        self.heartbeats: dict[bytes, Heartbeat] = {}
        others = (peer for peer in view.peers if peer != me)
        self._detector = FailureDetector(timing, others, now_s, self._machines)
        self._refused: set[bytes] = set()
        self._doubted: dict[bytes, bytes] = {}  # each peer's last digest that RESYNC has answered
        self._given: dict[bytes, tuple[bytes, bytes]] = {}  # digest and object for a GATHER
        self._unalike: set[bytes] = set()  # who lacks links, cannot be dialled, or is asked in vain
        self._links: LinkGraph | None = LinkGraph()  # None: to be found anew
        # When it was asked last who lives, who did, and whether they were a quorum.
        self._cached: tuple[float, set[bytes], bool] = (-1.0, set(), False)
        self.broken = BrokenPaths()

    def heard(self, peer: bytes, beat: Heartbeat | None, now_s: float) -> bool:
        """Note a sign of life; return False if it is not of the member that runs now.

        It may be of another incarnation, of an earlier life, or of a stranger.
        """
        member, known = self.view.member(peer), self.heartbeats.get(peer)
        if member is None or (beat is not None and beat.inc != member.inc):
            return False
        if beat is not None and known is not None and beat.life < known.life:
            return False
        if peer != self.me:
            if beat is not None and known is not None and beat.life > known.life:
                self._detector.forgive(peer, now_s)  # it was not silent: it was not there
            else:
                self._detector.heard(peer, now_s)
            self._refused.discard(peer)
            if peer not in self._cached[1]:
                self._look_again()
        if beat is not None and beat is not known:
            if not same_paths(known, beat):
                self._links = None
            self.heartbeats[peer] = beat
            if beat.unlinked or beat.outbound or beat.callers:
                self._unalike.add(peer)
            else:
                self._unalike.discard(peer)
            self._machines.says_lag(peer, beat.lag_s)
        if self._given and beat is not None and not beat.given:
            self._given.pop(peer, None)
        return True

    def life(self, peer: bytes) -> int:
        """Return the number of the process that speaks for a member; 0 if none was heard."""
        beat = self.heartbeats.get(peer)
        return beat.life if beat is not None else 0

    def restarted(self, begin: Begin) -> set[bytes]:
        """Return the participants of an attempt whose process is another one by now."""
        lives = [*zip(begin.participants, begin.lives, strict=False)]
        if begin.owners is not None:
            lives += zip(begin.owners.peers, begin.owners.lives, strict=True)
        return {peer for peer, life in lives if self.life(peer) != life}

    def refused(self, peer: bytes) -> None:
        if self.view.member(peer) is not None:
            self._refused.add(peer)
            self._look_again()

    @property
    def gone(self) -> set[bytes]:
        """Return the members whose life has certainly ended."""
        return self._refused

    # ------------------------------------------------------------ life and death

    def silent_since(self, peer: bytes, since_s: float) -> None:
        """Count a member as silent from before this view on."""
        if self.view.member(peer) is not None:
            self._detector.silent_since(peer, since_s)
            self._look_again()

    def silent_s(self, peer: bytes, now_s: float) -> float:
        return self._detector.silent_s(peer, now_s)

    def alive(self, now_s: float) -> set[bytes]:
        """Return who lives; the same set until something changes, so not to be changed."""
        if self._cached[0] != now_s:
            dead = self._refused.union(self._detector.suspected(now_s)) - {self.me}
            alive = {*self.view.peers} - dead
            self._cached = (now_s, alive, is_quorum(self.view, alive))
        return self._cached[1]

    def hears_quorum(self, now_s: float) -> bool:
        """Return whether those who live are a quorum of the view."""
        if self._cached[0] != now_s:
            self.alive(now_s)
        return self._cached[2]

    def _look_again(self) -> None:
        self._cached = (-1.0, set(), False)

    def dead(self, now_s: float) -> set[bytes]:
        return set(self.view.peers) - self.alive(now_s)

    def _is_dead(self, peer: bytes, now_s: float) -> bool:
        return peer in self._refused or self._detector.suspects(peer, now_s)

    def removable(self, now_s: float) -> set[bytes]:
        """Return the members that have been dead for long.

        Dead for a while is enough when one more loss would cost the quorum; of who is only slow
        it never is.
        """
        dead = self.dead(now_s)
        if not dead:
            return dead
        alive = [p for p in self.view.peers if p not in dead]
        fragile = any(not is_quorum(self.view, set(alive) - {p}) for p in alive)
        soon_s = self._timing.remove_eager_s if fragile else self._timing.remove_s
        return {
            p
            for p in dead
            if self.silent_s(p, now_s)
            > (self._timing.remove_s if self._detector.is_answered(p, now_s) else soon_s)
        }

    def to_look_at(self, now_s: float) -> list[bytes]:
        """Return the members that say nothing, whose kernels are to be asked."""
        return self._detector.to_look_at(now_s)

    def silence(self, peers: Collection[bytes], now_s: float) -> Silence:
        """Return what the silence of some of these members means for an attempt of theirs."""
        others = [peer for peer in peers if self.view.member(peer) is not None and peer != self.me]
        detector, least_s = self._detector, self._timing.failure_s
        limits_s = [detector.usual_limit_s(peer, now_s) for peer in others]
        silent = [peer for peer in others if detector.silent_s(peer, now_s) > least_s]
        return Silence(
            max(limits_s, default=least_s) - least_s,
            any(not self._is_dead(peer, now_s) for peer in silent),
            frozenset(p for p in silent if detector.is_answered(p, now_s)) - self._refused,
        )

    @property
    def links(self) -> LinkGraph:
        """Return who of the view has a link to whom, by what they have said last."""
        if self._links is None:
            self._links = graph_of(self.view, self.heartbeats, self.broken.pairs)
        return self._links

    @property
    def are_alike(self) -> bool:
        """Return whether all are placed alike: all have links to all, and nobody asks in vain."""
        return not self._unalike

    def outbound(self) -> set[bytes]:
        """Return who says that it can only dial out."""
        return {peer for peer in self._unalike if self.heartbeats[peer].outbound}

    def break_paths(self, pairs: Collection[Pair], now_s: float, *, is_stall: bool = True) -> float:
        """Count these pairs as without a link for a while; return for how long."""
        self._links = None
        return self.broken.note(pairs, now_s, is_stall=is_stall)

    def mend_paths(self, now_s: float) -> None:
        """Let the pairs be tried again whose time is up."""
        if self.broken.step(now_s):
            self._links = None

    # ------------------------------------------------------------ state and barrier

    def unsynced(self) -> set[bytes]:
        return {p for p, beat in self.heartbeats.items() if beat.unsynced and p != self.me}

    def loading(self, alive: set[bytes]) -> set[bytes]:
        """Return who of the living reads its state from its disk."""
        return {p for p in alive if (beat := self.heartbeats.get(p)) and beat.loading}

    def keepers(self) -> set[bytes]:
        """Return on whose disks results of rounds are, or will be."""
        return {peer for peer, beat in self.heartbeats.items() if beat.keeps_rounds}

    def has_synced(self, round_number: int, chain: bytes) -> list[bytes]:
        """Return others that hold this state and are not in doubt, in the view's order."""
        return [
            peer
            for peer in self.view.replicas
            if peer != self.me
            and (beat := self.heartbeats.get(peer)) is not None
            and not beat.unsynced
            and (beat.round, beat.chain) == (round_number, chain)
            and not self.is_doubted(peer, beat.digest)
        ]

    def digests(self, round_number: int) -> dict[bytes, bytes]:
        """Return the digests that others report for the state after this round."""
        return {
            peer: beat.digest
            for peer, beat in self.heartbeats.items()
            if beat.digest_round == round_number > 0
            and beat.digest
            and peer != self.me
            and not beat.unsynced
            and self._doubted.get(peer) != beat.digest
        }

    def undigested(self, alive: set[bytes], round_number: int) -> set[bytes]:
        """Return the living, synced replicas that have not reported the state after this round."""
        known = {
            p for p, b in self.heartbeats.items() if b.unsynced or b.digest_round == round_number
        }
        return alive.intersection(self.view.replicas) - known

    def doubt(self, peer: bytes, digest: bytes) -> None:
        """Count this report once: RESYNC has been sent."""
        self._doubted[peer] = digest

    def is_doubted(self, peer: bytes, digest: bytes) -> bool:
        return self._doubted.get(peer) == digest

    def discount_pause(self, pause_s: float) -> None:
        """Discount a pause in which we were stopped ourselves: nobody was silent meanwhile."""
        self._detector.discount_pause(pause_s)
        self._look_again()

    def unheard(self, alive: set[bytes]) -> set[bytes]:
        """Return the living members that have not said anything in this view yet."""
        return alive - self.heartbeats.keys()

    def awaited(self, alive: set[bytes], now_s: float) -> set[bytes]:
        """Return the living members whose first word in this view is due and may be on its way.

        Not so for as long as it takes to suspect one: it comes at once or it is lost.
        """
        return {peer for peer in self.unheard(alive) if self._detector.trusts(peer, now_s)}

    def trainers(self, alive: set[bytes]) -> set[bytes]:
        """Return who has a trainer in step with the state, whether rounds wait for it or not."""
        return {
            p for p in alive if (b := self.heartbeats.get(p)) and b.since >= 0 and not b.unsynced
        }

    def since(self, peer: bytes) -> int:
        """Return the round at which a peer's trainer came; -1 without one."""
        return self.heartbeats[peer].since

    def attached(self, alive: set[bytes]) -> set[bytes]:
        return {p for p in alive if (b := self.heartbeats.get(p)) and b.attached and not b.unsynced}

    def arrived(
        self, alive: set[bytes], fragment: int, round_number: int, chain: bytes
    ) -> set[bytes]:
        """Return those whose submission for this fragment waits, in the state that we have.

        A trainer may die after it: what has arrived still counts.
        """
        return {
            peer
            for peer in alive
            if (beat := self.heartbeats.get(peer))
            and fragment in beat.arrived
            and not beat.unsynced
            and (beat.round, beat.chain) == (round_number, chain)
            and self.has_given(peer)
        }

    def calls(self, peer: bytes) -> bool:
        """Return whether what waits at a peer is a collective of its session, and no step."""
        beat = self.heartbeats.get(peer)
        return beat is not None and beat.operation is not None

    def give(self, peer: bytes, data: bytes) -> None:
        """Keep a member's object for the GATHER that its trainer waits for."""
        if self.view.member(peer) is not None:
            self._given[peer] = (object_digest(data), data)

    def has_given(self, peer: bytes) -> bool:
        """Return whether the object that a member's heartbeat names is here."""
        beat = self.heartbeats.get(peer)
        return beat is not None and beat.given == self._given.get(peer, (b"", b""))[0]

    def given(self, peer: bytes) -> bytes:
        return self._given.get(peer, (b"", b""))[1]

    def weight(self, peer: bytes, fragment: int) -> float:
        beat = self.heartbeats.get(peer)
        waiting = zip(beat.arrived, beat.weights, strict=True) if beat else ()
        return dict(waiting).get(fragment, 0.0)

    def progress_bytes(self, peers: Collection[bytes]) -> int:
        """Return how many bytes some members have moved, as their heartbeats say.

        What those receive that are catching up is not of a round.
        """
        beats = (self.heartbeats.get(peer) for peer in peers)
        return sum(beat.progress_bytes for beat in beats if beat is not None and not beat.unsynced)

    def frozen(self, alive: set[bytes]) -> int:
        """Return the highest ballot number that a living member has promised elsewhere.

        0 if there is none.
        """
        frozen = [x.promised for peer, x in self.heartbeats.items() if x.frozen and peer in alive]
        return max(frozen, default=0)
