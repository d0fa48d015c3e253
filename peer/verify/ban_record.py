"""Record who is banned from the run, and by which evidence, as one member knows it. Sans-I/O.

Evidence that stands alone convinces everybody who checks it. The word of a majority, or of one half
of a pair, convinces only those who know that these peers were members: whoever took part in the
attempt, and whoever hears the same from more than half of the members of its view. Of a pair those
who took part have to agree as well, because its accuser signs what it likes. A view that names a
ban (peer/membership/bans.py) convinces its members, and the file that it names takes the place of
any other, so that all keep the same. Nothing is ever taken back: a peer that was banned by mistake
comes back with another identity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from atoll.peer.membership.view import short
from atoll.peer.verify.evidence import EVIDENCE_BYTES_MAX, Evidence, Finding, verify_evidence
from atoll.peer.verify.statement import SignedStatement

# Peers that can be banned; what is known of more is not kept. Four times the most of one view.
BANS_MAX: Final = 4096
UNSURE_MAX: Final = 64  # pieces of evidence that wait for more members to say the same ...
UNSURE_BYTES_MAX: Final = 2 * EVIDENCE_BYTES_MAX  # ... and their size: most have some kilobytes
# Of believed evidence that stays in memory, the newest, as large as one may be: the home has all.
BELIEVED_BYTES_MAX: Final = EVIDENCE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Ban:
    """Say who is out, and why. ``evidence``: None once it is in the home alone."""

    peer: bytes
    digest: bytes
    round: int
    finding: Finding
    evidence: Evidence | None


@dataclass(slots=True)
class _Unsure:
    """Hold evidence that waits for others to say the same.

    ``jury``: whose word counts, where we have taken part ourselves; otherwise that of our view's
    members does.
    """

    evidence: Evidence
    finding: Finding
    nbytes: int
    jury: frozenset[bytes] = frozenset()
    tellers: set[bytes] = field(default_factory=set)


class Bans:
    """Keep the evidence that one member has, and decide whom it bans.

    Of a pair each participant believes one in an attempt, and of each accuser one for ever: that is
    its word. More than half of the participants beside the two have to say the same, so who
    contradicts one before some and another before others has nobody banned but itself.
    """

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._by_peer: dict[bytes, Ban] = {}
        self._by_digest: dict[bytes, Evidence | None] = {}  # None: it is in the home alone
        self._unsure: dict[bytes, _Unsure] = {}
        self._spare: dict[bytes, tuple[bytes, ...]] = {}  # more evidence against who is out
        self._named: dict[bytes, bytes] = {}  # by views: peer -> digest of the evidence
        self._accused: dict[bytes, bytes] = {}  # accuser -> whom we believe that it contradicts
        self._believed_in: dict[bytes, bytes] = {}  # attempt -> the evidence believed in it

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._by_peer or peer in self._named

    def __len__(self) -> int:
        return len(self._by_peer.keys() | self._named.keys())

    @property
    def all(self) -> list[Ban]:
        return list(self._by_peer.values())

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Return the digests of all evidence that counts here."""
        return tuple(self._by_digest)

    @property
    def words(self) -> tuple[bytes, ...]:
        """Return the digests of evidence that is our word, and does not count yet."""
        return tuple(d for d, each in self._unsure.items() if self._me in each.tellers)

    @property
    def unsure(self) -> tuple[bytes, ...]:
        """Return the digests of all evidence that is here and does not count yet."""
        return tuple(self._unsure)

    def against(self, peer: bytes) -> frozenset[bytes]:
        """Return the digests of all evidence that proves this ban; some of it may not be here."""
        ban = self._by_peer.get(peer)
        spare = (digest for digest, banned in self._spare.items() if peer in banned)
        named = self._named.get(peer)
        own = [ban.digest] if ban is not None else []
        return frozenset((*own, *spare, *([named] if named else [])))

    def of(self, peer: bytes) -> Ban | None:
        return self._by_peer.get(peer)

    def evidence(self, digest: bytes) -> Evidence | None:
        """Return the evidence if it is in memory."""
        unsure = self._unsure.get(digest)
        return unsure.evidence if unsure is not None else self._by_digest.get(digest)

    def has(self, digest: bytes) -> bool:
        """Return whether the evidence is here, in memory or in the home."""
        return digest in self._by_digest or digest in self._unsure

    def knows(self, digest: bytes) -> bool:
        """Return whether the evidence is here, whether or not it counts."""
        return digest in self._by_digest or digest in self._unsure or digest in self._spare

    def learn(self, evidence: Evidence, *, first_hand: bool = False) -> list[Ban]:
        """Verify evidence and return the bans that are new by it.

        ``first_hand``: we took part in that attempt. EvidenceError if it proves nothing.
        """
        return self.weigh(evidence, verify_evidence(evidence), first_hand=first_hand)

    def weigh(
        self,
        evidence: Evidence,
        finding: Finding,
        *,
        first_hand: bool = False,
        of_stranger: bool = False,
    ) -> list[Ban]:
        """Return the bans that are new by evidence that was verified already, which takes time.

        ``first_hand``: we took part in that attempt. ``of_stranger``: it is about peers that we do
        not know. Anybody can make some up, and prove what they have done, so it waits until most
        members say the same, or a view does.
        """
        digest, is_pair = evidence.digest, len(finding.banned) > 1
        named = tuple(peer for peer in finding.banned if self._named.get(peer) == digest)
        if named:
            return self._adopt(evidence, finding, named)
        if self._is_spare(digest, finding):
            return []
        if (finding.stands_alone and not of_stranger) or (first_hand and not is_pair):
            return self._adopt(evidence, finding, finding.banned)
        if digest not in self._unsure:
            nbytes = len(evidence.encoded)
            while not self._has_room(nbytes):
                if not self._forget_one():
                    return []
            if is_pair and (other := self._contrary(evidence)) is not None:
                two = Evidence("equivocation", evidence.said[0].signer, evidence.terms, other)
                return self.learn(two)
            self._unsure[digest] = _Unsure(evidence, finding, nbytes)
        if first_hand:
            self._unsure[digest].jury = frozenset(evidence.terms.jury) - {*finding.banned}
        return []

    def recall(self, evidence: Evidence) -> list[Ban]:
        """Believe what an earlier life of this peer has believed, and return the bans that are new.

        It counts whoever had to say so then: nobody may be left who would say it again.
        EvidenceError if it proves nothing.
        """
        finding = verify_evidence(evidence)
        spare = self._is_spare(evidence.digest, finding)
        return [] if spare else self._adopt(evidence, finding, finding.banned)

    def _is_spare(self, digest: bytes, finding: Finding) -> bool:
        """Return whether all that it bans are out by evidence that is here; if so, set it aside."""
        spare = all(peer in self._by_peer for peer in finding.banned)
        if spare:
            self._set_aside(digest, finding)
        return spare

    def _has_room(self, nbytes: int) -> bool:
        held = sum(each.nbytes for each in self._unsure.values())
        return len(self._unsure) < UNSURE_MAX and held + nbytes <= UNSURE_BYTES_MAX

    def _forget_one(self) -> bool:
        """Forget evidence of an attempt that we know nothing of; return whether there was any.

        What others say of such attempts makes room for what we do know of.
        """
        spare = next((digest for digest, each in self._unsure.items() if not each.jury), None)
        if spare is not None:
            del self._unsure[spare]
        return spare is not None

    def _contrary(self, pair: Evidence) -> tuple[SignedStatement, SignedStatement] | None:
        """Return two statements of an accuser who contradicts two in one attempt, or None."""
        (said,) = pair.said
        for each in self._unsure.values():
            (other, *_) = each.evidence.said
            same = (other.signer, other.phase) == (said.signer, said.phase)
            if same and other.statement.terms == said.statement.terms:
                return (other, said) if other.statement != said.statement else None
        return None

    def say(self, digest: bytes) -> bool:
        """Return whether it is our word from now on that this pair is to go.

        True only once, when the word is new.
        """
        unsure = self._unsure.get(digest)
        if unsure is None or self._me not in unsure.jury or self._me in unsure.tellers:
            return False
        (said,), accused = unsure.evidence.said, unsure.evidence.culprit
        attempt = said.statement.terms
        if said.signer in self or accused in self:  # one of them has been found out
            return False
        believed = self._believed_in.setdefault(attempt, digest) == digest
        if not believed or self._accused.setdefault(said.signer, accused) != accused:
            return False
        for words in (self._believed_in, self._accused):
            while len(words) > BANS_MAX:
                del words[next(iter(words))]
        unsure.tellers.add(self._me)
        return True

    def told(self, digest: bytes, member: bytes, members: Collection[bytes]) -> list[Ban]:
        """Take the word of a member (or ours) that this evidence counts; return new bans.

        ``members``: of our view.
        """
        unsure = self._unsure.get(digest)
        if unsure is None or member in self:
            return []
        jury = unsure.jury or frozenset(members)
        if member not in jury:
            return []
        unsure.tellers.add(member)
        same = {digest: unsure}
        if not unsure.jury:
            banned = {*unsure.finding.banned}
            same = {d: u for d, u in self._unsure.items() if {*u.finding.banned} == banned}
        voices = {teller for each in same.values() for teller in each.tellers & jury}
        if 2 * len(voices - {*unsure.finding.banned}) <= len(jury):
            return []
        most = max(same, key=lambda digest: len(same[digest].tellers & jury))
        found = same[most].finding
        return self._adopt(same[most].evidence, found, found.banned)

    def met(self, peers: Container[bytes]) -> list[Ban]:
        """Note that these peers are no strangers any more; return the bans that are new by it."""
        found: list[Ban] = []
        for each in tuple(self._unsure.values()):
            if each.finding.stands_alone and any(peer in peers for peer in each.finding.banned):
                found += self._adopt(each.evidence, each.finding, each.finding.banned)
        return found

    def named(self, bans: Mapping[bytes, bytes]) -> list[Ban]:
        """Take the bans that a view that we are in names: peer -> digest of its evidence.

        Return the bans by what was unsure until now; the files of others may have to be asked for.
        """
        found: list[Ban] = []
        for peer, digest in bans.items():
            if self._named.get(peer) == digest or len(self._named) >= BANS_MAX:
                continue
            self._named[peer] = digest
            self._spare.pop(digest, None)  # it has to be here
            unsure = self._unsure.get(digest)
            if unsure is not None and peer in unsure.finding.banned:
                found += self._adopt(unsure.evidence, unsure.finding, (peer,))
        return found

    def _adopt(self, evidence: Evidence, finding: Finding, peers: Collection[bytes]) -> list[Ban]:
        """Make this evidence what bans these peers; return the bans that are new."""
        digest, by_peer = evidence.digest, self._by_peer
        new = [peer for peer in peers if peer not in by_peer]
        if len(by_peer) + len(new) > BANS_MAX:
            return []
        again = [peer for peer in peers if peer in by_peer and self._named.get(peer) == digest]
        replaced = {by_peer[peer].digest: by_peer[peer].finding for peer in again}
        number = evidence.terms.round
        by_peer |= {peer: Ban(peer, digest, number, finding, evidence) for peer in (*new, *again)}
        self._by_digest[digest] = evidence
        in_use = {ban.digest for ban in by_peer.values()}
        for old in replaced.keys() - in_use:
            del self._by_digest[old]
            self._set_aside(old, replaced[old])
        for other, each in list(self._unsure.items()):
            if all(peer in by_peer for peer in each.finding.banned):
                del self._unsure[other]
                self._set_aside(other, each.finding)
        return [by_peer[peer] for peer in new]

    def let_go(self) -> None:
        """Keep BELIEVED_BYTES_MAX of evidence in memory, the newest: the home has had its turn."""
        held = sum(len(each.encoded) for each in self._by_digest.values() if each is not None)
        for digest, each in self._by_digest.items():
            if held <= BELIEVED_BYTES_MAX:
                break
            if each is not None:
                held -= len(each.encoded)
                self._by_digest[digest] = None
        for peer, ban in self._by_peer.items():
            self._by_peer[peer] = replace(ban, evidence=self._by_digest[ban.digest])

    def _set_aside(self, digest: bytes, finding: Finding) -> None:
        if digest not in self._by_digest:
            self._spare[digest] = finding.banned
        if len(self._spare) > BANS_MAX:
            del self._spare[next(iter(self._spare))]

    def rows(self) -> list[dict[str, object]]:
        """Return the bans for `atoll status`, in plain types. ``agreed``: a view names it."""
        rows: list[dict[str, object]] = [
            {
                "peer": short(ban.peer),
                "id": ban.peer.hex(),
                "kind": ban.finding.kind,
                "round": ban.round,
                "text": ban.finding.text,
                "evidence": ban.digest.hex(),
                "agreed": ban.peer in self._named,
            }
            for ban in self._by_peer.values()
        ]
        return rows + [
            {
                "peer": short(peer),
                "id": peer.hex(),
                "kind": "agreed",
                "round": 0,
                "text": f"{short(peer)}, as the members have agreed; the file is not here yet",
                "evidence": digest.hex(),
                "agreed": True,
            }
            for peer, digest in self._named.items()
            if peer not in self._by_peer
        ]


# ---------------------------------------------------------------- evidence that others have
#
# Keep what linked peers say about evidence, and choose whom to ask for what. Sans-I/O.
#
# What one peer says takes no room from what others say, and each is asked in its turn, so nobody
# can hide evidence behind heaps of digests that nothing belongs to.


SAID_MAX: Final = 4096  # digests of one peer that are remembered: more than it may have


@dataclass(slots=True)
class _Said:
    counts: dict[bytes, None] = field(default_factory=dict)  # it believes this evidence
    words: dict[bytes, None] = field(default_factory=dict)  # it says that this pair is to go
    absent: set[bytes] = field(default_factory=set)  # it has not given this when it was asked


class EvidenceIndex:
    """Keep what each linked peer says; who has not been asked for longest is first."""

    def __init__(self) -> None:
        self._said: dict[bytes, _Said] = {}

    def hear(self, peer: bytes, counts: Sequence[bytes], words: Sequence[bytes]) -> None:
        said = self._said.setdefault(peer, _Said())
        for known, new in ((said.counts, counts), (said.words, words)):
            known.update(dict.fromkeys(new))
            while len(known) > SAID_MAX:
                del known[next(iter(known))]

    def forget(self, peer: bytes) -> None:
        self._said.pop(peer, None)

    def of(self, digest: bytes) -> list[bytes]:
        """Return who speaks for this evidence."""
        return [
            p for p, said in self._said.items() if digest in said.counts or digest in said.words
        ]

    def believers(self, digests: Collection[bytes]) -> frozenset[bytes]:
        """Return for whom one of these counts."""
        return frozenset(
            p for p, said in self._said.items() if not said.counts.keys().isdisjoint(digests)
        )

    def next(
        self, able: Collection[bytes], lacks: Callable[[bytes], bool]
    ) -> tuple[bytes, bytes] | None:
        """Return whom of these to ask for what, and put it last in turn; None if nobody."""
        for peer, said in self._said.items():
            if peer not in able:
                continue
            named = (d for d in (*said.counts, *said.words) if d not in said.absent and lacks(d))
            if (digest := next(named, None)) is not None:
                self._said[peer] = self._said.pop(peer)
                return peer, digest
        return None

    def has_not(self, peer: bytes, digest: bytes) -> None:
        """Note that it was asked and did not give it: it is not asked again, over this link."""
        if peer in self._said:
            self._said[peer].absent.add(digest)
